"""Prints the state of a swarm's run from its store: ``python -m demo_optax.swarm URL``."""

import argparse
import sys

from demo_optax._src.swarm.history import draw, read_history, status
from demo_optax._src.swarm.store import ObjectStore, StoreError


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m demo_optax.swarm", description=__doc__)
    parser.add_argument("url", help="the run's place: a folder, s3://..., gs://... or az://...")
    parser.add_argument("--last", type=int, default=200, help="steps to look at (200); 0 for all")
    parser.add_argument("--picture", metavar="FILE", help="also draws who took part when")
    given = parser.parse_args()
    try:
        history = read_history(ObjectStore(given.url), given.last)
        print(status(history))
        if given.picture and history.manifests:
            draw(history, given.picture)
            print(f"wrote {given.picture}")
    except StoreError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

"""Prints how the run of a swarm stands, and draws it, from its store alone.

demo-optax swarm s3://bucket/run --picture life.png
"""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", help="the run's place: a folder, s3://..., gs://... or az://...")
    parser.add_argument("--last", type=int, default=200, help="steps to look at; 0 for all")
    parser.add_argument("--picture", metavar="FILE", help="also draws who took part when")


def run(args: argparse.Namespace) -> None:
    from demo_optax import swarm  # needs obstore, which the other commands do not

    history = swarm.read_history(swarm.ObjectStore(args.url), args.last)
    print(swarm.status(history))
    if args.picture and history.manifests:
        swarm.draw(history, args.picture)
        print(f"wrote {args.picture}")

"""Prints how the run of a swarm stands, and draws it, from its store alone.

demo-optax swarm s3://bucket/run --picture life.png
demo-optax swarm s3://bucket/run --watch
demo-optax swarm s3://bucket/run --key paris.key --owner owner.pub
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator

from demo_optax._src.commands.tables import print_table
from demo_optax._src.places import folder_of

ROUNDS = 10  # whose steps are printed
CLEAR = "\x1b[H\x1b[2J"


def add_arguments(add: Callable[..., None]) -> None:
    add("url", "the run's place: a folder, s3://..., gs://... or az://...")
    add("--key", "your key, if the run is for members only", None)
    add("--owner", "the owner's public line", None)
    add("--roster-at-least", "the lowest number of a roster to believe", 0, type=int)
    add("--last", "steps to look at; 0 for all", 200, type=int)
    add("--watch", "looks again every ten seconds, until Ctrl-C", action="store_true")
    add("--picture", "also draws who took part when", None, metavar="FILE")


def run(args: argparse.Namespace) -> None:
    from demo_optax import swarm  # needs obstore, which the other commands do not

    folder = folder_of(args.url)
    is_there = folder is None or folder.is_dir()  # an ObjectStore would make the folder
    store = _store_of(args) if is_there else None
    is_watched = "watch" in args
    with _while_somebody_reads(), contextlib.suppress(*[KeyboardInterrupt] * is_watched):
        for history in swarm.watch_history(store, args.last) if store else [None]:
            if history is None or not history.names:
                roster = f" yet ({history.access})" if history and args.key else ""
                raise FileNotFoundError(
                    f"there is no run of a swarm at {args.url!r}{roster}: give the place that its "
                    "workers have as --swarm, and start them."
                )
            print(CLEAR * (is_watched and sys.stdout.isatty()), end="")
            print(swarm.status(history))
            if history.manifests:
                _print_steps(history)
                if args.picture:
                    swarm.draw(history, args.picture)
                    print(f"wrote {args.picture}")
            if not is_watched:
                return
            print("Ctrl-C ends this.\n", flush=True)


@contextlib.contextmanager
def _while_somebody_reads() -> Iterator[None]:
    """Ends without a word once nobody reads what is printed, as after `| head`."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left of it


def _store_of(args: argparse.Namespace):
    """Returns the store of a run to look at, in which only members exist if a key is given."""
    from demo_optax import swarm
    from demo_optax._src.swarm.roster import KEY

    store = swarm.ObjectStore(args.url)
    if args.key and args.owner:
        return swarm.MembersOnly(store, args.key, args.owner, at_least=args.roster_at_least)
    if args.key or args.owner or store.get(KEY) is not None:
        raise ValueError(
            f"the run at {args.url!r} is for members only: give --key with the file of a key, and "
            "--owner with the owner's public line. A run that is open needs neither."
        )
    return store


def _print_steps(history) -> None:
    unit, has_rounds = history.unit, history.unit == "round"
    skipped = [history.skipped(index) for index in range(len(history.manifests))]
    cells = {
        name: [
            "skipped" if name in names else {0: "late", None: "away"}.get(n, n)
            for n, names in zip(steps, skipped, strict=True)
        ]
        for name, steps in history.taken().items()
    }
    rows = []
    for name, row in cells.items():
        counted = [n for n in row if isinstance(n, int)]
        numbers = len(counted), row.count("late"), row.count("skipped"), sum(counted)
        rows.append((name, *numbers[: 3 + has_rounds]))
    print()
    print_table(
        f"{unit.capitalize()}s in which each worker counted, was late, and had nothing finite"
        + ("; its steps that counted" if has_rounds else ""),
        ("worker", "counted", "late", "skipped", "steps")[: 4 + has_rounds],
        *rows,
    )
    if has_rounds:
        numbers = [manifest.step for manifest in history.manifests]
        print_table(
            f"Steps of each worker in the last {len(numbers[-ROUNDS:])} rounds",
            ("round", *cells),
            *list(zip(numbers, *cells.values(), strict=True))[-ROUNDS:],
        )

"""Prints how the run of a swarm stands, and draws it, from its store alone.

demo-optax swarm s3://bucket/run --picture life.png
demo-optax swarm s3://bucket/run --watch
demo-optax swarm s3://bucket/run --key paris.key --owner owner.pub
"""

import argparse
import contextlib
import sys

from demo_optax._src.commands.tables import print_table
from demo_optax._src.places import folder_of

ROUNDS = 10  # whose steps are printed
CLEAR = "\x1b[H\x1b[2J"


TEXT = dict(default=None)
ARGUMENTS = {
    "url": ({}, "the run's place: a folder, s3://..., gs://... or az://..."),
    "--key": (TEXT, "your key, if the run is for members only"),
    "--owner": (TEXT, "the owner's public line"),
    "--roster-at-least": (dict(default=0, type=int), "the lowest number of a roster to believe"),
    "--last": (dict(default=200, type=int), "steps to look at; 0 for all"),
    "--watch": (dict(action="store_true"), "looks again every ten seconds, until Ctrl-C"),
    "--picture": (TEXT | dict(metavar="FILE"), "also draws who took part when"),
}


def run(args: argparse.Namespace) -> None:
    from demo_optax import swarm  # needs obstore, which the other commands do not

    folder, is_watched = folder_of(args.url), "watch" in args
    # An ObjectStore would make the folder.
    store = _store_of(args) if folder is None or folder.is_dir() else None
    with contextlib.suppress(*[KeyboardInterrupt] * is_watched):
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
    unit, manifests, rows = history.unit, history.manifests, []
    columns = 5 if unit == "round" else 4
    words = {0: "late", None: "away"}
    cells = {
        name: [
            "skipped" if name in history.skipped(index) else words.get(n, n)
            for index, n in enumerate(steps)
        ]
        for name, steps in history.taken().items()
    }
    for name, row in cells.items():
        steps = [n for n in row if isinstance(n, int)]
        numbers = name, len(steps), row.count("late"), row.count("skipped"), sum(steps)
        rows.append(numbers[:columns])
    print()
    print_table(
        f"{unit.capitalize()}s in which each worker counted, was late, and had nothing finite"
        + "; its steps that counted" * (unit == "round"),
        ("worker", "counted", "late", "skipped", "steps")[:columns],
        *rows,
    )
    if unit == "round":
        rounds = list(zip([m.step for m in manifests], *cells.values(), strict=True))[-ROUNDS:]
        title = f"Steps of each worker in the last {len(rounds)} rounds"
        print_table(title, ("round", *cells), *rounds)

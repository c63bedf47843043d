"""Writes or prints who may take part in a swarm for members only, as its owner signs it.

demo-optax roster s3://bucket/run --owner owner.key --add paris.pub rome.pub
demo-optax roster s3://bucket/run --owner owner.key --without rome
demo-optax roster s3://bucket/run --owner owner.key
"""

import argparse
import glob
import pathlib

from demo_optax._src.places import folder_of

NAMES = dict(default=[], nargs="+")
ARGUMENTS = {
    "place": ({}, "the run's place: a folder, s3://..., gs://... or az://..."),
    "--owner": (dict(required=True), "the file of the owner's key"),
    "--add": (NAMES | dict(metavar="FILE"), "files with the public lines of members to add"),
    "--without": (NAMES | dict(metavar="NAME"), "names of members to take out"),
}


def run(args: argparse.Namespace) -> None:
    from demo_optax._src.swarm import roster, seals, store

    owner, added = seals.read_key(args.owner), [seals.read_public(file) for file in args.add]
    for file, public in zip(args.add, added, strict=True):
        if public.signs == owner.public.signs:
            raise ValueError(
                f"{file} is the owner's own line: leave it out, or give the owner a worker's key "
                "of its own."
            )
    folder = folder_of(args.place)
    is_there = args.add or folder is None or folder.is_dir()  # an ObjectStore makes the folder
    place = store.ObjectStore(args.place) if is_there else None
    there = place.get(roster.KEY) if place else None
    shown = roster.parse(there, owner.public)
    if there is not None and shown is None:
        raise ValueError(
            f"{args.place} has a roster that {owner.name} has not signed: give the key of its "
            f"owner, or put back the {roster.KEY} that the owner wrote."
        )
    if there is None and place and any(place.names(x) for x in ("slots", "manifests")):
        copies = ", ".join(sorted(glob.glob(f"{glob.escape(args.owner)}.*.roster")))
        put_back = f" If its {roster.KEY} was deleted, put back its copy: {copies}."
        raise ValueError(
            f"{args.place} has an open run, which stays open: give the roster a place of its own."
            + put_back * bool(copies)
        )
    if place is None or (shown is None and (args.without or not args.add)):
        raise ValueError(
            f"{args.place} has no roster: give the place of one, or begin one there with --add "
            "and the files of its members' public lines."
        )
    newest = shown
    if shown and (kept := _kept(args.owner, shown.run)).exists():
        last = roster.parse(kept.read_bytes(), owner.public) or shown
        newest = max(shown, last, key=lambda x: x.number)  # if somebody put back an earlier one
    present = newest.members().values() if newest else ()
    if is_changed := bool(args.without) or any(x not in present for x in added):
        signed = roster.change(newest, owner, added, args.without)
        shown = newest = roster.parse(signed, owner.public)
        assert shown is not None  # the owner has just signed it
        _kept(args.owner, shown.run).write_bytes(signed)
        place.put(roster.KEY, signed)
    assert shown is not None and newest is not None
    print(f"roster {shown.number} of {args.place}")
    for slot, public in sorted(shown.members().items()):
        print(f"  slot {slot}: {public.name}")
    if is_changed:
        print(f"copy: {_kept(args.owner, shown.run)}")
    elif newest.number > shown.number:
        print(f"roster {newest.number} is missing there: put back {_kept(args.owner, shown.run)}")


def _kept(owner: str, run: str) -> pathlib.Path:
    """Returns the file that keeps the last roster of a run, beside its owner's key."""
    return pathlib.Path(f"{owner}.{run}.roster")

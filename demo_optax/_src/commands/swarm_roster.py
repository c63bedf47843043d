"""Writes who may take part in a swarm for members only, as its owner signs it.

demo-optax swarm roster s3://bucket/run --owner owner.key paris.pub rome.pub
demo-optax swarm roster s3://bucket/run --owner owner.key --without rome
"""

import argparse
import pathlib
from collections.abc import Callable


def add_arguments(add: Callable[..., None]) -> None:
    add("place", "the run's place: a folder, s3://..., gs://... or az://...")
    add("public", "files with the public lines of members to add", [], nargs="*")
    add("--owner", "the file of the owner's key", required=True)
    add("--without", "a member to take out, which may be given again", [], action="append")


def run(args: argparse.Namespace) -> None:
    from demo_optax._src.swarm import roster, seals, store

    place, owner = store.ObjectStore(args.place), seals.read_key(args.owner)
    there = place.get(roster.KEY)
    before = roster.parse(there, owner.public)
    if there is not None and before is None:
        raise ValueError(
            f"{args.place} has a roster that {owner.name} has not signed: give the key of its "
            f"owner, or put back the {roster.KEY} that the owner wrote."
        )
    if before is None and any(place.names(folder) for folder in ("slots", "manifests")):
        raise ValueError(
            f"{args.place} has an open run, which stays open: give the roster a place of its own. "
            f"If its {roster.KEY} was deleted, put back the copy beside the owner's key."
        )
    if before is not None:  # who put back an earlier one gets no second one of the next number
        kept = _kept(args.owner, before.run)
        last = roster.parse(kept.read_bytes(), owner.public) if kept.exists() else None
        before = max(before, last or before, key=lambda x: x.number)
    added = map(seals.read_public, args.public)
    signed = roster.change(before, owner, added, args.without)
    written = roster.parse(signed, owner.public)
    assert written is not None  # the owner has just signed it
    _kept(args.owner, written.run).write_bytes(signed)
    place.put(roster.KEY, signed)
    print(f"roster {written.number} of {args.place}")
    for slot, public in sorted(written.members().items()):
        print(f"  slot {slot}: {public.name}")


def _kept(owner: str, run: str) -> pathlib.Path:
    """Returns the file that keeps the last roster of a run, beside its owner's key."""
    return pathlib.Path(f"{owner}.{run}.roster")

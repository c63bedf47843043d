"""The roster of a run for members only: who may take part, as the owner has signed it.

There is one object, which the owner alone replaces. It holds all of its history: who was a member
under each number follows from the newest one.
"""

import json
import re
import secrets
from collections.abc import Collection, Iterable
from typing import NamedTuple

from demo_optax._src.swarm import records, seals
from demo_optax._src.swarm.records import Damaged, SwarmError
from demo_optax._src.swarm.seals import Key, Public

KEY = "roster.json"
MOST_NAME = 1000  # bytes that are read as one


class Entry(NamedTuple):
    """A member, and the numbers of the rosters that it is in."""

    public: Public
    slot: int
    first: int
    last: int = 0  # 0 while it is a member


class Roster(NamedTuple):
    """What the owner has signed."""

    run: str  # 32 digits, which follow from the owner's key and a random word
    number: int  # grows by 1 with each change
    entries: tuple[Entry, ...]
    earlier: tuple[str, ...]  # names of the rosters before
    boxes: dict[str, str]  # the secrets of all numbers, sealed for each member and the owner
    name: str = ""  # its run, number, hash, and the owner's signature of these

    def members(self, number: int = 0) -> dict[int, Public]:
        """Returns the members by slot, under this number or an earlier one."""
        at = number or self.number
        return {x.slot: x.public for x in self.entries if x.first <= at <= (x.last or at)}

    def named(self, number: int) -> str:
        """Returns how manifests name this roster, or the earlier one of a number."""
        names = *self.earlier, self.name
        return names[number - 1] if 0 < number <= len(names) else ""

    def secrets(self, key: Key) -> list[bytes]:
        """Returns the secrets of all numbers, if they were sealed for this key."""
        signs = key.public.signs
        box = bytes.fromhex(self.boxes.get(signs, ""))
        content = key.open_box(box, "secrets", self.run, self.number, signs) or b""
        return [content[start : start + 32] for start in range(0, len(content), 32)]


def parse(data: bytes | None, owner: Public) -> Roster | None:
    """Reads a roster if the owner has signed these bytes; else it is as if there was none."""
    line, _, body = (data or b"").partition(b"\n")
    name = line[:MOST_NAME].decode(errors="replace")
    if not is_proven(name, owner) or name.split()[2] != records.sha256(body):
        return None
    values = json.loads(body)
    entries = tuple(Entry(Public(*public), *rest) for public, *rest in values.pop("entries"))
    earlier = tuple(values.pop("earlier"))
    return Roster(**values, entries=entries, earlier=earlier, name=name)


def change(
    roster: Roster | None, owner: Key, added: Iterable[Public] = (), without: Collection[str] = ()
) -> bytes:
    """Returns the signed bytes of the next roster, which has a secret of its own."""
    number = roster.number + 1 if roster else 1
    entries = list(roster.entries) if roster else []
    present = {x.public.name for x in entries if not x.last}
    if unknown := set(without) - present:
        raise SwarmError(
            f"{', '.join(map(repr, sorted(unknown)))} cannot be taken out: give names of members, "
            f"which are {', '.join(sorted(present)) or 'nobody'}."
        )
    entries = [
        x._replace(last=number - 1) if x.public.name in without and not x.last else x
        for x in entries
    ]
    for public in added:
        members = [x for x in entries if not x.last]
        if any(x.public == public for x in members):
            continue
        for x in members:
            if {x.public.name, x.public.signs, x.public.opens} & set(public):
                raise SwarmError(
                    f"{public.name!r} has the name or the key of the member {x.public.name!r}: "
                    f"give another one, or take it out first with --without {x.public.name}."
                )
        taken = {x.slot for x in members}
        slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        entries.append(Entry(public, slot, number))
    if not (members := [x.public for x in entries if not x.last]):
        raise SwarmError(f"roster {number} needs a member: give the public line of at least one.")
    known = roster.secrets(owner) if roster else []
    if len(known) != number - 1:
        raise SwarmError("this owner's key does not open the secrets: give the key that made them.")
    known = [*known, secrets.token_bytes(32)]
    word = secrets.token_bytes(32)  # so that two places of an owner are two runs
    run = roster.run if roster else seals.tag(word, owner.public.signs)[:16].hex()
    boxes = {
        x.signs: seals.close_box(x, b"".join(known), "secrets", run, number, x.signs).hex()
        for x in [*members, owner.public]
    }
    earlier = (*roster.earlier, roster.name) if roster else ()
    values = Roster(run, number, tuple(entries), earlier, boxes)._asdict()
    del values["name"]
    body = json.dumps(values).encode()
    said = run, number, records.sha256(body)
    return " ".join(map(str, (*said, owner.sign("roster", *said).hex()))).encode() + b"\n" + body


def is_proven(name: str, owner: Public) -> bool:
    """Tells whether the owner has signed a roster of this name, which need not be there."""
    if not re.fullmatch(records.ROSTER, name):
        return False
    *said, signature = name.split()
    return seals.is_signed(owner.signs, bytes.fromhex(signature), "roster", *said)


def number_of(name: str) -> int:
    """Returns the number in the name of a roster, or 0 in an open run."""
    if name and not re.fullmatch(records.ROSTER, name):
        raise Damaged(f"{name!r} names no roster.")
    return int(name.split()[1]) if name else 0

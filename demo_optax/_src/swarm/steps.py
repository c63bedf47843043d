"""What the workers say in a step: that they are here, that they have left, and their packets.

In an open run each says it by an object of its own, whose name a list finds. In a run for members
only each has one object in a step, whose name the others know, and which it has signed.
"""

import contextlib
from collections.abc import Collection, Iterable
from typing import NamedTuple

from demo_optax._src.swarm import records
from demo_optax._src.swarm.members_only import MembersOnly
from demo_optax._src.swarm.records import Damaged, Manifest, MemberId, PacketRef, StepFolder
from demo_optax._src.swarm.store import Store, in_parallel

MARKS = {mark.encode(): mark for mark in ("here", "left", "ends")}
EMPTY = StepFolder({}, frozenset(), frozenset(), frozenset())


class ListedSteps:
    """The steps of an open run."""

    def __init__(self, store: Store, slots: int):
        self._store, self._slots = store, slots

    def glance(self, step: int, head: str, waits_for: Iterable[int]) -> StepFolder:
        folder = records.step_key("packets", step)
        return records.read_folder(self._store.names(folder), self._slots)

    def look(
        self, step: int, head: str, folder: StepFolder, waits_for: Collection[int], thorough: bool
    ) -> StepFolder:
        return folder

    def payloads(self, step: int) -> dict[PacketRef, bytes]:
        return {}

    def key(self, step: int, packet: PacketRef) -> str:
        return records.packet_key(step, packet)

    def payload(self, data: bytes) -> bytes:
        return data

    def say(self, step: int, member: MemberId, mark: str) -> None:
        self._store.put(records.mark_key(step, member, mark), b"")

    def send(self, step: int, packet: PacketRef, data: bytes, head: str) -> PacketRef:
        self._store.put(self.key(step, packet), data)
        return packet

    def has_ended(self, step: int, me: MemberId) -> bool:
        return bool(self.glance(step, "", ()).ends - {me})


class Said(NamedTuple):
    """What a member has said in a step, after a head of its own."""

    head: str  # "" with a mark, which belongs to no chain
    packet: PacketRef  # of its words or its packet
    payload: bytes

    @property
    def mark(self) -> str | None:
        return MARKS.get(self.payload)

    @property
    def is_final(self) -> bool:
        return self.mark != "here"


class SignedSteps:
    """The steps of a run for members only."""

    def __init__(self, store: MembersOnly, slots: int):
        self._store, self._slots = store, slots
        self._said: dict[int, dict[int, Said]] = {}  # by step and slot
        self._asked: int | None = None  # the slot that the last glance was at
        self._looks = 0  # so that each glance is at another slot

    def glance(self, step: int, head: str, waits_for: Iterable[int]) -> StepFolder:
        """Looks at one member that is waited for: while it is missing, the others can wait."""
        open_ones, self._looks = self._open(step, waits_for), self._looks + 1
        self._asked = open_ones[self._looks % len(open_ones)] if open_ones else None
        if self._asked is not None:
            self._keep(step, self._asked, self._read(step, self._asked))
        return self.folder(step, head)

    def look(
        self, step: int, head: str, folder: StepFolder, waits_for: Collection[int], thorough: bool
    ) -> StepFolder:
        """Looks at the others, once the one that was waited for has come."""
        open_ones = self._open(step, waits_for)
        if self._asked not in open_ones:
            self.read_all(step, open_ones)
        if thorough or not self._open(step, waits_for):
            self.read_all(step, self._open(step, self._store.members(step)))
        return self.folder(step, head)

    def read_all(self, step: int, slots: Collection[int]) -> None:
        """Reads what these members have said; it may not be called in a thread for requests."""
        found = in_parallel(lambda slot: self._read(step, slot), slots)
        for slot, said in zip(slots, found, strict=True):
            self._keep(step, slot, said)

    def folder(self, step: int, head: str) -> StepFolder:
        """Returns what is known of a step; nobody waits for members with another head."""
        said = self._said.get(step, {}).values()
        marked = {
            mark: frozenset(x.packet.member for x in said if x.mark == mark)
            for mark in MARKS.values()
        }
        packets = {x.packet.slot: x.packet for x in said if x.mark is None and x.head == head}
        elsewhere = {x.packet.member for x in said if x.mark is None and x.head != head}
        return StepFolder(packets, marked["here"], marked["left"] | elsewhere, frozenset())

    def sides(self, step: int) -> dict[str, set[int]]:
        """Returns the slots of the members that sent a packet, by the head that it follows."""
        sides: dict[str, set[int]] = {}
        for slot, said in self._said.get(step, {}).items():
            if said.mark is None:
                sides.setdefault(said.head, set()).add(slot)
        return sides

    def payloads(self, step: int) -> dict[PacketRef, bytes]:
        return {x.packet: x.payload for x in self._said.get(step, {}).values()}

    def key(self, step: int, packet: PacketRef) -> str:
        return _key(step, packet.slot)

    def payload(self, data: bytes) -> bytes:
        return data.partition(b"\n")[2]

    def say(self, step: int, member: MemberId, mark: str) -> None:
        packet = PacketRef(*member, records.sha256(mark.encode()), 0, 0)
        key = _key(step, member[0] if mark != "ends" else None)
        data = self._signed(step, packet, mark.encode(), "")
        if mark == "ends":
            self._store.put(key, data)
        elif not self._store.create(key, data):
            said = self._read(step, member[0])
            if said is None or said.mark not in (None, mark):  # never in place of a packet
                self._store.put(key, data)

    def send(self, step: int, packet: PacketRef, data: bytes, head: str) -> PacketRef:
        signed = self._store.sign(step, packet, head)
        self._store.put(self.key(step, packet), self._signed(step, packet, data, head))
        self._keep(step, packet.slot, Said(head, signed, data))
        return signed

    def has_ended(self, step: int, me: MemberId) -> bool:
        said = self._read(step, None)
        return said is not None and said.mark == "ends" and said.packet.member != me

    def _signed(self, step: int, packet: PacketRef, payload: bytes, head: str) -> bytes:
        packet = self._store.sign(step, packet, head, MARKS.get(payload, "packet"))
        return records.encode(Manifest(step, (packet,), head, 0.0)) + b"\n" + payload

    def _open(self, step: int, slots: Iterable[int]) -> list[int]:
        said, members = self._said.get(step, {}), self._store.members(step)
        return [n for n in slots if n in members and (n not in said or not said[n].is_final)]

    def _keep(self, step: int, slot: int, said: Said | None) -> None:
        if said is not None:
            self._said.setdefault(step, {})[slot] = said
        for old in [n for n in list(self._said) if n < step - 1]:
            self._said.pop(old, None)

    def _read(self, step: int, slot: int | None) -> Said | None:
        """Reads what a member has said, or anybody's word that a round ends."""
        data = self._store.get(_key(step, slot)) or b""
        line, _, payload = data.partition(b"\n")
        with contextlib.suppress(Damaged, ValueError):
            spoken = records.decode(Manifest, line[:1000])
            (packet,) = spoken.packets  # of two it is nobody's
            is_own = slot in (None, packet.slot) and packet.slot < self._slots
            is_whole = spoken.step == step and packet.sha256 == records.sha256(payload)
            kind = MARKS.get(payload, "packet")
            is_valid = is_own and is_whole and (kind == "packet") == bool(spoken.previous)
            is_valid = is_valid and (kind == "ends") == (slot is None)
            if is_valid and self._store.is_signed(step, packet, spoken.previous, kind):
                return Said(spoken.previous, packet, payload)
        return None


def _key(step: int, slot: int | None) -> str:
    name = "ends" if slot is None else f"{slot:03d}.packet"
    return f"{records.step_key('packets', step)}/{name}"

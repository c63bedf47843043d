"""The steps of an open run and of one for members only: what is said there, and what is believed.

In an open run each worker says that it is here, that it has left, and its packet by an object of
its own, whose name a list finds. In a run for members only each has one object in a step, whose
name the others know, and which it has signed. `Member` knows no other difference between the two.
"""

import contextlib
import time
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from demo_optax._src.swarm import records
from demo_optax._src.swarm.members_only import MembersOnly
from demo_optax._src.swarm.records import (
    Damaged,
    Manifest,
    MemberId,
    PacketRef,
    SnapshotIndex,
    StepFolder,
    SwarmError,
)
from demo_optax._src.swarm.slots import last_claim
from demo_optax._src.swarm.store import Store, in_parallel

ROSTER_SECONDS = 10.0  # between two looks for a roster of a higher number
LOOK_SECONDS = 10.0  # between two looks for a later process with the same key

MARKS = {mark.encode(): mark for mark in ("here", "left", "ends")}
EMPTY = StepFolder({}, frozenset(), frozenset(), frozenset())


class ListedSteps:
    """The steps of an open run, in which everything is believed."""

    vain_steps = 0
    shortest_round = 0.0
    missing = origin = roster = ""

    def __init__(self, store: Store, slots: int):
        self._store, self._slots = store, slots

    def name(self, worker: str) -> str:
        return worker

    def has(self, step: int, slot: int) -> bool:
        return True

    def may_decide(self, step: int) -> bool:
        return True

    def look_for_roster(self) -> None:
        pass

    def begin(self, index: SnapshotIndex) -> str:
        return index.head

    def by_head(self, step: int) -> Mapping[str, set[int]]:
        return {}

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

    def send(
        self, step: int, packet: PacketRef, data: bytes, head: str, lost: tuple[int, ...]
    ) -> PacketRef:
        self._store.put(self.key(step, packet), data)
        return packet

    def has_ended(self, step: int, me: MemberId) -> bool:
        return bool(self.glance(step, "", ()).ends - {me})


class Said(NamedTuple):
    """What a member has said in a step, after a head of its own."""

    head: str  # "" with a mark, which belongs to no chain
    packet: PacketRef  # of its words or its packet
    payload: bytes
    lost: tuple[int, ...] = ()  # slots whose packets of the step before it did not apply

    @property
    def mark(self) -> str | None:
        return MARKS.get(self.payload)

    @property
    def is_final(self) -> bool:
        return self.mark != "here"


class SignedSteps:
    """The steps of a run for members only, in which only what members have signed is believed.

    Attributes:
      store: the store of the run.
      vain_steps: steps in which nobody waits again for a member that announced itself in vain.
      shortest_round: the share of a round's seconds after which a member may end it for all.
    """

    vain_steps = 10
    shortest_round = 0.5

    def __init__(self, store: MembersOnly, slots: int):
        self.store, self._slots = store, slots
        self._looked_for_roster, self._looked_for_itself = 0.0, time.monotonic()
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
        """Looks at the others, once the one that was waited for has come.

        Who follows another head may come back to this one.
        """
        open_ones = self._open(step, waits_for)
        if self._asked not in open_ones:
            self.read_all(step, open_ones)
        if thorough or not self._open(step, waits_for):
            elsewhere = set().union(*(x for y, x in self.by_head(step).items() if y != head))
            self.read_all(step, [*self._open(step, self.store.members(step)), *elsewhere])
        return self.folder(step, head)

    def name(self, worker: str) -> str:
        return self.store.members(0)[self.store.slot].name

    @property
    def missing(self) -> str:
        """What must be there before anything is decided, or an empty text."""
        return self.store.missing

    @property
    def origin(self) -> str:
        """What the first step follows while no snapshot was read."""
        return records.sha256(self.store.roster.run.encode())

    @property
    def roster(self) -> str:
        self.look_for_roster()
        return self.store.roster.name

    def look_for_roster(self) -> None:
        """Looks for the newest roster from time to time."""
        if time.monotonic() - self._looked_for_roster > ROSTER_SECONDS:
            self.store.look_for_roster()
            self._looked_for_roster = time.monotonic()

    def has(self, step: int, slot: int) -> bool:
        """Tells whether somebody is a member in a step, and has not been taken out since then."""
        stayed, public = self.store.roster.members(), self.store.members(step).get(slot)
        return public is not None and public == stayed.get(slot)

    def may_decide(self, step: int) -> bool:
        """Tells whether this worker is a member in a step, and nothing is missing."""
        return self.has(step, self.store.slot) and not self.missing

    def begin(self, index: SnapshotIndex) -> str:
        """Goes on from a snapshot, and returns the head that its step follows.

        The first step of a run follows the hash of its index.
        """
        self.store.begin(index.step, index.roster)
        return index.head if index.step else records.sha256(records.encode(index))

    def sent(self, step: int, slots: Collection[int]) -> dict[int, Said]:
        """Returns the packets that these members have sent in a step, by slot."""
        self.read_all(step, self._open(step, slots))
        return {slot: said for slot, said in self._packets(step).items() if slot in slots}

    def _packets(self, step: int) -> dict[int, Said]:
        said = list(self._said.get(step, {}).items())
        return {slot: x for slot, x in said if x.mark is None}

    def replace(self, step: int, manifest: Manifest) -> None:
        """Writes a manifest in place of one that this member's side does not believe."""
        self.store.put(records.step_key("manifests", step), records.encode(manifest))

    def read_all(self, step: int, slots: Collection[int]) -> None:
        """Reads what these members have said; it may not be called in a thread for requests."""
        found = in_parallel(lambda slot: self._read(step, slot), slots)
        for slot, said in zip(slots, found, strict=True):
            self._keep(step, slot, said)

    def folder(self, step: int, head: str) -> StepFolder:
        """Returns what is known of a step; nobody waits for members with another head."""
        said = list(self._said.get(step, {}).values())
        marked = {
            mark: frozenset(x.packet.member for x in said if x.mark == mark)
            for mark in MARKS.values()
        }
        sent = [x.packet for x in said if x.mark is None and x.head == head]
        packets = {x.slot: x for x in sent if self.has(step, x.slot)}
        elsewhere = {x.packet.member for x in said if x.mark is None and x.head != head}
        return StepFolder(packets, marked["here"], marked["left"] | elsewhere, frozenset())

    def by_head(self, step: int) -> Mapping[str, set[int]]:
        """Returns the slots of the members that sent a packet, by the head that it follows."""
        found: dict[str, set[int]] = {}
        for slot, said in self._packets(step).items():
            found.setdefault(said.head, set()).add(slot)
        return found

    def payloads(self, step: int) -> dict[PacketRef, bytes]:
        return {x.packet: x.payload for x in self._said.get(step, {}).values()}

    def key(self, step: int, packet: PacketRef) -> str:
        return _key(step, packet.slot)

    def payload(self, data: bytes) -> bytes:
        return data.partition(b"\n")[2]

    def say(self, step: int, member: MemberId, mark: str) -> None:
        packet = PacketRef(*member, records.sha256(mark.encode()), 0, 0)
        key = _key(step, member[0] if mark != "ends" else None)
        data = self._signed(step, packet, mark.encode())
        if mark == "ends":
            self.store.put(key, data)
        elif not self.store.create(key, data):
            said = self._read(step, member[0])
            if said is None or said.mark not in (None, mark):  # never in place of a packet
                self.store.put(key, data)

    def send(
        self, step: int, packet: PacketRef, data: bytes, head: str, lost: tuple[int, ...]
    ) -> PacketRef:
        self._end_if_replaced(packet.member)
        signed = self.store.sign(step, packet, head)
        self.store.put(self.key(step, packet), self._signed(step, packet, data, head, lost))
        self._keep(step, packet.slot, Said(head, signed, data, lost))
        return signed

    def _end_if_replaced(self, me: MemberId) -> None:
        """Raises SwarmError once a later process has this worker's key; it looks now and then."""
        if time.monotonic() - self._looked_for_itself < LOOK_SECONDS:
            return
        self._looked_for_itself = time.monotonic()
        if last_claim(self.store, me[0]) > me[1]:
            raise SwarmError(
                f"another process uses the key of {self.store.key.name!r} now: stop one of them, "
                "and give each process a key of its own."
            )

    def has_ended(self, step: int, me: MemberId) -> bool:
        said = self._read(step, None)
        return said is not None and said.mark == "ends" and said.packet.member != me

    def _signed(
        self,
        step: int,
        packet: PacketRef,
        payload: bytes,
        head: str = "",
        lost: tuple[int, ...] = (),
    ) -> bytes:
        packet = self.store.sign(step, packet, head, MARKS.get(payload, "packet"))
        spoken = Manifest(step, (packet,), head, 0.0, lost=lost)
        return records.encode(spoken) + b"\n" + payload

    def _open(self, step: int, slots: Iterable[int]) -> list[int]:
        said, members = self._said.get(step, {}), self.store.members(step)
        return [n for n in slots if n in members and (n not in said or not said[n].is_final)]

    def _keep(self, step: int, slot: int, said: Said | None) -> None:
        if said is not None:
            self._said.setdefault(step, {})[slot] = said
        for old in [n for n in list(self._said) if n < step - 1]:
            self._said.pop(old, None)

    def _read(self, step: int, slot: int | None) -> Said | None:
        """Reads what a member has said, or anybody's word that a round ends."""
        data = self.store.get(_key(step, slot)) or b""
        line, _, payload = data.partition(b"\n")
        with contextlib.suppress(Damaged, ValueError):
            spoken = records.decode(Manifest, line[:1000])
            (packet,) = spoken.packets  # of two it is nobody's
            is_own = slot in (None, packet.slot) and packet.slot < self._slots
            is_whole = spoken.step == step and packet.sha256 == records.sha256(payload)
            kind = MARKS.get(payload, "packet")
            is_valid = is_own and is_whole and (kind == "packet") == bool(spoken.previous)
            is_valid = is_valid and (kind == "ends") == (slot is None)
            if is_valid and self.store.is_signed(step, packet, spoken.previous, kind):
                return Said(spoken.previous, packet, payload, spoken.lost)
        return None


def _key(step: int, slot: int | None) -> str:
    name = "ends" if slot is None else f"{slot:03d}.packet"
    return f"{records.step_key('packets', step)}/{name}"


def steps_for(store: Store, slots: int, min_workers: int) -> ListedSteps | SignedSteps:
    if not isinstance(store, MembersOnly):
        return ListedSteps(store, slots)
    store.min_workers = min_workers
    return SignedSteps(store, slots)

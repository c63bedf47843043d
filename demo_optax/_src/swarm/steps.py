"""What the workers say in a step: that they are here, or have left, or their packet.

In an open run each says it by an object of its own, which a list finds, and everything is believed.
In a run for members only each has one object in a step, whose name the others know, so that nothing
is listed, and only what a member has signed is believed.
"""

import contextlib
import re
import time
from collections.abc import Collection
from typing import NamedTuple

from demo_optax._src.swarm import records
from demo_optax._src.swarm.members_only import MembersOnly
from demo_optax._src.swarm.records import Damaged, Manifest, MemberId, PacketRef, SwarmError
from demo_optax._src.swarm.slots import last_claim
from demo_optax._src.swarm.store import Store, in_parallel

ROSTER_SECONDS = 10.0  # between two looks for a roster of a higher number
LOOK_SECONDS = 10.0  # between two looks for a later process with the same key

MARKS = {mark.encode(): mark for mark in ("here", "left", "ends")}
_NAME = re.compile(r"(\d{3,10})\.(\d{6,10})\.(here|left|packet)")  # in an open run


class Said(NamedTuple):
    """What a worker has said in a step, after a head of its own."""

    head: str  # "" with a mark, which belongs to no chain, and in an open run
    packet: PacketRef  # of its words or its packet
    payload: bytes
    lost: tuple[int, ...] = ()  # slots whose packets of the step before it did not apply

    @property
    def mark(self) -> str | None:
        return MARKS.get(self.payload)


class StepFolder(NamedTuple):
    """What is known of a step."""

    packets: dict[int, PacketRef]  # by slot
    here: set[MemberId]  # workers that will send one
    left: set[MemberId]  # workers that will not
    elsewhere: set[tuple[int, str]]  # slots from which packets follow another head, with this


class Steps:
    """The steps of a run, as far as this worker has looked at them."""

    def __init__(self, store: Store, slots: int):
        self._store, self.slots = store, slots
        self.closed = store if isinstance(store, MembersOnly) else None
        self._looked_for_roster, self._looked_for_itself = 0.0, time.monotonic()
        self._said: dict[int, dict[str, Said]] = {}  # by step and name
        self._listed: dict[str, int] = {}  # slots of the packets in the last list, by name
        self._asked = ""  # the name that the last glance was at
        self._looks = 0  # so that each glance is at another one

    def forget(self) -> None:
        """Forgets what was said."""
        self._said, self._listed, self._asked = {}, {}, ""

    def glance(self, step: int, waits_for: Collection[int]) -> None:
        """Asks the store once: for a list, or for what a member has said that is waited for.

        While one of these is missing, the others can wait.
        """
        self._list(step)
        if self.closed and (open_ones := self._open(step, waits_for)):
            self._looks += 1
            self._asked = open_ones[self._looks % len(open_ones)]
            self._keep(step, self._asked, self._read(step, self._asked))

    def look(self, step: int, head: str, waits_for: Collection[int], thorough: bool) -> StepFolder:
        """Looks at the others, once the one that was waited for has come.

        Who follows another head may come back to this one.
        """
        open_ones = self._open(step, waits_for)
        if self._asked not in open_ones:
            self._read_all(step, open_ones)
        if thorough or not self._open(step, waits_for):
            elsewhere = {n for n, x in self.packets(step).items() if x.head != head}
            self._read_all(step, self._open(step, range(self.slots), elsewhere))
        return self.folder(step, head)

    def folder(self, step: int, head: str) -> StepFolder:
        """Returns what is known of a step; nobody waits for members with another head."""
        said = list(self._said.get(step, {}).values())
        here, left = ({x.packet.member for x in said if x.mark == y} for y in ("here", "left"))
        sent = self.packets(step)
        packets = {n: x.packet for n, x in sent.items() if x.head == head and self.has(step, n)}
        away = {n: x for n, x in sent.items() if x.head != head}
        left |= {x.packet.member for x in away.values()}
        return StepFolder(packets, here, left, {(n, x.head) for n, x in away.items()})

    def packets(self, step: int) -> dict[int, Said]:
        """Returns the packets that are known of a step, by slot: those of the last processes."""
        said = sorted(self._said.get(step, {}).values(), key=lambda x: x.packet)
        return {x.packet.slot: x for x in said if x.mark is None}

    def sent(self, step: int, slots: Collection[int]) -> dict[int, Said]:
        """Returns the packets of a step that were sent from these slots, and reads them first."""
        self._list(step)
        self._read_all(step, self._open(step, slots))
        return {slot: said for slot, said in self.packets(step).items() if slot in slots}

    def read(self, step: int) -> dict[int, Said]:
        """Returns the packets by slot that the store shows now, whatever it showed before."""
        names = [f"{slot:03d}.packet" for slot in range(self.slots) if self.has(step, slot)]
        found = in_parallel(lambda name: self._read(step, name), names)
        return {x.packet.slot: x for x in found if x is not None and x.mark is None}

    def followers(self, manifest: Manifest) -> set[int]:
        """Returns the slots from which packets of the next step follow a manifest."""
        said = self.read(manifest.step + 1).items()
        return {slot for slot, x in said if x.head == records.head(manifest, x.lost)}

    def say(self, step: int, member: MemberId, mark: str) -> None:
        """Says that a worker is ``here`` for a step, has ``left``, or that its round ``ends``."""
        packet = PacketRef(*member, records.sha256(mark.encode()), 0, 0)
        data = self._signed(step, packet, mark.encode())
        if mark == "ends":
            self._store.put(self._key(step, "ends"), data)
        elif not self._store.create(key := self._key(step, self._name(packet, mark)), data):
            said = self._said_at(step, key)
            if said is None or said.mark not in (None, mark):  # never in place of a packet
                self._store.put(key, data)

    def send(
        self, step: int, packet: PacketRef, data: bytes, head: str, lost: tuple[int, ...]
    ) -> PacketRef:
        """Sends a packet, and returns its reference with a signature, if there are any."""
        self._end_if_replaced(packet.member)
        packet = self._sign(step, packet, head)
        self._store.put(self.key(step, packet), self._signed(step, packet, data, head, lost))
        self._keep(step, self._name(packet, "packet"), Said(head, packet, data, lost))
        return packet

    def has_ended(self, step: int, me: MemberId) -> bool:
        """Tells whether another worker has ended a round."""
        said = self._said_at(step, self._key(step, "ends"))
        return said is not None and said.mark == "ends" and said.packet.member != me

    def key(self, step: int, packet: PacketRef) -> str:
        """Returns the key of a packet."""
        return self._key(step, self._name(packet, "packet"))

    def payload(self, data: bytes) -> bytes:
        """Returns what stands behind the reference in an object."""
        return data.partition(b"\n")[2]

    def has(self, step: int, slot: int) -> bool:
        """Tells whether somebody is a member in a step, and has not been taken out since then."""
        if self.closed is None:
            return True
        public = self.closed.members(step).get(slot)
        return public is not None and public == self.closed.roster.members().get(slot)

    def may_decide(self, step: int) -> bool:
        """Tells whether this worker is a member in a step, and nothing is missing."""
        closed = self.closed
        return closed is None or (self.has(step, closed.slot) and not closed.missing)

    def look_for_roster(self) -> str:
        """Looks for the newest roster from time to time, and returns its name."""
        if self.closed is None:
            return ""
        if time.monotonic() - self._looked_for_roster > ROSTER_SECONDS:
            self.closed.look_for_roster()
            self._looked_for_roster = time.monotonic()
        return self.closed.roster.name

    def _end_if_replaced(self, me: MemberId) -> None:
        """Raises SwarmError once a later process has this worker's key; it looks now and then."""
        if self.closed is None or time.monotonic() - self._looked_for_itself < LOOK_SECONDS:
            return
        self._looked_for_itself = time.monotonic()
        if last_claim(self.closed, me[0]) > me[1]:
            raise SwarmError(
                f"another process uses the key of {self.closed.key.name!r} now: stop one of them, "
                "and give each process a key of its own."
            )

    def _sign(self, step: int, packet: PacketRef, head: str, kind: str = "packet") -> PacketRef:
        return self.closed.sign(step, packet, head, kind) if self.closed else packet

    def _signed(
        self,
        step: int,
        packet: PacketRef,
        payload: bytes,
        head: str = "",
        lost: tuple[int, ...] = (),
    ) -> bytes:
        packet = self._sign(step, packet, head, MARKS.get(payload, "packet"))
        return records.encode(Manifest(step, (packet,), head, 0.0, lost=lost)) + b"\n" + payload

    def _list(self, step: int) -> None:
        """Lists an open run's step: the last packet of each slot, and marks, which need no look."""
        if self.closed is None:
            names = map(_NAME.fullmatch, self._store.names(records.step_key("packets", step)))
            found = [(x[0], int(x[1]), int(x[2]), x[3]) for x in names if x]
            packets = {slot: name for name, slot, _, kind in found if kind == "packet"}
            self._listed = {name: slot for slot, name in packets.items()}
            for name, slot, incarnation, mark in found:
                if mark != "packet" and slot < self.slots:
                    packet = PacketRef(slot, incarnation, "", 0, 0)
                    self._keep(step, name, Said("", packet, mark.encode()))

    def _open(self, step: int, slots: Collection[int], again: Collection[int] = ()) -> list[str]:
        """Returns the names from some slots at which something new may be said, or ``again``."""
        names, said = self._listed, self._said.get(step, {})
        if self.closed:
            names = {f"{slot:03d}.packet": slot for slot in self.closed.members(step)}

        def is_open(name: str) -> bool:
            is_final = name in said and said[name].mark != "here"
            return not is_final or names[name] in again

        return [name for name, slot in names.items() if slot in slots and is_open(name)]

    def _read_all(self, step: int, names: Collection[str]) -> None:
        """Reads what is said at some names."""
        found = in_parallel(lambda name: self._read(step, name), names)
        for name, said in zip(names, found, strict=True):
            self._keep(step, name, said)

    def _keep(self, step: int, name: str, said: Said | None) -> None:
        if said is not None:
            self._said.setdefault(step, {})[name] = said
        for old in [n for n in list(self._said) if n < step - 1]:
            self._said.pop(old, None)

    def _read(self, step: int, name: str) -> Said | None:
        """Reads what a worker has said, which nobody else says in its place."""
        said = self._said_at(step, self._key(step, name))
        if said is None or said.mark == "ends":
            return None
        return said if self._name(said.packet, said.mark or "packet") == name else None

    def _said_at(self, step: int, key: str) -> Said | None:
        """Returns what an object says if a worker has signed it, as far as workers sign."""
        with contextlib.suppress(Damaged, ValueError):
            line, _, payload = (self._store.get(key) or b"").partition(b"\n")
            spoken = records.decode(Manifest, line[:1000])
            (packet,) = spoken.packets  # of two it is nobody's
            kind, head = MARKS.get(payload, "packet"), spoken.previous
            is_whole = spoken.step == step and packet.sha256 == records.sha256(payload)
            is_signed = not self.closed or self.closed.is_signed(step, packet, head, kind)
            if is_whole and packet.slot < self.slots and is_signed:
                return Said(head, packet, payload, spoken.lost)
        return None

    def _name(self, packet: PacketRef, kind: str) -> str:
        if self.closed:
            return f"{packet.slot:03d}.packet"
        return f"{packet.slot:03d}.{packet.incarnation:06d}.{kind}"

    def _key(self, step: int, name: str) -> str:
        return f"{records.step_key('packets', step)}/{name}"

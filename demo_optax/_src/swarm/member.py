"""A worker among others that come and go: its slot, what it sends, and which packets count.

There is no leader. The first manifest of a step that is written stands, and says which packets
count. Whoever has all the packets that it waits for, or has waited long enough, proposes one.
"""

import collections
import contextlib
import logging
import statistics
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from demo_optax._src import checks
from demo_optax._src.swarm import records
from demo_optax._src.swarm.records import Damaged, Manifest, Packet
from demo_optax._src.swarm.slots import SwarmError, claim, read_claim
from demo_optax._src.swarm.store import Store, in_parallel

log = logging.getLogger("demo_optax.swarm")

FIRST_DEADLINE = 60.0  # seconds, while nobody knows how long a step takes
SHORTEST_DEADLINE = 2.0
STEPS_TO_WAIT = 3  # the deadline, in median steps
STEPS_TO_ANNOUNCE = 2  # which the others may take until they see an announcement
REMEMBERED = 21  # steps whose durations make the median
LONGEST_PAUSE = 0.05  # seconds between two looks at the store
TOLD_EVERY = 5.0  # seconds, of what a worker waits for
PATIENCE = 60.0  # seconds for which a read is tried again, where the store does not say

T = TypeVar("T")


class Left(Exception):
    """A worker was asked to leave while it waited."""


class Round(NamedTuple):
    """What a step's exchange gave.

    Attributes:
      manifest: which packets count.
      packets: their bytes, by slot; only this worker's own where they were ``swept``.
      own: this worker's slot; None where its packet is not among them.
      late: names of workers that were waited for in vain.
      waited: seconds that this worker spent in the exchange.
      swept: whether packets are gone, because a later snapshot stands for them.
    """

    manifest: Manifest
    packets: dict[int, bytes]
    own: int | None
    late: tuple[str, ...]
    waited: float
    swept: bool


class Member:
    """This process's place in a swarm.

    Args:
      store: that all workers of the run share.
      worker: a name of its own. A process that comes back under its name gets its slot again.
      slots: the most workers at a time; the same for all workers of the run.
      deadline: seconds for which a step waits for workers that took part in the last one. By
        default three median steps, and at least 2.
      min_workers: with fewer packets than this nobody goes on.
      tell: gets a line of text whenever there is something to say.

    Raises:
      SwarmError: all slots are taken.

    Example:
      >>> import tempfile
      >>> from demo_optax._src.swarm.store import ObjectStore
      >>> folder = tempfile.TemporaryDirectory()
      >>> member = Member(ObjectStore(folder.name), "paris", slots=4)
      >>> member.exchange(0, b"a packet").packets
      {0: b'a packet'}
      >>> folder.cleanup()
    """

    def __init__(
        self,
        store: Store,
        worker: str,
        *,
        slots: int = 16,
        deadline: float | None = None,
        min_workers: int = 1,
        tell: Callable[[str], None] = log.info,
    ):
        checks.static_integer("slots", slots, at_least=1)
        checks.static_integer("min_workers", min_workers, at_least=1)
        if deadline is not None:
            checks.in_interval("deadline", deadline, "(0, inf)")
        if not worker or not isinstance(worker, str):
            raise ValueError(f"worker must be a name of this worker alone, not {worker!r}.")
        if min_workers > slots:
            raise ValueError(
                f"min_workers={min_workers} can never come together in slots={slots}: give more "
                "slots, or fewer min_workers."
            )
        self.store, self.worker, self.slots = store, worker, slots
        self.min_workers, self.tell = min_workers, tell
        self._given_deadline = deadline
        self._durations: collections.deque[float] = collections.deque(maxlen=REMEMBERED)
        self._last_time: float | None = None
        self._manifests: dict[int, Manifest] = {}
        self._hashes: dict[int, str] = {}
        self._held: dict[str, bytes] = {}
        self._ahead: dict[str, bytes] = {}
        self._unfit: set[str] = set()
        self._names: dict[tuple[int, int], str] = {}
        self._leaving = threading.Event()
        self._asking = ThreadPoolExecutor(1, "manifests")
        self._reading = threading.RLock()  # with a delay, the exchange has a thread of its own
        self.slot, self.incarnation = claim(store, worker, uuid.uuid4().hex, slots)

    @property
    def deadline(self) -> float:
        """Seconds for which a step waits."""
        if self._given_deadline is not None:
            return self._given_deadline
        if len(self._durations) < 3:
            return FIRST_DEADLINE
        return max(STEPS_TO_WAIT * statistics.median(self._durations), SHORTEST_DEADLINE)

    @property
    def me(self) -> tuple[int, int]:
        """This worker's slot and incarnation."""
        return self.slot, self.incarnation

    @property
    def leaving(self) -> bool:
        """Whether `leave` was called."""
        return self._leaving.is_set()

    def exchange(self, step: int, packet: bytes) -> Round:
        """Sends a packet, and returns when it is decided which packets count.

        Raises:
          SwarmError: another process has taken this worker's slot, or a packet that counts cannot
            be read.
          StoreError: the store does not work.
          Left: `leave` was called meanwhile.
        """
        began = time.monotonic()
        own = Packet(*self.me, records.sha256(packet))
        key = records.packet_key(step, own)
        self._held, self._unfit = {key: packet}, set()
        self.store.put(key, packet)
        before = self.manifest(step - 1)
        expected = before.members if before else frozenset()
        manifest = self._agree(step, expected, len(packet), began)
        packets, swept = self._fetch(manifest)
        now = time.monotonic()
        if self._last_time is not None:
            self._durations.append(now - self._last_time)
        self._last_time = now
        late = tuple(map(self.name_of, self._late(manifest, expected)))
        slot = self.slot if own in manifest.packets else None
        return Round(manifest, packets, slot, late, now - began, swept)

    def receive(self, step: int) -> Round:
        """What others exchanged in a step that is decided.

        Raises:
          SwarmError, StoreError: it cannot be read.
          Left: `leave` was called meanwhile.
        """
        self._held = {}
        self._last_time = None  # the next step's duration would be that of catching up
        manifest = self._decided(step)
        packets, swept = self._fetch(manifest)
        return Round(manifest, packets, None, (), 0.0, swept)

    def read_ahead(self, first: int, steps: int) -> None:
        """Reads what was exchanged in steps to come, many objects at once, for their `receive`.

        Where these are the last that are decided, it asks the others to wait a little after them:
        a replay need not be faster than the run to end.
        """
        keys = [records.manifest_key(first + n) for n in range(steps)]
        manifests = zip(keys, in_parallel(self.store.get, keys), strict=True)
        self._ahead = {key: data for key, data in manifests if data is not None}
        if len(self._ahead) < steps:
            self.announce(first + len(self._ahead) + STEPS_TO_ANNOUNCE)
        named = []
        for data in self._ahead.values():
            with contextlib.suppress(Damaged):
                found = Manifest.decode(data)
                named += [records.packet_key(found.step, packet) for packet in found.packets]
        packets = zip(named, in_parallel(self.store.get, named), strict=True)
        self._ahead |= {key: data for key, data in packets if data is not None}

    def manifest(self, step: int) -> Manifest | None:
        """Which packets count in a step; None if it is not decided.

        Raises:
          SwarmError: another process has taken this worker's slot, or the manifest is of another
            run.
        """
        with self._reading:
            if step in self._manifests:
                return self._manifests[step]
            data = self._get(records.manifest_key(step))
            if data is None:
                return None
            try:
                return self._keep(step, Manifest.decode(data), data)
            except Damaged as error:  # then nobody can decide the step anew, or go on
                log.warning("the manifest of step %d: %s", step, error)
                return None

    def announce(self, step: int) -> None:
        """Asks the others to wait for this worker's packet in a step and the next."""
        for number in step, step + 1:  # this step may be decided at this moment
            self.store.put(records.mark_key(number, self.me, "here"), b"")

    def leave(self, step: int | None = None) -> None:
        """Ends a wait; with the next step's number it also tells the others not to wait."""
        self._leaving.set()
        if step is not None:
            decided = list(self._manifests)  # a copy: the exchange's thread adds to them
            step = max([step, *(number + 1 for number in decided)])  # it may replay
            for number in step, step + 1:  # a packet of this step may be under way
                self.store.put(records.mark_key(number, self.me, "left"), b"")

    def name_of(self, member: tuple[int, int]) -> str:
        """The name of the worker with this slot and incarnation."""
        if member not in self._names:
            self._names[member] = read_claim(self.store, member).worker
        return self._names[member]

    def _keep(self, step: int, found: Manifest, data: bytes) -> Manifest:
        with self._reading:
            self._require_next(step, found)
            self._manifests[step], self._hashes[step] = found, records.sha256(data)
            for old in [n for n in self._manifests if n < step - 1]:
                del self._manifests[old], self._hashes[old]
            return found

    def _require_next(self, step: int, found: Manifest) -> None:
        """Raises SwarmError unless it follows from the manifest before, and knows this worker."""
        before = self._hashes.get(step - 1, found.previous)
        if found.step != step or found.previous != before or found.packets[-1].slot >= self.slots:
            raise SwarmError(
                f"the manifest of step {step} does not follow from that of step {step - 1}: two "
                "runs share this place in the store, or somebody changed it. Use another place."
            )
        for packet in found.packets:
            if packet.slot == self.slot and packet.incarnation > self.incarnation:
                raise SwarmError(
                    f"another process is worker {self.worker!r} now, or has taken its slot "
                    f"{self.slot}: give every process a --worker name of its own."
                )

    def _agree(
        self, step: int, expected: frozenset[tuple[int, int]], size: int, began: float
    ) -> Manifest:
        """The manifest that stands."""
        told = began
        while True:
            self.end_if_leaving()
            looked = time.monotonic()
            asked = self._asking.submit(self.manifest, step)  # while this thread lists
            found = self._present(step)
            if (decided := asked.result()) is not None:
                return decided
            self._read(step, found.packets.values(), size)
            here = {n: x for n, x in found.packets.items() if self._holds(step, x)}
            arrived = frozenset(packet.member for packet in here.values())
            newest = dict(sorted(arrived | found.here))
            missing = sorted(
                member
                for member in (expected | found.here) - found.left - arrived
                if newest.get(member[0], 0) <= member[1]
            )
            now = time.monotonic()
            enough = len(arrived) >= self.min_workers
            if enough and (not missing or now - began >= self.deadline):
                return self._propose(step, here)
            if now - told > TOLD_EVERY:
                told = now
                self.tell(self._why_it_waits(step, missing, len(arrived), now - began))
            time.sleep(min(10 * (now - looked), LONGEST_PAUSE))  # a tenth of the time is for looks

    def _why_it_waits(
        self, step: int, missing: list[tuple[int, int]], arrived: int, waited: float
    ) -> str:
        if arrived < self.min_workers:
            return (
                f"step {step}: {arrived} of at least {self.min_workers} workers are here; waits "
                f"for more since {waited:.0f} s"
            )
        names = ", ".join(map(self.name_of, missing))
        return f"step {step}: waits for {names}, {waited:.0f} of at most {self.deadline:.0f} s"

    def _propose(self, step: int, packets: dict[int, Packet]) -> Manifest:
        named = tuple(packets[slot] for slot in sorted(packets))
        previous = self._hashes.get(step - 1, "")
        proposed = Manifest(step, named, previous, time.time())
        if self.store.create(records.manifest_key(step), data := proposed.encode()):
            return self._keep(step, proposed, data)
        return self._decided(step)

    def _decided(self, step: int) -> Manifest:
        """The manifest of a step that has one, though the store may not show it at once."""
        return self._retry(f"the manifest of step {step}", lambda: self.manifest(step))

    def _late(
        self, manifest: Manifest, expected: frozenset[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """Who was expected in a step, does not count, and had not said that it leaves."""
        absent = {x for x in expected - manifest.members if x[0] != self.slot}
        return sorted(absent - self._present(manifest.step).left) if absent else []

    def _present(self, step: int) -> records.Present:
        return records.read_folder(self.store.names(records.step_folder(step)), self.slots)

    def _holds(self, step: int, packet: Packet) -> bool:
        return records.packet_key(step, packet) in self._held

    def _read(self, step: int, packets: Iterable[Packet], size: int | None = None) -> None:
        """Reads packets that are not at hand, and keeps those with the right hash and size."""
        keys = {records.packet_key(step, packet): packet.sha256 for packet in packets}
        wanted = [key for key in keys if key not in self._held and key not in self._unfit]
        for key, data in zip(wanted, in_parallel(self._get, wanted), strict=True):
            if data is None:
                continue
            if records.sha256(data) == keys[key] and size in (None, len(data)):
                self._held[key] = data
            elif size is not None:
                self._unfit.add(key)

    def _get(self, key: str) -> bytes | None:
        return self._ahead.pop(key, None) or self.store.get(key)

    def _fetch(self, manifest: Manifest) -> tuple[dict[int, bytes], bool]:
        """All packets that count, and whether they were swept: then those that are at hand.

        Whoever cannot read one that was not swept must not go on.
        """
        keys = {x.slot: records.packet_key(manifest.step, x) for x in manifest.packets}
        self._unfit = set()

        def attempt() -> tuple[dict[int, bytes], bool] | None:
            self._read(manifest.step, manifest.packets)
            held = {slot: self._held[key] for slot, key in keys.items() if key in self._held}
            swept = len(held) < len(keys) and is_swept(self.store, manifest.step)
            return (held, swept) if swept or len(held) == len(keys) else None

        return self._retry(f"a packet that counts in step {manifest.step}", attempt)

    def _retry(self, what: str, attempt: Callable[[], T | None]) -> T:
        started, pause = time.monotonic(), 0.01
        patience = getattr(self.store, "patience", PATIENCE)
        while (found := attempt()) is None:
            self.end_if_leaving()
            if time.monotonic() - started > patience:
                raise SwarmError(
                    f"{what} cannot be read since {patience:.0f} s, or holds other bytes than its "
                    "hash says. Make sure that the store is well, and start this worker again: it "
                    "joins from a snapshot."
                )
            time.sleep(pause)
            pause = min(2 * pause, 1.0)
        return found

    def end_if_leaving(self) -> None:
        """Raises `Left` if `leave` was called."""
        if self.leaving:
            raise Left(f"worker {self.worker!r} was asked to leave: call close().")


def is_swept(store: Store, step: int) -> bool:
    """Whether a step's packets may be gone, because two later snapshots are there."""
    later = [name for name in store.names("snapshots") if name.endswith(".json")]
    return sum((records.step_of(name) or 0) > step for name in later) > 1

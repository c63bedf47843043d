"""A worker among others that come and go: its slot, what it sends, and which packets count.

There is no leader. The first manifest of a step that is written stands, and says which packets
count. Whoever has all the packets that it waits for, or has waited long enough, proposes one.
"""

import collections
import contextlib
import functools
import logging
import statistics
import threading
import time
import uuid
from collections.abc import Callable
from typing import NamedTuple

from demo_optax import checks
from demo_optax.swarm import records
from demo_optax.swarm.records import Claim, Damaged, Manifest, Packet
from demo_optax.swarm.store import Store, in_parallel

log = logging.getLogger("demo_optax.swarm")

FIRST_DEADLINE = 60.0  # seconds, while nobody knows how long a step takes
SHORTEST_DEADLINE = 2.0
STEPS_TO_WAIT = 3  # the deadline, in median steps
REMEMBERED = 21  # steps whose durations make the median


class SwarmError(RuntimeError):
    """A worker cannot go on with the others."""


class Left(Exception):
    """A worker was asked to leave while it waited."""


class Round(NamedTuple):
    """What a step's exchange gave.

    Attributes:
      manifest: which packets count.
      packets: their bytes, by slot; only this worker's own where they were ``swept``.
      counts: whether this worker's packet is among them.
      late: names of workers that were waited for in vain.
      waited: seconds that this worker spent in the exchange.
      swept: whether packets are gone, because a later snapshot stands for them.
    """

    manifest: Manifest
    packets: dict[int, bytes]
    counts: bool
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
      >>> from demo_optax.swarm.store import ObjectStore
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
        self._nonce = uuid.uuid4().hex
        self._durations: collections.deque[float] = collections.deque(maxlen=REMEMBERED)
        self._last_time: float | None = None
        self._manifests: dict[int, Manifest] = {}
        self._hashes: dict[int, str] = {}
        self._held: dict[str, bytes] = {}
        self._leaving = threading.Event()
        self.slot, self.incarnation = self._claim()

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
        self._held = {key: packet}
        self.store.put(key, packet)
        manifest, late = self._agree(step, began)
        packets, swept = self._fetch(manifest)
        now = time.monotonic()
        if self._last_time is not None:
            self._durations.append(now - self._last_time)
        self._last_time = now
        counts = own in manifest.packets
        names = tuple(map(self.name_of, late))
        return Round(manifest, packets, counts, names, now - began, swept)

    def receive(self, step: int) -> Round | None:
        """What others exchanged in a step; None if it is not decided."""
        manifest = self.manifest(step)
        if manifest is None:
            return None
        self._held = {}
        self._last_time = None  # the next step's duration would be that of catching up
        packets, swept = self._fetch(manifest)
        return Round(manifest, packets, False, (), 0.0, swept)

    def manifest(self, step: int) -> Manifest | None:
        """Which packets count in a step; None if it is not decided.

        Raises:
          SwarmError: another process has taken this worker's slot, or the store holds something
            else than a manifest of this run.
        """
        if step in self._manifests:
            return self._manifests[step]
        data = self.store.get(records.manifest_key(step))
        if data is None:
            return None
        try:
            found = Manifest.decode(data)
        except Damaged as error:
            raise SwarmError(f"step {step}: {error}") from error
        before = self._hashes.get(step - 1)
        if found.step != step or (before is not None and found.previous != before):
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
        self._manifests[step], self._hashes[step] = found, records.sha256(data)
        for old in [n for n in self._manifests if n < step - 1]:
            del self._manifests[old], self._hashes[old]
        return found

    def announce(self, step: int) -> None:
        """Asks the others to wait for this worker's packet in a step."""
        self.store.put(f"{records.step_folder(step)}/{records.member_name(self.me)}.here", b"")

    def leave(self, step: int | None = None) -> None:
        """Ends a wait; with the next step's number it also tells the others not to wait."""
        self._leaving.set()
        if step is not None:
            self.store.put(f"{records.step_folder(step)}/{records.member_name(self.me)}.left", b"")

    def name_of(self, member: tuple[int, int]) -> str:
        """The name of the worker with this slot and incarnation."""
        return self.worker if member == self.me else _name_of(self.store, *member)

    def _agree(self, step: int, began: float) -> tuple[Manifest, list[tuple[int, int]]]:
        """The manifest that stands, and who was waited for in vain."""
        before = self.manifest(step - 1)
        expected = before.members if before else frozenset()
        pause, told = 0.002, began
        while True:
            if self._leaving.is_set():
                raise Left
            if (decided := self.manifest(step)) is not None:
                return decided, []
            found = records.read_folder(self.store.names(records.step_folder(step)), self.slots)
            arrived = frozenset(packet.member for packet in found.packets.values())
            newest = dict(sorted(arrived | found.here))
            missing = sorted(
                member
                for member in (expected | found.here) - found.left - arrived
                if newest.get(member[0], 0) <= member[1]
            )
            self._prefetch(step, found.packets)
            now = time.monotonic()
            enough = len(arrived) >= self.min_workers
            if enough and (not missing or now - began >= self.deadline):
                return self._propose(step, found.packets), missing
            if now - told > 5:
                told = now
                self.tell(self._why_it_waits(step, missing, len(arrived), now - began))
            time.sleep(pause)
            pause = min(1.5 * pause, 0.05)

    def _why_it_waits(self, step: int, missing, arrived: int, waited: float) -> str:
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
        self.store.create(records.manifest_key(step), proposed.encode())
        return self._read(step)

    def _read(self, step: int) -> Manifest:
        """The manifest of a step that is decided, which a list may show before a read does."""
        return self._retry(f"the manifest of step {step}", lambda: self.manifest(step))

    def _prefetch(self, step: int, packets: dict[int, Packet]) -> None:
        """Reads packets before it is decided that they count."""
        keys = {records.packet_key(step, packet): packet for packet in packets.values()}
        wanted = [key for key in keys if key not in self._held]
        for key, data in zip(wanted, in_parallel(self.store.get, wanted), strict=True):
            if data is not None and records.sha256(data) == keys[key].sha256:
                self._held[key] = data

    def _fetch(self, manifest: Manifest) -> tuple[dict[int, bytes], bool]:
        """All packets that count, and whether they were swept: then those that are at hand.

        Whoever cannot read one that was not swept must not go on.
        """
        named = {packet.slot: packet for packet in manifest.packets}
        keys = {n: records.packet_key(manifest.step, packet) for n, packet in named.items()}

        def attempt() -> tuple[dict[int, bytes], bool] | None:
            self._prefetch(manifest.step, named)
            held = {slot: self._held[key] for slot, key in keys.items() if key in self._held}
            swept = len(held) < len(keys) and is_swept(self.store, manifest.step)
            return (held, swept) if swept or len(held) == len(keys) else None

        return self._retry(f"a packet that counts in step {manifest.step}", attempt)

    def _retry(self, what: str, attempt: Callable):
        started, pause = time.monotonic(), 0.01
        while (found := attempt()) is None:
            if time.monotonic() - started > self.store_patience:
                raise SwarmError(
                    f"{what} cannot be read since {self.store_patience:.0f} s, or holds other "
                    "bytes than its hash says. Start this worker again: it joins from a snapshot."
                )
            time.sleep(pause)
            pause = min(2 * pause, 1.0)
        return found

    @property
    def store_patience(self) -> float:
        """Seconds for which a read is tried again."""
        return getattr(self.store, "patience", 60.0)

    def _claim(self) -> tuple[int, int]:
        """Takes a slot: its own of before, a free one, or one whose worker is gone longest."""
        for _ in range(100):
            newest = newest_claims(self.store)
            slot = self._wanted_slot(newest)
            incarnation = newest[slot][0] + 1 if slot in newest else 1
            claim = Claim(self.worker, self._nonce, time.time())
            key = f"slots/{slot:03d}/{incarnation:06d}"
            with contextlib.suppress(Damaged):
                data = (
                    self.store.get(key)
                    if not self.store.create(key, records.to_json(claim))
                    else None
                )
                if data is None or records.from_json(Claim, data).nonce == self._nonce:
                    return slot, incarnation
        raise SwarmError(f"{self.worker} found no slot in 100 tries: start it again.")

    def _is_mine(self, key: str) -> bool:
        """Whether a claim is this process's own, whose answer was lost on its way."""
        data = self.store.get(key)
        with contextlib.suppress(Damaged):
            return data is not None and records.from_json(Claim, data).nonce == self._nonce
        return False

    def _wanted_slot(self, newest: dict[int, tuple[int, Claim]]) -> int:
        own = [slot for slot, (_, claim) in newest.items() if claim.worker == self.worker]
        own = [slot for slot in own if slot < self.slots]
        free = [slot for slot in range(self.slots) if slot not in newest]
        if own or free:
            return (own or free)[0]
        active = {packet.slot for packet in (last_manifest(self.store) or _NONE).packets}
        gone = [slot for slot in range(self.slots) if slot not in active]
        if not gone:
            names = ", ".join(newest[slot][1].worker for slot in sorted(active))
            raise SwarmError(
                f"all {self.slots} slots are taken, by {names}: stop a worker, or start all of "
                "them again in a new place with more slots."
            )
        return min(gone, key=lambda slot: newest[slot][1].time)


_NONE = Manifest(-1, (), "", 0.0)


@functools.lru_cache(1024)
def _name_of(store: Store, slot: int, incarnation: int) -> str:
    data = store.get(f"slots/{slot:03d}/{incarnation:06d}")
    with contextlib.suppress(Damaged):
        if data is not None:
            return records.from_json(Claim, data).worker
    return f"slot {slot}"


def newest_claims(store: Store) -> dict[int, tuple[int, Claim]]:
    """Of each slot that was ever claimed, its newest incarnation and claim."""
    newest: dict[int, int] = {}
    for name in store.names("slots"):
        slot, _, incarnation = name.partition("/")
        if slot.isdecimal() and incarnation.isdecimal():
            newest[int(slot)] = max(int(incarnation), newest.get(int(slot), 0))
    found = {}
    for slot, incarnation in newest.items():
        data = store.get(f"slots/{slot:03d}/{incarnation:06d}")
        with contextlib.suppress(Damaged):
            if data is not None:
                found[slot] = incarnation, records.from_json(Claim, data)
    return found


def is_swept(store: Store, step: int) -> bool:
    """Whether a step's packets may be gone, because two later snapshots are there."""
    later = [name for name in store.names("snapshots") if name.endswith(".json")]
    return sum(int(name[:8]) > step for name in later) > 1


def last_manifest(store: Store) -> Manifest | None:
    """The manifest of the last step that is decided."""
    names = store.names("manifests")
    data = store.get(f"manifests/{names[-1]}") if names else None
    return Manifest.decode(data) if data else None

"""A worker's part in the protocol: its slot, what it sends, and which packets count.

There is no leader. The first manifest that is written for a step stands, and says which packets
count. A worker proposes one as soon as it has all packets it waits for, or has waited long enough.
"""

import collections
import contextlib
import statistics
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Set
from typing import Any, NamedTuple, TypeVar

from demo_optax._src import checks
from demo_optax._src.swarm import records
from demo_optax._src.swarm.records import Damaged, Manifest, MemberId, PacketRef, SwarmError
from demo_optax._src.swarm.slots import claim, read_claim
from demo_optax._src.swarm.store import Store, in_parallel, log

FIRST_DEADLINE = 60.0  # seconds, while nobody knows how long a step takes
SHORTEST_DEADLINE = 2.0
DEADLINE_STEPS = 3  # the deadline, in median steps
DEADLINE_ROUNDS = 0.5  # the deadline, in median rounds of several steps
NUM_DURATIONS = 21  # steps in the median
STEPS_TO_ANNOUNCE = 2  # that the others may take until they see an announcement
LOOKING_SHARE = 0.1  # of the time in which a worker waits
POLL_SECONDS = 0.05  # at most between two looks at a step, but
POLL_SHARE = 0.02  # of a median round, behind which the exchange is hidden
LOG_EVERY_SECONDS = 5.0
PATIENCE = 60.0  # seconds for which a read is tried again, unless the store has its own

T = TypeVar("T")


class Left(Exception):
    """The worker was asked to leave while it waited."""


class ExchangeResult(NamedTuple):
    """The result of a step's exchange."""

    manifest: Manifest
    packets: dict[int, bytes]  # those that count, by slot; only this worker's own if swept
    swept: bool  # whether packets are gone from the store, because later snapshots replace them
    members: tuple[str, ...]  # names of the workers whose packets count
    late: tuple[str, ...] = ()  # names of the workers that were waited for in vain
    own: int | None = None  # this worker's slot, if its packet counts
    waited: float = 0.0  # seconds that this worker spent in the exchange


class Member:
    """The place of this process in a swarm.

    Args:
      store: the store that all workers of the run share.
      worker: a unique name. A process that comes back under its name gets its slot again.
      slots: the largest number of workers at a time; the same for all workers of the run.
      deadline: seconds for which a step waits for the workers that took part in the last one. The
        default is three median steps, or half a median round, and at least 2 seconds.
      min_workers: a step waits, without a deadline, until this many packets are there.
      tell: is called with a line of text whenever there is something to report.

    Raises:
      SwarmError: all slots are taken. Methods raise it if another process has taken this worker's
        slot, if two runs share the store, or if a packet that counts cannot be read.
      StoreError: the store does not work.
      Left: `leave` was called while a method waited.

    Example:
      >>> import tempfile
      >>> from demo_optax.swarm import Member, ObjectStore
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
        if not worker or not isinstance(worker, str) or not worker.isprintable():
            raise ValueError(
                "worker must be a name of this worker alone, of characters that can be printed, "
                f"not {worker!r}."
            )
        if min_workers > slots:
            raise ValueError(
                f"min_workers={min_workers} can never come together in slots={slots}: give more "
                "slots, or fewer min_workers."
            )
        self.store, self.worker, self.slots = store, worker, slots
        self.min_workers, self.tell = min_workers, tell
        self.unit = "step"  # what the exchanges are called in messages; or "round"
        self.last_sent: int | None = None  # the number of the exchange that got the last packet
        self._fixed_deadline = deadline
        self._durations: collections.deque[float] = collections.deque(maxlen=NUM_DURATIONS)
        self._last_time: float | None = None
        self._last_steps = 1  # of the last packet
        self._has_sent = False
        self._manifests: dict[int, Manifest] = {}  # the last ones
        self._hashes: dict[int, str] = {}  # of these manifests
        self._packets: dict[str, bytes] = {}  # of the current step
        self._prefetched: dict[str, bytes] = {}
        self._names: dict[MemberId, str] = {}
        self._leaving = threading.Event()
        self._lock = threading.RLock()  # with a delay, the exchange has a thread of its own
        self._transferring = threading.Lock()  # packets, for which snapshots make way
        self.slot, self.incarnation = claim(store, worker, uuid.uuid4().hex, slots)

    @property
    def deadline(self) -> float:
        """Seconds for which a step waits."""
        if self._fixed_deadline is not None:
            return self._fixed_deadline
        if len(self._durations) < 3:
            return FIRST_DEADLINE
        share = DEADLINE_STEPS if self._last_steps == 1 else DEADLINE_ROUNDS
        return max(share * statistics.median(self._durations), SHORTEST_DEADLINE)

    @property
    def _longest_pause(self) -> float:
        return max(POLL_SECONDS, POLL_SHARE * statistics.median(self._durations or [0.0]))

    @property
    def me(self) -> MemberId:
        """This worker's slot and incarnation."""
        return self.slot, self.incarnation

    @property
    def leaving(self) -> bool:
        """Whether `leave` was called."""
        return self._leaving.is_set()

    def exchange(
        self, step: int, packet: bytes, steps: int = 1, tokens: int = 1, ends_round: bool = False
    ) -> ExchangeResult:
        """Sends a packet, and returns once it is decided which packets count.

        The numbers of steps and tokens that the packet results from enter the manifest. With
        ``ends_round`` it asks the others to end their round too.
        """
        started = time.monotonic()
        if ends_round:
            self.store.put(records.mark_key(step, self.me, "ends"), b"")
        own, self._last_steps = None, steps
        if self.may_send(step):
            own = self.send(step, packet, steps, tokens)
        previous = self.manifest(step - 1)
        expected = previous.members if previous else frozenset()
        manifest = self._agree(step, expected, len(packet), started)
        result = self._fetch(manifest)
        now = time.monotonic()
        if self._last_time is not None:
            self._durations.append(now - self._last_time)
        self._last_time = now
        late = {x for x in expected - manifest.members if x[0] != self.slot}
        if late:
            late -= self._folder(step).left
        return result._replace(
            late=tuple(map(self.name_of, sorted(late))),
            own=self.slot if own and own in manifest.packets else None,
            waited=now - started,
        )

    def send(self, step: int, packet: bytes, steps: int = 1, tokens: int = 1) -> PacketRef:
        """Sends a packet, without waiting for a decision."""
        own = PacketRef(*self.me, records.sha256(packet), steps, tokens)
        key = records.packet_key(step, own)
        self._packets = {key: packet}
        with self._transferring:
            self.store.put(key, packet)
        self.last_sent = step
        return own

    def may_send(self, step: int) -> bool:
        """Tells whether an earlier process of this worker has left no packet in a step.

        That packet shall count. Otherwise the worker helps to decide the step, and sends nothing.
        """
        self._packets = {}
        if self._has_sent:
            return True
        self._has_sent = True
        earlier = self._folder(step).packets.get(self.slot)
        if earlier is None or earlier.member == self.me:
            return True
        self.store.put(records.mark_key(step, self.me, "left"), b"")
        return False

    def wait_for_transfers(self) -> None:
        """Waits until no packet is being sent or read."""
        with self._transferring:
            pass

    def others_ended(self, step: int) -> bool:
        """Tells whether others have ended a round of local steps."""
        return bool(self._folder(step).ends - {self.me})

    def receive(self, step: int) -> ExchangeResult:
        """Returns what the others exchanged in a step that is decided."""
        self._packets = {}
        self._last_time = None  # otherwise the next duration would contain the catching up
        return self._fetch(self._decided(step))

    def read_ahead(self, first: int, steps: int) -> None:
        """Reads what was exchanged in the next steps, many objects at once, for `receive`."""
        manifests = [records.step_key("manifests", first + n) for n in range(steps)]
        self._prefetched = self._read_all(manifests)
        if len(self._prefetched) < steps:  # so that a replay ends even if it is not faster
            self.announce(first + len(self._prefetched) + STEPS_TO_ANNOUNCE)
        packets = []
        for data in self._prefetched.values():
            with contextlib.suppress(Damaged):
                manifest = records.decode(Manifest, data)
                packets += [records.packet_key(manifest.step, x) for x in manifest.packets]
        self._prefetched |= self._read_all(packets)

    def manifest(self, step: int) -> Manifest | None:
        """Returns which packets count in a step, or None if it is not decided."""
        with self._lock:
            if step in self._manifests:
                return self._manifests[step]
            data = self._get(records.step_key("manifests", step))
            if data is None:
                return None
            try:
                return self._keep(step, records.decode(Manifest, data), data)
            except Damaged as error:  # then nobody can decide the step anew, or go on
                log.warning("the manifest of %s %d: %s", self.unit, step, error)
                return None

    def announce(self, step: int) -> None:
        """Asks the others to wait for this worker's packet in a step and in the next one."""
        for number in step, step + 1:  # the first may be decided at this moment
            self.store.put(records.mark_key(number, self.me, "here"), b"")

    def leave(self, step: int | None = None) -> None:
        """Ends a wait; given the next step's number, it also tells the others not to wait."""
        self._leaving.set()
        if step is not None:
            # It may be catching up; the list is a copy, since the exchange's thread adds to it.
            step = max([step, *(decided + 1 for decided in list(self._manifests))])
            for number in step, step + 1:  # a packet of the first may be on its way
                self.store.put(records.mark_key(number, self.me, "left"), b"")
            self.store.put(records.left_key(self.me), b"")  # for whoever looks at the run later

    def end_if_leaving(self) -> None:
        """Raises `Left` if `leave` was called."""
        if self.leaving:
            raise Left(f"worker {self.worker!r} was asked to leave: call close().")

    def name_of(self, member: MemberId) -> str:
        """Returns the name of the worker with a slot and incarnation."""
        if member not in self._names:
            self._names[member] = read_claim(self.store, member).worker
        return self._names[member]

    def _keep(self, step: int, manifest: Manifest, data: bytes) -> Manifest:
        with self._lock:
            self._require_next(step, manifest)
            self._manifests[step], self._hashes[step] = manifest, records.sha256(data)
            for old in [n for n in self._manifests if n < step - 1]:
                del self._manifests[old], self._hashes[old]
            return manifest

    def _require_next(self, step: int, manifest: Manifest) -> None:
        """Raises SwarmError unless the manifest follows the one before, and knows this worker."""
        previous, last = self._hashes.get(step - 1, manifest.previous), manifest.packets[-1]
        if (manifest.step, manifest.previous) != (step, previous) or last.slot >= self.slots:
            raise SwarmError(
                f"the manifest of {self.unit} {step} does not follow from the one before: two runs "
                "share this place in the store, or somebody changed it. Use another place."
            )
        for packet in manifest.packets:
            if packet.slot == self.slot and packet.incarnation > self.incarnation:
                raise SwarmError(
                    f"another process is worker {self.worker!r} now, or has taken its slot "
                    f"{self.slot}: give every process a --worker name of its own."
                )

    def _agree(self, step: int, expected: Set[MemberId], size: int, started: float) -> Manifest:
        """Returns the manifest that stands, and proposes one when this worker need not wait."""
        logged = started
        while True:
            self.end_if_leaving()
            looked = time.monotonic()
            reads: list[Callable[[int], Any]] = [self.manifest, self._folder]
            manifest, folder = in_parallel(lambda read: read(step), reads)
            if manifest is not None:
                return manifest
            present = folder.packets.values()
            self._read(step, present, size)
            packets = [x for x in present if records.packet_key(step, x) in self._packets]
            arrived = frozenset(packet.member for packet in packets)
            newest = dict(sorted(arrived | folder.here))
            missing = sorted(
                (slot, incarnation)
                for slot, incarnation in (expected | folder.here) - folder.left - arrived
                if newest.get(slot, 0) <= incarnation
            )
            now = time.monotonic()
            waited = now - started
            if len(arrived) >= self.min_workers and (not missing or waited >= self.deadline):
                return self._propose(step, packets)
            if now - logged > LOG_EVERY_SECONDS:
                logged = now
                names = ", ".join(map(self.name_of, missing))
                what = (
                    f"waits for {names}, {waited:.0f} of at most {self.deadline:.0f} s"
                    if len(arrived) >= self.min_workers
                    else f"{len(arrived)} of at least {self.min_workers} workers are here; has "
                    f"waited for more for {waited:.0f} s"
                )
                self.tell(f"{self.unit} {step}: {what}")
            time.sleep(min((now - looked) / LOOKING_SHARE, self._longest_pause))

    def _propose(self, step: int, packets: list[PacketRef]) -> Manifest:
        previous = self._hashes.get(step - 1, "")
        proposed = Manifest(step, tuple(sorted(packets)), previous, time.time())
        if self.store.create(records.step_key("manifests", step), data := records.encode(proposed)):
            return self._keep(step, proposed, data)
        return self._decided(step)

    def _decided(self, step: int) -> Manifest:
        """Returns the manifest of a decided step, which the store may not show at once."""
        return self._retry(f"the manifest of {self.unit} {step}", lambda: self.manifest(step))

    def _folder(self, step: int) -> records.StepFolder:
        return records.read_folder(self.store.names(records.step_key("packets", step)), self.slots)

    def _read(self, step: int, packets: Iterable[PacketRef], size: int | None = None) -> None:
        """Reads the packets that are not there yet, and keeps those of the right hash and size."""
        hashes = {records.packet_key(step, packet): packet.sha256 for packet in packets}
        missing = hashes.keys() - self._packets.keys()
        with self._transferring if missing else contextlib.nullcontext():
            found = self._read_all(missing)
        for key, data in found.items():
            if records.sha256(data) == hashes[key] and size in (None, len(data)):
                self._packets[key] = data

    def _read_all(self, keys: Collection[str]) -> dict[str, bytes]:
        """Reads the objects that exist."""
        objects = zip(keys, in_parallel(self._get, keys), strict=True)
        return {key: data for key, data in objects if data is not None}

    def _get(self, key: str) -> bytes | None:
        return self._prefetched.pop(key, None) or self.store.get(key)

    def _fetch(self, manifest: Manifest) -> ExchangeResult:
        """Reads all packets that count; a worker may miss one only if it was swept."""
        step = manifest.step
        keys = {x.slot: records.packet_key(step, x) for x in manifest.packets}

        def attempt() -> ExchangeResult | None:
            self._read(step, manifest.packets)
            packets = {n: self._packets[key] for n, key in keys.items() if key in self._packets}
            swept = len(packets) < len(keys)
            if swept:  # which happens only after two later snapshots
                indices = [x for x in self.store.names("snapshots") if x.endswith(".json")]
                if sum(later > step for later in records.steps_of(indices)) < 2:
                    return None
            members = tuple(self.name_of(packet.member) for packet in manifest.packets)
            return ExchangeResult(manifest, packets, swept, members)

        return self._retry(f"a packet that counts in {self.unit} {step}", attempt)

    def _retry(self, what: str, attempt: Callable[[], T | None]) -> T:
        started, pause = time.monotonic(), 0.01
        patience = getattr(self.store, "patience", PATIENCE)
        while (result := attempt()) is None:
            self.end_if_leaving()
            if time.monotonic() - started > patience:
                raise SwarmError(
                    f"{what} cannot be read since {patience:.0f} s, or holds other bytes than its "
                    "hash says. Make sure that the store is well, and start this worker again: it "
                    "joins from a snapshot."
                )
            time.sleep(pause)
            pause = min(2 * pause, 1.0)
        return result

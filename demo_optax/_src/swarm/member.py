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
from demo_optax._src.swarm.store import PART, ObjectStore, Store, in_parallel, log

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
AHEAD_BYTES = 100_000_000  # of packets that are read before their step is applied

T = TypeVar("T")


class Left(Exception):
    """The worker was asked to leave while it waited."""


class ExchangeResult(NamedTuple):
    """The result of a step's exchange."""

    manifest: Manifest
    packets: dict[int, bytes]  # those that count, by slot; only this worker's own if swept
    swept: bool  # whether packets are gone from the store, because later snapshots replace them
    members: tuple[str, ...]  # names of the workers whose packets count
    skipped: tuple[str, ...] = ()  # names of the others in the manifest, who had nothing finite
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
        self._has_sent = False
        self._manifests: dict[int, Manifest] = {}  # the last ones
        self._hashes: dict[int, str] = {}  # of these manifests
        self._packets: dict[str, bytes] = {}  # of the current step
        self._prefetched: dict[str, bytes] = {}
        self._ahead: list[str] = []  # packets to read next, in order,
        self._most_ahead = slots  # and how many of them at once
        self._packet_bytes: int | None = None  # of a packet that may count, if it is known
        self._wrong: set[MemberId] = set()  # senders of other packets, which were told
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
        share = DEADLINE_ROUNDS if self.unit == "round" else DEADLINE_STEPS
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

    def expect(self, packet_bytes: int) -> None:
        """Says how many bytes a packet of this run has: nothing much larger is read as one.

        What is a little larger comes from a worker with other settings, and counts for nobody.
        """
        if isinstance(self.store, ObjectStore):
            self.store.packet_bytes = max(PART, 2 * packet_bytes)
        self._packet_bytes = packet_bytes
        self._most_ahead = min(self.slots, AHEAD_BYTES // packet_bytes)
        size = packet_bytes / 1e6
        self.tell(
            f"the packets of {self.slots} slots take {self.slots * size:,.1f} MB of the devices' "
            f"memory, {size:,.1f} MB each; the host holds only those that are there"
        )

    def exchange(
        self, step: int, packet: bytes, steps: int = 1, tokens: float = 1, ends_round: bool = False
    ) -> ExchangeResult:
        """Sends a packet, and returns once it is decided which packets count.

        The numbers of steps and tokens that the packet results from enter the manifest. A packet of
        0 steps, which everybody rejects, does not count. With ``ends_round`` the packet is of a
        round, as it is if it is of several steps, and the others are asked to end theirs too.
        """
        started = time.monotonic()
        if ends_round:
            self.store.put(records.mark_key(step, self.me, "ends"), b"")
        if ends_round or steps > 1:
            self.unit = "round"
        own = None
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

    def send(self, step: int, packet: bytes, steps: int = 1, tokens: float = 1) -> PacketRef:
        """Sends a packet, without waiting for a decision."""
        checks.static_integer("steps", steps, at_least=0)
        checks.in_interval("tokens", tokens, "[0, inf)")
        own = PacketRef(*self.me, records.sha256(packet), int(steps), records.tokens_of(tokens))
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
        manifest = self._decided(step)
        while self._ahead and self._ahead[0].startswith(records.step_key("packets", step)):
            now, self._ahead = self._ahead[: self._most_ahead], self._ahead[self._most_ahead :]
            self._prefetched |= self._read_all(now)
        return self._fetch(manifest)

    def read_ahead(self, first: int, steps: int) -> None:
        """Reads the manifests of the next steps at once, and lets `receive` read packets ahead.

        It reads no more of these at once than there are slots, and at most 100 MB.
        """
        manifests = [records.step_key("manifests", first + n) for n in range(steps)]
        self._prefetched = self._read_all(manifests)
        if len(self._prefetched) < steps:  # so that a replay ends even if it is not faster
            self.announce(first + len(self._prefetched) + STEPS_TO_ANNOUNCE)
        packets = []
        for data in self._prefetched.values():
            with contextlib.suppress(Damaged):
                manifest = records.decode(Manifest, data)
                packets += [records.packet_key(manifest.step, x) for x in manifest.packets]
        self._ahead = packets if self._most_ahead else []

    def manifest(self, step: int) -> Manifest | None:
        """Returns which packets count in a step, or None if it is not decided."""
        with self._lock:
            if step in self._manifests:
                return self._manifests[step]
            key = records.step_key("manifests", step)
            try:
                data = self._get(key)
                if data is None:
                    return None
                return self._keep(step, records.decode(Manifest, data, key), data)
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
        sent = {records.packet_key(step, packet): packet for packet in packets}
        missing = sent.keys() - self._packets.keys()
        with self._transferring if missing else contextlib.nullcontext():
            found = self._read_all(missing)
        for key, data in found.items():
            packet = sent[key]
            if records.sha256(data) == packet.sha256 and self._fits(step, packet, data, size):
                self._packets[key] = data

    def _fits(self, step: int, packet: PacketRef, data: bytes, size: int | None) -> bool:
        """Tells whether a packet has a length that may count; says once of a worker if not."""
        if size is None or len(data) == size:
            return True
        if packet.member not in self._wrong:
            self._wrong.add(packet.member)
            self.tell(
                f"{self.unit} {step}: the packet of {self.name_of(packet.member)} has "
                f"{len(data):,} bytes instead of {size:,}, and packets of another length count for "
                "nobody: start this worker with the settings of the others"
            )
        return False

    def _read_all(self, keys: Collection[str]) -> dict[str, bytes]:
        """Reads the objects that exist and are not too large."""

        def read(key: str) -> bytes | None:
            with contextlib.suppress(Damaged):
                return self._get(key)

        objects = zip(keys, in_parallel(read, keys), strict=True)
        return {key: data for key, data in objects if data is not None}

    def _get(self, key: str) -> bytes | None:
        ahead = self._prefetched.pop(key, None)
        return self.store.get(key) if ahead is None else ahead

    def _fetch(self, manifest: Manifest) -> ExchangeResult:
        """Reads all packets that count; a worker may miss one only if it was swept."""
        step = manifest.step
        keys = {x.slot: records.packet_key(step, x) for x in manifest.packets}

        def attempt() -> ExchangeResult | None:
            self._read(step, manifest.packets)
            packets = {n: self._packets[key] for n, key in keys.items() if key in self._packets}
            counted = {packet.slot: packet for packet in manifest.packets}
            swept = len(packets) < len(keys)
            if swept:  # which happens only after two later snapshots
                indices = [x for x in self.store.names("snapshots") if x.endswith(".json")]
                if sum(later > step for later in records.steps_of(indices)) < 2:
                    return None
            for packet in manifest.packets:
                data = packets.get(packet.slot)
                if data is not None and not self._fits(step, packet, data, self._packet_bytes):
                    del packets[packet.slot], counted[packet.slot]
            names = [(self.name_of(packet.member), packet.steps) for packet in counted.values()]
            members = tuple(name for name, steps in names if steps)
            skipped = tuple(name for name, steps in names if not steps)
            return ExchangeResult(manifest, packets, swept, members, skipped)

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

"""A worker's part in the protocol: its slot, what it sends, and which packets count.

There is no leader. A step's manifest says which packets count. A worker proposes one as soon as it
has all packets it waits for, or has waited long enough.
"""

import contextlib
import itertools
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Set
from typing import NamedTuple, TypeVar

from demo_optax._src import checks
from demo_optax._src.swarm import records, snapshots
from demo_optax._src.swarm.chain import Chain
from demo_optax._src.swarm.members_only import MembersOnly
from demo_optax._src.swarm.pace import Pace
from demo_optax._src.swarm.records import (
    Damaged,
    Manifest,
    MemberId,
    PacketRef,
    SnapshotIndex,
    SwarmError,
)
from demo_optax._src.swarm.slots import claim, manifests_of, read_claim
from demo_optax._src.swarm.steps import Steps
from demo_optax._src.swarm.store import PART, ObjectStore, Store, in_parallel, log

STEPS_TO_ANNOUNCE = 2  # that the others may take until they see an announcement
LOOKING_SHARE = 0.1  # of the time in which a worker waits
LOG_EVERY_SECONDS = 5.0
PATIENCE = 60.0  # seconds for which a read is tried again, unless the store has its own
AHEAD_BYTES = 100_000_000  # of packets that are read before their step is applied
SHORTEST_ROUND = 0.5  # the share of a round before which others cannot end it for a member

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
      store: the store that all workers of the run share; `MembersOnly` if they have keys.
      worker: a unique name. A process that comes back under its name gets its slot again. With a
        key the name and the slot are those of the roster, and the argument is left out.
      slots: the largest number of workers at a time; the same for all workers of the run.
      deadline: seconds for which a step waits for the workers that took part in the last one. The
        default is three median steps, or half a median round, and at least 2 seconds.
      min_workers: a step waits, without a deadline, until this many packets are there. With
        `MembersOnly` no step with fewer is believed, so all workers should have the same number.
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
        worker: str = "",
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
        self._closed = store if isinstance(store, MembersOnly) else None
        if self._closed:
            self._closed.min_workers, members = min_workers, self._closed.roster.members()
            worker = members[self._closed.slot].name
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
        self._object_store = getattr(store, "inner", store)
        self.min_workers, self.tell = min_workers, tell
        self.last_sent: int | None = None  # the number of the exchange that got the last packet
        self.repeat: Callable[[], object] = lambda: None  # signs the last snapshot again
        self._packets: dict[PacketRef, bytes] = {}  # of the current step
        self._sent: dict[int, tuple] = {}  # its last two packets, as arguments of `Steps.send`
        self._to_read: list[str] = []  # packets of the steps that were read ahead, in order
        self._prefetched: dict[str, bytes] = {}  # those that were read
        self._packet_bytes: int | None = None  # of a packet that may count, if it is known
        self._wrong: set[MemberId] = set()  # senders of other packets, which were told
        self._names: dict[MemberId, str] = {}
        self._leaving = threading.Event()
        self._transferring = threading.Lock()  # held while packets travel; snapshots wait for it
        self.slot, self.incarnation = claim(store, worker, uuid.uuid4().hex, slots)
        self.pace = Pace(deadline, getattr(store, "patience", PATIENCE))
        self._steps = Steps(store, slots)
        self.chain = Chain(
            store, self._steps, self.me, worker, self.pace, lambda line: self.tell(line)
        )

    @property
    def unit(self) -> str:
        """What the exchanges are called: step, or round."""
        return self.pace.unit

    @property
    def deadline(self) -> float:
        """Seconds for which a step waits."""
        return self.pace.deadline

    @property
    def me(self) -> MemberId:
        """This worker's slot and incarnation."""
        return self.slot, self.incarnation

    def expect(self, packet_bytes: int) -> None:
        """Says how many bytes a packet of this run has: nothing much larger is read as one.

        What is a little larger comes from a worker with other settings, and counts for nobody.
        """
        if isinstance(store := self._object_store, ObjectStore):
            store.packet_bytes = max(PART, 2 * packet_bytes)
        self._packet_bytes = packet_bytes
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
            self._steps.say(step, self.me, "ends")
        if ends_round or steps > 1:
            self.pace.unit = "round"
        own = self.send(step, packet, steps, tokens) if self.may_send(step) else None
        previous = self.manifest(step - 1)
        counted = previous.members if previous else frozenset()
        expected = {x for x in counted if self._steps.has(step, x[0])}
        manifest = self._agree(step, expected, len(packet), started)
        result = self._fetch(manifest)
        self.pace.end_step()
        left = self._steps.folder(step, self._followed(step)).left
        late = sorted(x for x in expected - manifest.members - left if x[0] != self.slot)
        return result._replace(
            waited=time.monotonic() - started,
            late=tuple(map(self.name_of, [] if self.chain.astray else late)),
            own=self.slot if own in manifest.packets else None,
        )

    def send(self, step: int, packet: bytes, steps: int = 1, tokens: float = 1) -> PacketRef:
        """Sends a packet, without waiting for a decision."""
        checks.static_integer("steps", steps, at_least=0)
        checks.in_interval("tokens", tokens, "[0, inf)")
        own = PacketRef(*self.me, records.sha256(packet), int(steps), records.tokens_of(tokens))
        sent = own, packet, self._followed(step), self.chain.lost(step - 1)
        with self._transferring:
            own = self._steps.send(step, *sent)
        self._packets = {own: packet}
        before = {n: earlier for n, earlier in self._sent.items() if n == step - 1}
        self._sent, self.last_sent = before | {step: sent}, step
        return own

    def _send_again(self, step: int) -> None:
        """Puts this worker's last packets back if somebody has taken them away.

        Who is missing in a step may still wait for the packet of the step before.
        """
        for number in sorted(self._sent.keys() & {step - 1, step}):
            own, packet, *_ = self._sent[number]
            there = self.store.get(self._steps.key(number, own))
            if there is None or self._steps.payload(there) != packet:
                self.tell(f"{self.unit} {number}: this worker's packet is gone, and is sent again")
                with self._transferring:
                    self._steps.send(number, *self._sent[number])

    def may_send(self, step: int) -> bool:
        """Tells whether this worker has left no packet in a step before.

        An earlier process may have, or this one before it went back to a snapshot. That packet
        shall count, since manifests may list it, and the worker sends nothing in its place.
        """
        self._packets = {}
        if self.chain.is_unheard or not self._steps.may_decide(step):
            return False  # or the roster that it is in does not hold yet
        if not self.pace.may_replay:
            return True
        earlier = self._steps.sent(step, [self.slot]).get(self.slot)
        is_over = self.store.get(records.step_key("manifests", step)) is not None
        self.pace.may_replay = earlier is not None or is_over
        if earlier is None or earlier.head != self._followed(step):
            return True
        if earlier.packet.member != self.me:
            self._steps.say(step, self.me, "left")
        return False

    def wait_for_transfers(self) -> None:
        """Waits until no packet is being sent or read."""
        with self._transferring:
            pass

    def others_ended(self, step: int) -> bool:
        """Tells whether others have ended a round of local steps."""
        return self._steps.has_ended(step, self.me)

    @property
    def shortest_round(self) -> float:
        """The share of a round's seconds after which others may end it for this worker."""
        return SHORTEST_ROUND if self._closed else 0.0

    def receive(self, step: int) -> ExchangeResult:
        """Returns what the others exchanged in a step that is decided."""
        self._packets = {}
        self.pace.skip_next()
        manifest = self._await_manifest(step)
        at_once = min(self.slots, AHEAD_BYTES // (self._packet_bytes or 1))
        while at_once and self._to_read and records.step_in(self._to_read[0]) == step:
            now, self._to_read = self._to_read[:at_once], self._to_read[at_once:]
            self._prefetched |= self._read_all(now)
        return self._fetch(manifest, is_past=True)

    def read_ahead(self, first: int, steps: int) -> None:
        """Reads the manifests of the next steps at once, and lets `receive` read packets ahead.

        It reads no more of these at once than there are slots, and at most 100 MB.
        """
        self.chain.ahead = ahead = manifests_of(self.store, range(first, first + steps))
        if len(ahead) < steps:  # so that a replay ends even if it is not faster
            self.announce(first + len(ahead) + STEPS_TO_ANNOUNCE)
        self._to_read = [self._steps.key(n, x) for n, m in ahead.items() for x in m.packets]
        self._prefetched = {}

    def manifest(self, step: int) -> Manifest | None:
        """Returns which packets count in a step, or None if it is not decided."""
        return self.chain.manifest(step)

    def go_on_from(self, index: SnapshotIndex) -> None:
        """Goes on from a snapshot; for members only the next step follows its arrays and roster."""
        self._prefetched, self._to_read, self.pace.may_replay = {}, [], True
        self.chain.go_on_from(index)

    def announce(self, step: int) -> None:
        """Asks the others to wait for this worker's packet in a step and in the next one."""
        for number in step, step + 1:  # the first may be decided at this moment
            self._steps.say(number, self.me, "here")

    def leave(self, step: int | None = None) -> None:
        """Ends a wait; given the next step's number, it also tells the others not to wait."""
        self._leaving.set()
        if isinstance(store := self._object_store, ObjectStore):
            store.is_leaving = True
        if step is not None:
            step = max(step, self.chain.last_step() + 1)  # it may be catching up
            for number in step, step + 1:  # a packet of the first may be on its way
                self._steps.say(number, self.me, "left")
            self.store.put(records.left_key(self.me), b"")  # for whoever looks at the run later

    def end_if_leaving(self) -> None:
        """Raises `Left` if `leave` was called."""
        if self._leaving.is_set():
            raise Left(f"worker {self.worker!r} was asked to leave: call close().")

    def name_of(self, member: MemberId) -> str:
        """Returns the name of the worker with a slot and incarnation."""
        if member not in self._names:
            self._names[member] = read_claim(self.store, member).worker
        return self._names[member]

    def _followed(self, step: int) -> str:
        """Returns the head that a packet of a step must follow; in an open run none does."""
        return self.chain.head(step - 1) if self._closed else ""

    def _agree(self, step: int, expected: Set[MemberId], size: int, started: float) -> Manifest:
        """Returns the manifest that stands, and proposes one when this worker need not wait.

        A worker that is astray gets an empty one.
        """
        chain, pace = self.chain, self.pace
        logged, head = started, self._followed(step)
        waits_for = {slot for slot, _ in expected if slot != self.slot}

        def glance() -> None:
            self._steps.glance(step, sorted(waits_for))

        while True:
            self.end_if_leaving()
            looked = time.monotonic()
            manifest, _ = in_parallel(lambda look: look(), [lambda: self.manifest(step), glance])
            if manifest is not None:
                return manifest
            waited = looked - started
            with self._transferring:
                folder = self._steps.look(step, head, waits_for, thorough=waited >= pace.deadline)
            is_ahead = chain.watch_sides(step, folder.elsewhere, waited > pace.patient_wait)
            if chain.astray:
                return Manifest(step, (), head, time.time())
            present = folder.packets.values()
            self._read(step, present, size)
            packets = [x for x in present if x in self._packets]
            arrived = frozenset(packet.member for packet in packets)
            here = frozenset(x for x in folder.here if not chain.is_in_vain(step, x[0]))
            newest = dict(sorted(arrived | here))
            missing = sorted(
                (slot, incarnation)
                for slot, incarnation in (expected | here) - folder.left - arrived
                if newest.get(slot, 0) <= incarnation
            )
            waits_for, now = {slot for slot, _ in missing}, time.monotonic()
            chain.left = chain.left | folder.left
            leaves_out_most = missing and chain.left_out(step, {slot for slot, _ in arrived})
            deadline = pace.patient_wait if leaves_out_most else pace.deadline
            may_decide = self._steps.may_decide(step) and not chain.is_unheard
            may_decide &= is_ahead or not folder.elsewhere or not chain.is_patient(step)
            is_enough = may_decide and len(arrived) >= self.min_workers
            if is_enough and (not missing or waited >= deadline):
                if leaves_out_most and not chain.try_without_most(step):
                    continue
                chain.vain |= {slot: step for slot, _ in set(missing) & here - expected}
                if (decided := self._propose(step, packets)) is not None:
                    return decided
            if now - logged > LOG_EVERY_SECONDS:
                logged = now
                what = self._what_it_waits_for(step, waited, deadline, missing, len(arrived))
                self.tell(f"{self.unit} {step}: {what}")
                self._send_again(step)
                self._steps.look_for_roster()
                self.repeat()
                if waited > pace.deadline:
                    chain.compare(step)
            time.sleep(min((now - looked) / LOOKING_SHARE, pace.longest_pause))

    def _what_it_waits_for(
        self,
        step: int,
        waited: float,
        deadline: float,
        missing: Collection[MemberId],
        num_arrived: int,
    ) -> str:
        refused, without = self.chain.refused
        if self._closed and self._closed.missing:
            return f"waits, since {self._closed.missing}"
        if refused == step:
            why = "with packets that it cannot read"
            if without:
                names = ", ".join(map(self.name_of, sorted(without)))
                why = f"without half or more of those who counted lately, such as {names}"
            return (
                f"others have decided it {why}: waits {waited:.0f} of at most "
                f"{self.pace.patient_wait:.0f} s until it goes on from there"
            )
        if num_arrived >= self.min_workers:
            names = ", ".join(map(self.name_of, missing))
            return f"waits for {names}, {waited:.0f} of at most {deadline:.0f} s"
        return (
            f"{num_arrived} of at least {self.min_workers} workers are here; has waited for more "
            f"for {waited:.0f} s"
        )

    def _propose(self, step: int, packets: list[PacketRef]) -> Manifest | None:
        """Decides a step, unless a manifest is there from which as many members have gone on."""
        lost, head = self.chain.lost(step - 1), self.chain.head(step - 1)
        now, named = time.time(), self._steps.look_for_roster()
        proposed = Manifest(step, tuple(sorted(packets)), head, now, named, lost)
        if self.store.create(records.step_key("manifests", step), records.encode(proposed)):
            return self.chain.keep(step, proposed)
        return self.chain.settle(proposed) if self._closed else self._await_manifest(step)

    def _await_manifest(self, step: int) -> Manifest:
        """Returns the manifest of a decided step, which the store may not show at once."""
        what = f"the manifest of {self.unit} {step}"
        return self._retry(lambda: what, lambda: self.manifest(step))

    def _read(self, step: int, packets: Iterable[PacketRef], size: int | None = None) -> None:
        """Reads the packets that are not there yet, and keeps those of the right hash and size."""
        found = {x.packet: x.payload for x in self._steps.packets(step).values()}
        wanted = set(packets) - self._packets.keys()
        away = {self._steps.key(step, packet): packet for packet in wanted - found.keys()}
        with self._transferring if away else contextlib.nullcontext():
            for key, data in self._read_all(away).items():
                found[away[key]] = self._steps.payload(data)
        for packet in wanted & found.keys():
            is_whole = records.sha256(found[packet]) == packet.sha256
            if is_whole and self._fits(step, packet, found[packet], size):
                self._packets[packet] = found[packet]

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
                return self._prefetched.pop(key, None) or self.store.get(key)

        objects = zip(keys, in_parallel(read, keys), strict=True)
        return {key: data for key, data in objects if data is not None}

    def _fetch(self, manifest: Manifest, is_past: bool = False) -> ExchangeResult:
        """Reads all packets that count; a worker may miss one only if it was swept.

        For members only, one that most who counted could not read counts for nobody. A worker that
        cannot read one that most have goes back to a snapshot, and applies nothing else.
        """
        step, chain = manifest.step, self.chain
        if chain.astray:
            return ExchangeResult(manifest, {}, True, ())

        def attempt(is_last: bool = False) -> ExchangeResult | None:
            self._read(step, manifest.packets)
            packets = {x.slot: self._packets[x] for x in manifest.packets if x in self._packets}
            counted, lost = {packet.slot: packet for packet in manifest.packets}, ()
            missing = counted.keys() - packets.keys()
            if self._closed and (missing or is_past):
                lost = chain.lost_by_others(manifest, missing)
            if missing:  # perhaps with this worker's own one, for which others wait like this
                self._send_again(step)
            if lost is None and is_last:  # nobody has said anything yet
                lost = missing
            if lost:
                chain.vain |= dict.fromkeys(lost, step)
                chain.learn(step, lost=tuple(sorted(lost)), head=records.head(manifest, lost))
                counted = {slot: x for slot, x in counted.items() if slot not in lost}
                packets = {slot: data for slot, data in packets.items() if slot not in lost}
            swept = len(packets) < len(counted)
            if swept:  # which happens only after two later snapshots
                newest = itertools.groupby(chain.later_snapshots(step), lambda x: x.step)
                if len(list(itertools.islice(newest, snapshots.NUM_KEPT))) < snapshots.NUM_KEPT:
                    if not is_last:
                        return None
                    chain.astray = f"most members have what it lacks of {self.unit} {step}"
            for slot, data in list(packets.items()):
                if not self._fits(step, counted[slot], data, self._packet_bytes):
                    del packets[slot], counted[slot]
            chain.learn(step)
            names = [(self.name_of(packet.member), packet.steps) for packet in counted.values()]
            members = tuple(name for name, steps in names if steps)
            skipped = tuple(name for name, steps in names if not steps)
            return ExchangeResult(manifest, packets, swept, members, skipped)

        def unread() -> str:
            away = [x.member for x in manifest.packets if x not in self._packets]
            names = ", ".join(map(self.name_of, away))
            return f"a packet that counts in {self.unit} {step}, of {names},"

        try:
            return self._retry(unread, attempt, 0.5 if self._closed else 1.0)
        except SwarmError as error:
            if self._closed is None or (result := attempt(is_last=True)) is None:
                raise
            known = "Most members have it:" if chain.astray else "If most members have it,"
            self.tell(
                f"{str(error).partition('. ')[0]}. {known} this worker goes back to a snapshot and "
                "tries again. Put back what is gone, for instance from a version that the bucket "
                "keeps."
            )
            return result

    def _retry(
        self, what: Callable[[], str], attempt: Callable[[], T | None], share: float = 1.0
    ) -> T:
        started, pause, told = time.monotonic(), 0.01, False
        patience = share * self.pace.patience
        while (result := attempt()) is None:
            self.end_if_leaving()
            waited = time.monotonic() - started
            if not told and waited > LOG_EVERY_SECONDS:
                told = True
                self.tell(f"{what()} cannot be read yet: waits for at most {patience:g} s")
            if waited > patience:
                raise SwarmError(
                    f"{what()} cannot be read since {patience:g} s, or holds other bytes than "
                    "its hash says. Make sure that the store is well, and start this worker again: "
                    "it joins from a snapshot."
                )
            time.sleep(pause)
            pause = min(2 * pause, 1.0)
        return result

"""A worker's part in the protocol: its slot, what it sends, and which packets count.

There is no leader. The first manifest that is written for a step stands, and says which packets
count. A worker proposes one as soon as it has all packets it waits for, or has waited long enough.
"""

import collections
import contextlib
import itertools
import statistics
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from typing import Any, NamedTuple, TypeVar

from demo_optax._src import checks
from demo_optax._src.swarm import records, sides, snapshots
from demo_optax._src.swarm.members_only import MembersOnly
from demo_optax._src.swarm.records import (
    Damaged,
    Manifest,
    MemberId,
    PacketRef,
    SnapshotIndex,
    SwarmError,
)
from demo_optax._src.swarm.sides import Decided
from demo_optax._src.swarm.slots import claim, have_left, manifests_of, read_claim
from demo_optax._src.swarm.steps import Steps
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
# In a run for members only:
PATIENT_DEADLINES = 5  # that pass before a step goes on without most of those who counted
MOST_FOLLOWED = 20  # steps of others, to see who has gone on
VAIN_STEPS = 10  # in which nobody waits again for a member that announced itself in vain
SHORTEST_ROUND = 0.5  # the share of a round's seconds after which a member may end it for all

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
        beginning = ""
        if self._closed:
            self._closed.min_workers, members = min_workers, self._closed.roster.members()
            worker = members[self._closed.slot].name
            beginning = records.sha256(self._closed.roster.run.encode())
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
        self._may_have_sent = True  # in the next step, before it started or went back
        self._steps = Steps(store, slots)
        self._decided = {-1: Decided(beginning, time.monotonic())}
        self._counted: dict[int, frozenset[MemberId]] = {}  # for members only
        self.judged_from = 0 if self._closed else sys.maxsize  # the first step that these need
        self._absent = -1, 0.0  # a step, and when it had no manifest yet
        self._refused = -1, ""  # a step, and why its manifest is not taken yet
        self._asked = -1, 0.0  # a step, and when it last asked who has gone on from its manifest
        self._sought = 0  # the step of the last snapshot for which it went back
        self.is_unheard = False  # nobody signs its snapshots, so it may be on a side of its own
        self.astray: str | None = None  # why this worker must go back to a snapshot, if it must
        self._cut = 0  # the last step that went on without most of those who counted
        self._compared_at = time.monotonic()  # the time when it last compared its chain, and
        self._compared_until = 0  # the step up to which it has while there was no trouble
        self.repeat: Callable[[], object] = lambda: None  # says again what somebody may delete
        self._left: set[MemberId] = set()  # members that said that they leave
        self._vain: dict[int, int] = {}  # the last step in which others waited for a slot in vain
        self._packets: dict[PacketRef, bytes] = {}  # of the current step
        self._sent: dict[int, tuple] = {}  # its own last two: what `send` of the steps takes
        self._ahead: dict[int, Manifest] = {}  # what was read ahead
        self._to_read: list[str] = []  # packets of these steps, in order
        self._prefetched: dict[str, bytes] = {}  # those that were read
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
    def _object_store(self) -> Store:
        return getattr(self.store, "inner", self.store)

    @property
    def _patience(self) -> float:
        return getattr(self.store, "patience", PATIENCE)

    @property
    def _patient_wait(self) -> float:
        """Seconds before a step goes on without most, who may lack a packet for half as long."""
        deadline = self.deadline
        replays = self._may_have_sent and not self._durations
        if self._fixed_deadline is None and replays:  # at no pace of a step
            deadline = SHORTEST_DEADLINE
        return max(PATIENT_DEADLINES * deadline, self._patience + deadline)

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
            self.unit = "round"
        own = self.send(step, packet, steps, tokens) if self.may_send(step) else None
        previous = self.manifest(step - 1)
        counted = previous.members if previous else frozenset()
        expected = {x for x in counted if self._steps.has(step, x[0])}
        manifest = self._agree(step, expected, len(packet), started)
        result = self._fetch(manifest)
        now = time.monotonic()
        if self._last_time is not None:
            self._durations.append(now - self._last_time)
        self._last_time = now
        late = {x for x in expected - manifest.members if x[0] != self.slot and not self.astray}
        if late:
            late -= self._steps.folder(step, self._followed(step)).left
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
        sent = own, packet, self._followed(step), self.lost(step - 1)
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
        if self.is_unheard or not self._steps.may_decide(step):
            return False  # or the roster that it is in does not hold yet
        if not self._may_have_sent:
            return True
        earlier = self._steps.sent(step, [self.slot]).get(self.slot)
        is_over = self.store.get(records.step_key("manifests", step)) is not None
        self._may_have_sent = earlier is not None or is_over
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
        self._last_time = None  # otherwise the next duration would contain the catching up
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
        self._ahead = manifests_of(self.store, range(first, first + steps))
        if len(self._ahead) < steps:  # so that a replay ends even if it is not faster
            self.announce(first + len(self._ahead) + STEPS_TO_ANNOUNCE)
        self._to_read = [self._steps.key(n, x) for n, m in self._ahead.items() for x in m.packets]
        self._prefetched = {}

    def manifest(self, step: int) -> Manifest | None:
        """Returns which packets count in a step, or None if it is not decided."""
        with self._lock:
            if (known := self._known(step).manifest) is not None:
                return known
            key, looked = records.step_key("manifests", step), time.monotonic()
            try:
                if (manifest := self._ahead.pop(step, None)) is None:
                    if (data := self.store.get(key)) is None:
                        self._absent, self._refused = (step, looked), (-1, "")
                        return None
                    manifest = records.decode(Manifest, data, key)
                return self._keep(step, manifest) if self._is_taken(step, manifest) else None
            except Damaged as error:  # then nobody can decide the step anew, or go on
                log.warning("the manifest of %s %d: %s", self.unit, step, error)
                return None

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
            # It may be catching up; the list is a copy, since the exchange's thread adds to it.
            step = max([step, *(decided + 1 for decided in list(self._decided))])
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

    def head(self, step: int) -> str:
        """Returns the hash of what was decided up to a step, if this worker knows it."""
        return self._known(step).head

    def _followed(self, step: int) -> str:
        """Returns the head that a packet of a step must follow; in an open run none does."""
        return self.head(step - 1) if self._closed else ""

    @property
    def counted(self) -> dict[int, frozenset[MemberId]]:
        """Whose packets counted, by step, for snapshots to come of members only."""
        return dict(self._counted)

    def lost(self, step: int) -> tuple[int, ...]:
        """Returns the slots whose packets of a step this worker did not apply."""
        return self._known(step).lost

    def go_on_from(self, index: SnapshotIndex) -> None:
        """Goes on from a snapshot; for members only, the first step follows its arrays and roster.

        Like the others it then knows who counted since the snapshot before, so that all judge alike
        who is left out. In an open run nobody asks what a snapshot follows.
        """
        counted: dict[int, frozenset[MemberId]] = {}
        with contextlib.suppress(Damaged):  # then it knows those of the last steps
            if self._closed:
                known = None if self.astray else self.counted
                counted.update(snapshots.counted_before(self._closed, index, known))
        with self._lock:
            self.astray, self._cut, self._ahead = None, 0, {}
            self._prefetched, self._to_read = {}, []
            self._may_have_sent, self.is_unheard, head = True, False, index.head
            self._steps = Steps(self.store, self.slots)  # what was said may be written over
            if self._closed:
                self._closed.begin(index.step, index.roster)
                same = index._replace(file="")  # if several began the run, with equal arrays
                head = head if index.step else records.sha256(records.encode(same))
            self._decided = {index.step - 1: Decided(head, time.monotonic(), lost=index.lost)}
            self._counted = counted

    def _keep(self, step: int, manifest: Manifest) -> Manifest:
        with self._lock:
            self._require_next(step, manifest)
            head = self.head(step) or records.head(manifest)  # the first is that of a snapshot
            self._learn(step, head=head, manifest=manifest)
            counted = sides.slots_of(manifest)  # whatever earlier processes of theirs have said
            self._left = {member for member in self._left if member[0] not in counted}
            if self._closed:
                self._closed.hold(step + 1, manifest.roster)
                self._counted[step] = manifest.members
            kept_from = min(step - 1, self.judged_from)
            for kept in self._decided, self._counted:
                for old in [n for n in kept if n < kept_from]:
                    kept.pop(old)
            return manifest

    def _known(self, step: int) -> Decided:
        return self._decided.get(step, Decided())

    def _learn(self, step: int, **changes: Any) -> None:
        self._decided[step] = self._known(step)._replace(learned=time.monotonic(), **changes)

    def _follows(self, step: int, manifest: Manifest) -> bool:
        return self.head(step - 1) in ("", manifest.previous)  # "" if nothing is known

    def _require_next(self, step: int, manifest: Manifest) -> None:
        """Raises SwarmError unless the manifest follows the one before, and knows this worker."""
        follows, last = self._follows(step, manifest) or self.astray, manifest.packets[-1]
        if manifest.step != step or not follows or last.slot >= self.slots:
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

    def _is_taken(self, step: int, manifest: Manifest) -> bool:
        """Tells whether a manifest stands; in an open run each does.

        With keys it is valid, and follows from the one before.
        """
        if self._closed is None:
            return True
        absent_step, absent = self._absent
        absent = absent if absent_step == step else 0.0
        if not sides.is_valid(self._steps, step, manifest, absent):
            return False
        if known := self.head(step):  # of a snapshot, which says what was decided before it
            return records.head(manifest, self.lost(step)) == known
        slots = sides.slots_of(manifest)
        if not self._follows(step, manifest):
            return False
        if self.head(step - 1) and manifest.lost != self.lost(step - 1):
            return False
        for member in self._left_out(step, slots):
            self._steps.glance(step, [member[0]])
            said = self._steps.folder(step, self.head(step - 1)).left
            has_left = self.store.get(records.left_key(member)) is not None
            self._left = self._left | said | ({member} if has_left else set())
        are_there = all(self._is_there(step, packet) for packet in manifest.packets)
        others = {x for x in self._left_out(step, slots) if x[0] != self.slot}
        asked, now = self._asked, time.monotonic()
        if others and (asked[0] != step or now - asked[1] >= self.deadline):
            self._asked = step, now  # not at each look, since packets may be large
            gone_on = self._gone_on(manifest)  # as it knows itself that it was late, so may they
            others = {x for x in others if x[0] not in gone_on}
        if are_there and not others:
            return True
        if self._is_patient(step):
            names = ", ".join(map(self.name_of, sorted(others)))
            without = f"without half or more of those who counted lately, such as {names}"
            self._refused = step, without if others else "with packets that it cannot read"
            return False
        self._cut = step
        return True

    def _is_patient(self, step: int) -> bool:
        """Tells whether those who counted before may still be waited for in a step."""
        return time.monotonic() - self._known(step - 1).learned < self._patient_wait

    def _is_there(self, step: int, packet: PacketRef) -> bool:
        """Tells whether a packet can be read, if those of its sender could not be read lately."""
        if packet in self._packets or not self._is_in_vain(step, packet.slot):
            return True
        data = self.store.get(self._steps.key(step, packet)) or b""
        return records.sha256(self._steps.payload(data)) == packet.sha256

    def _left_out(self, step: int, slots: Set[int]) -> set[MemberId]:
        """Returns who is missing of those who counted and have not left, if most are.

        These are all since the last attested snapshot, so that they are not left out by halves.
        """
        counted = [x for n, x in self.counted.items() if self._cut <= n < step]
        left = {slot for slot, _ in self._left} - slots
        voters = {x for x in self._voters(step, counted) if x[0] not in left}
        missing = {x for x in voters if x[0] not in slots}
        return missing if 2 * len(missing) >= len(voters) else set()

    def _voters(self, step: int, counted: Iterable[Set[MemberId]]) -> set[MemberId]:
        """Returns who counted and is still a member: the last process in each slot."""
        newest = dict(sorted(set().union(*counted))).items()
        return {x for x in newest if self._steps.has(step, x[0])}

    def _go_back(self, step: int, why: str) -> None:
        self.astray = f"{why}: it goes back to a snapshot"
        self.tell(f"{self.unit} {step}: {self.astray}")

    def _look_for_later_snapshot(self, step: int) -> None:
        """Goes there if the others are past this step, whose manifest somebody has taken away."""
        later = next(self.later_snapshots(max(step, self._sought)), None)
        if later is not None:
            self._sought = later.step  # once, since nobody may be able to read it
            self._go_back(step, "most members have signed a later snapshot")

    def later_snapshots(self, step: int) -> Iterator[SnapshotIndex]:
        """Yields the snapshots after a step in which it believes, the newest ones first."""
        return filter(self.believes, snapshots.indices(self.store, step + 1))

    def believes(self, index: SnapshotIndex) -> bool:
        """Tells whether this worker may go on from a snapshot; in an open run from any.

        It may if most of those who counted, as far as it knows, have signed it. Else the snapshot
        must be attested, and what this worker has applied must lead to it by steps in which most of
        the others counted. A newcomer has applied nothing, and believes what is attested.
        """
        if (closed := self._closed) is None:
            return True
        counted = self.counted
        present = self._voters(max(self._decided), counted.values())
        if snapshots.is_signed_by_most(closed, index, {slot for slot, _ in present}):
            return True
        if not snapshots.is_attested(closed, index, counted):
            return False
        return not counted or self._is_linked(closed, index, present)

    def _is_linked(self, closed: MembersOnly, index: SnapshotIndex, present: Set[MemberId]) -> bool:
        """Tells whether steps lead from a snapshot to what this worker has applied, or from there.

        In those that it has not applied most of the others who are ``present`` must have counted.
        """
        if self.head(index.step - 1) == index.head:
            return True
        if index.step <= (first := min(self._decided)):  # what it knows must follow from there
            known = index._replace(step=first + 1, head=self.head(first), lost=self.lost(first))
            with contextlib.suppress(Damaged):
                *_, after = snapshots.chain_before(closed, known._replace(since=index.step))
                return after.previous == index.head
            return False
        others = {slot for slot, _ in present - have_left(self.store, present)} - {self.slot}
        with contextlib.suppress(Damaged):
            for manifest in snapshots.chain_before(closed, index._replace(since=first + 1)):
                if 2 * len(sides.slots_of(manifest) & others) <= len(others):
                    return False
                if self.head(manifest.step - 1) == manifest.previous:
                    return True
        return False

    def _compare_chains(self, closed: MembersOnly, step: int, within: range | None = None) -> bool:
        """Tells whether no other side is larger than its own; looks at some steps, or at all.

        It goes back to a snapshot if it can follow a larger side from there. If its own is the
        largest, it puts its manifests in place again, where they are gone or others are there.
        """
        thorough = within is None
        known = {n: x.manifest for n, x in sorted(self._decided.items()) if x.manifest}
        own = {n: manifest for n, manifest in known.items() if within is None or n in within}
        stored = manifests_of(self.store, [*own, step])
        fork = sides.first_fork(own, stored, step)
        mine = own[fork].previous if fork in own else self.head(fork - 1)
        said = self._steps.read(fork) if thorough or fork < step else self._steps.packets(step)
        followed = {mine: {slot: n for n in own if n >= fork for slot in sides.slots_of(own[n])}}
        if fork in stored and (other := stored[fork]).previous != mine:
            listed = [x for x in other.packets if closed.is_signed(fork, x, other.previous)]
            gone_on = self._gone_on(other) if thorough else {}
            followed[other.previous] = {x.slot: fork for x in listed} | gone_on
        votes = sides.votes(fork, said, followed)
        votes = {x: {n for n in y if self._steps.has(fork, n)} for x, y in votes.items()}
        others = {head: slots - {self.slot} for head, slots in votes.items() if head != mine}
        if thorough and any(others.values()):
            counted = [x for n, x in self.counted.items() if n < fork]
            voters = {slot for slot, _ in self._voters(fork, counted)}
            signed = snapshots.signed_by_most(closed, fork, voters)
            if signed is not None and self.head(signed.step - 1) != signed.head:
                self._go_back(step, f"most members signed a snapshot at {signed.step} of others")
                return False
            others = others if signed is None else {}
        sure = {self.slot} | votes.get(mine, set())
        hoped = sure | self._silent(fork) - set().union(*others.values())
        before, after = stored.get(fork - 1), stored.get(fork)
        decided = {after.previous if after else "", mine if fork in own else ""}
        best = sides.goes_on({**others, mine: hoped}, decided)
        if best != mine:
            if (
                before is not None
                and sides.leads_to(best, before, said, after)
                and sides.is_valid(self._steps, fork - 1, before)
            ):
                others_go = f"{len(others[best])} members go on from another {self.unit} {fork - 1}"
                self._go_back(step, f"{others_go} than this worker, whose side has {len(hoped)}")
        elif sides.goes_on({**others, mine: sure}, decided) == mine:
            for n, manifest in own.items():
                if n not in stored or records.head(stored[n]) != records.head(manifest):
                    self.store.put(records.step_key("manifests", n), records.encode(manifest))
        return best == mine

    def _next_steps(self, step: int) -> range:
        """Returns the next few steps to compare while there is no trouble, in turn."""
        first = self._compared_until
        first = first if first < step else min(self._decided, default=step)
        self._compared_until = first + MOST_FOLLOWED
        return range(first, self._compared_until)

    def _silent(self, step: int) -> set[int]:
        """Returns who counted in the step before, and may still send a packet that follows it."""
        if not self._is_patient(step):
            return set()
        left = {slot for slot, _ in self._left}
        return {x for x in self._known(step - 1).slots if self._steps.has(step, x)} - left

    def _agree(self, step: int, expected: Set[MemberId], size: int, started: float) -> Manifest:
        """Returns the manifest that stands, and proposes one when this worker need not wait."""
        logged, head = started, self._followed(step)
        compared: Set[tuple[int, str]] = set()  # the last ones on other sides, and
        is_ahead = True  # whether no side of theirs was larger
        waits_for = {slot for slot, _ in expected if slot != self.slot}

        def glance() -> None:
            self._steps.glance(step, sorted(waits_for))

        while True:
            self.end_if_leaving()
            looked = time.monotonic()
            manifest, _ = in_parallel(lambda look: look(), [lambda: self.manifest(step), glance])
            if manifest is not None:
                return manifest
            is_over = looked - started >= self.deadline
            with self._transferring:
                folder = self._steps.look(step, head, waits_for, thorough=is_over)
            away = folder.elsewhere
            is_due = looked - self._compared_at > (self.deadline if away else self._patient_wait)
            if self._closed and (is_due or away - compared):
                within = range(step - 1, step)
                if is_due:
                    self._compared_at, within = looked, None if away else self._next_steps(step)
                compared, is_ahead = away, self._compare_chains(self._closed, step, within)
                if is_due and looked - started > self._patient_wait:
                    self._look_for_later_snapshot(step)
            if self.astray:
                return Manifest(step, (), head, time.time())
            present = folder.packets.values()
            self._read(step, present, size)
            packets = [x for x in present if x in self._packets]
            arrived = frozenset(packet.member for packet in packets)
            here = frozenset(x for x in folder.here if not self._is_in_vain(step, x[0]))
            newest = dict(sorted(arrived | here))
            missing = sorted(
                (slot, incarnation)
                for slot, incarnation in (expected | here) - folder.left - arrived
                if newest.get(slot, 0) <= incarnation
            )
            waits_for = {slot for slot, _ in missing}
            now = time.monotonic()
            waited, deadline = looked - started, self.deadline
            self._left = self._left | folder.left
            if missing and self._left_out(step, {slot for slot, _ in arrived}):
                deadline = self._patient_wait
            may_decide = self._steps.may_decide(step) and not self.is_unheard
            may_decide &= is_ahead or not away or not self._is_patient(step)
            is_enough = may_decide and len(arrived) >= self.min_workers
            if is_enough and (not missing or waited >= deadline):
                if self._closed and deadline > self.deadline:  # it goes on without most
                    self._cut = step
                    self._compare_chains(self._closed, step)
                    self._look_for_later_snapshot(step)
                    if self.astray:
                        continue
                self._vain |= {slot: step for slot, _ in set(missing) & here - expected}
                if (decided := self._propose(step, packets)) is not None:
                    return decided
            if now - logged > LOG_EVERY_SECONDS:
                logged = now
                names = ", ".join(map(self.name_of, missing))
                if self._closed and self._closed.missing:
                    what = f"waits, since {self._closed.missing}"
                elif self._refused[0] == step:
                    what = (
                        f"others have decided it {self._refused[1]}: waits {waited:.0f} of at most "
                        f"{self._patient_wait:.0f} s until it goes on from there"
                    )
                elif len(arrived) >= self.min_workers:
                    what = f"waits for {names}, {waited:.0f} of at most {deadline:.0f} s"
                else:
                    what = (
                        f"{len(arrived)} of at least {self.min_workers} workers are here; has "
                        f"waited for more for {waited:.0f} s"
                    )
                self.tell(f"{self.unit} {step}: {what}")
                self._send_again(step)
                self._steps.look_for_roster()
                self.repeat()
                if self._closed and waited > self.deadline:
                    self._compare_chains(self._closed, step)
            longest = max(POLL_SECONDS, POLL_SHARE * statistics.median(self._durations or [0.0]))
            time.sleep(min((now - looked) / LOOKING_SHARE, longest))

    def _is_in_vain(self, step: int, slot: int) -> bool:
        """Tells whether others have lately waited in vain for what a member announced or listed."""
        return step - self._vain.get(slot, step) in range(1, VAIN_STEPS if self._closed else 0)

    def _propose(self, step: int, packets: list[PacketRef]) -> Manifest | None:
        """Decides a step, unless a manifest is there from which as many members have gone on."""
        lost, key = self.lost(step - 1), records.step_key("manifests", step)
        now, head, named = time.time(), self.head(step - 1), self._steps.look_for_roster()
        proposed = Manifest(step, tuple(sorted(packets)), head, now, named, lost)
        if self.store.create(key, records.encode(proposed)):
            return self._keep(step, proposed)
        if self._closed is None:
            return self._await_manifest(step)
        is_patient = self._is_patient(step)
        if (decided := self.manifest(step)) is None:
            if self._may_replace(step, proposed):
                self.store.put(key, records.encode(proposed))
                decided = self.manifest(step)
            elif not is_patient:
                self._go_back(step, "others have decided it in another way")
        return decided

    def _may_replace(self, step: int, proposed: Manifest) -> bool:
        """Tells whether a manifest that this worker does not take may be written over.

        It may not if as many have gone on from it as have not, or a roster that it names is not
        there yet. One of its own side may not either if this worker did not count before.
        """
        if not self._steps.may_decide(step):
            return False
        if (there := manifests_of(self.store, [step]).get(step)) is None:
            return True
        last, is_same = self._known(step - 1), there.previous == proposed.previous
        counted = last.slots - set(proposed.lost) if last.manifest else {self.slot}
        if self.slot not in counted and is_same:
            return False
        is_valid = sides.is_valid(self._steps, step, there)
        here, listed = sides.slots_of(proposed), sides.slots_of(there)
        gone_on = set(self._gone_on(there))
        if not is_same:  # who is here has come back from there
            gone_on -= here
        if not is_valid:
            gone_on -= {self.slot}  # in an earlier process, with other settings
        elif is_same and listed < here:  # they may have applied it, and sent nothing since
            gone_on |= listed
        return len(gone_on) < len(here - gone_on)

    def _gone_on(self, manifest: Manifest) -> dict[int, int]:
        """Returns the last steps in which slots have followed a manifest or its successors."""
        gone_on: dict[int, int] = {}
        for later in range(manifest.step + 1, manifest.step + 1 + MOST_FOLLOWED):
            gone_on |= dict.fromkeys(self._steps.followers(manifest), later)
            there = manifests_of(self.store, [later]).get(later)
            if there is None or there.previous != records.head(manifest, there.lost):
                break
            manifest = there
        return gone_on

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
        step = manifest.step
        if self.astray:
            return ExchangeResult(manifest, {}, True, ())

        def attempt(is_last: bool = False) -> ExchangeResult | None:
            self._read(step, manifest.packets)
            packets = {x.slot: self._packets[x] for x in manifest.packets if x in self._packets}
            counted, lost = {packet.slot: packet for packet in manifest.packets}, ()
            missing = counted.keys() - packets.keys()
            if self._closed and (missing or is_past):
                later = step + 1
                following = self._ahead.get(later) or manifests_of(self.store, [later]).get(later)
                lost = sides.lost_later(self._steps, manifest, missing, following)
            if missing:  # perhaps with this worker's own one, for which others wait like this
                self._send_again(step)
            if lost is None and is_last:  # nobody has said anything yet
                lost = missing
            if lost:
                self._vain |= dict.fromkeys(lost, step)
                self._learn(step, lost=tuple(sorted(lost)), head=records.head(manifest, lost))
                counted = {slot: x for slot, x in counted.items() if slot not in lost}
                packets = {slot: data for slot, data in packets.items() if slot not in lost}
            swept = len(packets) < len(counted)
            if swept:  # which happens only after two later snapshots
                newest = itertools.groupby(self.later_snapshots(step), lambda x: x.step)
                if len(list(itertools.islice(newest, snapshots.NUM_KEPT))) < snapshots.NUM_KEPT:
                    if not is_last:
                        return None
                    self.astray = f"most members have what it lacks of {self.unit} {step}"
            for packet in manifest.packets:
                data = packets.get(packet.slot)
                if data is not None and not self._fits(step, packet, data, self._packet_bytes):
                    del packets[packet.slot], counted[packet.slot]
            self._learn(step)
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
            known = "Most members have it:" if self.astray else "If most members have it,"
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
        patience = share * self._patience
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

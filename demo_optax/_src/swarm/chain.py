"""What one worker holds to be decided, and what it believes of the others.

In an open run the first manifest that is written for a step stands. In a run for members only a
worker judges each manifest and snapshot. Members that go on from different manifests are on
different sides. A worker that finds a larger side than its own is astray: it goes back to a
snapshot.
"""

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any, NamedTuple

from demo_optax._src.swarm import records, sides, snapshots
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
from demo_optax._src.swarm.slots import have_left, manifests_of
from demo_optax._src.swarm.steps import Steps
from demo_optax._src.swarm.store import Store, log

# In a run for members only:
MOST_FOLLOWED = 20  # steps of others, to see who has gone on
VAIN_STEPS = 10  # in which nobody waits again for a member that announced itself in vain


class Decided(NamedTuple):
    """A step that is behind a worker, as far as the worker knows it."""

    head: str = ""  # the hash of what was decided up to it
    learned: float = math.inf  # when the worker learned of it, by its own clock
    manifest: Manifest | None = None  # None in the step before a snapshot
    lost: tuple[int, ...] = ()  # slots whose packets this worker did not apply

    @property
    def slots(self) -> set[int]:
        """The slots whose packets counted."""
        return sides.slots_of(self.manifest) if self.manifest else set()


class Chain:
    """The decided steps that one worker has followed; each manifest names the one before.

    Args:
      store: the store of the run; `MembersOnly` if its workers have keys.
      steps: reads and writes what workers say in each step.
      me: this worker's slot and incarnation.
      worker: its name.
      pace: how long it waits.
      tell: is called with a line of text whenever there is something to report.
    """

    def __init__(
        self,
        store: Store,
        steps: Steps,
        me: MemberId,
        worker: str,
        pace: Pace,
        tell: Callable[[str], None],
    ):
        self._store, self._steps, self._closed = store, steps, steps.closed
        (self._slot, self._incarnation), self._worker = me, worker
        self._pace, self._tell = pace, tell
        beginning = records.sha256(self._closed.roster.run.encode()) if self._closed else ""
        self._decided = {-1: Decided(beginning, time.monotonic())}
        self._lock = threading.RLock()  # with a delay, the exchange has a thread of its own
        self.ahead: dict[int, Manifest] = {}  # what was read ahead
        # These matter for members only:
        self.astray: str | None = None  # why this worker must go back to a snapshot, if it must
        self.is_unheard = False  # nobody signs its snapshots, so it may be on a side of its own
        self.judged_from = 0 if self._closed else sys.maxsize  # the first step to remember
        self.left: set[MemberId] = set()  # members that said that they leave
        self.vain: dict[int, int] = {}  # the last step in which others waited for a slot in vain
        self.refused: tuple[int, Set[MemberId]] = -1, set()  # a step, and whom it leaves out
        self._counted: dict[int, frozenset[MemberId]] = {}
        self._absent = -1, 0.0  # a step, and when it had no manifest yet
        self._asked = -1, 0.0  # a step, and when it last asked who has gone on from its manifest
        self._cut = 0  # the last step that went on without most of those who counted
        self._sought = 0  # the step of the last snapshot for which it went back
        self._elsewhere: tuple[int, Set[tuple[int, str]]] = -1, set()  # when it last compared
        self._is_ahead = True  # no side was larger then
        self._compared_at = time.monotonic()  # the time of the last routine comparison
        self._compared_until = 0  # where the next routine comparison begins

    def head(self, step: int) -> str:
        """Returns the hash of what was decided up to a step, if this worker knows it."""
        return self._known(step).head

    def lost(self, step: int) -> tuple[int, ...]:
        """Returns the slots whose packets of a step this worker did not apply."""
        return self._known(step).lost

    @property
    def counted(self) -> dict[int, frozenset[MemberId]]:
        """Who counted in each step that is remembered; empty in an open run."""
        return dict(self._counted)

    def manifest(self, step: int) -> Manifest | None:
        """Returns which packets count in a step, or None if it is not decided."""
        with self._lock:
            if (known := self._known(step).manifest) is not None:
                return known
            if 0 <= self.last_step() < step - 1:  # it has gone back to an earlier snapshot
                return None
            key, looked = records.step_key("manifests", step), time.monotonic()
            try:
                if (manifest := self.ahead.pop(step, None)) is None:
                    if (data := self._store.get(key)) is None:
                        self._absent, self.refused = (step, looked), (-1, set())
                        return None
                    manifest = records.decode(Manifest, data, key)
                return self.keep(step, manifest) if self._is_taken(step, manifest) else None
            except Damaged as error:  # then nobody can decide the step anew, or go on
                log.warning("the manifest of %s %d: %s", self._pace.unit, step, error)
                return None

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
            self._steps.forget()  # since what was said may be written over
            self.astray, self._cut, self.ahead = None, 0, {}
            self.is_unheard, self._elsewhere = False, (-1, set())
            head = index.head
            if self._closed:
                self._closed.begin(index.step, index.roster)
                same = index._replace(file="")  # if several began the run, with equal arrays
                head = head if index.step else records.sha256(records.encode(same))
            self._decided = {index.step - 1: Decided(head, time.monotonic(), lost=index.lost)}
            self._counted = counted

    def keep(self, step: int, manifest: Manifest) -> Manifest:
        """Adds a manifest, and forgets what is needed no more."""
        with self._lock:
            self._require_next(step, manifest)
            head = self.head(step) or records.head(manifest)  # the first is that of a snapshot
            self.learn(step, head=head, manifest=manifest)
            counted = sides.slots_of(manifest)  # whatever earlier processes of theirs have said
            self.left = {member for member in self.left if member[0] not in counted}
            if self._closed:
                self._closed.hold(step + 1, manifest.roster)
                self._counted[step] = manifest.members
            kept_from = min(step - 1, self.judged_from)
            for kept in self._decided, self._counted:
                for old in [n for n in kept if n < kept_from]:
                    kept.pop(old)
            return manifest

    def last_step(self) -> int:
        """Returns the last decided step; it copies the keys, since other threads add some."""
        return max(list(self._decided))

    def _known(self, step: int) -> Decided:
        return self._decided.get(step, Decided())

    def learn(self, step: int, **changes: Any) -> None:
        """Changes what is known of a step, and notes the time."""
        self._decided[step] = self._known(step)._replace(learned=time.monotonic(), **changes)

    def _follows(self, step: int, manifest: Manifest) -> bool:
        return self.head(step - 1) in ("", manifest.previous)  # "" if nothing is known

    def _require_next(self, step: int, manifest: Manifest) -> None:
        """Raises SwarmError unless the manifest follows the one before, and knows this worker."""
        follows, last = self._follows(step, manifest) or self.astray, manifest.packets[-1]
        if manifest.step != step or not follows or last.slot >= self._steps.slots:
            raise SwarmError(
                f"the manifest of {self._pace.unit} {step} does not follow from the one before: "
                "two runs share this place in the store, or somebody changed it. Use another place."
            )
        for packet in manifest.packets:
            if packet.slot == self._slot and packet.incarnation > self._incarnation:
                raise SwarmError(
                    f"another process is worker {self._worker!r} now, or has taken its slot "
                    f"{self._slot}: give every process a --worker name of its own."
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
        if away := self.left_out(step, slots):
            self._steps.sent(step, {slot for slot, _ in away})
            said = self._steps.folder(step, self.head(step - 1)).left
            self.left = self.left | said | have_left(self._store, away)
        are_there = all(self._is_there(step, packet) for packet in manifest.packets)
        others = {x for x in self.left_out(step, slots) if x[0] != self._slot}
        asked, now = self._asked, time.monotonic()
        if others and (asked[0] != step or now - asked[1] >= self._pace.deadline):
            self._asked = step, now  # not at each look, since packets may be large
            gone_on = self._gone_on(manifest)  # as it knows itself that it was late, so may they
            others = {x for x in others if x[0] not in gone_on}
        if are_there and not others:
            return True
        if self.is_patient(step):
            self.refused = step, others
            return False
        self._cut = step
        return True

    def is_patient(self, step: int) -> bool:
        """Tells whether those who counted before may still be waited for in a step."""
        return time.monotonic() - self._known(step - 1).learned < self._pace.patient_wait

    def _is_there(self, step: int, packet: PacketRef) -> bool:
        """Tells whether a packet is there; looks if others lately waited in vain for its sender."""
        if not self.is_in_vain(step, packet.slot):
            return True
        said = self._steps.packets(step).get(packet.slot)
        if said and said.packet == packet:  # since then somebody may have changed it
            return True
        data = self._store.get(self._steps.key(step, packet)) or b""
        return records.sha256(self._steps.payload(data)) == packet.sha256

    def left_out(self, step: int, slots: Set[int]) -> set[MemberId]:
        """Returns who is missing of those who counted and have not left, if that is half or more.

        It asks about all steps since the last attested snapshot, so that nobody is left out by
        halves, or since the last step that went on without most.
        """
        counted = [x for n, x in self.counted.items() if self._cut <= n < step]
        left = {slot for slot, _ in self.left} - slots
        voters = {x for x in self._voters(step, counted) if x[0] not in left}
        missing = {x for x in voters if x[0] not in slots}
        return missing if 2 * len(missing) >= len(voters) else set()

    def _voters(self, step: int, counted: Iterable[Set[MemberId]]) -> set[MemberId]:
        """Returns who counted and is still a member: the last process in each slot."""
        newest = dict(sorted(set().union(*counted))).items()
        return {x for x in newest if self._steps.has(step, x[0])}

    def _mark_astray(self, step: int, why: str) -> None:
        self.astray = f"{why}: it goes back to a snapshot"
        self._tell(f"{self._pace.unit} {step}: {self.astray}")

    def _look_for_later_snapshot(self, step: int) -> None:
        """Goes there if the others are past this step, whose manifest somebody has taken away."""
        later = next(self.later_snapshots(max(step, self._sought)), None)
        if later is not None:
            self._sought = later.step  # once, since nobody may be able to read it
            self._mark_astray(step, "most members have signed a later snapshot")

    def later_snapshots(self, step: int) -> Iterator[SnapshotIndex]:
        """Yields the snapshots after a step in which it believes, the newest ones first."""
        return filter(self.believes, snapshots.indices(self._store, step + 1))

    def believes(self, index: SnapshotIndex) -> bool:
        """Tells whether this worker may go on from a snapshot; in an open run from any.

        It may if most of those who counted, as far as it knows, have signed it. Else the snapshot
        must be attested, and what this worker has applied must lead to it by steps in which most of
        the others counted. A newcomer has applied nothing, and believes what is attested.
        """
        if (closed := self._closed) is None:
            return True
        counted = self.counted
        present = self._voters(self.last_step(), counted.values())
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
        others = {slot for slot, _ in present - have_left(self._store, present)} - {self._slot}
        with contextlib.suppress(Damaged):
            for manifest in snapshots.chain_before(closed, index._replace(since=first + 1)):
                if 2 * len(sides.slots_of(manifest) & others) <= len(others):
                    return False
                if self.head(manifest.step - 1) == manifest.previous:
                    return True
        return False

    def is_in_vain(self, step: int, slot: int) -> bool:
        """Tells whether others have lately waited in vain for what a member announced or listed."""
        return step - self.vain.get(slot, step) in range(1, VAIN_STEPS if self._closed else 0)

    def settle(self, proposed: Manifest) -> Manifest | None:
        """Returns the manifest that others wrote for a step, or replaces it by the proposed one."""
        step, is_patient = proposed.step, self.is_patient(proposed.step)
        if (decided := self.manifest(step)) is None:
            if self._may_replace(step, proposed):
                self._store.put(records.step_key("manifests", step), records.encode(proposed))
                decided = self.manifest(step)
            elif not is_patient:
                self._mark_astray(step, "others have decided it in another way")
        return decided

    def _may_replace(self, step: int, proposed: Manifest) -> bool:
        """Tells whether a manifest that this worker does not take may be written over.

        It may not if as many have gone on from it as have not, or a roster that it names is not
        there yet. One of its own side may not either if this worker did not count before.
        """
        if not self._steps.may_decide(step):
            return False
        if (there := manifests_of(self._store, [step]).get(step)) is None:
            return True
        last, is_same = self._known(step - 1), there.previous == proposed.previous
        counted = last.slots - set(proposed.lost) if last.manifest else {self._slot}
        if self._slot not in counted and is_same:
            return False
        is_valid = sides.is_valid(self._steps, step, there)
        here, listed = sides.slots_of(proposed), sides.slots_of(there)
        gone_on = set(self._gone_on(there))
        if not is_same:  # who is here has come back from there
            gone_on -= here
        if not is_valid:
            gone_on -= {self._slot}  # in an earlier process, with other settings
        elif is_same and listed < here:  # they may have applied it, and sent nothing since
            gone_on |= listed
        return len(gone_on) < len(here - gone_on)

    def _gone_on(self, manifest: Manifest) -> dict[int, int]:
        """Returns the last steps in which slots have followed a manifest or its successors."""
        gone_on: dict[int, int] = {}
        for later in range(manifest.step + 1, manifest.step + 1 + MOST_FOLLOWED):
            gone_on |= dict.fromkeys(self._steps.followers(manifest), later)
            there = manifests_of(self._store, [later]).get(later)
            if there is None or there.previous != records.head(manifest, there.lost):
                break
            manifest = there
        return gone_on

    def lost_by_others(self, manifest: Manifest, missing: Set[int]) -> tuple[int, ...] | None:
        """Returns the slots whose packets nobody applied, or None while this is not known."""
        later = manifest.step + 1
        following = self.ahead.get(later) or manifests_of(self._store, [later]).get(later)
        return sides.lost_later(self._steps, manifest, missing, following)

    def watch_sides(self, step: int, elsewhere: Set[tuple[int, str]], looks_later: bool) -> bool:
        """Tells whether no other side was larger when this worker last compared its own.

        It compares as soon as packets follow a new head, and from time to time. If it
        ``looks_later`` it then looks for a snapshot of later steps too.
        """
        if self._closed is None:
            return True
        if self._elsewhere[0] != step:
            self._elsewhere, self._is_ahead = (step, set()), True
        now, pace = time.monotonic(), self._pace
        is_due = now - self._compared_at > (pace.deadline if elsewhere else pace.patient_wait)
        if is_due or elsewhere - self._elsewhere[1]:
            within = range(step - 1, step)
            if is_due:
                self._compared_at, within = now, None if elsewhere else self._next_steps(step)
            self._elsewhere, self._is_ahead = (step, elsewhere), self.compare(step, within)
            if is_due and looks_later:
                self._look_for_later_snapshot(step)
        return self._is_ahead

    def try_without_most(self, step: int) -> bool:
        """Compares sides before a step leaves out most; tells whether this worker may go on."""
        self._cut = step
        self.compare(step)
        self._look_for_later_snapshot(step)
        return not self.astray

    def compare(self, step: int, within: range | None = None) -> bool:
        """Tells whether no other side is larger than this worker's, within some steps or in all.

        It goes back to a snapshot if it can follow a larger side from there. If its own is the
        largest, it puts its manifests in place again, where they are gone or others are there.
        """
        if (closed := self._closed) is None:
            return True
        thorough = within is None
        known = {n: x.manifest for n, x in sorted(self._decided.items()) if x.manifest}
        own = {n: manifest for n, manifest in known.items() if within is None or n in within}
        stored = manifests_of(self._store, [*own, step])
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
        others = {head: slots - {self._slot} for head, slots in votes.items() if head != mine}
        if thorough and any(others.values()):
            counted = [x for n, x in self.counted.items() if n < fork]
            voters = {slot for slot, _ in self._voters(fork, counted)}
            signed = snapshots.signed_by_most(closed, fork, voters)
            if signed is not None and self.head(signed.step - 1) != signed.head:
                why = f"most members signed a snapshot at {signed.step} of others"
                self._mark_astray(step, why)
                return False
            others = others if signed is None else {}
        sure = {self._slot} | votes.get(mine, set())
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
                from_there = f"go on from another {self._pace.unit} {fork - 1} than this worker"
                there = f"{len(others[best])} members {from_there}"
                self._mark_astray(step, f"{there}, whose side has {len(hoped)}")
        elif sides.goes_on({**others, mine: sure}, decided) == mine:
            for n, manifest in own.items():
                if n not in stored or records.head(stored[n]) != records.head(manifest):
                    self._store.put(records.step_key("manifests", n), records.encode(manifest))
        return best == mine

    def _next_steps(self, step: int) -> range:
        """Returns the next few steps to compare while there is no trouble, in turn."""
        first = self._compared_until if self._compared_until < step else min(self._decided)
        self._compared_until = first + MOST_FOLLOWED
        return range(first, self._compared_until)

    def _silent(self, step: int) -> set[int]:
        """Returns who counted in the step before, and may still send a packet that follows it."""
        if not self.is_patient(step):
            return set()
        left = {slot for slot, _ in self.left}
        return {x for x in self._known(step - 1).slots if self._steps.has(step, x)} - left

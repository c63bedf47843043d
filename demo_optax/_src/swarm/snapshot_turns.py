"""Whose turn it is to write a snapshot, and what the others do with it."""

import collections
import functools
import math
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from demo_optax._src.swarm import snapshots
from demo_optax._src.swarm.member import Member
from demo_optax._src.swarm.members_only import MembersOnly
from demo_optax._src.swarm.records import Damaged, Manifest, MemberId, SnapshotIndex
from demo_optax._src.swarm.snapshots import Leaves, Turn

LARGEST_DRIFT = 0.1  # that different kinds of devices may explain
SIGNED_DRIFT = 1e-3  # up to which a member signs another's snapshot; measured: below 1e-6
POLL_SECONDS = 0.25
HEARD_SECONDS = 2.0  # between two looks for a snapshot that most have signed
MOST_TURNS = 100  # that are remembered, of all members
STEPS_TO_JUDGE = 10  # at the least, whose members a step may not leave out

Comparison = tuple[SnapshotIndex, float, Leaves | None]
"""A snapshot, the drift from it, and its arrays if a worker should go on from them."""


class SnapshotTurns:
    """Writes snapshots in turn with the other workers, or compares with theirs, in threads."""

    def __init__(self, member: Member, every: int):
        self.member, self.every = member, every
        self._closed = member.store if isinstance(member.store, MembersOnly) else None
        if self._closed:
            self._closed.every = every
        self._threads = ThreadPoolExecutor(2, "snapshots")
        self._written: Future[None] | None = None
        self._compared: Future[Comparison | None] | None = None
        self._signed: SnapshotIndex | None = None  # the last snapshot that this member signed
        self._last = 0  # the last step that had a turn
        self._attested = 0  # the last step whose snapshot most members have signed
        self._turns: collections.deque[Turn] = collections.deque(maxlen=MOST_TURNS)
        self._own: collections.deque[int] = collections.deque([0, 0], 2)  # its own last ones
        self._closing = threading.Event()
        member.repeat = self._sign_again

    def take(self, step: int, shared: Leaves, num_params: int, manifest: Manifest) -> None:
        """Writes a snapshot of the arrays before a step, or compares them with its writer's.

        The members of the manifest, which all workers know, take turns. A worker that still writes
        an earlier snapshot, or whose parameters are not finite, writes none, and none twice.
        """
        members, before = [packet.member for packet in manifest.packets], self._last
        writer, self._last = members[step // self.every % len(members)], max(step, before)
        self._turns.append((step, self._slot_in_index(writer)))
        if writer != self.member.me:
            if self._compared is None or self._compared.done():
                origin, slot = self._origin(step), self._slot_in_index(writer)
                self._compared = self._threads.submit(
                    self._compare, step, slot, shared, num_params, origin
                )
        elif step <= before:
            return
        elif self._written and not self._written.done():
            self._warn(step, "was not written, since an earlier one is still being written")
        elif not snapshots.is_finite(shared[:num_params]):
            self._warn(step, "was not written, since this worker's parameters are not finite")
        else:
            if self._written:
                self._written.result()  # raises what nobody expected
            self._written = self._threads.submit(self._write, step, shared, self._origin(step))

    def comparison(self) -> Comparison | None:
        """Returns the last comparison once it has ended, and only once."""
        if self._compared is None or not self._compared.done():
            return None
        ended, self._compared = self._compared, None
        return ended.result()

    def go_on_from(self, index: SnapshotIndex) -> None:
        """Forgets the turns after a snapshot that is believed, since this worker starts there."""
        self._attested = index.step
        self._turns.clear()

    def close(self) -> None:
        self._closing.set()
        self._threads.shutdown(wait=True)

    def _origin(self, step: int) -> dict[str, Any]:
        """Returns what the index of a snapshot must say of the steps before."""
        closed, chain = self._closed, self.member.chain
        named = closed.roster.named(closed.number_at(step)) if closed else ""
        return {"head": chain.head(step - 1), "roster": named, "lost": chain.lost(step - 1)}

    def _slot_in_index(self, writer: MemberId) -> int | None:
        return writer[0] if self._closed else None

    def _later(self, step: int) -> list[Turn]:
        return [x for x in list(self._turns) if x[0] > step]  # a copy, since turns are added

    def _last_attested(self, before: int) -> int:
        """Returns the step of the newest snapshot that most members have signed."""
        store, chain = self.member.store, self.member.chain
        turns = [x for x in self._later(self._attested) if x[0] < before]
        for index in snapshots.attested(store, reversed(turns), chain.counted):
            if chain.head(index.step - 1) in ("", index.head):  # else it is of another side
                self._attested = index.step
                break
        chain.judged_from = min(self._attested, before - STEPS_TO_JUDGE)
        return self._attested

    def _write(self, step: int, shared: Leaves, origin: dict[str, Any]) -> None:
        try:
            store, wait = self.member.store, self.member.wait_for_transfers
            if self._closed:
                origin["since"] = self._last_attested(step)
            slot = self._slot_in_index(self.member.me)
            if index := snapshots.write(store, step, shared, wait, slot, **origin):
                self._signed = index
                snapshots.sweep(store, step)
            else:
                self._warn(step, "was not written, since another one stands in its place")
            if self._closed:
                self._wait_until_heard(self._closed, step, origin["since"])
        except (OSError, Damaged) as error:  # another worker writes the next one
            self._warn(step, f"was not written: {error}")

    def _wait_until_heard(self, closed: MembersOnly, step: int, since: int) -> None:
        """Lets this worker send nothing while nobody's snapshot is signed since two of its turns.

        It may be on the smaller one of two sides that do not see each other.
        """
        if since >= self._own[0]:
            self._own.append(step)
            return
        member, chain = self.member, self.member.chain
        chain.is_unheard = True
        member.tell(
            f"{member.unit} {step}: most members have signed no snapshot since that of {since}, so "
            "this worker sends nothing until they do: let the owner take those out of the roster "
            "that are gone for good"
        )
        while chain.is_unheard and next(chain.later_snapshots(since), None) is None:
            if self._closing.wait(HEARD_SECONDS):
                return
            self._sign_again()
            closed.look_for_roster()
        self._own.extend([0, 0])
        if chain.is_unheard:
            chain.astray = "a newer snapshot was signed by most members"
            chain.is_unheard = False

    def _compare(
        self, step: int, slot: int | None, own: Leaves, num_params: int, origin: dict[str, Any]
    ) -> Comparison | None:
        """Awaits a step's snapshot; returns None if none comes, or it cannot be read."""
        store, own_digest = self.member.store, snapshots.digest(own)
        find = functools.partial(snapshots.read_index, store, step, slot)
        try:
            while (index := find()) is None:
                if any(snapshots.exists(store, *x) for x in reversed(self._later(step))):
                    return None  # its writer was gone, or skipped it
                if self._closing.wait(POLL_SECONDS):
                    return None
            may_sign = self._closed is not None and self._agrees(index, origin)
            if index.digest == own_digest:
                if may_sign:
                    self._sign(index)
                return index, 0.0, None
            leaves = snapshots.read(store, index, own)
        except (OSError, Damaged) as error:
            self._warn(step, f"was not compared: {error}")
            return None
        # Each by itself, since numbers such as a residual's norm may be far larger than the rest.
        state = range(num_params, len(own))
        arrays, numbers = ([n for n in state if bool(own[n].ndim) == b] for b in (True, False))
        drifts = [
            snapshots.relative_difference([own[n] for n in part], [leaves[n] for n in part])
            for part in (range(num_params), arrays, numbers)
        ]
        drift = float(np.max(drifts))
        is_own_broken = not math.isfinite(drift) and snapshots.is_finite(leaves)
        if may_sign and drift <= SIGNED_DRIFT and snapshots.has_equal_integers(own, leaves):
            self._sign(index)
        if drift <= SIGNED_DRIFT or is_own_broken or (drift < LARGEST_DRIFT and not self._closed):
            return (index, drift, leaves) if self._is_believed(index) else None
        differs = f"differs from this worker's parameters or state by {drift:.2g} of their norm"
        if self._closed and self._is_believed(index):
            self._warn(step, f"{differs}, and was taken over, since most members have signed it")
            return index, drift, leaves
        self._warn(
            step,
            f"{differs}, more than rounding explains, and was not taken over: stop the worker that "
            "is wrong",
        )
        return index, drift, None

    def _sign(self, index: SnapshotIndex) -> None:
        self._signed = index
        snapshots.attest(self.member.store, index)

    def _sign_again(self) -> None:
        """Signs the last snapshot once more, since others may wait for what somebody deleted."""
        if self._signed is not None:
            snapshots.attest(self.member.store, self._signed)

    def _agrees(self, index: SnapshotIndex, origin: dict[str, Any]) -> bool:
        """Tells whether this worker has come to the snapshot on the way that its index says."""
        there = {name: getattr(index, name) for name in origin}
        return there == origin and index.since <= self._last_attested(index.step)

    def _is_believed(self, index: SnapshotIndex) -> bool:
        """Waits until most members have signed a snapshot; none is taken over before."""
        while not self.member.chain.believes(index):
            if self._last > index.step or self._closing.wait(POLL_SECONDS):
                return False
        return True

    def _warn(self, step: int, what: str) -> None:
        self.member.tell(f"the snapshot before {self.member.unit} {step} {what}")

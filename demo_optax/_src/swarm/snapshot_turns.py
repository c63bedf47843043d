"""Who writes which snapshot, and whether a worker's own parameters are those of the snapshot.

Both happen in threads, beside the training.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from demo_optax._src.swarm import snapshots
from demo_optax._src.swarm.member import Member
from demo_optax._src.swarm.records import Damaged, Manifest, SnapshotIndex

LARGEST_DRIFT = 0.1  # that unlike devices may explain
PAUSE = 0.25  # seconds between two looks at the store


class Comparison(NamedTuple):
    """A snapshot, beside what this worker had at its step.

    Attributes:
      snapshot: its index.
      own: this worker's arrays at that step, if they differ.
      equal: whether they are equal to the last bit.
    """

    snapshot: SnapshotIndex
    own: Sequence[np.ndarray]
    equal: bool


class Adoption(NamedTuple):
    """What to make of a snapshot.

    Attributes:
      step: the first that comes after it.
      drift: by how much this worker differed, relative to the snapshot's norm.
      leaves: its arrays, to go on from; None where this worker goes on with its own.
    """

    step: int
    drift: float
    leaves: list[np.ndarray] | None


class SnapshotTurns:
    """Every so many steps one worker in turn writes a snapshot; the others compare theirs.

    Args:
      member: this worker's place in the swarm.
      every: steps between two snapshots.
    """

    def __init__(self, member: Member, every: int):
        self.member, self.every = member, every
        self._writing = ThreadPoolExecutor(1, "snapshots")
        self._comparing = ThreadPoolExecutor(1, "comparisons")
        self._written: Future[None] | None = None
        self._compared: Future[Comparison | None] | None = None
        self._awaited = -1

    def take(
        self, step: int, shared: list[np.ndarray], num_params: int, manifest: Manifest
    ) -> None:
        """Writes a snapshot, or compares it with the one that another worker writes.

        A worker writes none while it is still writing another, when its parameters are not finite,
        or when it is about to replace them by those of an earlier one. Otherwise its own are the
        newer truth: what it still compares with an earlier one ends.

        Args:
          step: the first that comes after it.
          shared: parameters and shared state, as they are before that step.
          num_params: arrays of ``shared`` that are parameters, the first.
          manifest: of an exchange that all workers know; its members take turns.
        """
        members = [packet.member for packet in manifest.packets]
        if members[step // self.every % len(members)] != self.member.me:
            if self._compared is None:
                self._awaited = step
                self._compared = self._comparing.submit(self._compare, step, shared)
            return
        if self._compared and self._compared.done() and _differs(self._compared.result()):
            return
        if self._written and not self._written.done():
            self._warn(step, "was not written, since an earlier one is still being written")
        elif not snapshots.is_finite(shared[:num_params]):
            self._warn(step, "was not written, since this worker's parameters are not finite")
        else:
            self._awaited, self._compared = -1, None
            self._written = self._writing.submit(self._write, step, shared)

    def adoption(self, like: list[Any]) -> Adoption | None:
        """What the last comparison that has ended found, and what to take over; asks once.

        Args:
          like: shapes and dtypes of the arrays.
        """
        if self._compared is None or not self._compared.done():
            return None
        ended, self._compared = self._compared, None
        found = ended.result()
        if found is None or found.equal:
            return None if found is None else Adoption(found.snapshot.step, 0.0, None)
        step = found.snapshot.step
        try:
            leaves = snapshots.read(self.member.store, found.snapshot, like)
        except (OSError, Damaged) as error:  # it may have been swept
            self._warn(step, f"was not taken over: {error}")
            return None
        drift = snapshots.relative_difference(list(found.own), leaves)
        is_own_broken = not snapshots.is_finite(list(found.own)) and snapshots.is_finite(leaves)
        if drift < LARGEST_DRIFT or is_own_broken:
            return Adoption(step, drift, leaves)
        self._warn(
            step,
            f"differs from this worker's parameters by {drift:.2g} of their norm, more than "
            "rounding explains, and was not taken over: stop the worker that is wrong",
        )
        return Adoption(step, drift, None)

    def close(self) -> None:
        """Finishes what is being written."""
        self._awaited = -1
        self._comparing.shutdown(wait=True, cancel_futures=True)
        self._writing.shutdown(wait=True)

    def _write(self, step: int, shared: list[np.ndarray]) -> None:
        try:
            snapshots.write(self.member.store, step, shared)
            snapshots.sweep(self.member.store)
        except (OSError, Damaged) as error:  # another worker writes the next one
            self._warn(step, f"was not written: {error}")

    def _compare(self, step: int, shared: list[np.ndarray]) -> Comparison | None:
        own, store = snapshots.digest(shared), self.member.store
        try:
            while self._awaited == step:
                index = snapshots.read_index(store, step)
                if index is not None:
                    same = index.digest == own
                    return Comparison(index, [] if same else shared, same)
                if any(later > step for later in snapshots.steps_of(store)):
                    return None  # its writer was gone, or left it out
                time.sleep(PAUSE)
        except (OSError, Damaged) as error:
            self._warn(step, f"was not compared: {error}")
        return None

    def _warn(self, step: int, what: str) -> None:
        self.member.tell(f"the snapshot of step {step} {what}")


def _differs(found: Comparison | None) -> bool:
    return found is not None and not found.equal

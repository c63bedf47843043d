"""Who writes which snapshot, and whether a worker's own parameters are those of the snapshot.

Both happen in threads, beside the training.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from demo_optax.swarm import snapshots
from demo_optax.swarm.member import Member
from demo_optax.swarm.records import Damaged, Manifest, SnapshotIndex

PAUSE = 0.25  # seconds between two looks at the store


class Difference(NamedTuple):
    """A snapshot that differs from what this worker had at its step.

    Attributes:
      snapshot: its index.
      own: this worker's arrays at that step.
    """

    snapshot: SnapshotIndex
    own: Sequence[np.ndarray]


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
        self._compared: Future[Difference | None] | None = None
        self._due = 0

    def take(self, step: int, shared: list[np.ndarray], manifest: Manifest) -> None:
        """Writes a snapshot, or compares it with the one that another worker writes.

        A comparison ends when the next snapshot is due, so that nobody writes one whose own
        parameters may have to be replaced.

        Args:
          step: the first that comes after it.
          shared: parameters and shared state, as they are before that step.
          manifest: of an exchange that all workers know; its members take turns.
        """
        self._due, self._compared = step, None
        members = [packet.member for packet in manifest.packets]
        if members[step // self.every % len(members)] == self.member.me:
            self._writing.submit(self._write, step, shared)
        else:
            self._compared = self._comparing.submit(self._compare, step, shared)

    def difference(self) -> Difference | None:
        """What the last comparison that has ended found; asks once."""
        if self._compared is None or not self._compared.done():
            return None
        ended, self._compared = self._compared, None
        return ended.result()

    def close(self) -> None:
        """Finishes what is being written."""
        self._due = -1
        self._comparing.shutdown(wait=True, cancel_futures=True)
        self._writing.shutdown(wait=True)

    def _write(self, step: int, shared: list[np.ndarray]) -> None:
        try:
            snapshots.write(self.member.store, step, shared)
            snapshots.sweep(self.member.store)
        except (OSError, Damaged) as error:  # another worker writes the next one
            self.member.tell(f"the snapshot of step {step} was not written: {error}")

    def _compare(self, step: int, shared: list[np.ndarray]) -> Difference | None:
        own = snapshots.digest(shared)
        while self._due == step:
            try:
                index = snapshots.read_index(self.member.store, step)
            except (OSError, Damaged) as error:
                self.member.tell(f"the snapshot of step {step} was not compared: {error}")
                return None
            if index is not None:
                return None if index.digest == own else Difference(index, shared)
            time.sleep(PAUSE)
        return None

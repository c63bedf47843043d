"""When a worker ends its round of local steps: there is no common clock, and nobody leads.

A round ends after a number of steps, or after some seconds. Then the first worker whose time is
over leaves a mark in the store, and the others end their round at their next step.
"""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

from demo_optax._src.swarm.member import Member


class RoundClock:
    """Tells the lead of a worker when its round is over.

    Args:
      member: the worker's place in the swarm.
      steps: the number of steps after which a round ends.
      seconds: the number of seconds after which it ends instead, or None.
    """

    def __init__(self, member: Member, steps: int, seconds: float | None):
        self.member, self.steps, self.seconds = member, steps, seconds
        self._began = time.monotonic()
        self._thread = ThreadPoolExecutor(1, "round")
        self._round = -1  # which is watched
        self._watched: Future[bool] | None = None
        self._ended = threading.Event()

    def is_decided(self, number: int) -> bool:
        """Tells whether the others have decided a round that this worker has not ended."""
        watched = self._watch(number)
        return watched.done() and watched.result()

    def is_over(self, number: int, steps: int) -> bool:
        """Tells whether to end a round in which this worker has taken some steps."""
        if self.seconds is None:
            return steps >= self.steps
        return self._watch(number).done() or time.monotonic() - self._began >= self.seconds

    def end(self) -> bool:
        """Begins the next round; returns whether the others should end this one too."""
        self._ended.set()
        self._began = time.monotonic()
        return self.seconds is not None

    def close(self) -> None:
        self._ended.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _watch(self, number: int) -> "Future[bool]":
        """Watches a round in a thread; returns whether it is decided, once others have ended it."""
        if self._watched is None or self._round != number:
            self._ended.set()
            self._round, self._ended = number, threading.Event()
            self._watched = self._thread.submit(self.member.await_others, number, self._ended)
        return self._watched

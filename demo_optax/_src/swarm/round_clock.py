"""When a worker ends its round of local steps: there is no common clock, and nobody leads.

A round ends after a number of steps, or after some seconds. Then the first worker whose time is
over leaves a mark in the store, and the others end their round at their next step.
"""

import threading
import time
from typing import Literal

from demo_optax._src.swarm.member import Member

LOOKS = 20  # at a round that lasts as long as the last one
SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 5.0  # seconds between two looks


class RoundClock:
    """Tells the first process of a worker what has become of its round.

    A thread looks at the store while the worker trains, some times in each round.

    Args:
      member: the worker's place in the swarm.
      steps: the number of steps after which a round ends.
      seconds: the number of seconds after which it ends instead, or None.
    """

    def __init__(self, member: Member, steps: int, seconds: float | None):
        self._member, self._steps, self._seconds = member, steps, seconds
        self._began, self._length = time.monotonic(), seconds or 0.0
        self._round: int | None = None  # the round to look at
        self._seen: tuple[int, bool, bool] | None = None  # round, is decided, was ended by others
        self._error: Exception | None = None
        self._closed = threading.Event()
        # The process may end while this thread waits for the store.
        self._thread = threading.Thread(target=self._watch, name="round", daemon=True)

    def look(self, number: int, steps: int) -> Literal["decided", "over", "open"]:
        """Tells whether a round, in which this worker has taken some steps, is to be ended.

        It is ``"decided"`` if the others have exchanged their packets without this worker's.

        Raises:
          StoreError, SwarmError: the thread met with this error.
        """
        if self._error is not None:
            raise self._error
        self._round = number
        if self._thread.ident is None:
            self._thread.start()
        seen, is_decided, was_ended = self._seen or (-1, False, False)
        if seen == number and is_decided:
            return "decided"
        if self._seconds is None:
            return "over" if steps >= self._steps else "open"
        share = (time.monotonic() - self._began) / self._seconds
        was_ended &= seen == number and share >= self._member.shortest_round
        return "over" if share >= 1 or was_ended else "open"

    def restart(self) -> None:
        """Begins a round."""
        now = time.monotonic()
        if self._round is not None:
            self._length = self._seconds or now - self._began
        self._round, self._began = None, now

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        try:
            while not self._closed.wait(self._pause()):
                if (number := self._round) is None:
                    continue
                is_decided = self._member.manifest(number) is not None
                ended = self._seconds is not None and self._member.others_ended(number)
                self._seen = number, is_decided, ended
        except Exception as error:  # raised again where the worker looks
            self._error = error

    def _pause(self) -> float:
        length = max(self._length, time.monotonic() - self._began)
        return min(max(length / LOOKS, SHORTEST_PAUSE), LONGEST_PAUSE)

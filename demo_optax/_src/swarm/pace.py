"""How long a worker waits for the others, judged by its own last steps."""

import collections
import statistics
import time

FIRST_DEADLINE = 60.0  # seconds, while nobody knows how long a step takes
SHORTEST_DEADLINE = 2.0
DEADLINE_STEPS = 3  # the deadline, in median steps
DEADLINE_ROUNDS = 0.5  # the deadline, in median rounds of several steps
NUM_DURATIONS = 21  # steps in the median
POLL_SECONDS = 0.05  # the longest pause between two looks is at least this,
POLL_SHARE = 0.02  # and grows with this share of a median round, which hides the exchange
PATIENT_DEADLINES = 5  # before members go on without most of those who counted


class Pace:
    """The durations of a worker's last steps or rounds, and what follows from them.

    If a fixed ``deadline`` is given, it is used instead. A failed read is tried again for
    ``patience`` seconds.
    """

    def __init__(self, deadline: float | None, patience: float):
        self.unit = "step"  # what the exchanges are called in messages; or "round"
        self.patience = patience
        self.may_replay = True  # whether this worker may have been in the next steps before
        self._fixed_deadline = deadline
        self._durations: collections.deque[float] = collections.deque(maxlen=NUM_DURATIONS)
        self._last_time: float | None = None

    def end_step(self) -> None:
        """Records the time since the last exchange ended."""
        now = time.monotonic()
        if self._last_time is not None:
            self._durations.append(now - self._last_time)
        self._last_time = now

    def skip_next(self) -> None:
        """Leaves out the next duration, which would include catching up."""
        self._last_time = None

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
    def patient_wait(self) -> float:
        """Seconds for which a step waits before it leaves out most of those who counted."""
        deadline = self.deadline
        if self._fixed_deadline is None and self.may_replay and not self._durations:
            deadline = SHORTEST_DEADLINE  # since a replay has no steps to time
        return max(PATIENT_DEADLINES * deadline, self.patience + deadline)

    @property
    def longest_pause(self) -> float:
        """Seconds between two looks at a step, at most."""
        return max(POLL_SECONDS, POLL_SHARE * statistics.median(self._durations or [0.0]))

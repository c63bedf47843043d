"""How long a worker waits for the others, by the time that its own last steps took."""

import collections
import statistics
import time

FIRST_DEADLINE = 60.0  # seconds, while nobody knows how long a step takes
SHORTEST_DEADLINE = 2.0
DEADLINE_STEPS = 3  # the deadline, in median steps
DEADLINE_ROUNDS = 0.5  # the deadline, in median rounds of several steps
NUM_DURATIONS = 21  # steps in the median
POLL_SECONDS = 0.05  # at most between two looks at a step, but
POLL_SHARE = 0.02  # of a median round, behind which the exchange is hidden
PATIENT_DEADLINES = 5  # that pass before a step goes on without most of those who counted


class Pace:
    """The durations of a worker's last steps or rounds, and what follows from them.

    The ``deadline`` stands in place of that which the durations give. Reads are tried again for
    ``patience`` seconds.
    """

    def __init__(self, deadline: float | None, patience: float):
        self.unit = "step"  # what the exchanges are called in messages; or "round"
        self.patience = patience
        self.may_replay = True  # steps that this worker was in before it started or went back
        self._fixed_deadline = deadline
        self._durations: collections.deque[float] = collections.deque(maxlen=NUM_DURATIONS)
        self._last_time: float | None = None

    def end_step(self) -> None:
        """Measures the time since the last exchange, at the end of one."""
        now = time.monotonic()
        if self._last_time is not None:
            self._durations.append(now - self._last_time)
        self._last_time = now

    def catch_up(self) -> None:
        """Leaves out the next duration, which would contain the catching up."""
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
        """Seconds before a step goes on without most, who may lack a packet for half as long."""
        deadline = self.deadline
        if self._fixed_deadline is None and self.may_replay and not self._durations:
            deadline = SHORTEST_DEADLINE  # at no pace of a step
        return max(PATIENT_DEADLINES * deadline, self.patience + deadline)

    @property
    def longest_pause(self) -> float:
        """Seconds between two looks at a step, at most."""
        return max(POLL_SECONDS, POLL_SHARE * statistics.median(self._durations or [0.0]))

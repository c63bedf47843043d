"""What a worker tells of a step, and the exchange that it has under way meanwhile."""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from demo_optax._src.metrics import ExchangeMetrics
from demo_optax._src.parallel.processes import by_lead
from demo_optax._src.swarm.member import ExchangeResult, Member


class SwarmMetrics(NamedTuple):
    """Holds what `SwarmWorker.step` measured in a step.

    Attributes:
      step: int, the number of the exchange that the step's gradient goes into, from 0. With
        `demo_optax.local_steps` it is the number of the round.
      loss: float, the loss of this worker.
      gradient_norm: float, the norm of its gradient before clipping.
      exchange: `demo_optax.ExchangeMetrics` of the exchange that the parameters were updated with.
      applied: int, the number of the exchange whose result came in this step, or None if none came.
        With a delay it is an earlier one than ``step``.
      members: names of the workers whose packets counted in that exchange; empty if none came.
      skipped: names of the workers that had nothing finite to send in that exchange.
      late: names of the workers for which this worker waited in vain in that exchange.
      waited: float, seconds in the exchange; with a delay, those that the gradient did not hide.
      packet_bytes: int, bytes that it sent.
      replayed: int, steps that it caught up with afterwards, or rounds.
      drift: float, the norm by which its parameters differed from the last snapshot, relative to
        that of the snapshot, or the same of the shared state if that is larger; None in steps
        without a comparison.
      round_steps: int, the steps in the round that this step ended, else 0; 1 without rounds.
    """

    step: int
    loss: float
    gradient_norm: float
    exchange: ExchangeMetrics
    applied: int | None
    members: tuple[str, ...]
    skipped: tuple[str, ...]
    late: tuple[str, ...]
    waited: float
    packet_bytes: int
    replayed: int
    drift: float | None
    round_steps: int


class ExchangeUnderWay:
    """Carries one packet at a time to the others, in a thread of the worker's first process.

    All processes of the worker must call its methods together.
    """

    def __init__(self, member: Member | None):
        self._member, self._thread = member, ThreadPoolExecutor(1, "exchange")
        self._pending: Future[ExchangeResult] | None = None

    def begin(self, step: int, packet: bytes, steps: int, tokens: float, ends_round: bool) -> None:
        """Sends a packet that these steps and tokens went into (see `Member.exchange`)."""
        if self._member is not None:
            args = step, packet, steps, tokens, ends_round
            self._pending = self._thread.submit(self._member.exchange, *args)

    def result(self, timeout: float | None = None) -> ExchangeResult | None:
        """Waits for the result, and returns None if it is not there in time."""

        def ask() -> ExchangeResult | None:
            assert self._pending is not None
            _, late = wait([self._pending], timeout)
            return None if late else self._pending.result()

        return by_lead(ask)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

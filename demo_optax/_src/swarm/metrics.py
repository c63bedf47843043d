"""What a step of a swarm tells."""

from typing import NamedTuple

from demo_optax._src.metrics import ExchangeMetrics


class SwarmMetrics(NamedTuple):
    """Measurements of a step.

    Attributes:
      step: int, its number, from 0; catching up may have followed it.
      loss: float, this worker's.
      gradient_norm: float, of its gradient before clipping.
      exchange: `demo_optax.ExchangeMetrics` of the exchange whose result the parameters got.
      members: names of the workers whose packets counted in it.
      late: names of workers that it waited for in vain.
      waited: float, seconds that this worker spent in the exchange; with a delay, those that were
        not hidden by its gradient.
      packet_bytes: int, bytes that it sent.
      replayed: int, steps that it caught up with afterwards.
      drift: float, norm of what parameters and shared state differed by from the last snapshot,
        relative to the norm of the snapshot; 0 where they were equal, None in most steps, in which
        nothing was compared.
    """

    step: int
    loss: float
    gradient_norm: float
    exchange: ExchangeMetrics
    members: tuple[str, ...]
    late: tuple[str, ...]
    waited: float
    packet_bytes: int
    replayed: int
    drift: float | None

"""An exchange whose packets are applied one step later, so that it overlaps with the compute."""

import dataclasses

from demo_optax.compression import Plan
from demo_optax.exchange.protocol import (
    Aggregate,
    Mean,
    Outbox,
    Subtraction,
    Traffic,
)
from demo_optax.exchange.wrapper import ExchangeWrapper, PendingState
from demo_optax.metrics import ExchangeMetrics


@dataclasses.dataclass(frozen=True)
class Delayed(ExchangeWrapper):
    r"""Exchanges the packets of the previous step while this step computes its gradient.

    A message leaves the momentum when it is sent, and enters the mean a step later:

    .. math::
        m_t &\leftarrow \beta m_{t-1} + w\, T(g_t) \\
        q_t &= \mathrm{select}(m_t), \quad \hat q_t = \mathrm{decode}(\mathrm{encode}(q_t)) \\
        m_t &\leftarrow m_t - \alpha\, \hat q_t + \alpha\, (1 - a_{t-1})\, \hat q_{t-1} \\
        u_t &= T^{-1}(\mathrm{mean}(a_{t-1}\, \hat q_{t-1}))

    :math:`a_{t-1}` is the fraction of the previous message that was accepted: 0 if its packet was
    rejected, below 1 if its norm was limited. The rejected fraction is added back to the momentum.

    Attributes:
      inner: the exchange that is delayed.

    Example:
      >>> import demo_optax
      >>> delayed = Delayed(demo_optax.AllGather("data"))
      >>> tx = demo_optax.demo_scaled(1e-3, exchange=delayed)
    """

    def __post_init__(self):
        if isinstance(self.inner, Delayed):
            raise ValueError(
                "Delayed(Delayed(...)) would wait for two steps, but the delay is one step: leave "
                "one of them out."
            )

    def exchange(
        self,
        plan: Plan,
        outbox: Outbox,
        state: PendingState,
        previous_metrics: ExchangeMetrics,
        mean: Mean,
    ) -> Aggregate:
        """Exchanges the packets of the previous call (see `Exchange.exchange`)."""
        pending = state.pending, state.subtracted_fraction
        aggregate, message, correction = self.exchange_pending(
            plan, *pending, outbox.step - 1, state.inner, previous_metrics, mean
        )
        return aggregate._replace(
            subtractions=[
                Subtraction.uniform(plan, outbox.message, outbox.factor, under_way=True),
                Subtraction(message, correction, delay=1),
            ],
            state=self.pending_state(plan, outbox.packets, outbox.factor, aggregate.state),
            delay=1,
        )

    def traffic(self, plan: Plan, workers: int) -> Traffic:
        """The traffic of the inner exchange, overlapped with the compute."""
        return self.inner.traffic(plan, workers)._replace(overlaps=True)

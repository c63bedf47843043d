"""The exchange that applies packets one step later, so that it overlaps with the compute."""

import dataclasses
from typing import Any

from demo_optax._src.axes import AxisName
from demo_optax._src.compression import Plan
from demo_optax._src.compression.packet import PacketLayout
from demo_optax._src.exchange.protocol import Aggregate, Exchange, Traffic


@dataclasses.dataclass(frozen=True)
class Delayed:
    r"""Exchanges the packets of the previous step while this step computes its gradient.

    A message leaves the momentum when it is sent and enters the mean one step later:

    .. math::
        m_t &\leftarrow \beta m_{t-1} + w\, T(g_t) \\
        q_t &= \mathrm{select}(m_t), \quad \hat q_t = \mathrm{decode}(\mathrm{encode}(q_t)) \\
        m_t &\leftarrow m_t - \alpha\, \hat q_t + \alpha\, (1 - a_{t-1})\, \hat q_{t-1} \\
        u_t &= T^{-1}(\mathrm{mean}(a_{t-1}\, \hat q_{t-1}))

    :math:`a_{t-1}` is the fraction of the previous message that was accepted. It is 0 if the packet
    was rejected and below 1 if its norm was limited. The rejected fraction is added back to the
    momentum. The state of the momentum keeps the outbox of the last step, ``pending``.

    Attributes:
      inner: the exchange that is delayed.

    Example:
      >>> import demo_optax
      >>> delayed = Delayed(demo_optax.AllGather("data"))
      >>> tx = demo_optax.demo_scaled(1e-3, exchange=delayed)
    """

    inner: Exchange

    def __post_init__(self):
        if isinstance(self.inner, Delayed):
            raise ValueError(
                "Delayed(Delayed(...)) would wait for two steps, but the delay is one step: leave "
                "one of them out."
            )

    @property
    def axis_name(self) -> AxisName:
        return self.inner.axis_name

    def packets_per_worker(self) -> int:
        return self.inner.packets_per_worker()

    def layout(self, plan: Plan) -> PacketLayout:
        return self.inner.layout(plan)

    def init(self, plan: Plan) -> Any:
        return self.inner.init(plan)

    def exchange(self, *args) -> Aggregate:
        """Exchanges the packets that it is given, those of the previous step."""
        return self.inner.exchange(*args)

    def traffic(self, plan: Plan, workers: int) -> Traffic:
        """Returns the traffic of the inner exchange, which overlaps with the compute."""
        return self.inner.traffic(plan, workers)._replace(overlaps=True)

"""The exchange delayed by one step, around another one: it overlaps with the compute."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from demo_optax import axes
from demo_optax.compression import Compression, Plan
from demo_optax.compression.packet import Packets
from demo_optax.exchange.around import Around
from demo_optax.exchange.protocol import (
    Aggregate,
    Mean,
    Outgoing,
    Subtraction,
    Traffic,
)
from demo_optax.metrics import ExchangeMetrics


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class PacketFormat:
    """What it takes to decode the pending packets: a static node, which checkpoints describe.

    ``==`` is always True: ``optax.tree.map_params`` compares states of different shapes, and must
    find them equal.

    Attributes:
      compression: the settings.
      shapes: of the tensors.
      extra: words that the exchange puts after the header.
      multiple: the packet's length is padded to a multiple of this many words.
    """

    compression: Compression
    shapes: tuple[tuple[int, ...], ...]
    extra: int
    multiple: int

    always_equal = True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PacketFormat)

    def __hash__(self) -> int:
        return 0


class DelayedState(NamedTuple):
    """What a delayed exchange keeps.

    Attributes:
      pending: uint32 ``(owners, words)``, the packets of the last step; each worker its own.
      subtracted_fraction: float32 scalar in [0, 1], how much of their message has left the
        momentum; each worker its own.
      inner: state of the inner exchange.
      format: static, of the pending packets.
    """

    pending: Packets
    subtracted_fraction: Float32[Array, ""]
    inner: Any
    format: PacketFormat


@dataclasses.dataclass(frozen=True)
class Delayed(Around):
    r"""Exchanges the packets of the last step while this one computes its gradient.

    A message leaves the momentum when it is sent, and enters the mean a step later:

    .. math::
        m_t &\leftarrow \beta m_{t-1} + w\, T(g_t) \\
        q_t &= \mathrm{select}(m_t), \quad \hat q_t = \mathrm{decode}(\mathrm{encode}(q_t)) \\
        m_t &\leftarrow m_t - \alpha\, \hat q_t + \alpha\, (1 - a_{t-1})\, \hat q_{t-1} \\
        u_t &= T^{-1}(\mathrm{mean}(a_{t-1}\, \hat q_{t-1}))

    :math:`a_{t-1}` is the part of the last message that was accepted: 1, or less where the packet
    was damaged or its norm limited. The rest goes back into the momentum.

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

    def init(self, plan: Plan) -> DelayedState:
        """Empty packets, which every worker rejects."""
        none = jnp.zeros((self.packets_per_worker(), self.layout(plan).words), jnp.uint32)
        none, nothing = axes.as_varying((none, jnp.zeros((), jnp.float32)), self.axis_name)
        return DelayedState(none, nothing, self.inner.init(plan), self._format(plan))

    def _format(self, plan: Plan) -> PacketFormat:
        layout, shapes = self.layout(plan), tuple(x.shape for x in plan.geometries)
        return PacketFormat(plan.compression, shapes, layout.extra, layout.multiple)

    def exchange(
        self, plan: Plan, outgoing: Outgoing, state: DelayedState, last: ExchangeMetrics, mean: Mean
    ) -> Aggregate:
        """Exchanges the packets of the call before (see `Exchange.exchange`).

        Raises:
          ValueError: those were made with another compression.
        """
        if state.format.compression != plan.compression:
            raise ValueError(
                f"the state holds packets of {state.format.compression}, but the optimizer has "
                f"{plan.compression}: go back to the old settings, or restore the run with "
                "demo_optax.checkpoint, which puts what they carry back into the momentum."
            )
        pending = state.pending, state.subtracted_fraction
        found, message, correction = self.exchange_pending(
            plan, *pending, outgoing.step - 1, state.inner, last, mean
        )
        return found._replace(
            subtractions=[
                Subtraction.of_whole(plan, outgoing.message, outgoing.factor),
                Subtraction(message, correction, delay=1),
            ],
            state=DelayedState(outgoing.packets, outgoing.factor, found.state, self._format(plan)),
            delay=1,
        )

    def traffic(self, plan: Plan, workers: int) -> Traffic:
        """The traffic of the inner exchange, overlapped with the compute."""
        return self.inner.traffic(plan, workers)._replace(overlaps=True)

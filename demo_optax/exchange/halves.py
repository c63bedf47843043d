r"""An exchange in two halves, each a program of its own; between them the host exchanges packets.

.. math::
    \text{Sealed:} \quad m_t &\leftarrow \beta m_{t-1} + w\, T(g_t), \quad
        q_t = \mathrm{select}(m_t), \quad m_t \leftarrow m_t - \alpha\, q_t \\
    \text{Opened:} \quad m_t &\leftarrow m_t + \alpha\, (1 - a_t)\, q_t, \quad
        u_t = T^{-1}(\mathrm{mean}(q_t))

:math:`a_t` is the part of this worker's message that was accepted: 0 where its packet came too
late, or where it sent none.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float32

from demo_optax import axes
from demo_optax.compression import Plan
from demo_optax.compression.packet import Packets
from demo_optax.compression.selection import Everything
from demo_optax.exchange.around import Around
from demo_optax.exchange.protocol import Aggregate, Mean, Outgoing, SparseSum, Subtraction
from demo_optax.metrics import ExchangeMetrics


class HalvesState(NamedTuple):
    """What is under way between the halves of a step.

    Attributes:
      pending: uint32 ``(owners, words)``, this worker's packets; zeros after the second half.
      subtracted: float32 scalar, the part of their message that has left the momentum.
      inner: state of the inner exchange.
    """

    pending: Packets
    subtracted: Float32[Array, ""]
    inner: Any


@dataclasses.dataclass(frozen=True)
class Sealed(Around):
    """The first half: a worker seals its packets; what the others sent is not there yet.

    Its updates, and whatever comes after it in the chain, are to be thrown away.

    Example:
      >>> import demo_optax
      >>> tx = demo_optax.demo(1e-3, exchange=Sealed(demo_optax.AllGather("data")))
    """

    def init(self, plan: Plan) -> HalvesState:
        """Nothing is under way."""
        return nothing_pending(self, plan, self.inner.init(plan))

    def exchange(
        self, plan: Plan, sent: Outgoing, state: HalvesState, last: ExchangeMetrics, mean: Mean
    ) -> Aggregate:
        """Keeps the packets for the second half."""
        del mean
        return Aggregate(
            mean=[_zero(section.num_blocks, section.selector.n) for section in plan.sections],
            subtractions=[Subtraction.of_whole(plan, sent.message, sent.factor)],
            state=HalvesState(sent.packets, sent.factor, state.inner),
            metrics=last,
        )


@dataclasses.dataclass(frozen=True)
class Opened(Around):
    """The second half: the packets of the first are exchanged. The gradient is ignored.

    A worker that skipped the first half has nothing under way, and applies what the others sent.

    Example:
      >>> import demo_optax
      >>> tx = demo_optax.demo(1e-3, exchange=Opened(demo_optax.AllGather("data")))
    """

    def init(self, plan: Plan) -> HalvesState:
        """Nothing is under way."""
        return nothing_pending(self, plan, self.inner.init(plan))

    def exchange(
        self, plan: Plan, sent: Outgoing, state: HalvesState, last: ExchangeMetrics, mean: Mean
    ) -> Aggregate:
        """Exchanges the packets of the first half, which have the same step."""
        found, message, correction = self.exchange_pending(
            plan, state.pending, state.subtracted, sent.step, state.inner, last, mean
        )
        return found._replace(
            subtractions=[Subtraction(message, correction)],
            state=nothing_pending(self, plan, found.state),
        )


def nothing_pending(exchange: Around, plan: Plan, inner: Any) -> HalvesState:
    """The state before the first half: packets that every worker rejects."""
    none = jnp.zeros((exchange.packets_per_worker(), exchange.layout(plan).words), jnp.uint32)
    none, nothing = axes.as_varying((none, jnp.zeros((), jnp.float32)), exchange.axis_name)
    return HalvesState(none, nothing, inner)


def _zero(blocks: int, n: int) -> SparseSum:
    nowhere = jnp.zeros((1, blocks, 0), jnp.int32)
    return SparseSum(nowhere, jnp.zeros((1, blocks, n), jnp.float32), Everything(n))

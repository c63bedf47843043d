r"""An exchange in two halves, each a program of its own; between them the host exchanges packets.

.. math::
    \text{Sealed:} \quad m_t &\leftarrow \beta m_{t-1} + w\, T(g_t), \quad
        q_t = \mathrm{select}(m_t), \quad m_t \leftarrow m_t - \alpha\, q_t \\
    \text{Opened:} \quad m_t &\leftarrow m_t + \alpha\, (1 - a_t)\, q_t, \quad
        u_t = T^{-1}(\mathrm{mean}(q_t))

:math:`a_t` is the fraction of this worker's message that was accepted: 0 if its packet came too
late, or if it sent none.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from demo_optax.arrays import BoolScalar
from demo_optax.compression import Plan
from demo_optax.compression.selection import AllCoefficients
from demo_optax.exchange.protocol import (
    Aggregate,
    Exchange,
    Mean,
    Outbox,
    SparseSum,
    Subtraction,
)
from demo_optax.exchange.wrapper import ExchangeWrapper, PendingState
from demo_optax.metrics import ExchangeMetrics


@dataclasses.dataclass(frozen=True)
class Sealed(ExchangeWrapper):
    """The first half: a worker seals its packets, before it has those of the others.

    The caller discards its updates, and the state of all links after it in the chain.

    Example:
      >>> import demo_optax
      >>> tx = demo_optax.demo(1e-3, exchange=Sealed(demo_optax.AllGather("data")))
    """

    def exchange(
        self,
        plan: Plan,
        outbox: Outbox,
        state: PendingState,
        previous_metrics: ExchangeMetrics,
        mean: Mean,
    ) -> Aggregate:
        """Keeps the packets for the second half."""
        del mean
        return Aggregate(
            mean=[_zero(section.num_blocks, section.selector.n) for section in plan.sections],
            subtractions=[Subtraction.uniform(plan, outbox.message, outbox.factor, under_way=True)],
            state=self.pending_state(plan, outbox.packets, outbox.factor, state.inner),
            metrics=previous_metrics,
        )


@dataclasses.dataclass(frozen=True)
class Opened(ExchangeWrapper):
    """The second half: exchanges the packets of the first.

    Call it with the extra argument ``participates=False``; otherwise the gradient is accumulated a
    second time. A worker that skipped the first half has no pending packets, and applies what the
    others sent.

    Example:
      >>> import demo_optax
      >>> tx = demo_optax.demo(1e-3, exchange=Opened(demo_optax.AllGather("data")))
    """

    def exchange(
        self,
        plan: Plan,
        outbox: Outbox,
        state: PendingState,
        previous_metrics: ExchangeMetrics,
        mean: Mean,
    ) -> Aggregate:
        """Exchanges the packets of the first half, which have the same step."""
        aggregate, message, correction = self.exchange_pending(
            plan,
            state.pending,
            state.subtracted_fraction,
            outbox.step,
            state.inner,
            previous_metrics,
            mean,
        )
        none, nothing = jnp.zeros_like(outbox.packets), jnp.zeros_like(outbox.factor)
        return aggregate._replace(
            subtractions=[Subtraction(message, correction)],
            state=self.pending_state(plan, none, nothing, aggregate.state),
        )


def took_part(exchange: Exchange, participates: BoolScalar, state: Any) -> BoolScalar:
    """Whether a worker's gradient of this step entered its momentum.

    Args:
      exchange: the exchange.
      participates: whether it entered in this update.
      state: the exchange's state before the update. In the second half it tells of the first.
    """
    return state.subtracted_fraction > 0 if isinstance(exchange, Opened) else participates


def _zero(blocks: int, n: int) -> SparseSum:
    no_positions = jnp.zeros((1, blocks, 0), jnp.int32)
    return SparseSum(no_positions, jnp.zeros((1, blocks, n), jnp.float32), AllCoefficients(n))

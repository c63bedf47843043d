"""The exchange that applies packets one step later, so that it overlaps with the compute."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float32, Int32

from demo_optax._src import axes
from demo_optax._src.axes import AxisName
from demo_optax._src.compression import Compression, Plan
from demo_optax._src.compression.packet import Message, PacketLayout, Packets
from demo_optax._src.compression.plan import select, shared_positions
from demo_optax._src.exchange.protocol import (
    Aggregate,
    Exchange,
    Mean,
    Outbox,
    Subtraction,
    Traffic,
)
from demo_optax._src.metrics import ExchangeMetrics


class DelayedState(NamedTuple):
    """State of `Delayed`, which is the worker's last outbox, not exchanged yet.

    The packets are zeros if none are under way. The positions and values of all sections are joined
    in one array each, whose meaning follows from the static ``compression``. The ``factor`` is the
    fraction of the message that has left the momentum.
    """

    packets: Packets
    positions: Int32[Array, "positions"]
    values: Float32[Array, "values"]
    factor: Float32[Array, ""]
    inner: Any
    compression: Compression


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
    momentum.

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

    def init(self, plan: Plan) -> DelayedState:
        """Returns a state with packets of zeros, which every worker rejects."""
        packets = jnp.zeros((self.packets_per_worker(), self.layout(plan).words), jnp.uint32)
        message = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), _message_shapes(plan))
        outbox = Outbox(packets, message, jnp.float32(0), jnp.int32(-1))
        return self.keep(plan, outbox, self.inner.init(plan))

    def exchange(
        self,
        plan: Plan,
        outbox: Outbox,
        state: DelayedState,
        previous_metrics: ExchangeMetrics,
        mean: Mean,
    ) -> Aggregate:
        """Exchanges the packets of the previous call (see `Exchange.exchange`)."""
        message = message_of(plan, state.positions, state.values)
        pending = Outbox(state.packets, message, state.factor, outbox.step - 1)
        aggregate = self.inner.exchange(plan, pending, state.inner, previous_metrics, mean)
        (delivered,) = aggregate.subtractions
        rest = dataclasses.replace(delivered.less(pending.factor), delay=1)
        sent = Subtraction.uniform(plan, outbox.message, outbox.factor, under_way=True)
        return aggregate._replace(
            subtractions=[sent, rest],
            state=self.keep(plan, outbox, aggregate.state),
            delay=1,
        )

    def traffic(self, plan: Plan, workers: int) -> Traffic:
        """Returns the traffic of the inner exchange, which overlaps with the compute."""
        return self.inner.traffic(plan, workers)._replace(overlaps=True)

    def keep(self, plan: Plan, outbox: Outbox, inner) -> DelayedState:
        """Returns the state in which an outbox waits for its exchange."""
        flat = map(_flat, outbox.message, (jnp.int32, jnp.float32))
        packets, positions, values, factor = axes.as_varying(
            (outbox.packets, *flat, outbox.factor), self.axis_name
        )
        return DelayedState(packets, positions, values, factor, inner, plan.compression)


def message_of(plan: Plan, positions: Int32[Array, "_"], values: Float32[Array, "_"]) -> Message:
    """Returns the message whose positions and values a `DelayedState` keeps."""
    shapes = _message_shapes(plan)
    return Message(*map(_divided, (positions, values), shapes))


def _flat(arrays: Sequence[Array], dtype: DTypeLike) -> Array:
    return jnp.concatenate([jnp.zeros(0, dtype), *[x.ravel() for x in arrays]])


def _divided(x: Array, like: Sequence[Any]) -> tuple[Array, ...]:
    ends = list(itertools.accumulate(math.prod(y.shape) for y in like))
    parts = jnp.split(x, ends)[: len(ends)]
    return tuple(part.reshape(y.shape) for part, y in zip(parts, like, strict=True))


def _message_shapes(plan: Plan) -> Message:
    selectors = [section.selector for section in plan.sections]
    blocks = [
        jax.ShapeDtypeStruct((s.num_blocks, s.selector.n), jnp.float32) for s in plan.sections
    ]
    return jax.eval_shape(
        lambda x: select(selectors, x, shared_positions(plan.sections, jnp.int32(0))), blocks
    )

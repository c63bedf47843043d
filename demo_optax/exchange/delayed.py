"""The exchange delayed by one step, around another one: it overlaps with the compute."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from demo_optax import axes
from demo_optax.axes import AxisName
from demo_optax.compression import Compression, Plan
from demo_optax.compression.packet import Layout, Message, Origin, Packets, merge_rows, open_heads
from demo_optax.exchange.averaging import read
from demo_optax.exchange.protocol import (
    Aggregate,
    Exchange,
    Mean,
    Outgoing,
    Subtraction,
    Traffic,
    own_numbers,
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
      subtracted: float32 scalar, the part of their message that has left the momentum; each worker
        its own.
      inner: state of the inner exchange.
      format: static, of the pending packets.
    """

    pending: Packets
    subtracted: Float32[Array, ""]
    inner: Any
    format: PacketFormat


@dataclasses.dataclass(frozen=True)
class Delayed:
    r"""Exchanges the packets of the last step while this one computes its gradient.

    A message leaves the momentum when it is sent, and enters the mean a step later:

    .. math::
        m_t &\leftarrow \beta m_{t-1} + w\, T(g_t) \\
        q_t &= \mathrm{select}(m_t), \quad m_t \leftarrow m_t - \alpha\, q_t
            + \alpha\, (1 - c_{t-1})\, q_{t-1} \\
        u_t &= T^{-1}(\mathrm{mean}(q_{t-1}))

    :math:`c_{t-1}` is the part of the last message that was accepted: 1, or less where the packet
    was damaged or its norm limited. The rest goes back into the momentum.

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
        """The axis of the inner exchange."""
        return self.inner.axis_name

    def owners(self) -> int:
        """As the inner exchange."""
        return self.inner.owners()

    def layout(self, plan: Plan) -> Layout:
        """As the inner exchange."""
        return self.inner.layout(plan)

    def init(self, plan: Plan) -> DelayedState:
        """Empty packets, which every worker rejects."""
        none = jnp.zeros((self.owners(), self.layout(plan).words), jnp.uint32)
        none, nothing = axes.as_varying((none, jnp.zeros((), jnp.float32)), self.axis_name)
        return DelayedState(none, nothing, self.inner.init(plan), self._format(plan))

    def _format(self, plan: Plan) -> PacketFormat:
        layout, shapes = self.layout(plan), tuple(x.shape for x in plan.geometries)
        return PacketFormat(plan.compression, shapes, layout.extra, layout.multiple)

    def exchange(
        self, plan: Plan, sent: Outgoing, state: DelayedState, last: ExchangeMetrics, mean: Mean
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
        origin = Origin(sent.step - 1, own_numbers(len(state.pending), self.axis_name))
        message = decode_pending(plan, self.layout(plan), state.pending, origin)
        pending = Outgoing(state.pending, message, state.subtracted, origin.step)
        found = self.inner.exchange(plan, pending, state.inner, last, mean)
        (of_inner,) = found.subtractions
        now = [jnp.full((s.blocks, 1), sent.factor) for s in plan.sections]
        # At most 0: what was not accepted goes back
        correction = [factors - state.subtracted for factors in of_inner.factors]
        return found._replace(
            subtractions=[
                Subtraction(sent.message, now),
                Subtraction(of_inner.message, correction, delay=1),
            ],
            state=DelayedState(sent.packets, sent.factor, found.state, self._format(plan)),
            delay=1,
        )

    def traffic(self, plan: Plan, workers: int) -> Traffic:
        """The traffic of the inner exchange, overlapped with the compute."""
        return self.inner.traffic(plan, workers)._replace(overlaps=True)


def decode_pending(plan: Plan, layout: Layout, packets: Packets, origin: Origin) -> Message:
    """What a worker sealed in its packets; zeros where these are to be rejected, or damaged."""
    _, _, intact = open_heads(layout, packets, origin)
    found = read(layout, packets, intact).message
    blocks = [section.blocks for section in plan.sections]
    shared = plan.shared_positions(origin.step)
    positions = [
        merge_rows(x, n) if at is None else at
        for at, x, n in zip(shared, found.positions, blocks, strict=True)
    ]
    return Message(tuple(positions), tuple(map(merge_rows, found.values, blocks)))

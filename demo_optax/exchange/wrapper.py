"""What exchanges around another one have in common: they decide when its packets count."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from demo_optax import axes
from demo_optax.arrays import IntScalar
from demo_optax.axes import AxisName
from demo_optax.compression import Compression, Plan
from demo_optax.compression.packet import (
    Message,
    Origin,
    PacketLayout,
    Packets,
    merge_rows,
    parse_headers,
)
from demo_optax.exchange.averaging import decode_accepted
from demo_optax.exchange.protocol import (
    Aggregate,
    Exchange,
    Mean,
    Outgoing,
    Traffic,
    packet_ids,
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


class PendingState(NamedTuple):
    """What is kept for packets that are under way.

    Attributes:
      pending: uint32 ``(packets_per_worker, words)``, this worker's packets of the last step; zeros
        where there are none.
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
class ExchangeWrapper:
    """An exchange that sends the packets of another one, as they are.

    Attributes:
      inner: that exchange.
    """

    inner: Exchange

    @property
    def axis_name(self) -> AxisName:
        """The axis of the inner exchange."""
        return self.inner.axis_name

    def packets_per_worker(self) -> int:
        """Packets of the inner exchange."""
        return self.inner.packets_per_worker()

    def layout(self, plan: Plan) -> PacketLayout:
        """The layout of the inner exchange's packets."""
        return self.inner.layout(plan)

    def traffic(self, plan: Plan, workers: int) -> Traffic:
        """The traffic of the inner exchange."""
        return self.inner.traffic(plan, workers)

    def init(self, plan: Plan) -> PendingState:
        """Nothing is under way: empty packets, which every worker rejects."""
        packets = jnp.zeros((self.packets_per_worker(), self.layout(plan).words), jnp.uint32)
        packets, nothing = axes.as_varying((packets, jnp.zeros((), jnp.float32)), self.axis_name)
        return self.pending_state(plan, packets, nothing, self.inner.init(plan))

    def pending_state(
        self, plan: Plan, packets: Packets, subtracted: Float32[Array, ""], inner: Any
    ) -> PendingState:
        """The state while these packets are under way."""
        layout, shapes = self.layout(plan), tuple(x.shape for x in plan.geometries)
        kept = PacketFormat(plan.compression, shapes, layout.extra, layout.multiple)
        return PendingState(packets, subtracted, inner, kept)

    def exchange_pending(
        self,
        plan: Plan,
        packets: Packets,
        subtracted_fraction: Float32[Array, ""],
        step: IntScalar,
        inner: Any,
        previous_metrics: ExchangeMetrics,
        mean: Mean,
    ) -> tuple[Aggregate, Message, Sequence[Float32[Array, "_blocks 1"]]]:
        """Exchanges packets whose message left the momentum when they were sealed.

        Args:
          plan: of the tensors.
          packets: this worker's own.
          subtracted_fraction: of their message, what has left the momentum, in [0, 1].
          step: in which they were sealed.
          inner: state of the inner exchange.
          previous_metrics: metrics of the exchange before.
          mean: as in `Exchange.exchange`.

        Returns:
          The aggregate, the message, and the part of it that still leaves the momentum. That is 0,
          or negative where the message was not accepted: what was not goes back.
        """
        origin = Origin(step, packet_ids(len(packets), self.axis_name))
        message = decode_pending(plan, self.layout(plan), packets, origin)
        pending = Outgoing(packets, message, subtracted_fraction, step)
        found = self.inner.exchange(plan, pending, inner, previous_metrics, mean)
        (of_inner,) = found.subtractions
        remaining = [factors - subtracted_fraction for factors in of_inner.factors]
        return found, of_inner.message, remaining


def decode_pending(plan: Plan, layout: PacketLayout, packets: Packets, origin: Origin) -> Message:
    """What a worker sealed in its packets; zeros where these are to be rejected, or damaged."""
    _, _, intact = parse_headers(layout, packets, origin)
    found = decode_accepted(layout, packets, intact).message
    num_blocks = [section.num_blocks for section in plan.sections]
    shared = plan.shared_positions(origin.step)
    positions = [
        merge_rows(x, n) if at is None else at
        for at, x, n in zip(shared, found.positions, num_blocks, strict=True)
    ]
    return Message(tuple(positions), tuple(map(merge_rows, found.values, num_blocks)))

"""Exchanges that wrap another and change when its packets are applied."""

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
from demo_optax.compression.settings import TensorShapes
from demo_optax.exchange.averaging import decode_accepted
from demo_optax.exchange.protocol import (
    Aggregate,
    Exchange,
    Mean,
    Outbox,
    Traffic,
    packet_ids,
)
from demo_optax.metrics import ExchangeMetrics


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class PacketFormat:
    """All that is needed to decode pending packets: a static node, which checkpoints describe.

    Attributes:
      compression: the settings.
      shapes: shapes of the tensors.
      extra: words that the exchange puts after the header.
      multiple: the packet's length is padded to a multiple of this many words.
    """

    compression: Compression
    shapes: TensorShapes
    extra: int
    multiple: int


class PendingState(NamedTuple):
    """State of an exchange with pending packets: packets that are sealed but not yet applied.

    Attributes:
      pending: uint32 ``(packets_per_worker, words)``, this worker's pending packets; zeros if there
        are none.
      subtracted_fraction: float32 scalar in [0, 1], the fraction of their message that has left the
        momentum; each worker has its own.
      inner: state of the inner exchange.
      format: static, format of the pending packets.
    """

    pending: Packets
    subtracted_fraction: Float32[Array, ""]
    inner: Any
    format: PacketFormat


@dataclasses.dataclass(frozen=True)
class ExchangeWrapper:
    """An exchange that sends the packets of an inner exchange unchanged.

    Attributes:
      inner: the inner exchange.
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
        """No pending packets: words of zeros, which every worker rejects."""
        packets = jnp.zeros((self.packets_per_worker(), self.layout(plan).words), jnp.uint32)
        packets, nothing = axes.as_varying((packets, jnp.zeros((), jnp.float32)), self.axis_name)
        return self.pending_state(plan, packets, nothing, self.inner.init(plan))

    def pending_state(
        self, plan: Plan, packets: Packets, subtracted: Float32[Array, ""], inner: Any
    ) -> PendingState:
        """The state with these pending packets."""
        layout, shapes = self.layout(plan), TensorShapes(x.shape for x in plan.geometries)
        packet_format = PacketFormat(plan.compression, shapes, layout.extra, layout.multiple)
        return PendingState(packets, subtracted, inner, packet_format)

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
          plan: the plan of the tensors.
          packets: this worker's pending packets.
          subtracted_fraction: fraction of their message that has left the momentum, in [0, 1].
          step: step in which they were sealed.
          inner: state of the inner exchange.
          previous_metrics: metrics of the previous exchange.
          mean: as in `Exchange.exchange`.

        Returns:
          The aggregate, the message, and for each section the fractions of it that are still to be
          subtracted: 0 where it was accepted, and negative where not, so that the rejected fraction
          is added back.
        """
        origin = Origin(step, packet_ids(len(packets), axes.index(self.axis_name)))
        message = decode_pending(plan, self.layout(plan), packets, origin)
        pending = Outbox(packets, message, subtracted_fraction, step)
        aggregate = self.inner.exchange(plan, pending, inner, previous_metrics, mean)
        (subtraction,) = aggregate.subtractions
        return aggregate, subtraction.message, subtraction.less(subtracted_fraction).factors


def decode_pending(plan: Plan, layout: PacketLayout, packets: Packets, origin: Origin) -> Message:
    """The message that a worker sealed in its packets; zeros for packets that are not accepted."""
    _, _, intact = parse_headers(layout, packets, origin)
    message = decode_accepted(layout, packets, intact).message
    num_blocks = [section.num_blocks for section in plan.sections]
    shared = plan.shared_positions(origin.step)
    positions = [
        merge_rows(x, n) if at is None else at
        for at, x, n in zip(shared, message.positions, num_blocks, strict=True)
    ]
    return Message(tuple(positions), tuple(map(merge_rows, message.values, num_blocks)))

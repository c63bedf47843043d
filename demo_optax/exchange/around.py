"""What exchanges around another one have in common: they decide when its packets count."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxtyping import Array, Float32

from demo_optax.arrays import IntScalar
from demo_optax.axes import AxisName
from demo_optax.compression import Plan
from demo_optax.compression.packet import (
    Layout,
    Message,
    Origin,
    Packets,
    merge_rows,
    open_heads,
)
from demo_optax.exchange.averaging import decode_accepted
from demo_optax.exchange.protocol import (
    Aggregate,
    Exchange,
    Mean,
    Outgoing,
    Traffic,
    own_numbers,
)
from demo_optax.metrics import ExchangeMetrics


@dataclasses.dataclass(frozen=True)
class Around:
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

    def layout(self, plan: Plan) -> Layout:
        """The layout of the inner exchange's packets."""
        return self.inner.layout(plan)

    def traffic(self, plan: Plan, workers: int) -> Traffic:
        """The traffic of the inner exchange."""
        return self.inner.traffic(plan, workers)

    def exchange_pending(
        self,
        plan: Plan,
        packets: Packets,
        subtracted_fraction: Float32[Array, ""],
        step: IntScalar,
        inner: Any,
        last: ExchangeMetrics,
        mean: Mean,
    ) -> tuple[Aggregate, Message, Sequence[Float32[Array, "_blocks 1"]]]:
        """Exchanges packets whose message left the momentum when they were sealed.

        Args:
          plan: of the tensors.
          packets: this worker's own.
          subtracted_fraction: of their message, what has left the momentum, in [0, 1].
          step: in which they were sealed.
          inner: state of the inner exchange.
          last: metrics of the exchange before.
          mean: as in `Exchange.exchange`.

        Returns:
          The aggregate, the message, and the part of it that still leaves the momentum. That is 0,
          or negative where the message was not accepted: what was not goes back.
        """
        origin = Origin(step, own_numbers(len(packets), self.axis_name))
        message = decode_pending(plan, self.layout(plan), packets, origin)
        pending = Outgoing(packets, message, subtracted_fraction, step)
        found = self.inner.exchange(plan, pending, inner, last, mean)
        (of_inner,) = found.subtractions
        remaining = [factors - subtracted_fraction for factors in of_inner.factors]
        return found, of_inner.message, remaining


def decode_pending(plan: Plan, layout: Layout, packets: Packets, origin: Origin) -> Message:
    """What a worker sealed in its packets; zeros where these are to be rejected, or damaged."""
    _, _, intact = open_heads(layout, packets, origin)
    found = decode_accepted(layout, packets, intact).message
    num_blocks = [section.num_blocks for section in plan.sections]
    shared = plan.shared_positions(origin.step)
    positions = [
        merge_rows(x, n) if at is None else at
        for at, x, n in zip(shared, found.positions, num_blocks, strict=True)
    ]
    return Message(tuple(positions), tuple(map(merge_rows, found.values, num_blocks)))

"""Packets were transferred by the host; no device collective is used."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, UInt32

from demo_optax import axes, checks
from demo_optax.arrays import IntScalar
from demo_optax.axes import AxisName
from demo_optax.compression import Plan
from demo_optax.compression.packet import Origin, PacketLayout
from demo_optax.exchange import collectives
from demo_optax.exchange.averaging import average_all
from demo_optax.exchange.protocol import Aggregate, Mean, Outbox, Subtraction, Traffic
from demo_optax.metrics import ExchangeMetrics


@dataclasses.dataclass(frozen=True, eq=False)
class Received:
    """Averages packets that the program was given, one row for each slot of a swarm.

    An empty slot is a row of zeros, which every worker rejects. Workers differ by their rows alone:
    all seal their packets with the packet id 0.

    Attributes:
      axis_name: an axis of size 1, along which this process holds its one worker.
      packets: uint32 ``(shards, slots, words)``. None stands for this worker's own packet alone.
      slot: int32 scalar, this worker's row; -1 if its packet is not among them.
      shard_axes: the axes along which the worker's devices hold shards, in the order of ``shards``.
      norm_limit: as in `demo_optax.AllGather`.

    Example:
      >>> import demo_optax
      >>> tx = demo_optax.demo(1e-3, exchange=Received("data"))
    """

    axis_name: AxisName = None
    packets: UInt32[Array, "shards slots words"] | None = None
    slot: IntScalar | int = 0
    shard_axes: tuple[str, ...] = ()
    norm_limit: float | None = None

    def __post_init__(self):
        axes.names(self.axis_name)
        if self.norm_limit is not None:
            checks.in_interval("norm_limit", self.norm_limit, "[1, inf)")

    def packets_per_worker(self) -> int:
        """One packet holds the whole message."""
        return 1

    def layout(self, plan: Plan) -> PacketLayout:
        """The layout of a worker's packet."""
        return PacketLayout(plan.sections)

    def init(self, plan: Plan) -> tuple[()]:
        """No state."""
        del plan
        return ()

    def exchange(
        self,
        plan: Plan,
        sent: Outbox,
        state: tuple[()],
        previous_metrics: ExchangeMetrics,
        mean: Mean,
    ) -> Aggregate:
        """Averages the packets (see `Exchange.exchange`)."""
        if self.packets is None:
            packets = collectives.gather(sent.packets[0], self.axis_name)
        else:
            packets = self.packets[axes.index(self.shard_axes)]
        origin = Origin(sent.step, jnp.zeros(len(packets), jnp.int32))
        layout = self.layout(plan)
        average = average_all(
            plan, layout, packets, origin, self.norm_limit, previous_metrics, mean
        )
        slot = jnp.asarray(self.slot)
        factor = sent.factor * jnp.where(slot >= 0, average.clip_factors[slot], 0.0)
        return Aggregate(
            mean=average.mean,
            subtractions=[Subtraction.uniform(plan, sent.message, factor)],
            state=state,
            metrics=average.metrics,
        )

    def traffic(self, plan: Plan, workers: int) -> Traffic:
        """A packet to the store, and one of each other worker from it."""
        packet = 4 * self.layout(plan).words
        return Traffic(packet, packet * (workers - 1), 2)

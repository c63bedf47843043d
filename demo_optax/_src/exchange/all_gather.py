"""The exchange by one all-gather, after which every worker averages all packets."""

import dataclasses

import jax.numpy as jnp

from demo_optax._src import axes, checks
from demo_optax._src.arrays import IntScalar
from demo_optax._src.axes import AxisName
from demo_optax._src.compression import Plan
from demo_optax._src.compression.packet import Origin, PacketLayout, Packets, parse_headers
from demo_optax._src.compression.plan import shared_positions
from demo_optax._src.exchange import collectives
from demo_optax._src.exchange.averaging import average, medians_and_weights, norm_caps
from demo_optax._src.exchange.protocol import Aggregate, Exchange, Mean, Outbox, Traffic
from demo_optax._src.metrics import ExchangeMetrics, summarise


@dataclasses.dataclass(frozen=True)
class AllGather:
    """Gathers all packets on every worker and averages them there.

    The traffic of a link grows with the number of workers.

    Attributes:
      axis_name: the workers' axis, bound by ``jax.shard_map``, ``jax.pmap`` or ``jax.vmap``; a
        tuple of names for workers along several axes; None for a single worker.
      norm_limit: what a worker's message may count for, as a multiple of the median of all
        messages, or None for no limit. It holds for the weight, and for the weight times the norm,
        so a message of the median weight or less has at most so many times the usual norm. The
        excess stays in the worker's momentum. The limit bounds the effect of a broken worker, and
        holds for each shard of sharded parameters.
      gather: function that takes a packet, uint32 ``(words,)``, and the axis name to the packets of
        all workers, uint32 ``(workers, words)``, in the order of ``jax.lax.axis_index``; None for
        one ``jax.lax.all_gather``. All workers must get the same rows, which the digests in later
        packets show (`demo_optax.ExchangeMetrics.agreed`). ``docs/how_to/extend.md`` writes a ring.

    Raises:
      ValueError: at the first step: ``gather`` returns another shape or dtype.

    Example:
      >>> import demo_optax
      >>> tx = demo_optax.demo(1e-3, exchange=AllGather("data", norm_limit=10.0))
    """

    axis_name: AxisName = None
    norm_limit: float | None = None
    gather: collectives.Gather | None = None

    def __post_init__(self):
        axes.names(self.axis_name)
        if self.norm_limit is not None:
            checks.in_interval("norm_limit", self.norm_limit, "[1, inf)")
            object.__setattr__(self, "norm_limit", float(self.norm_limit))

    def packets_per_worker(self) -> int:
        """Returns 1, since one packet holds the whole message."""
        return 1

    def layout(self, plan: Plan) -> PacketLayout:
        return PacketLayout(plan.sections)

    def init(self, plan: Plan) -> tuple[()]:
        del plan
        return ()

    def exchange(
        self,
        plan: Plan,
        outbox: Outbox,
        state: tuple[()],
        previous_metrics: ExchangeMetrics,
        mean: Mean,
    ) -> Aggregate:
        packets = collectives.gather(outbox.packets[0], self.axis_name, self.gather)
        worker = axes.index(self.axis_name)
        average = self.average(plan, packets, outbox, worker, previous_metrics, mean)
        return average._replace(state=state)

    def average(
        self,
        plan: Plan,
        packets: Packets,
        outbox: Outbox,
        worker: IntScalar,
        previous_metrics: ExchangeMetrics,
        mean: Mean,
    ) -> Aggregate:
        """Averages packets, one row per worker, no matter how they were transported.

        Rows of zeros are rejected. ``worker`` is this worker's row, and the other arguments are
        those of `Exchange.exchange`.
        """
        layout, ids = self.layout(plan), jnp.arange(len(packets), dtype=jnp.int32)
        headers, _, intact = parse_headers(layout, packets, Origin(outbox.step, ids))
        medians, weights = medians_and_weights(headers, intact, self.norm_limit)
        caps = norm_caps(medians, headers.weight, self.norm_limit)
        shared = shared_positions(plan.sections, outbox.step)
        means, fractions = average(layout, packets, intact, shared, caps, weights, mean)
        accepted = fractions > 0
        checksums = jnp.where(accepted, packets[:, 0], 0)
        return Aggregate(
            mean=means,
            accepted=[jnp.full((s.num_blocks, 1), fractions[worker]) for s in plan.sections],
            state=(),
            metrics=summarise(headers, accepted, checksums, previous_metrics),
        )

    def traffic(self, plan: Plan, workers: int) -> Traffic:
        """Returns the traffic of a packet to each other worker and one from each of them."""
        packet, others = 4 * self.layout(plan).words, workers - 1
        return Traffic(packet, packet * others, others)


def resolve_exchange(axis_name: AxisName, exchange: Exchange | None) -> Exchange:
    """Returns the exchange of an optimizer that was given an axis name, an exchange or neither."""
    if exchange is None:
        return AllGather(axis_name)
    if not isinstance(exchange, Exchange):
        raise TypeError(
            f"exchange must be an exchange such as demo_optax.AllGather('data'), not {exchange!r}."
        )
    if axis_name is not None and axis_name != exchange.axis_name:
        raise ValueError(
            f"axis_name={axis_name!r} and exchange={exchange} name different axes: leave out "
            "axis_name, which is short for exchange=AllGather(axis_name)."
        )
    return exchange

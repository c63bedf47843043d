"""How the workers' messages become the same aggregate on all of them.

all-gather:  every worker ── its packet ──► everybody, who averages
two-phase:   every worker ── a part ──► each part's owner, who averages
                                        and compresses ── the mean ──► everybody
"""

import jax.numpy as jnp

from demo_optax import axes, messages, metrics, wire
from demo_optax.arrays import Coefficients, IntScalar
from demo_optax.averaging import Aggregate, average, largest_norm
from demo_optax.axes import AxisName
from demo_optax.compression import Plan, known_positions
from demo_optax.compression.sparse import Mean
from demo_optax.messages import Packets
from demo_optax.metrics import ExchangeMetrics, Report
from demo_optax.two_phase import two_phase


def exchange(
    plan: Plan,
    sent: Packets,
    residual: tuple[Coefficients, ...],
    last: ExchangeMetrics,
    step: IntScalar,
    axis_name: AxisName,
    mean: Mean,
) -> Aggregate:
    """Gives every worker the mean of all workers' messages.

    No packet is trusted: one with a wrong checksum, of another step or worker, with positions that
    do not ascend within their block or lie beyond it, or with a value or a block's energy that is
    not finite counts as absent, on all workers alike that count the same steps. A worker whose
    count differs hears itself alone.

    Args:
      plan: of the tensors, the same on all workers.
      sent: this worker's packets.
      residual: what it has yet to send of the blocks that it owns.
      last: metrics of the step before.
      step: in which the packets were sealed.
      axis_name: the workers' axis or axes; None for a single worker.
      mean: over the ``"senders"`` of each coefficient, or over all ``"workers"`` that take part.
    """
    run = two_phase if plan.compression.exchange == "two-phase" else _all_gather
    return run(plan, sent, residual, last, step, axis_name, mean)


def _all_gather(plan, sent, residual, last, step, axis_name, mean) -> Aggregate:
    """Every worker averages all packets."""
    layout = plan.layout
    packets = wire.gather(sent[0], axis_name)
    found = messages.opened(layout, packets, step, jnp.arange(len(packets), dtype=jnp.int32))
    known = known_positions(plan.compression, layout, step)
    largest = largest_norm(found, plan.compression.norm_limit)
    averaged = average(layout, found.body, found.intact, known, largest, mean)
    counted = averaged.weights > 0
    delivered = averaged.weights[axes.index(axis_name)]
    reports = Report(*found.numbers[:, : len(Report._fields)].T)
    return Aggregate(
        averaged.coefficients,
        [jnp.broadcast_to(delivered, (section.blocks, 1)) for section in layout.sections],
        residual,
        metrics.summarise(reports, counted, jnp.where(counted, packets[:, 0], 0), last),
    )

"""The one collective of a step, and how the workers' packets become one aggregate.

Every worker decodes the same bytes in the same order with the same program, so that the
aggregate is equal to the last bit everywhere.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, UInt32

from demo_optax import axes, metrics
from demo_optax.arrays import BoolScalar, Coefficients, FloatScalar, IntScalar
from demo_optax.axes import AxisName
from demo_optax.compression import Compressed, Plan, packet, sparse
from demo_optax.compression.packet import MULTIPLE, Origin
from demo_optax.compression.sparse import Mean, Sums
from demo_optax.metrics import ExchangeMetrics, Report


class Aggregate(NamedTuple):
    """What an exchange gives every worker.

    Attributes:
      coefficients: for each group the mean, float32; zero where nobody sent any.
      delivered: the part of this worker's own message that counted; 0 if none did.
      metrics: of the step.
    """

    coefficients: list[Coefficients]
    delivered: FloatScalar
    metrics: ExchangeMetrics


def exchange(
    plan: Plan,
    compressed: Compressed,
    report: Report,
    takes_part: BoolScalar,
    step: IntScalar,
    axis_name: AxisName,
    mean: Mean,
    last: ExchangeMetrics,
) -> Aggregate:
    """Gives every worker the mean of all workers' messages.

    No packet is trusted: one with a wrong checksum, of another step or worker, with positions that
    do not ascend within their block, or with a value or a block's energy that is not finite counts
    as absent, on all workers alike that count the same steps. A worker whose count differs hears
    itself alone.

    Args:
      plan: of the tensors, the same on all workers.
      compressed: what this worker sends.
      report: what its packet tells beside that.
      takes_part: whether its packet shall count.
      step: updates so far.
      axis_name: the workers' axis or axes; None for a single worker.
      mean: over the ``"senders"`` of each coefficient, or over all ``"workers"`` that take part.
      last: metrics of the step before.
    """
    layout, known = plan.layout, compressed.selected.positions
    own = Origin(step, axes.index(axis_name))
    packets = gather(packet.seal(jnp.stack(report), compressed.body, takes_part, own), axis_name)
    workers, most = len(packets), max((s.k for s in layout.sections), default=1)
    unseal = jax.vmap(lambda words, sender: packet.unseal(words, Origin(step, sender)))
    numbers, bodies, intact = unseal(packets, jnp.arange(workers))
    reports = Report(*numbers.T)
    largest = _largest_norm(reports, intact, plan.compression.norm_limit)
    zeros = [
        axes.varying_like(jnp.zeros((s.blocks, s.block_size)), packets) for s in layout.sections
    ]

    def decode(bodies, intact):
        messages, valid = jax.vmap(lambda body: packet.decode(layout, body, known))(bodies)
        counted, energy = intact & valid, jnp.zeros(len(intact), jnp.float32)
        for values in messages.values:
            of_blocks = jnp.sum(jnp.square(values), axis=2)
            counted &= jnp.isfinite(of_blocks).all(axis=1)
            energy += jnp.sum(of_blocks, axis=1)
        norm = jnp.sqrt(jnp.minimum(energy, jnp.finfo(jnp.float32).max))
        weights = jnp.where(counted, jnp.minimum(1.0, largest / norm), 0.0)
        sent = [sparse.weighted(p, v, weights) for p, v in zip(*messages, strict=True)]
        return sent, weights

    def add(sums, some):
        sent, weights = decode(*some)
        return list(map(sparse.add_sent, sums, sent)), weights

    if workers * most <= sparse.AT_ONCE:
        sent, weights = decode(bodies, intact)
        means = [sparse.mean_of_sent(*both, mean) for both in zip(zeros, sent, strict=True)]
    else:
        missing = -workers % _packets_at_once(most)
        rounds = jnp.pad(bodies, ((0, missing), (0, 0))), jnp.pad(intact, (0, missing))
        rounds = jax.tree.map(lambda x: x.reshape(-1, _packets_at_once(most), *x.shape[1:]), rounds)
        sums, weights = jax.lax.scan(add, [Sums(x, x) for x in zeros], rounds)
        weights = weights.reshape(-1)[:workers]
        participants = jnp.sum(weights > 0, dtype=jnp.float32)
        means = [sparse.mean_of_sums(s, mean, participants) for s in sums]
    delivered = weights[axes.index(axis_name)]
    return Aggregate(means, delivered, metrics.summarise(reports, weights, packets[:, 0], last))


def _largest_norm(
    reports: Report, intact: Bool[Array, "workers"], limit: float | None
) -> FloatScalar:
    """The norm that a message may have: a multiple of the median of what is reported.

    Of an even number the lower one counts, and messages of zeros do not: whoever lies about its
    norm moves the median by a place at most.
    """
    if limit is None:
        return jnp.array(jnp.inf, jnp.float32)
    norms = jnp.sqrt(reports.sent)
    norms = jnp.sort(jnp.where(intact & (norms > 0), norms, jnp.inf))
    middle = jnp.maximum(jnp.sum(jnp.isfinite(norms)) - 1, 0) // 2
    return limit * norms[middle]


def gather(packet: UInt32[Array, "words"], axis_name: AxisName) -> UInt32[Array, "workers words"]:
    """All workers' packets, typed as the same everywhere where types are.

    Where several devices of a worker hold the same packet, each sends its part of it, so that it
    crosses the links between workers once; the parts are joined inside the worker.
    """
    if axis_name is None:
        return packet[None]
    manual = axes.manual_names(axis_name)
    if manual != axes.names(axis_name):
        gathered = packet  # vmap knows only the plain form, and only one axis at a time
        for name in reversed(axes.names(axis_name)):
            to = "invarying" if name in manual else "varying"
            gathered = jax.lax.all_gather(gathered, name, to=to)
        return gathered.reshape(-1, packet.size)
    copies = axes.copies_of(packet, axis_name)
    if not copies:
        return jax.lax.all_gather(packet, axis_name, to="invarying")
    parts = jnp.pad(packet, (0, -packet.size % (axes.size(copies) * MULTIPLE)))
    parts = parts.reshape(axes.size(copies), -1)[jax.lax.axis_index(copies)]
    gathered = jax.lax.all_gather(parts, axis_name, to="invarying")
    joined = jax.lax.all_gather(gathered, copies, axis=1, tiled=True, to="invarying")
    return joined[:, : packet.size]


def _packets_at_once(most: int) -> int:
    """How many packets of up to ``most`` coefficients of a block are decoded together."""
    return max(sparse.AT_ONCE // most, 1)

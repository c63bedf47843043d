"""The one collective of a step, and how the workers' packets become one aggregate.

Every worker decodes the same bytes in the same order with the same program, so that the
aggregate is equal to the last bit everywhere.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

from demo_optax import axes, metrics
from demo_optax.arrays import BoolScalar, Coefficients, IntScalar
from demo_optax.axes import AxisName
from demo_optax.compression import Compressed, Plan, packet, sparse
from demo_optax.compression.packet import MULTIPLE, Origin
from demo_optax.compression.sparse import Mean, Sums
from demo_optax.metrics import ExchangeMetrics, Report


class Aggregate(NamedTuple):
    """What an exchange gives every worker.

    Attributes:
      coefficients: for each group the mean, float32; zero where nobody sent any.
      delivered: whether this worker's own packet counted.
      metrics: of the step.
    """

    coefficients: list[Coefficients]
    delivered: BoolScalar
    metrics: ExchangeMetrics


def exchange(
    plan: Plan,
    compressed: Compressed,
    report: Report,
    takes_part: BoolScalar,
    step: IntScalar,
    axis_name: AxisName,
    mean: Mean,
) -> Aggregate:
    """Gives every worker the mean of all workers' messages.

    No packet is trusted: one with a wrong checksum, of another step or worker, with positions that
    do not ascend within their block, or with a value that is not finite counts as absent, on all
    workers alike that count the same steps. A worker whose count differs hears itself alone.

    Args:
      plan: of the tensors, the same on all workers.
      compressed: what this worker sends.
      report: what its packet tells beside that.
      takes_part: whether its packet shall count.
      step: updates so far.
      axis_name: the workers' axis or axes; None for a single worker.
      mean: over the ``"senders"`` of each coefficient, or over all ``"workers"`` that take part.
    """
    layout, known = plan.layout, compressed.selected.positions
    own = Origin(step, axes.index(axis_name))
    packets = gather(packet.seal(jnp.stack(report), compressed.body, takes_part, own), axis_name)
    workers, most = len(packets), max((s.k for s in layout.sections), default=1)
    at_once = _packets_at_once(most)
    zeros = [
        axes.varying_like(jnp.zeros((s.blocks, s.block_size)), packets) for s in layout.sections
    ]

    def decode(packets, senders):
        unseal = jax.vmap(lambda words, sender: packet.unseal(words, Origin(step, sender)))
        numbers, bodies, intact = unseal(packets, senders)
        messages, valid = jax.vmap(lambda body: packet.decode(layout, body, known))(bodies)
        counted = intact & valid
        sent = [sparse.only_counted(p, v, counted) for p, v in zip(*messages, strict=True)]
        return sent, (numbers, counted)

    def add(sums, some):
        sent, numbers_and_counted = decode(*some)
        return list(map(sparse.add_sent, sums, sent)), numbers_and_counted

    if workers * most <= sparse.AT_ONCE:
        sent, (numbers, counted) = decode(packets, jnp.arange(workers))
        means = [sparse.mean_of_sent(*both, mean) for both in zip(zeros, sent, strict=True)]
    else:
        # Packets of zeros, whose checksum is wrong, fill the last round up.
        rounds = jnp.pad(packets, ((0, -workers % at_once), (0, 0)))
        rounds = rounds.reshape(-1, at_once, packets.shape[1])
        senders = jnp.arange(len(rounds) * at_once).reshape(-1, at_once)
        sums, each_round = jax.lax.scan(add, [Sums(x, x) for x in zeros], (rounds, senders))
        numbers, counted = (x.reshape(-1, *x.shape[2:])[:workers] for x in each_round)
        participants = jnp.sum(counted, dtype=jnp.float32)
        means = [sparse.mean_of_sums(s, mean, participants) for s in sums]
    delivered = counted[axes.index(axis_name)]
    return Aggregate(means, delivered, metrics.summarise(Report(*numbers.T), counted))


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

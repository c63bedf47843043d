"""How several workers' packets become their mean. No packet is trusted.

Every worker that averages the same packets does it in the same order with the same program, so that
the mean is equal to the last bit everywhere.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, UInt32

from demo_optax import axes
from demo_optax.arrays import Coefficients, FloatScalar
from demo_optax.compression import Known, packet, sparse
from demo_optax.compression.packet import Layout, Opened, Travelled
from demo_optax.compression.sparse import Mean, Sums
from demo_optax.metrics import ExchangeMetrics


class Average(NamedTuple):
    """The mean of what some workers sent.

    Attributes:
      coefficients: for each section, float32; zero where nobody sent any.
      weights: of the workers' messages; 0 where one does not count.
    """

    coefficients: list[Coefficients]
    weights: Float32[Array, "workers"]


class Aggregate(NamedTuple):
    """What an exchange gives every worker.

    Attributes:
      coefficients: for each group the mean, float32; zero where nobody sent any.
      delivered: for each group, of each block, the part of this worker's own message that counted.
      residual: for each group, what this worker has yet to send of the blocks that it owns; none
        where nobody owns any.
      metrics: of the step.
    """

    coefficients: Sequence[Coefficients]
    delivered: Sequence[Float32[Array, "_blocks 1"]]
    residual: tuple[Coefficients, ...]
    metrics: ExchangeMetrics


class Decoded(NamedTuple):
    """What workers sent, and what to believe of it.

    Attributes:
      messages: what travelled of them, each array with an axis of workers in front.
      counted: whether a worker's message is well formed.
      norms: of the messages.
    """

    messages: Travelled
    counted: Bool[Array, "workers"]
    norms: Float32[Array, "workers"]


def decode(
    layout: Layout,
    bodies: UInt32[Array, "workers words"],
    intact: Bool[Array, "workers"],
) -> Decoded:
    """Decodes packets. One counts if it is intact, its positions ascend and its energy is finite.

    That of each block, which a norm of all would hide.
    """
    messages, valid = jax.vmap(functools.partial(packet.decode, layout))(bodies)
    counted, energy = intact & valid, jnp.zeros(len(intact), jnp.float32)
    for values in messages.values:
        of_blocks = jnp.sum(jnp.square(values), axis=2)
        counted &= jnp.isfinite(of_blocks).all(axis=1)
        energy += jnp.sum(of_blocks, axis=1)
    return Decoded(messages, counted, norm_of(energy))


def norm_of(energy: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """The root of a sum of squares, which may have ended beyond float32."""
    return jnp.sqrt(jnp.minimum(energy, jnp.finfo(jnp.float32).max))


def average(
    layout: Layout,
    bodies: UInt32[Array, "workers words"],
    intact: Bool[Array, "workers"],
    known: Known,
    largest: FloatScalar,
    mean: Mean,
) -> Average:
    """Averages packets.

    Args:
      layout: of each of them.
      bodies: of the packets.
      intact: whether they are.
      known: positions that every worker knows.
      largest: norm that counts of a message; what is longer is scaled down to it.
      mean: over the ``"senders"`` of each coefficient, or over all ``"workers"`` that take part.
    """
    workers, at_once = len(bodies), _workers_at_once(layout)
    pairs = list(zip(layout.sections, known, strict=True))

    def zeros(blocks: int, size: int) -> Coefficients:
        return axes.varying_like(jnp.zeros((blocks, size), jnp.float32), bodies)

    # All workers' values at known places are averaged first, and then put there.
    empty = [zeros(s.blocks, s.block_size if at is None else s.k) for s, at in pairs]

    def placed(means):
        return [
            m if at is None else sparse.add_at(zeros(s.blocks, s.block_size), at, m)
            for m, (s, at) in zip(means, pairs, strict=True)
        ]

    def weighted(bodies, intact):
        messages, counted, norms = decode(layout, bodies, intact)
        weights = jnp.where(counted, shortened(norms, largest), 0.0)
        return [sparse.weighted(p, v, weights) for p, v in zip(*messages, strict=True)], weights

    def add(sums, some):
        sent, weights = weighted(*some)
        return list(map(sparse.add_sent, sums, sent)), weights

    if workers <= at_once:
        sent, weights = weighted(bodies, intact)
        means = [sparse.mean_of_sent(*both, mean) for both in zip(empty, sent, strict=True)]
        return Average(placed(means), weights)
    missing = -workers % at_once
    rounds = jnp.pad(bodies, ((0, missing), (0, 0))), jnp.pad(intact, (0, missing))
    rounds = jax.tree.map(lambda x: x.reshape(-1, at_once, *x.shape[1:]), rounds)
    sums, weights = jax.lax.scan(add, [Sums(x, x) for x in empty], rounds)
    weights = weights.reshape(-1)[:workers]
    participants = jnp.sum(weights > 0, dtype=jnp.float32)
    means = [sparse.mean_of_sums(s, mean, participants) for s in sums]
    return Average(placed(means), weights)


def _workers_at_once(layout: Layout) -> int:
    """Packets to decode together: few where their positions travel.

    Otherwise as many as have no more values than all blocks have coefficients.
    """
    if any(s.index_coding == "bins" for s in layout.sections):
        return sparse.BINS_AT_ONCE
    travelling = [s.k for s in layout.sections if s.index_coding is not None]
    if travelling:
        return max(sparse.AT_ONCE // max(travelling), 1)
    dense = sum(s.blocks * s.block_size for s in layout.sections)
    return max(dense // max(sum(s.blocks * s.k for s in layout.sections), 1), 1)


def shortened(
    norms: Float32[Array, "*shape"], largest: Float32[Array, "..."]
) -> Float32[Array, "*shape"]:
    """The part of messages of these norms that counts, from 0 to 1 whatever is said."""
    limit = jnp.maximum(largest, 0.0)
    return jnp.where(norms > limit, limit / norms, 1.0)


def largest_norm(packets: Opened, limit: float | None) -> FloatScalar:
    """The norm that counts of a message: a multiple of the median of what the packets say.

    Of an even number the lower one counts, and messages of zeros do not: whoever lies about its
    norm moves the median by a place at most.
    """
    largest = jnp.finfo(jnp.float32).max
    if limit is None:
        return jnp.array(largest, jnp.float32)
    norms = jnp.sqrt(packets.numbers[:, -1])
    norms = jnp.sort(jnp.where(packets.intact & (norms > 0), norms, jnp.inf))
    middle = jnp.maximum(jnp.sum(jnp.isfinite(norms)) - 1, 0) // 2
    return jnp.minimum(limit * norms[middle], largest)

"""A few values of each block: added to it, and the mean of several workers' values.

A scatter is the natural way. TPUs sort its indices and then loop, so there comparisons and matrix
products take its place. Either way every addition has its place in a fixed order, whatever the
device, so that all workers get the same bits.
"""

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from demo_optax.compression.transforms import product

Mean = Literal["senders", "workers"]
MEANS = get_args(Mean)

_MOST_COMPARISONS = 16  # of each element; beyond, a product costs less
ROUND = 128  # coefficients of a block that one product takes: the side of a TPU's matrix unit


class Sent(NamedTuple):
    """What some workers sent of blocks of one size.

    Attributes:
      positions: int32 ``(workers, blocks, k)``, unique in each block.
      values: float32 ``(workers, blocks, k)``.
      counts: bool ``(workers,)``; what does not count may be anything.
    """

    positions: jax.Array
    values: jax.Array
    counts: jax.Array


class Sums(NamedTuple):
    """What several workers sent, added up.

    Attributes:
      values: float32 ``(blocks, n)``.
      senders: float32 ``(blocks, n)``, how many sent each coefficient.
    """

    values: jax.Array
    senders: jax.Array


def add_at(blocks: jax.Array, positions: jax.Array, values: jax.Array) -> jax.Array:
    """Adds ``(blocks, k)`` values to blocks ``(blocks, n)``, at positions unique in each."""
    compare = positions.shape[1] <= _MOST_COMPARISONS
    return jax.lax.platform_dependent(
        blocks,
        positions,
        values.astype(blocks.dtype),
        tpu=_add_by_comparison if compare else _add_by_product,
        default=_add_by_scatter,
    )


def add_sent(sums: Sums, sent: Sent) -> Sums:
    """Adds what some workers sent to what others did."""
    return jax.lax.platform_dependent(
        sums, sent, tpu=_add_sent_by_product, default=_add_sent_by_scatter
    )


def mean_of_sums(sums: Sums, mean: Mean, participants: jax.Array) -> jax.Array:
    """The mean ``(blocks, n)`` over the senders of each coefficient, or over all participants."""
    return sums.values / jnp.maximum(sums.senders if mean == "senders" else participants, 1)


def mean_of_sent(start: Sums, sent: Sent, mean: Mean) -> jax.Array:
    """The mean of what all workers sent, where they are few; ``start`` is zero."""
    participants = jnp.sum(sent.counts, dtype=jnp.float32)

    def by_scatter(start, sent):
        return mean_of_sums(_add_sent_by_scatter(start, sent), mean, participants)

    def by_product(start, sent):
        positions, values, _ = _in_front_of_blocks(sent)
        equal = positions[:, None] == positions[None]
        senders = jnp.sum(equal, axis=0, dtype=jnp.float32)
        weighted = values / (senders if mean == "senders" else jnp.maximum(participants, 1))
        return start.values + _dense(positions.T, weighted.T, start.values.shape[1])

    return jax.lax.platform_dependent(start, sent, tpu=by_product, default=by_scatter)


def _add_by_scatter(blocks, positions, values):
    rows = jnp.arange(len(blocks))[:, None]
    return blocks.at[rows, positions].add(values, unique_indices=True, mode="promise_in_bounds")


def _add_by_comparison(blocks, positions, values):
    # Blocks along the last dimension are how a TPU holds the coefficients that come from products.
    place = jnp.arange(blocks.shape[1])[:, None]
    total = blocks.T
    for own, value in zip(positions.T, values.T, strict=True):
        total += jnp.where(own[None] == place, value[None], 0)
    return total.T


def _add_by_product(blocks, positions, values):
    return blocks + _dense(positions, values, blocks.shape[1])


def _add_sent_by_scatter(sums, sent):
    _, blocks, k = sent.positions.shape
    first = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (blocks, k))

    def add(sums, sent):
        at = jnp.where(sent.counts, sent.positions, first)
        ones = jnp.broadcast_to(sent.counts.astype(jnp.float32), at.shape)
        added = jnp.where(sent.counts, sent.values, 0), ones
        return Sums(*(_add_by_scatter(x, at, y) for x, y in zip(sums, added, strict=True))), None

    return jax.lax.scan(add, sums, sent)[0]


def _add_sent_by_product(sums, sent):
    positions, *added = _in_front_of_blocks(sent)
    pairs = zip(sums, added, strict=True)
    return Sums(*(x + _dense(positions.T, y.T, x.shape[1]) for x, y in pairs))


def _in_front_of_blocks(sent):
    """Positions, values and counts ``(workers * k, blocks)``; nowhere what does not count."""
    counts = jnp.broadcast_to(sent.counts[:, None, None], sent.values.shape)
    positions, values = jnp.where(counts, sent.positions, -1), jnp.where(counts, sent.values, 0)
    parts = positions, values, counts.astype(jnp.float32)
    return [x.transpose(0, 2, 1).reshape(-1, x.shape[1]) for x in parts]


def _dense(positions, values, n):
    """Sums ``(blocks, n)`` of values ``(blocks, j)``, by one product for each block.

    A position is a row and a column: a block is the sum of the outer products of their units.
    """
    shift = n.bit_length() // 2
    columns, rows = 1 << shift, -(-n >> shift)

    positions, values = jax.lax.optimization_barrier((positions, values))
    def units(places, size):
        return (places[:, None] == jnp.arange(size)[None, :, None]).astype(jnp.float32)
    v = values[:, None]
    dense = product("brj,bcj->brc", units(positions >> shift, rows), v * units(positions & (columns - 1), columns))
    return dense.reshape(len(dense), rows * columns)[:, :n]

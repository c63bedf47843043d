"""A few values of each block: added to it, and the sums of several workers' values.

A scatter is the natural way. TPUs sort its indices and then loop, so there comparisons and matrix
products take its place. Either way every addition has its place in a fixed order, whatever the
device, so that all workers get the same bits.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from demo_optax.compression.transforms import product

_MOST_COMPARISONS = 16  # of each element; beyond, a product costs less
ROUND = 128  # coefficients of a block that one product takes: the side of a TPU's matrix unit


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


def add_round(sums: Sums, positions: jax.Array, values: jax.Array, counts: jax.Array) -> Sums:
    """Adds what some workers sent.

    Args:
      sums: so far.
      positions: int32 ``(workers, blocks, k)``, unique in each block.
      values: float32 like them.
      counts: bool ``(workers,)``; what does not count may be anything.
    """
    return jax.lax.platform_dependent(
        sums, positions, values, counts, tpu=_round_by_product, default=_round_by_scatter
    )


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
    (dense,) = _dense(positions, [values], blocks.shape[1])
    return blocks + dense


def _round_by_scatter(sums, positions, values, counts):
    first = jnp.broadcast_to(jnp.arange(positions.shape[2], dtype=jnp.int32), positions.shape[1:])

    def add(sums, worker):
        positions, values, counts = worker
        at = jnp.where(counts, positions, first)
        sent = jnp.broadcast_to(counts.astype(jnp.float32), values.shape)
        added = jnp.where(counts, values, 0), sent
        return Sums(*(_add_by_scatter(x, at, y) for x, y in zip(sums, added, strict=True))), None

    return jax.lax.scan(add, sums, (positions, values, counts))[0]


def _round_by_product(sums, positions, values, counts):
    def side_by_side(x):
        return x.transpose(1, 0, 2).reshape(x.shape[1], -1)

    counts = jnp.broadcast_to(counts[:, None, None], values.shape)
    added = jnp.where(counts, values, 0), counts.astype(jnp.float32)
    n = sums.values.shape[1]
    dense = _dense(side_by_side(positions), [side_by_side(x) for x in added], n)
    return Sums(*(x + y for x, y in zip(sums, dense, strict=True)))


def _dense(positions, values, n):
    """Sums ``(blocks, n)`` of each of some values ``(blocks, j)``, by one product for each block.

    A position is a row and a column: a block is the sum of the outer products of their units.
    """
    columns = 1 << (n.bit_length() // 2)
    rows = -(-n // columns)
    row, column = jnp.divmod(positions, columns)
    row = (row[:, :, None] == jnp.arange(rows)[None, None]).astype(jnp.float32)
    column = column[:, :, None] == jnp.arange(columns)[None, None]
    scaled = [jnp.where(column, x[:, :, None], 0.0) for x in values]
    dense = product("bjr,bjc->brc", row, jnp.concatenate(scaled, axis=-1))
    parts = jnp.split(dense, len(values), axis=-1)
    return [x.reshape(len(x), rows * columns)[:, :n] for x in parts]

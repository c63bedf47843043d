"""A few values of each block: added to it, and the mean of several workers' values.

A scatter is the natural way. TPUs sort its indices and then loop, so there comparisons and matrix
products take its place. Either way every addition has its place in a fixed order, whatever the
device, so that all workers get the same bits.
"""

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Shaped

from demo_optax.arrays import FloatScalar
from demo_optax.compression import bins, runs
from demo_optax.compression.bins import Bins
from demo_optax.compression.runs import Run
from demo_optax.compression.transforms import product

Mean = Literal["senders", "workers"]
MEANS = get_args(Mean)

Dense = Float[Array, "blocks n"]
Positions = Int32[Array, "blocks k"]
Values = Float[Array, "blocks k"]
AllPositions = Int32[Array, "workers blocks k"] | Bins
AllValues = Float32[Array, "workers blocks k"]

AT_ONCE = 64  # coefficients of a block that are compared, or in one product, of all workers
BINS_AT_ONCE = 16  # workers whose values of the same bins are added in one unrolled loop
_LANES = 128  # of a TPU's vectors: narrower arrays are padded to them in memory
_MOST_COMPARISONS = 16  # of each element; beyond, a product costs less


class Sent(NamedTuple):
    """What some workers sent of blocks of one size.

    Attributes:
      positions: unique in each block; None where all workers send the same.
      values: zero where a worker does not count.
      counted: whether it does.
    """

    positions: AllPositions | None
    values: AllValues
    counted: Bool[Array, "workers 1 1"]


class Sums(NamedTuple):
    """What several workers sent, added up.

    Attributes:
      values: of each coefficient.
      senders: how many sent it.
    """

    values: Dense
    senders: Dense


def weighted(
    positions: AllPositions | None, values: AllValues, weights: Float32[Array, "workers"]
) -> Sent:
    """Untrusted messages times their weights; those of weight 0 send zeros."""
    factors = weights[:, None, None]
    counted = factors > 0
    if isinstance(positions, Bins):
        positions = Bins(jnp.where(counted, positions.places, 0))
    elif positions is not None:
        first = jnp.arange(positions.shape[2], dtype=positions.dtype)[None, None]
        positions = jnp.where(counted, positions, first)
    return Sent(positions, jnp.where(counted, values * factors, 0), counted)


def add_at(blocks: Dense, positions: Positions | Run | Bins, values: Values) -> Dense:
    """Adds values to blocks, at positions unique in each."""
    if isinstance(positions, Run):
        return runs.add(blocks, positions, values.astype(blocks.dtype))
    if isinstance(positions, Bins):
        return jax.lax.platform_dependent(
            blocks,
            positions,
            values.astype(blocks.dtype),
            cpu=_add_by_scatter,
            default=bins.add,
        )
    compare = positions.shape[1] <= _MOST_COMPARISONS
    return jax.lax.platform_dependent(
        blocks,
        positions,
        values.astype(blocks.dtype),
        tpu=_add_by_comparison if compare else _add_by_product,
        default=_add_by_scatter,
    )


def mean_of_sent(zeros: Dense, sent: Sent, mean: Mean) -> Dense:
    """The mean of what all workers sent, where they are few.

    The senders of a coefficient are counted by comparing all positions of a block.
    """
    positions = sent.positions
    if mean == "workers" or positions is None or len(sent.values) == 1:  # both are the same
        number = jnp.sum(sent.counted, dtype=jnp.float32)
    elif isinstance(positions, Bins):
        equal = (positions.places[:, None] == positions.places[None]) & sent.counted[:, None]
        number = jnp.sum(equal, axis=0, dtype=jnp.float32)
    else:
        positions = _blocks_last(jnp.where(sent.counted, positions, -1))
        equal = positions[:, None] == positions[None]
        number = jnp.sum(equal, axis=0, dtype=jnp.float32)
        workers, blocks, k = sent.values.shape
        number = number.reshape(workers, k, blocks).transpose(0, 2, 1)
    return _add_all(zeros, sent.positions, sent.values / jnp.maximum(number, 1))


def add_sent(sums: Sums, sent: Sent) -> Sums:
    """Adds what some workers sent to what others did."""
    ones = jnp.broadcast_to(sent.counted.astype(jnp.float32), sent.values.shape)
    added = zip(sums, (sent.values, ones), strict=True)
    return Sums(*(_add_all(total, sent.positions, values) for total, values in added))


def mean_of_sums(sums: Sums, mean: Mean, participants: FloatScalar) -> Float32[Array, "blocks n"]:
    """The mean over the senders of each coefficient, or over all participants."""
    return sums.values / jnp.maximum(sums.senders if mean == "senders" else participants, 1)


def _add_all(blocks: Dense, positions: AllPositions | None, values: AllValues) -> Dense:
    """Adds values to blocks, the workers' one after the other.

    Without positions the blocks hold nothing but the places of the values.
    """
    if positions is None:
        return blocks + jnp.sum(values, axis=0)

    def by_scatter(blocks: Dense, positions: AllPositions, values: AllValues) -> Dense:
        def add(blocks: Dense, worker: tuple[Positions | Bins, Values]) -> tuple[Dense, None]:
            return _add_by_scatter(blocks, *worker), None

        return jax.lax.scan(add, blocks, (positions, values))[0]

    if isinstance(positions, Bins):
        return jax.lax.platform_dependent(
            blocks, positions, values, cpu=by_scatter, default=bins.add_all
        )

    def by_product(
        blocks: Dense, positions: Int32[Array, "workers blocks k"], values: AllValues
    ) -> Dense:
        return _add_by_product(blocks, _blocks_last(positions).T, _blocks_last(values).T)

    return jax.lax.platform_dependent(blocks, positions, values, tpu=by_product, default=by_scatter)


def _add_by_scatter(blocks: Dense, positions: Positions | Bins, values: Values) -> Dense:
    rows, places = jnp.arange(len(blocks))[:, None], bins.in_block(positions)
    return blocks.at[rows, places].add(values, unique_indices=True, mode="promise_in_bounds")


def _add_by_comparison(blocks: Dense, positions: Positions, values: Values) -> Dense:
    # Blocks along the last dimension are how a TPU holds the coefficients that come from products.
    place = jnp.arange(blocks.shape[1])[:, None]
    total = blocks.T
    for own, value in zip(positions.T, values.T, strict=True):
        total += jnp.where(own[None] == place, value[None], 0)
    return total.T


def _add_by_product(blocks: Dense, positions: Positions, values: Values) -> Dense:
    """Adds values: sums of the outer products of rows' and columns' units."""
    n = blocks.shape[1]
    shift = min((n - 1).bit_length(), _LANES.bit_length() - 1)
    columns, rows = 1 << shift, -(-n >> shift)

    def units(places: Int[Array, "blocks k"], size: int) -> Float[Array, "blocks {size} k"]:
        return (places[:, None] == jnp.arange(size)[None, :, None]).astype(blocks.dtype)

    row, column = units(positions >> shift, rows), units(positions & (columns - 1), columns)
    dense = product("brj,bcj->brc", values[:, None] * row, column, exact=True)
    return blocks + dense.reshape(len(blocks), rows * columns)[:, :n]


def _blocks_last(x: Shaped[Array, "workers blocks k"]) -> Shaped[Array, "workers*k blocks"]:
    return x.transpose(0, 2, 1).reshape(-1, x.shape[1])

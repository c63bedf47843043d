"""Coefficients at positions of blocks: finding the largest, reading and adding them, and sums.

A scatter is the natural way to add, but TPUs sort its indices and then loop, so there comparisons
and matrix products are used instead. The order of additions is fixed on every device, so that all
workers get the same bits.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32, Shaped

from demo_optax._src import axes
from demo_optax._src.arrays import Coefficients, IntScalar, true_once_computed
from demo_optax._src.compression.transforms import product

Dense = Shaped[Array, "blocks n"]
Picked = Shaped[Array, "blocks k"]
Picks = Int32[Array, "blocks k"]
NoPicks = Int32[Array, "blocks 0"]
BlockPositions = Int[Array, "blocks k"]
WorkerPositions = Int[Array, "workers blocks k"]
WorkerValues = Shaped[Array, "workers blocks k"]

STRIDED_GROUP_SIZE = 8  # elements
_LANES = 128  # a TPU pads narrower arrays to this width of its vectors in memory
_MOST_COMPARISONS = 16  # per element; a product costs less than more of them


def take(blocks: Dense, positions: BlockPositions) -> Picked:
    return jnp.take_along_axis(blocks, positions, axis=-1, mode="promise_in_bounds")


def add(blocks: Dense, positions: BlockPositions, values: Picked) -> Dense:
    """Adds floats or integers to blocks, at positions that are unique in each."""
    by_product = positions.shape[1] > _MOST_COMPARISONS
    if not jnp.issubdtype(blocks.dtype, jnp.floating):
        on_tpu = _add_in_turn
    else:
        on_tpu = _add_by_product if by_product else _add_by_comparison
    values = values.astype(blocks.dtype)
    return jax.lax.platform_dependent(blocks, positions, values, tpu=on_tpu, default=scatter)


def add_all(blocks: Dense, positions: WorkerPositions, values: WorkerValues) -> Dense:
    def by_product(blocks: Dense, positions: WorkerPositions, values: WorkerValues) -> Dense:
        return _add_by_product(blocks, _blocks_last(positions).T, _blocks_last(values).T)

    return jax.lax.platform_dependent(
        blocks, positions, values, tpu=by_product, default=scatter_all
    )


def sender_weight_sums(
    positions: Int32[Array, "workers blocks k"], weights: Float32[Array, "workers 1 1"]
) -> Float32[Array, "workers blocks k"]:
    """Sums the weights of each coefficient's senders by comparing all positions of a block."""
    workers, blocks, k = positions.shape
    all_positions, all_weights = _blocks_last(positions), jnp.repeat(weights[:, 0], k, axis=0)
    equal = all_positions[:, None] == all_positions[None]
    sums = jnp.sum(jnp.where(equal, all_weights[:, None], 0.0), axis=0)
    return sums.reshape(workers, k, blocks).transpose(0, 2, 1)


def scatter(blocks: Dense, positions: BlockPositions, values: Picked) -> Dense:
    rows = jnp.arange(len(blocks))[:, None]
    return blocks.at[rows, positions].add(values, unique_indices=True, mode="promise_in_bounds")


def scatter_all(blocks: Dense, positions: WorkerPositions, values: WorkerValues) -> Dense:
    def add(blocks: Dense, worker: tuple[BlockPositions, Picked]) -> tuple[Dense, None]:
        return scatter(blocks, *worker), None

    blocks = axes.varying_like(axes.varying_like(blocks, positions), values)
    return jax.lax.scan(add, blocks, (positions, values))[0]


def largest_by_strided_groups(
    magnitudes: Float32[Array, "blocks n"],
    largest: Callable[[Float32[Array, "_blocks _n"]], Int32[Array, "_blocks _k"]],
) -> Int32[Array, "blocks _k"]:
    """Finds the positions of the largest magnitudes by two selections in shorter rows.

    A block has ``n / 8`` strided groups of 8 elements, each of which holds every ``n / 8``-th
    element. The groups with the largest maxima hold the largest elements.
    """
    groups = magnitudes.shape[1] // STRIDED_GROUP_SIZE
    rows = [magnitudes[:, i * groups : (i + 1) * groups] for i in range(STRIDED_GROUP_SIZE)]
    chosen = largest(functools.reduce(jnp.maximum, rows))
    steps = groups * jnp.arange(STRIDED_GROUP_SIZE, dtype=jnp.int32)
    candidates = (chosen[:, None, :] + steps[None, :, None]).reshape(len(magnitudes), -1)
    return take(candidates, largest(take(magnitudes, candidates)))


@dataclasses.dataclass(frozen=True)
class AllCoefficients:
    """Selector of all ``n`` coefficients of a block, which needs no positions."""

    n: int
    sends_positions = False

    @property
    def k(self) -> int:
        return self.n

    def positions(self, num_blocks: int, step: IntScalar) -> Int32[Array, "{num_blocks} 0"]:
        del step
        return jnp.zeros((num_blocks, 0), jnp.int32)

    def take(self, blocks: Dense, positions: NoPicks) -> Dense:
        del positions
        return blocks

    def add(self, blocks: Dense, positions: NoPicks, values: Dense) -> Dense:
        del positions
        return blocks + values.astype(blocks.dtype)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["positions", "values"], meta_fields=["selector"]
)
@dataclasses.dataclass(frozen=True)
class SparseSum:
    """The aggregate of a section as a sum of sparse terms, which `dense` adds in order.

    Attributes:
      positions: int32 ``(terms, blocks, places)``.
      values: float32 ``(terms, blocks, k)``.
      selector: the selector that defines the positions.
    """

    positions: Array
    values: Array
    selector: Any

    def dense(self) -> Coefficients:
        """Returns the coefficients ``(blocks, n)``, which are zero where no worker sent any."""
        blocks = self.values.shape[1]
        # The zeros depend on the values, or XLA would make those of all sections at once.
        zeros = jnp.where(true_once_computed([self.values]), jnp.float32(0), jnp.float32(1))
        zeros = jnp.broadcast_to(zeros, (blocks, self.selector.n))
        if len(self.values) == 1:
            return self.selector.add(zeros, self.positions[0], self.values[0])
        return self.selector.add_all(zeros, self.positions, self.values)


def _add_by_comparison(blocks: Dense, positions: BlockPositions, values: Picked) -> Dense:
    # The blocks come last, as in the layout in which a TPU's products leave the coefficients.
    place = jnp.arange(blocks.shape[1], dtype=jnp.int32)[:, None]
    total = blocks.T
    for position, value in zip(positions.T, values.T, strict=True):
        total += jnp.where(position[None] == place, value[None], 0)
    return total.T


def _add_in_turn(blocks: Dense, positions: BlockPositions, values: Picked) -> Dense:
    """Adds one value of each block after another, which is exact for integers."""
    place = jnp.arange(blocks.shape[1], dtype=jnp.int32)[None]

    def add(number: Any, total: Dense) -> Dense:
        position, value = (
            jax.lax.dynamic_slice_in_dim(x, number, 1, axis=1) for x in (positions, values)
        )
        return total + jnp.where(position == place, value, jnp.zeros_like(value))

    total = axes.varying_like(axes.varying_like(blocks, positions), values)
    return jax.lax.fori_loop(0, positions.shape[1], add, total)


def _add_by_product(
    blocks: Dense, positions: BlockPositions, values: Float[Array, "blocks k"]
) -> Dense:
    """Adds values as sums of outer products of one-hot rows and one-hot columns."""
    n = blocks.shape[1]
    shift = min((n - 1).bit_length(), _LANES.bit_length() - 1)
    columns, rows = 1 << shift, -(-n >> shift)

    def one_hot(places: BlockPositions, size: int) -> Float[Array, "blocks {size} k"]:
        each = jnp.arange(size, dtype=jnp.int32)[None, :, None]
        return (places[:, None] == each).astype(blocks.dtype)

    row, column = one_hot(positions >> shift, rows), one_hot(positions & (columns - 1), columns)
    dense = product("brj,bcj->brc", values[:, None] * row, column, exact=True)
    return blocks + dense.reshape(len(blocks), rows * columns)[:, :n]


def _blocks_last(x: Shaped[Array, "workers blocks k"]) -> Shaped[Array, "workers*k blocks"]:
    return x.transpose(0, 2, 1).reshape(-1, x.shape[1])

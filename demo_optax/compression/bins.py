"""The largest coefficient of each of ``k`` bins; bin ``b`` holds every ``k``-th from ``b`` on.

A maximum and a comparison find them, where the ``k`` largest of all want a sort, and a place in a
bin has fewer bits than one in a block. It is what TPU-KNN's approximate top-k begins with (Chern et
al., arXiv 2206.14286).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32, Shaped


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bins:
    """One coefficient of each bin.

    Attributes:
      places: of the coefficients in their bins, one for each of a block's ``k`` bins.
    """

    places: Int32[Array, "*workers blocks k"]

    @property
    def positions(self) -> Int32[Array, "*workers blocks k"]:
        """Of the coefficients in their blocks."""
        k = self.places.shape[-1]
        first = jnp.arange(k, dtype=jnp.int32)
        return self.places * k + first.reshape((1,) * (self.places.ndim - 1) + (k,))


def in_block(
    chosen: Int[Array, "*workers blocks k"] | Bins,
) -> Int[Array, "*workers blocks k"]:
    """Positions in the block, of either kind."""
    return chosen.positions if isinstance(chosen, Bins) else chosen


def place_bits(n: int, k: int) -> int:
    """Bits of a place in one of ``k`` bins of a block of ``n``.

    Example:
      >>> place_bits(4096, 64)
      6
    """
    return (_depth(n, k) - 1).bit_length()


def largest(magnitudes: Float[Array, "blocks n"], k: int) -> Bins:
    """The largest of each bin, of magnitudes; of equal ones any."""
    return Bins(jnp.argmax(_binned(magnitudes, k, -1.0), axis=0).T.astype(jnp.int32))


def take(blocks: Shaped[Array, "blocks n"], chosen: Bins) -> Shaped[Array, "blocks k"]:
    """One element of each bin."""
    binned = _binned(blocks, chosen.places.shape[-1], 0)
    return jnp.sum(jnp.where(_here(chosen.places, len(binned)), binned, 0), axis=0).T


def add(
    blocks: Float[Array, "blocks n"], chosen: Bins, values: Float[Array, "blocks k"]
) -> Float[Array, "blocks n"]:
    """Adds a value to one element of each bin."""
    return add_all(blocks, Bins(chosen.places[None]), values[None])


def add_all(
    blocks: Float[Array, "blocks n"], chosen: Bins, values: Float[Array, "workers blocks k"]
) -> Float[Array, "blocks n"]:
    """Adds several workers' values to one element of each bin, in the order of the workers."""
    total = _binned(blocks, values.shape[-1], 0)
    for places, value in zip(chosen.places, values, strict=True):
        here = _here(places, len(total))
        total += jnp.where(here, value.T[None], 0)
    # Without a barrier XLA adds in two dimensions, and keeps every comparison in memory for it.
    total = jax.lax.optimization_barrier(total)
    return total.reshape(-1, len(blocks))[: blocks.shape[1]].T


def _depth(n: int, k: int) -> int:
    """Places in a bin; where ``k`` does not divide ``n``, the last bins have one less."""
    return -(-n // k)


def _binned(
    blocks: Shaped[Array, "blocks n"], k: int, filling: float
) -> Shaped[Array, "places {k} blocks"]:
    """Blocks along the last dimension, where TPUs want the longest."""
    count, n = blocks.shape
    depth = _depth(n, k)
    padded = jnp.pad(blocks.T, ((0, depth * k - n), (0, 0)), constant_values=filling)
    return padded.reshape(depth, k, count)


def _here(places: Int32[Array, "blocks k"], depth: int) -> Bool[Array, "{depth} k blocks"]:
    return places.T[None] == jnp.arange(depth, dtype=jnp.int32)[:, None, None]

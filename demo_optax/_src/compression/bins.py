"""Selection of the largest coefficient in each of ``k`` bins.

Bin ``b`` holds the elements b, b+k, b+2k, … of a block. Finding its largest element takes only a
maximum and a comparison, whereas an exact top-k needs a sort, and a place in a bin takes fewer bits
than a position in a block. TPU-KNN's approximate top-k starts the same way (Chern et al.,
arXiv 2206.14286).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Shaped

from demo_optax._src.arrays import BoolScalar
from demo_optax._src.compression import sparse
from demo_optax._src.compression.bits import pack_bits, unpack_bits, words_of
from demo_optax._src.compression.sparse import Dense, Picked, Picks, WorkerValues

Places = Picks
AllPlaces = Int32[Array, "workers blocks k"]


@dataclasses.dataclass(frozen=True)
class Bins:
    """Selector of the largest coefficient in each of the ``k`` bins of a block of ``n``.

    Its positions are places in the bins, from 0 to ``ceil(n / k) - 1``.
    """

    n: int
    k: int
    sends_positions = True
    workers_at_once = 16  # their values are added in one unrolled loop

    @property
    def place_bits(self) -> int:
        """Returns the number of bits that a place takes.

        Example:
          >>> Bins(4096, 64).place_bits
          6
        """
        return (-(-self.n // self.k) - 1).bit_length()

    def position_words(self, num_blocks: int) -> int:
        return words_of(num_blocks * self.k, self.place_bits)

    def select(self, coefficients: Float[Array, "blocks n"]) -> Places:
        """Returns the places of the largest magnitudes and breaks ties arbitrarily."""
        magnitudes = jnp.abs(coefficients.astype(jnp.float32))
        if self.n % (sparse.STRIDED_GROUP_SIZE * self.k):  # a group would belong to several bins
            return self._largest(magnitudes)

        # The stride of the groups is a multiple of k, so a position is k * place + bin.
        def by_strided_groups(magnitudes: Float32[Array, "blocks n"]) -> Places:
            def largest(x: Float32[Array, "_blocks _n"]) -> Int32[Array, "_blocks _k"]:
                binned = x.reshape(len(x), -1, self.k)
                return self.in_block(jnp.argmax(binned, axis=1).astype(jnp.int32))

            return sparse.largest_by_strided_groups(magnitudes, largest) // self.k

        return jax.lax.platform_dependent(magnitudes, cpu=by_strided_groups, default=self._largest)

    def take(self, blocks: Dense, places: Places) -> Picked:
        def by_gather(blocks: Array, places: Places) -> Array:
            return sparse.take(blocks, self.in_block(places))

        return jax.lax.platform_dependent(
            blocks, places, tpu=self._take_by_comparison, default=by_gather
        )

    def add(self, blocks: Dense, places: Places, values: Picked) -> Dense:
        return self.add_all(blocks, places[None], values[None])

    def add_all(self, blocks: Dense, places: AllPlaces, values: WorkerValues) -> Dense:
        def by_scatter(blocks: Array, places: AllPlaces, values: Array) -> Array:
            return sparse.scatter_all(blocks, self.in_block(places), values)

        values = values.astype(blocks.dtype)
        return jax.lax.platform_dependent(
            blocks, places, values, cpu=by_scatter, default=self._add_by_comparison
        )

    def sender_weight_sums(
        self, places: AllPlaces, weights: Float32[Array, "workers 1 1"]
    ) -> Float32[Array, "workers blocks k"]:
        equal = places[:, None] == places[None]
        return jnp.sum(jnp.where(equal, weights[:, None], 0.0), axis=0)

    def encode(self, places: Places) -> Array:
        return pack_bits(places.astype(jnp.uint32), self.place_bits)

    def decode(self, words: Array, num_blocks: int) -> tuple[Places, BoolScalar]:
        """Unpacks untrusted words into places, or into zeros and False if one is out of bounds."""
        places = unpack_bits(words, self.place_bits, num_blocks * self.k)
        places = places.reshape(num_blocks, self.k).astype(jnp.int32)
        inside = jnp.all(self.in_block(places) < self.n)
        return jnp.where(inside, places, 0), inside

    def in_block(
        self, places: Int32[Array, "*workers blocks k"]
    ) -> Int32[Array, "*workers blocks k"]:
        """Converts places in the bins to positions in the block."""
        first = jnp.arange(self.k, dtype=jnp.int32)
        return places * self.k + first.reshape((1,) * (places.ndim - 1) + (self.k,))

    def _largest(self, magnitudes: Float32[Array, "blocks n"]) -> Places:
        return jnp.argmax(self._binned(magnitudes, -1.0), axis=0).T.astype(jnp.int32)

    def _take_by_comparison(self, blocks: Dense, places: Places) -> Picked:
        binned = self._binned(blocks, 0)
        depths = jnp.arange(len(binned), dtype=jnp.int32)[:, None, None]
        taken = jnp.where(places.T[None] == depths, binned, 0)
        return jnp.sum(taken, axis=0, dtype=blocks.dtype).T

    def _add_by_comparison(self, blocks: Dense, places: AllPlaces, values: WorkerValues) -> Dense:
        total = self._binned(blocks, 0)
        depths = jnp.arange(len(total), dtype=jnp.int32)[:, None, None]
        for place, value in zip(places, values, strict=True):
            total += jnp.where(place.T[None] == depths, value.T[None], 0)
        # Without a barrier XLA adds in two dimensions and keeps every comparison in memory.
        total = jax.lax.optimization_barrier(total)
        return total.reshape(-1, len(blocks))[: self.n].T

    def _binned(self, blocks: Dense, filling: float) -> Shaped[Array, "places k blocks"]:
        """Puts the blocks last, because TPUs are fastest if the last dimension is the longest."""
        depth = -(-self.n // self.k)  # unless k divides n, the last bins have one place fewer
        missing = depth * self.k - self.n
        padded = jnp.pad(blocks.T, ((0, missing), (0, 0)), constant_values=filling)
        return padded.reshape(depth, self.k, len(blocks))

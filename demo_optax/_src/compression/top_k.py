"""Selection of the ``k`` largest coefficients of each block, and codings of their positions.

========== =============================================== ================================
coding     bits per block of ``n``                         cheapest for
========== =============================================== ================================
packed     ``k ceil(log2 n)``                              the smallest ``k``
elias-fano ``k l + k + ceil(n / 2**l) - 1``,               in between
           with ``l = floor(log2(n / k))``
bitmap     ``n``                                           about a quarter of ``n`` and more
========== =============================================== ================================

Positions are sent in ascending order. Elias-Fano sends the low ``l`` bits of each position
unchanged and the high parts, which ascend slowly, in unary, as a bitmap in which the i-th position
sets bit ``high + i``. A block's bitmap travels as whole words and one shorter field for the rest.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32, UInt32

from demo_optax._src.arrays import BoolScalar
from demo_optax._src.compression import sparse
from demo_optax._src.compression.bits import pack_bits, unpack_bits, words_of

CODINGS = "packed", "elias-fano", "bitmap"

_GPU_KERNEL_K = 16  # XLA has a top-k kernel for GPUs up to this many coefficients
_AT_ONCE = 64  # coefficients of a block from all workers that are compared or multiplied at once


@dataclasses.dataclass(frozen=True)
class TopK:
    """Selector of the ``k`` largest coefficients of a block of ``n``, with ascending positions."""

    n: int
    k: int
    sends_positions = True
    take = staticmethod(sparse.take)
    add = staticmethod(sparse.add)
    add_all = staticmethod(sparse.add_all)
    sender_weight_sums = staticmethod(sparse.sender_weight_sums)

    @property
    def places(self) -> int:
        """Returns the number of places in a block that a position may name."""
        return self.n

    @property
    def workers_at_once(self) -> int:
        return max(_AT_ONCE // self.k, 1)

    @property
    def coding(self) -> str:
        """Returns the coding of the positions that takes the fewest bits.

        Example:
          >>> [TopK(4096, k).coding for k in (1, 8, 2048)]
          ['packed', 'elias-fano', 'bitmap']
        """
        return min(CODINGS, key=self.position_bits)

    def position_bits(self, coding: str) -> int:
        low, bitmap = _fields(self.places, self.k, coding)
        return self.k * low + bitmap

    def position_words(self, num_blocks: int) -> int:
        low, bitmap = _fields(self.places, self.k, self.coding)
        whole_words = num_blocks * (bitmap // 32)
        rests = words_of(num_blocks, bitmap % 32)
        return words_of(num_blocks * self.k, low) + whole_words + rests

    def select(self, coefficients: Float[Array, "blocks n"]) -> Int32[Array, "blocks k"]:
        # XLA's fast paths take only float32.
        magnitudes = jnp.abs(coefficients.astype(jnp.float32))
        slow = ["cpu"] if self.k <= _GPU_KERNEL_K else ["cpu", "cuda", "rocm"]
        chosen = jax.lax.platform_dependent(
            magnitudes, default=self._by_kernel, **dict.fromkeys(slow, self._by_strided_groups)
        )
        return jnp.sort(chosen, axis=-1)

    def encode(
        self, positions: Int32[Array, "blocks k"], coding: str | None = None
    ) -> UInt32[Array, "words"]:
        """Packs ascending positions into words, with the shortest coding unless one is given."""
        coding = coding or self.coding
        low_bits, size = _fields(self.places, self.k, coding)
        low = positions.astype(jnp.uint32) & jnp.uint32((1 << low_bits) - 1)
        bitmap = _bitmap((positions >> low_bits) + _shift(self.k, coding), size)
        whole, rest = bitmap[:, : size // 32], bitmap[:, size // 32 :]
        return jnp.concatenate(
            [pack_bits(low, low_bits), whole.reshape(-1), pack_bits(rest, size % 32)]
        )

    def decode(
        self, words: UInt32[Array, "words"], num_blocks: int, coding: str | None = None
    ) -> tuple[Int32[Array, "{num_blocks} k"], BoolScalar]:
        """Unpacks untrusted words, or returns the first ``k`` positions and False if invalid."""
        k, coding = self.k, coding or self.coding
        low_bits, size = _fields(self.places, k, coding)
        for_low = words_of(num_blocks * k, low_bits)
        low, whole, rest = jnp.split(words, [for_low, for_low + num_blocks * (size // 32)])
        positions = unpack_bits(low, low_bits, num_blocks * k).reshape(num_blocks, k)
        positions = positions.astype(jnp.int32)
        complete = jnp.array(True)
        if size:
            bitmap = [whole.reshape(num_blocks, size // 32)]
            if size % 32:
                bitmap.append(unpack_bits(rest, size % 32, num_blocks)[:, None])
            ones, complete = _positions_of_ones(jnp.concatenate(bitmap, axis=1), k)
            positions |= (ones - _shift(k, coding)) << low_bits
        ascending = jnp.all(positions[:, 1:] > positions[:, :-1])
        inside = jnp.all((positions >= 0) & (positions < self.places))
        valid = complete & ascending & inside
        return jnp.where(valid, positions, jnp.arange(k, dtype=jnp.int32)[None]), valid

    def _by_kernel(self, magnitudes: Float32[Array, "blocks n"]) -> Int32[Array, "blocks k"]:
        return jax.lax.top_k(magnitudes, self.k)[1]

    def _by_strided_groups(
        self, magnitudes: Float32[Array, "blocks n"]
    ) -> Int32[Array, "blocks k"]:
        """Replaces `_by_kernel` on devices that are slow on long rows, which GPUs sort whole."""
        if self.n % sparse.STRIDED_GROUP_SIZE or self.n // sparse.STRIDED_GROUP_SIZE < 4 * self.k:
            return self._by_kernel(magnitudes)
        return sparse.largest_by_strided_groups(magnitudes, lambda x: jax.lax.top_k(x, self.k)[1])


def _fields(n: int, k: int, coding: str) -> tuple[int, int]:
    """Returns the number of bits of each low part, and of the block's bitmap."""
    low = (n // k).bit_length() - 1
    return {
        "packed": ((n - 1).bit_length(), 0),
        "elias-fano": (low, k + -(-n >> low) - 1),
        "bitmap": (0, n),
    }[coding]


def _shift(k: int, coding: str) -> Int32[Array, "1 {k}"]:
    """Returns the numbers by which Elias-Fano tells equal high parts apart, or zeros."""
    steps = jnp.arange(k, dtype=jnp.int32)[None]
    return steps if coding == "elias-fano" else jnp.zeros_like(steps)


def _is_dense(k: int, size: int) -> bool:
    """Tells whether handling every bit costs less than comparing ``k`` places with all words."""
    return k * size // 32 > 4096


def _bitmap(ones: Int[Array, "blocks k"], size: int) -> UInt32[Array, "blocks words"]:
    """Returns the ``ceil(size / 32)`` words of each block in which these bits are set."""
    if _is_dense(ones.shape[1], size):
        bits = jnp.zeros((len(ones), -(-size // 32) * 32), jnp.uint32)
        bits = bits.at[jnp.arange(len(ones))[:, None], ones].set(1, unique_indices=True)
        return pack_bits(bits, 1).reshape(len(ones), -1)
    words = jnp.arange(-(-size // 32), dtype=jnp.int32)[None, None]
    bits = jnp.uint32(1) << (ones % 32).astype(jnp.uint32)
    in_word = ones[:, :, None] // 32 == words
    return jnp.sum(jnp.where(in_word, bits[:, :, None], jnp.uint32(0)), 1, jnp.uint32)


def _positions_of_ones(
    bitmap: UInt32[Array, "blocks words"], k: int
) -> tuple[Int32[Array, "blocks {k}"], BoolScalar]:
    """Finds the ``k`` set bits in the words of each block; tells whether every block has ``k``."""
    blocks, size = bitmap.shape[0], 32 * bitmap.shape[1]
    if _is_dense(k, size):
        bits = unpack_bits(bitmap.reshape(-1), 1, blocks * size).reshape(blocks, size)
        rank = jnp.cumsum(bits.astype(jnp.int32), axis=1) - 1
        slot = jnp.where(bits == 1, rank, k)  # a slot of k or more is dropped
        places = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[None], bits.shape)
        positions = jnp.zeros((blocks, k), jnp.int32)
        positions = positions.at[jnp.arange(blocks)[:, None], slot].set(places, mode="drop")
        return positions, jnp.all(rank[:, -1] == k - 1)
    words = jnp.arange(bitmap.shape[1], dtype=jnp.int32)[None, None]
    counts = jax.lax.population_count(bitmap).astype(jnp.int32)
    through = jnp.cumsum(counts, axis=1)
    rank = jnp.arange(k, dtype=jnp.int32)[None]
    # Find the word that holds the i-th set bit, and how many set bits come before it in that word
    word = jnp.sum(through[:, None] <= rank[:, :, None], 2, jnp.int32)
    in_word = word[:, :, None] == words
    rank -= jnp.sum(jnp.where(in_word, (through - counts)[:, None], 0), 2, jnp.int32)
    bits = jnp.sum(jnp.where(in_word, bitmap[:, None], jnp.uint32(0)), 2, jnp.uint32)
    place = jnp.zeros_like(rank)
    for width in (16, 8, 4, 2, 1):  # a binary search inside the word
        below = bits & jnp.uint32((1 << width) - 1)
        inside = jax.lax.population_count(below).astype(jnp.int32)
        above = rank >= inside
        bits = jnp.where(above, bits >> width, below)
        rank -= jnp.where(above, inside, 0)
        place += jnp.where(above, width, 0)
    return 32 * word + place, jnp.all(through[:, -1] == k)

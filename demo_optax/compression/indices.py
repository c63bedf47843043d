"""Index codings: the ``k`` ascending positions of a block in a fixed number of bits.

========== =============================================== ================================
coding     bits per block of ``n``                         cheapest for
========== =============================================== ================================
packed     ``k ceil(log2 n)``                              the smallest ``k``
elias-fano ``k l + k + ceil(n / 2**l) - 1``,               in between
           with ``l = floor(log2(n / k))``
bitmap     ``n``                                           about a quarter of ``n`` and more
========== =============================================== ================================

Elias-Fano sends the low ``l`` bits of each position as they are, and the high parts, which
ascend slowly, in unary: a bitmap in which the i-th position sets bit ``high + i``.
"""

import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from demo_optax.compression.bits import pack_bits, unpack_bits, words_of

IndexCoding = Literal["packed", "elias-fano", "bitmap"]
INDEX_CODINGS = get_args(IndexCoding)


def index_bits(n: int, k: int, coding: IndexCoding) -> int:
    """Bits for the positions of one block."""
    low, high = _fields(n, k, coding)
    return k * low + high


def cheapest(n: int, k: int) -> IndexCoding:
    """The coding with the fewest bits for ``k`` of ``n``.

    Example:
      >>> [cheapest(4096, k) for k in (1, 8, 2048)]
      ['packed', 'elias-fano', 'bitmap']
    """
    return min(INDEX_CODINGS, key=lambda coding: index_bits(n, k, coding))


def entropy_bits(n: int, k: int) -> float:
    """``log2`` of the number of ways to choose ``k`` of ``n``: what no coding can beat."""
    return math.log2(math.comb(n, k))


def index_words(blocks: int, n: int, k: int, coding: IndexCoding) -> int:
    """Words for the positions of some blocks."""
    low, high = _fields(n, k, coding)
    return words_of(blocks * k, low) + words_of(blocks * high, 1)


def encode(indices: jax.Array, n: int, coding: IndexCoding) -> jax.Array:
    """Packs int32 ``(blocks, k)``, ascending in each block, into ``index_words`` words."""
    blocks, k = indices.shape
    low_bits, high_size = _fields(n, k, coding)
    low = indices.astype(jnp.uint32) & jnp.uint32((1 << low_bits) - 1)
    words = [pack_bits(low, low_bits)]
    if high_size:
        ones = (indices >> low_bits) + _shift(k, coding)
        rows = jnp.arange(blocks)[:, None]
        bitmap = jnp.zeros((blocks, high_size), jnp.uint32)
        words.append(pack_bits(bitmap.at[rows, ones].set(1, unique_indices=True), 1))
    return jnp.concatenate(words)


def decode(
    words: jax.Array, blocks: int, n: int, k: int, coding: IndexCoding
) -> tuple[jax.Array, jax.Array]:
    """The inverse of `encode`, for words that anyone may have written.

    Returns:
      int32 ``(blocks, k)`` and a bool scalar: whether they ascend in each block and lie in it.
    """
    low_bits, high_size = _fields(n, k, coding)
    split = words_of(blocks * k, low_bits)
    indices = unpack_bits(words[:split], low_bits, blocks * k).reshape(blocks, k)
    indices = indices.astype(jnp.int32)
    complete = jnp.array(True)
    if high_size:
        bitmap = unpack_bits(words[split:], 1, blocks * high_size).reshape(blocks, high_size)
        ones, complete = _positions_of_ones(bitmap.astype(jnp.int32), k)
        indices |= (ones - _shift(k, coding)) << low_bits
    ascending = jnp.all(indices[:, 1:] > indices[:, :-1])
    inside = jnp.all((indices >= 0) & (indices < n))
    return indices, complete & ascending & inside


def _fields(n: int, k: int, coding: IndexCoding) -> tuple[int, int]:
    """``(bits of each low part, bits of the block's bitmap)``."""
    if coding == "packed":
        return (n - 1).bit_length(), 0
    if coding == "bitmap":
        return 0, n
    low = (n // k).bit_length() - 1
    return low, k + -(-n >> low) - 1


def _shift(k: int, coding: IndexCoding) -> jax.Array:
    """What Elias-Fano adds to high parts, so that equal ones set different bits: ``(1, k)``."""
    steps = jnp.arange(k, dtype=jnp.int32)[None]
    return steps if coding == "elias-fano" else jnp.zeros_like(steps)


def _positions_of_ones(bitmap: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Where each row of ``(blocks, size)`` has its ``k`` ones, and whether all rows have ``k``."""
    blocks, size = bitmap.shape
    rank = jnp.cumsum(bitmap, axis=1) - 1
    slot = jnp.where(bitmap == 1, rank, k)  # a slot of k or more is dropped
    rows = jnp.arange(blocks)[:, None]
    positions = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), bitmap.shape)
    found = jnp.zeros((blocks, k), jnp.int32).at[rows, slot].set(positions, mode="drop")
    return found, jnp.all(rank[:, -1] == k - 1)

"""Index codings: the ``k`` ascending positions of a block in a fixed number of bits.

========== =============================================== ================================
coding     bits per block of ``n``                         cheapest for
========== =============================================== ================================
packed     ``k ceil(log2 n)``                              the smallest ``k``
elias-fano ``k l + k + ceil(n / 2**l) - 1``,               in between
           with ``l = floor(log2(n / k))``
bitmap     ``n``                                           about a quarter of ``n`` and more
bins       ``k ceil(log2(ceil(n / k)))``                   one coefficient of each of ``k`` bins
========== =============================================== ================================

Elias-Fano sends the low ``l`` bits of each position as they are, and the high parts, which
ascend slowly, in unary: a bitmap in which the i-th position sets bit ``high + i``. A block's bitmap
travels as whole words, and what is left of it as one shorter field.
"""

import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Int32, UInt32

from demo_optax.arrays import BoolScalar
from demo_optax.compression.bins import Bins, place_bits
from demo_optax.compression.bits import pack_bits, unpack_bits, words_of

IndexCoding = Literal["packed", "elias-fano", "bitmap"]
PositionCoding = IndexCoding | Literal["bins"]
INDEX_CODINGS = get_args(IndexCoding)


def index_bits(n: int, k: int, coding: PositionCoding) -> int:
    """Bits for the positions of one block."""
    low, bitmap = _fields(n, k, coding)
    return k * low + bitmap


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


def index_words(blocks: int, n: int, k: int, coding: PositionCoding) -> int:
    """Words for the positions of some blocks."""
    low, bitmap = _fields(n, k, coding)
    return words_of(blocks * k, low) + blocks * (bitmap // 32) + words_of(blocks, bitmap % 32)


def encode(
    chosen: Int32[Array, "blocks k"] | Bins, n: int, coding: PositionCoding
) -> UInt32[Array, "words"]:
    """Packs indices, ascending in each block, or places in bins, into ``index_words`` words."""
    indices = chosen.places if isinstance(chosen, Bins) else chosen
    _, k = indices.shape
    low_bits, size = _fields(n, k, coding)
    low = indices.astype(jnp.uint32) & jnp.uint32((1 << low_bits) - 1)
    bitmap = _bitmap((indices >> low_bits) + _shift(k, coding), size)
    whole, rest = bitmap[:, : size // 32], bitmap[:, size // 32 :]
    return jnp.concatenate(
        [pack_bits(low, low_bits), whole.reshape(-1), pack_bits(rest, size % 32)]
    )


def decode(
    words: UInt32[Array, "words"], blocks: int, n: int, k: int, coding: PositionCoding
) -> tuple[Int32[Array, "{blocks} {k}"] | Bins, BoolScalar]:
    """Decodes untrusted words.

    Returns:
      Indices, and whether they ascend in each block and lie in it; or places in bins, and whether
      they lie in the block.
    """
    low_bits, size = _fields(n, k, coding)
    for_low = words_of(blocks * k, low_bits)
    low, whole, rest = jnp.split(words, [for_low, for_low + blocks * (size // 32)])
    indices = unpack_bits(low, low_bits, blocks * k).reshape(blocks, k).astype(jnp.int32)
    if coding == "bins":
        found = Bins(indices)
        return found, jnp.all(found.positions < n)
    complete = jnp.array(True)
    if size:
        bitmap = [whole.reshape(blocks, size // 32)]
        if size % 32:
            bitmap.append(unpack_bits(rest, size % 32, blocks)[:, None])
        ones, complete = _positions_of_ones(jnp.concatenate(bitmap, axis=1), k)
        indices |= (ones - _shift(k, coding)) << low_bits
    ascending = jnp.all(indices[:, 1:] > indices[:, :-1])
    inside = jnp.all((indices >= 0) & (indices < n))
    return indices, complete & ascending & inside


def _fields(n: int, k: int, coding: PositionCoding) -> tuple[int, int]:
    """``(bits of each low part, bits of the block's bitmap)``."""
    low = (n // k).bit_length() - 1
    return {
        "packed": ((n - 1).bit_length(), 0),
        "elias-fano": (low, k + -(-n >> low) - 1),
        "bitmap": (0, n),
        "bins": (place_bits(n, k), 0),
    }[coding]


def _shift(k: int, coding: PositionCoding) -> Int32[Array, "1 {k}"]:
    """What Elias-Fano adds to high parts, so that equal ones set different bits; else zeros."""
    steps = jnp.arange(k, dtype=jnp.int32)[None]
    return steps if coding == "elias-fano" else jnp.zeros_like(steps)


def _is_dense(k: int, size: int) -> bool:
    """Whether bits one by one cost less than comparing ``k`` places with all words."""
    return k * size // 32 > 4096


def _bitmap(ones: Int[Array, "blocks k"], size: int) -> UInt32[Array, "blocks words"]:
    """The ``ceil(size / 32)`` words in which these bits are set."""
    if _is_dense(ones.shape[1], size):
        bits = jnp.zeros((len(ones), -(-size // 32) * 32), jnp.uint32)
        bits = bits.at[jnp.arange(len(ones))[:, None], ones].set(1, unique_indices=True)
        return pack_bits(bits, 1).reshape(len(ones), -1)
    words = jnp.arange(-(-size // 32))[None, None]
    bits = jnp.uint32(1) << (ones % 32).astype(jnp.uint32)
    own = ones[:, :, None] // 32 == words
    return jnp.sum(jnp.where(own, bits[:, :, None], jnp.uint32(0)), 1, jnp.uint32)


def _positions_of_ones(
    bitmap: UInt32[Array, "blocks words"], k: int
) -> tuple[Int32[Array, "blocks {k}"], BoolScalar]:
    """Where the words of each block have their ``k`` ones, and whether all blocks have ``k``."""
    blocks, size = bitmap.shape[0], 32 * bitmap.shape[1]
    if _is_dense(k, size):
        bits = unpack_bits(bitmap.reshape(-1), 1, blocks * size).reshape(blocks, size)
        rank = jnp.cumsum(bits.astype(jnp.int32), axis=1) - 1
        slot = jnp.where(bits == 1, rank, k)  # a slot of k or more is dropped
        places = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[None], bits.shape)
        found = jnp.zeros((blocks, k), jnp.int32)
        found = found.at[jnp.arange(blocks)[:, None], slot].set(places, mode="drop")
        return found, jnp.all(rank[:, -1] == k - 1)
    words = jnp.arange(bitmap.shape[1])[None, None]
    counts = jax.lax.population_count(bitmap).astype(jnp.int32)
    through = jnp.cumsum(counts, axis=1)
    rank = jnp.arange(k, dtype=jnp.int32)[None]
    word = jnp.sum(through[:, None] <= rank[:, :, None], 2, jnp.int32)
    own = word[:, :, None] == words
    rank -= jnp.sum(jnp.where(own, (through - counts)[:, None], 0), 2, jnp.int32)
    bits = jnp.sum(jnp.where(own, bitmap[:, None], jnp.uint32(0)), 2, jnp.uint32)
    place = jnp.zeros_like(rank)
    for width in (16, 8, 4, 2, 1):
        below = bits & jnp.uint32((1 << width) - 1)
        inside = jax.lax.population_count(below).astype(jnp.int32)
        above = rank >= inside
        bits = jnp.where(above, bits >> width, below)
        rank -= jnp.where(above, inside, 0)
        place += jnp.where(above, width, 0)
    return 32 * word + place, jnp.all(through[:, -1] == k)

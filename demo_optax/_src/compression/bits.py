"""Packing of bit fields into 32-bit words, conversion of arrays to words, and a checksum."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int64, UInt32


def words_of(fields: int, bits: int) -> int:
    return math.ceil(fields * bits / 32)


def pack_bits(fields: UInt32[Array, "..."], bits: int) -> UInt32[Array, "words"]:
    """Packs fields below ``2**bits`` into words, least significant bits first.

    The fields have 0 to 32 bits each and fill ``ceil(fields.size * bits / 32)`` words.

    Example:
      >>> [hex(word) for word in pack_bits(jnp.array([0xABC, 0xDEF, 0x123], jnp.uint32), 12)]
      ['0x23defabc', '0x1']
    """
    words = words_of(fields.size, bits)
    if words == 0:
        return jnp.zeros(0, jnp.uint32)
    period, word, shift = _period(bits)
    fields = fields.reshape(-1)
    fields = jnp.pad(fields, (0, -fields.size % len(word))).reshape(-1, len(word))
    low = fields << shift
    high = jnp.where(shift > 0, fields >> (32 - shift) % 32, 0)
    # Each word is the sum of the parts that lie in it, since their bits are disjoint.
    columns = np.arange(period)[None]
    in_low, in_high = ((word[:, None] + i == columns)[None].astype(np.uint32) for i in (0, 1))
    packed = jnp.sum(low[:, :, None] * in_low + high[:, :, None] * in_high, 1, jnp.uint32)
    return packed.reshape(-1)[:words]


def unpack_bits(words: UInt32[Array, "words"], bits: int, count: int) -> UInt32[Array, "{count}"]:
    """Inverts `pack_bits`."""
    if count * bits == 0:
        return jnp.zeros(count, jnp.uint32)
    period, word, shift = _period(bits)
    words = jnp.pad(words, (0, -words.size % period)).reshape(-1, period)
    fields = words[:, word] >> shift
    if period > 1:  # some fields begin in one word and end in the next
        high = words[:, np.minimum(word + 1, period - 1)] << (32 - shift) % 32
        fields |= jnp.where(shift > 0, high, 0)
    return (fields & np.uint32((1 << bits) - 1)).reshape(-1)[:count]


def _period(bits: int) -> tuple[int, Int64[np.ndarray, "fields"], UInt32[np.ndarray, "1 fields"]]:
    """Returns how many words pass until a field begins at a word's first bit again.

    For each field in these words, it also returns the word and the bit where the field begins.
    """
    divisor = math.gcd(bits, 32)
    word, shift = np.divmod(np.arange(32 // divisor) * bits, 32)
    return bits // divisor, word, shift.astype(np.uint32)[None]


def checksum(words: UInt32[Array, "..."]) -> UInt32[Array, ""]:
    """Returns a sum, modulo 2**32, of hashes of each word together with its place.

    It always changes with a single word, and misses other changes with a probability of 2**-32. A
    sum of the words themselves, or of anything linear in them, would miss two flipped signs or two
    swapped values.

    >>> import jax.numpy as jnp
    >>> checksum(jnp.uint32([1, 2])) == checksum(jnp.uint32([2, 1]))
    Array(False, dtype=bool)
    """
    places = positions(words.shape, contiguous_strides(words.shape))
    return jnp.sum(hashed(words, places), dtype=jnp.uint32)


def hashed(seeds: UInt32[Array, "..."], places: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Hashes a seed and a place by MurmurHash3's mixer, one-to-one for each seed."""
    x = seeds + places * jnp.uint32(0x9E3779B9)
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def positions(shape: tuple[int, ...], strides: tuple[int, ...]) -> UInt32[Array, "..."]:
    """Returns the flat position of each element of an array with this shape and strides."""
    result = jnp.zeros(shape, jnp.uint32)
    for axis, stride in enumerate(strides):
        index = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        result += index * jnp.uint32(stride % 2**32)
    return result


def to_words(x: Array) -> UInt32[Array, "..."]:
    """Returns the bits of an array, as one word per element or several along one more axis."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([to_words(x.real), to_words(x.imag)])
    if x.dtype == bool:
        return x.astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(x, _unsigned(x.dtype)).astype(jnp.uint32)


def from_words(words: UInt32[Array, "..."], like: Array) -> Array:
    """Inverts `to_words`, with the dtype of ``like``."""
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(like))
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        return jax.lax.complex(*(from_words(part, like.real) for part in words))
    if like.dtype == bool:
        return words.astype(bool)
    return jax.lax.bitcast_convert_type(words.astype(_unsigned(like.dtype)), like.dtype)


def _unsigned(dtype: DTypeLike) -> str:
    """Returns the unsigned integer type as wide as a dtype, of at most 32 bits."""
    info = jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo
    return f"uint{min(info(dtype).bits, 32)}"


def round_stochastically(
    x: Float[Array, "*shape"], bits: UInt32[Array, "*shape"], dtype: DTypeLike
) -> Float[Array, "*shape"]:
    """Rounds numbers up or down to bfloat16 at random, so that the expected value is the number.

    Rounding to nearest would lose every change that is smaller than half a step. The upper 16 bits
    of a float32 are a bfloat16, so random ``bits`` are added to the lower ones, which are then
    dropped. A finite number never becomes infinite. Other dtypes are rounded to nearest.
    """
    if jnp.dtype(dtype) != jnp.bfloat16:
        return x.astype(dtype)
    largest = float(jnp.finfo(jnp.bfloat16).max)
    words = to_words(jnp.clip(x.astype(jnp.float32), -largest, largest))
    words = (words + (bits >> 16)) >> 16
    rounded = jax.lax.bitcast_convert_type(words.astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isnan(x), jnp.bfloat16(jnp.nan), rounded)

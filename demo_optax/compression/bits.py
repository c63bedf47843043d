"""Fields of any number of bits, packed into 32-bit words without gaps."""

import math

import jax
import jax.numpy as jnp


def words_of(fields: int, bits: int) -> int:
    """Words that a number of fields takes."""
    return math.ceil(fields * bits / 32)


def pack_bits(fields: jax.Array, bits: int) -> jax.Array:
    """Packs the low ``bits`` bits of each field into words, least significant first.

    Args:
      fields: uint32 of any shape, each below ``2**bits``.
      bits: from 0 to 32.

    Returns:
      uint32 ``(ceil(fields.size * bits / 32),)``.

    Example:
      >>> [hex(word) for word in pack_bits(jnp.array([0xABC, 0xDEF, 0x123], jnp.uint32), 12)]
      ['0x23defabc', '0x1']
    """
    words = words_of(fields.size, bits)
    if words == 0:
        return jnp.zeros(0, jnp.uint32)
    per_period, period = _period(bits)
    fields = fields.reshape(-1)
    fields = jnp.pad(fields, (0, -fields.size % per_period)).reshape(-1, per_period)
    columns = [jnp.zeros_like(fields[:, 0])] * period
    for i in range(per_period):
        word, shift = divmod(i * bits, 32)
        columns[word] |= fields[:, i] << shift
        if shift + bits > 32:
            columns[word + 1] |= fields[:, i] >> (32 - shift)
    return jnp.stack(columns, axis=1).reshape(-1)[:words]


def unpack_bits(words: jax.Array, bits: int, count: int) -> jax.Array:
    """The inverse of `pack_bits`: ``count`` fields of ``bits`` bits, uint32 ``(count,)``."""
    if count * bits == 0:
        return jnp.zeros(count, jnp.uint32)
    per_period, period = _period(bits)
    words = jnp.pad(words, (0, -words.size % period)).reshape(-1, period)
    mask = jnp.uint32((1 << bits) - 1)
    fields = []
    for i in range(per_period):
        word, shift = divmod(i * bits, 32)
        field = words[:, word] >> shift
        if shift + bits > 32:
            field |= words[:, word + 1] << (32 - shift)
        fields.append(field & mask)
    return jnp.stack(fields, axis=1).reshape(-1)[:count]


def _period(bits: int) -> tuple[int, int]:
    """``(fields, words)`` after which fields begin at a word's first bit again."""
    shared = math.gcd(bits, 32)
    return 32 // shared, bits // shared

"""The bytes of one step: what a worker sends, as one array of 32-bit words.

    | header, 4 words | group 0: indices | group 0: values | group 1: indices | ...

A group holds the blocks of equal size of all tensors, in the order of the tensors. Its indices
and its values are fields of a fixed number of bits, packed without gaps; each section starts at
a whole word. The layout follows from shapes and settings alone.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from demo_optax.compression import indices as index_coding
from demo_optax.compression import values as value_coding
from demo_optax.compression.values import ValueCoding

VALID = 0x44654D6F  # "DeMo": the first word of a packet that counts


@dataclasses.dataclass(frozen=True)
class Group:
    """Blocks of one size: ``k`` of ``block_size`` coefficients are sent of each of ``blocks``."""

    blocks: int
    block_size: int
    k: int

    @property
    def index_bits(self) -> int:
        return index_coding.index_bits(self.block_size, self.k)

    def words(self, bits: int) -> int:
        """Words that one field of ``bits`` bits for each coefficient takes."""
        return math.ceil(self.blocks * self.k * bits / 32)


@dataclasses.dataclass(frozen=True)
class PacketLayout:
    """Where everything lies in a packet."""

    groups: tuple[Group, ...]
    values: ValueCoding

    @property
    def words(self) -> int:
        """Length of a packet in 32-bit words."""
        bits = value_coding.value_bits(self.values)
        return len(Header._fields) + sum(g.words(g.index_bits) + g.words(bits) for g in self.groups)


class Header(NamedTuple):
    """What a worker says about its message.

    Attributes:
      validity: uint32, `VALID` in a packet that counts.
      momentum: float32, energy (sum of squares) of the momentum before anything was taken out.
      sent: float32, energy of the values as the others decode them.
      residual: float32, energy of the momentum afterwards.
    """

    validity: jax.Array
    momentum: jax.Array
    sent: jax.Array
    residual: jax.Array


class Message(NamedTuple):
    """Coefficients of all groups.

    Attributes:
      indices: for each group int32 ``(blocks, k)``, positions in the block, unique in each.
      values: for each group floats ``(blocks, k)``, float32 where they were decoded.
    """

    indices: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


def encode(layout: PacketLayout, message: Message) -> jax.Array:
    """The words behind the header, uint32."""
    bits = value_coding.value_bits(layout.values)
    sections = [jnp.zeros(0, jnp.uint32)]
    for group, indices, values in zip(layout.groups, *message, strict=True):
        sections.append(pack_bits(indices.astype(jnp.uint32), group.index_bits))
        sections.append(pack_bits(value_coding.encode(values, layout.values), bits))
    return jnp.concatenate(sections)


def decode(layout: PacketLayout, body: jax.Array) -> Message:
    """The inverse of `encode`: positions exactly, values as rounded by their coding."""
    bits = value_coding.value_bits(layout.values)
    indices, values, start = [], [], 0

    def fields(group, width):
        nonlocal start
        stop = start + group.words(width)
        unpacked = unpack_bits(body[start:stop], width, group.blocks * group.k)
        start = stop
        return unpacked.reshape(group.blocks, group.k)

    for group in layout.groups:
        if group.index_bits:
            indices.append(fields(group, group.index_bits).astype(jnp.int32))
        else:
            everything = jnp.arange(group.k, dtype=jnp.int32)
            indices.append(jnp.broadcast_to(everything, (group.blocks, group.k)))
        values.append(value_coding.decode(fields(group, bits), layout.values))
    return Message(tuple(indices), tuple(values))


def add_header(header: Header, body: jax.Array) -> jax.Array:
    """The whole packet: uint32 ``(layout.words,)``."""
    numbers = jnp.stack(header[1:]).astype(jnp.float32)
    words = jax.lax.bitcast_convert_type(numbers, jnp.uint32)
    return jnp.concatenate([header.validity.astype(jnp.uint32)[None], words, body])


def split_header(packet: jax.Array) -> tuple[Header, jax.Array]:
    """The inverse of `add_header`."""
    words, body = jnp.split(packet, [len(Header._fields)])
    numbers = jax.lax.bitcast_convert_type(words[1:], jnp.float32)
    return Header(words[0], *numbers), body


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
    words = math.ceil(fields.size * bits / 32)
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
    if count == 0:
        return jnp.zeros(0, jnp.uint32)
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

"""The bytes of one step: what a worker sends, as one array of 32-bit words.

    | header | group 0: indices, step sizes, values | group 1: indices, step sizes, values | ...

A group holds the blocks of equal size of all tensors, in the order of the tensors. Its sections
are fields of a fixed number of bits, packed without gaps; each section starts at a whole word.
The layout follows from shapes and settings alone.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from demo_optax.compression import indices as index_codings
from demo_optax.compression import values as value_codings
from demo_optax.compression.bits import checksum, pack_bits, unpack_bits, words_of
from demo_optax.compression.indices import IndexCoding
from demo_optax.compression.values import Fields, ValueCoding

_SEAL = 0x44654D6F  # "DeMo"
_HEADER_WORDS = 5  # validity, then the four numbers of a Header


@dataclasses.dataclass(frozen=True)
class Group:
    """Blocks of one size: ``k`` of ``block_size`` coefficients are sent of each of ``blocks``.

    Attributes:
      blocks: how many.
      block_size: coefficients of a block.
      k: how many of them are sent.
      indices: coding of their positions; None where every worker knows them.
      values: coding of their values.
    """

    blocks: int
    block_size: int
    k: int
    indices: IndexCoding | None
    values: ValueCoding

    @property
    def sections(self) -> tuple[int, int, int]:
        """Words of indices, step sizes and values."""
        indices = 0
        if self.indices is not None:
            indices = index_codings.index_words(self.blocks, self.block_size, self.k, self.indices)
        steps = words_of(self.blocks, value_codings.step_bits(self.values))
        return indices, steps, words_of(self.blocks * self.k, value_codings.value_bits(self.values))


@dataclasses.dataclass(frozen=True)
class PacketLayout:
    """Where everything lies in a packet."""

    groups: tuple[Group, ...]

    @property
    def words(self) -> int:
        """Length of a packet in 32-bit words."""
        return _HEADER_WORDS + sum(sum(group.sections) for group in self.groups)


class Header(NamedTuple):
    """What a worker says about its message.

    Attributes:
      fingerprint: float32, a number that tells different local gradients apart.
      momentum: float32, energy (sum of squares) of the momentum before anything was taken out.
      sent: float32, the part of it that the others get: what was selected, less rounding errors.
      residual: float32, energy of the momentum afterwards.
    """

    fingerprint: jax.Array
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


def encode(
    layout: PacketLayout,
    message: Message,
    real: Sequence[jax.Array | None],
    key: jax.Array | None = None,
) -> jax.Array:
    """The words behind the header, uint32.

    Args:
      layout: of the packet.
      message: what to send.
      real: for each group which of its places are not padding, or None where all are real.
      key: for stochastic rounding; None rounds to the nearest.
    """
    sections = [jnp.zeros(0, jnp.uint32)]
    groups = zip(layout.groups, *message, real, strict=True)
    for number, (group, indices, values, mask) in enumerate(groups):
        own_key = None if key is None else jax.random.fold_in(key, number)
        if group.indices is not None:
            sections.append(index_codings.encode(indices, group.block_size, group.indices))
        fields = value_codings.encode(values, group.values, own_key, mask)
        sections.append(pack_bits(fields.steps, value_codings.step_bits(group.values)))
        sections.append(pack_bits(fields.values, value_codings.value_bits(group.values)))
    return jnp.concatenate(sections)


def decode(
    layout: PacketLayout, body: jax.Array, known: tuple[jax.Array | None, ...]
) -> tuple[Message, jax.Array]:
    """What words behind a header say, whoever wrote them.

    Args:
      layout: of the packet.
      body: uint32, the words behind the header.
      known: for each group the positions that every worker knows, or None where they travel.

    Returns:
      The message, and a bool scalar: whether every position ascends within its block and every
      value is finite. Where not, positions may lie anywhere.
    """
    all_indices, all_values, sound = [], [], jnp.array(True)
    for group, indices in zip(layout.groups, known, strict=True):
        for_indices, for_steps, for_values = group.sections
        index_words, step_words, value_words, body = jnp.split(
            body, [for_indices, for_indices + for_steps, for_indices + for_steps + for_values]
        )
        if indices is None:
            assert group.indices is not None
            indices, fine = index_codings.decode(
                index_words, group.blocks, group.block_size, group.k, group.indices
            )
            sound &= fine
        fields = Fields(
            unpack_bits(step_words, value_codings.step_bits(group.values), group.blocks),
            unpack_bits(
                value_words, value_codings.value_bits(group.values), group.blocks * group.k
            ).reshape(group.blocks, group.k),
        )
        values, fine = value_codings.decode(fields, group.values)
        all_indices.append(indices)
        all_values.append(values)
        sound &= fine
    return Message(tuple(all_indices), tuple(all_values)), sound


def seal(header: Header, body: jax.Array, count: jax.Array) -> jax.Array:
    """The whole packet, uint32 ``(layout.words,)``.

    Its first word is the checksum of the rest, or its complement where the packet must not
    ``count``; so whatever was changed on the way, the packet counts no more.
    """
    numbers = jnp.stack(header).astype(jnp.float32)
    rest = jnp.concatenate([jax.lax.bitcast_convert_type(numbers, jnp.uint32), body])
    validity = checksum(rest) ^ jnp.uint32(_SEAL)
    return jnp.concatenate([jnp.where(count, validity, ~validity)[None], rest])


def unseal(packet: jax.Array) -> tuple[Header, jax.Array, jax.Array]:
    """Header, body, and whether the validity word is right and the numbers finite."""
    numbers = jax.lax.bitcast_convert_type(packet[1:_HEADER_WORDS], jnp.float32)
    intact = (packet[0] ^ jnp.uint32(_SEAL) == checksum(packet[1:])) & jnp.all(
        jnp.isfinite(numbers)
    )
    return Header(*numbers), packet[_HEADER_WORDS:], intact

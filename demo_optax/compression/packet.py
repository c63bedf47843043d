"""The bytes of one step: what a worker sends, as one array of 32-bit words.

    | checksum | numbers | section 0: indices, scales, values | section 1: ... | zeros |

A section holds the blocks of one shape of all tensors, in the order of the plan: fields of a fixed
number of bits, packed without gaps, each kind from a whole word on. The layout follows from shapes
and settings alone. The length is a multiple of 128 words, without which XLA makes an all-reduce of
the all-gather for TPUs.
"""

import dataclasses
import functools
import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, PRNGKeyArray, UInt32

from demo_optax.arrays import BoolScalar, IntScalar, Positions, Values
from demo_optax.compression import indices as index_codings
from demo_optax.compression import values as value_codings
from demo_optax.compression.bins import Bins
from demo_optax.compression.bits import checksum, pack_bits, unpack_bits, words_of
from demo_optax.compression.indices import PositionCoding
from demo_optax.compression.runs import Run
from demo_optax.compression.values import Fields, ValueCoding

NUMBERS = 7  # float32: a `demo_optax.metrics.Report`, and the energy of the packet's message
MULTIPLE = 128


@dataclasses.dataclass(frozen=True)
class Section:
    """Blocks of one size: ``k`` of ``block_size`` coefficients are sent of each of ``blocks``.

    Attributes:
      blocks: how many.
      block_size: coefficients of a block.
      k: how many of them are sent.
      index_coding: of their positions; None where every worker knows them.
      value_coding: of their values.
      draw: what positions that every worker knows follow from, a selection and a seed; None of
        others. It is no part of the layout, but packets that wait must not be read with another.
    """

    blocks: int
    block_size: int
    k: int
    index_coding: PositionCoding | None
    value_coding: ValueCoding
    draw: tuple[str, int] | None = None

    @property
    def parts(self) -> tuple[int, int, int]:
        """Words of indices, scales and values."""
        indices = 0
        if self.index_coding is not None:
            indices = index_codings.index_words(
                self.blocks, self.block_size, self.k, self.index_coding
            )
        scales = words_of(self.blocks, value_codings.scale_bits(self.value_coding))
        values = words_of(self.blocks * self.k, value_codings.value_bits(self.value_coding))
        return indices, scales, values


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where everything lies in a packet.

    Attributes:
      sections: one for each shape of blocks.
      numbers: float32, that the sender reports beside them.
      multiple: of which the packet's length is one, in words.
    """

    sections: tuple[Section, ...]
    numbers: int = NUMBERS
    multiple: int = MULTIPLE

    @property
    def words(self) -> int:
        """Length of a packet in 32-bit words."""
        used = 1 + self.numbers + sum(sum(section.parts) for section in self.sections)
        return used + -used % self.multiple


class Message(NamedTuple):
    """Coefficients of all sections.

    Attributes:
      positions: for each section, in the block, unique in each.
      values: for each section.
    """

    positions: tuple[Positions | Run | Bins, ...]
    values: tuple[Values, ...]


class Travelled(NamedTuple):
    """What travels of a message.

    Attributes:
      positions: for each section; None where every worker knows them.
      values: for each section.
    """

    positions: tuple[Positions | Bins | None, ...]
    values: tuple[Values, ...]


@functools.partial(jax.jit, static_argnums=0)
def encode(
    layout: Layout, message: Travelled, key: PRNGKeyArray | None = None
) -> UInt32[Array, "words"]:
    """Encodes a message as the packet's body.

    Args:
      layout: of the packet.
      message: what to send.
      key: for stochastic rounding; None rounds to the nearest.
    """
    words: list[Array] = []
    for number, (section, positions, values) in enumerate(
        zip(layout.sections, *message, strict=True)
    ):
        own_key = None if key is None else jax.random.fold_in(key, number)
        if section.index_coding is not None:
            assert positions is not None
            words.append(index_codings.encode(positions, section.block_size, section.index_coding))
        fields = value_codings.encode(values, section.value_coding, own_key)
        words.append(pack_bits(fields.scales, value_codings.scale_bits(section.value_coding)))
        words.append(pack_bits(fields.values, value_codings.value_bits(section.value_coding)))
    used = sum(len(x) for x in words)
    return jnp.concatenate(
        [*words, jnp.zeros(layout.words - 1 - layout.numbers - used, jnp.uint32)]
    )


@functools.partial(jax.jit, static_argnums=0)
def decode(layout: Layout, body: UInt32[Array, "words"]) -> tuple[Travelled, BoolScalar]:
    """Decodes an untrusted body.

    Args:
      layout: of the packet.
      body: as from `encode`.

    Returns:
      What travelled, and whether every position lies in its block, behind those before it or in
      its bin, and every value is finite. Where not, positions may lie anywhere.
    """
    all_positions: list[Positions | Bins | None] = []
    all_values: list[Values] = []
    valid = jnp.array(True)
    for section in layout.sections:
        blocks, k, coding = section.blocks, section.k, section.value_coding
        for_indices, for_scales, for_values = section.parts
        index_words, scale_words, value_words, body = jnp.split(
            body, [for_indices, for_indices + for_scales, for_indices + for_scales + for_values]
        )
        positions, inside = None, True
        if section.index_coding is not None:
            positions, inside = index_codings.decode(
                index_words, blocks, section.block_size, k, section.index_coding
            )
        scales = unpack_bits(scale_words, value_codings.scale_bits(coding), blocks)
        fields = unpack_bits(value_words, value_codings.value_bits(coding), blocks * k)
        values, finite = value_codings.decode(Fields(scales, fields.reshape(blocks, k)), coding)
        valid &= inside & finite
        all_positions.append(positions)
        all_values.append(values)
    return Travelled(tuple(all_positions), tuple(all_values)), valid


class Origin(NamedTuple):
    """Where a packet comes from. It does not travel, but its checksum does."""

    step: IntScalar
    worker: IntScalar


def seal(
    layout: Layout,
    numbers: Float32[Array, "numbers"],
    body: UInt32[Array, "words"],
    count: BoolScalar,
    origin: Origin,
) -> UInt32[Array, "1+numbers+words"]:
    """Makes the packet of its numbers and its body.

    Its first word is the checksum of the rest, of its layout and its origin, or the complement
    where the packet must not ``count``; so a packet that was changed on the way, or comes from
    another step or worker, counts no more.
    """
    rest = jnp.concatenate([jax.lax.bitcast_convert_type(numbers, jnp.uint32), body])
    validity = _validity(layout, rest, origin)
    return jnp.concatenate([jnp.where(count, validity, ~validity)[None], rest])


class Opened(NamedTuple):
    """An untrusted packet.

    Attributes:
      numbers: float32 ``(layout.numbers,)``.
      body: uint32, its other words.
      intact: whether the checksum is right and the numbers are finite.
    """

    numbers: Float32[Array, "..."]
    body: UInt32[Array, "..."]
    intact: Bool[Array, "..."]


def unseal(layout: Layout, packet: UInt32[Array, "words"], origin: Origin) -> Opened:
    """Opens a packet that is to be of this origin."""
    validity, words, body = jnp.split(packet, [1, 1 + layout.numbers])
    numbers = jax.lax.bitcast_convert_type(words, jnp.float32)
    intact = validity[0] == _validity(layout, packet[1:], origin)
    return Opened(numbers, body, intact & jnp.all(jnp.isfinite(numbers)))


def _validity(layout: Layout, rest: UInt32[Array, "words"], origin: Origin) -> UInt32[Array, ""]:
    of_layout = jnp.uint32(zlib.crc32(repr(layout).encode()))
    return checksum(rest) ^ checksum(jnp.stack(origin).astype(jnp.uint32)) ^ of_layout

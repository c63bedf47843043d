"""The bytes of one step: what a worker sends, as one array of 32-bit words.

    | checksum | header | extra | section 0: positions, scales, values | section 1: ... | zeros |

A section holds the blocks of one shape of all tensors, in the order of the plan: fields of a fixed
number of bits, packed without gaps, each kind from a whole word on. The layout follows from shapes
and settings alone. The length is a multiple of 128 words, without which XLA makes an all-reduce of
the all-gather for TPUs.
"""

import dataclasses
import functools
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, Shaped, UInt32

from demo_optax.arrays import (
    BoolScalar,
    FloatScalar,
    IntScalar,
    Positions,
    Values,
    clamp_to_float32,
)
from demo_optax.compression import values as value_codings
from demo_optax.compression.bits import checksum, pack_bits, unpack_bits, words_of
from demo_optax.compression.values import CodedValues, ValueCoding

MULTIPLE = 128

Packets = UInt32[Array, "packets words"]


class Header(NamedTuple):
    """What a packet says of its worker's step: scalars, or with an axis of packets.

    Every field travels as the 32 bits of one word.

    Attributes:
      fingerprint: uint32, differs where gradients do; 0 for a gradient of zeros.
      received: uint32, digest of the packets that the worker got until the step before.
      restarted: uint32, blocks of its momentum that started again from zero.
      momentum_energy: float32, sum of squares of the momentum before anything was taken out.
      sent_energy: float32, the part of it that the others get: that of what was selected, less
        that of the rounding errors.
      residual_energy: float32, energy of the momentum afterwards.
      message_energy: float32, energy of the values in this packet.
      weight: float32, of the message in the mean over workers; 1 unless the update says otherwise.
    """

    fingerprint: UInt32[Array, "..."]
    received: UInt32[Array, "..."]
    restarted: UInt32[Array, "..."]
    momentum_energy: Float32[Array, "..."]
    sent_energy: Float32[Array, "..."]
    residual_energy: Float32[Array, "..."]
    message_energy: Float32[Array, "..."]
    weight: Float32[Array, "..."]


_DTYPES = ("uint32",) * 3 + ("float32",) * 5  # of the header's fields
_NAMES_IN_FORMAT = {
    "PacketLayout": "Layout",
    "SharedSlice": "SharedRun",
    "AllCoefficients": "Everything",
}


@dataclasses.dataclass(frozen=True)
class Section:
    """Blocks of one size.

    Attributes:
      num_blocks: how many.
      selector: which of their coefficients are sent (`demo_optax.compression.selection`).
      value_coding: of their values.
    """

    num_blocks: int
    selector: Any
    value_coding: ValueCoding

    @property
    def word_counts(self) -> tuple[int, int, int]:
        """Words of positions, scales and values."""
        positions = (
            self.selector.position_words(self.num_blocks) if self.selector.sends_positions else 0
        )
        scales = words_of(self.num_blocks, value_codings.scale_bits(self.value_coding))
        bits = value_codings.value_bits(self.value_coding)
        return positions, scales, words_of(self.num_blocks * self.selector.k, bits)


@dataclasses.dataclass(frozen=True)
class PacketLayout:
    """Where everything lies in a packet.

    Attributes:
      sections: one for each shape of blocks.
      extra: words that an exchange puts after the header.
      multiple: the packet's length is padded to a multiple of this many words.
    """

    sections: tuple[Section, ...]
    extra: int = 0
    multiple: int = MULTIPLE

    @property
    def head(self) -> int:
        """Words in front of the sections."""
        return 1 + len(Header._fields) + self.extra

    @property
    def words(self) -> int:
        """Length of a packet in 32-bit words."""
        used = self.head + sum(sum(section.word_counts) for section in self.sections)
        return used + -used % self.multiple

    def per_owner(self, owners: int) -> "PacketLayout":
        """The layout of one owner's equal share of the blocks; the last shares may be padded."""

        def share_of(section: Section) -> Section:
            return dataclasses.replace(section, num_blocks=-(-section.num_blocks // owners))

        return dataclasses.replace(self, sections=tuple(map(share_of, self.sections)))


class Message(NamedTuple):
    """Coefficients of all sections.

    Attributes:
      positions: for each section, as its selector has them; None where a packet was decoded that
        does not hold them.
      values: for each section.
    """

    positions: tuple[Any, ...]
    values: tuple[Values | Float32[Array, "workers _blocks _k"], ...]


class Origin(NamedTuple):
    """Where a packet comes from. It does not travel, but is part of the checksum.

    Attributes:
      step: in which it was sealed.
      number: among the packets of all workers.
    """

    step: IntScalar
    number: Int32[Array, "..."]


def encode(sections: Sequence[Section], selected: Message) -> tuple[list[CodedValues], Message]:
    """Rounds values as their coding does.

    Returns:
      The coded values of each section, and the message that the others decode.
    """
    coded = [
        value_codings.encode(values, section.value_coding)
        for section, values in zip(sections, selected.values, strict=True)
    ]
    decoded = [
        value_codings.decode(own, section.value_coding)[0]
        for section, own in zip(sections, coded, strict=True)
    ]
    return coded, Message(selected.positions, tuple(decoded))


def build(
    layout: PacketLayout,
    header: Header,
    coded: Sequence[CodedValues],
    message: Message,
    valid: BoolScalar,
    origin: Origin,
    extra: UInt32[Array, "extra"] | None = None,
) -> Packets:
    """Seals a message in packets, one for each owner of an equal share of its blocks.

    The first word of each is a checksum of the rest, of its layout and its origin; the complement
    of it, if the packet is to be rejected. A packet that was changed on the way, or comes from
    another step or worker, is rejected too.

    Args:
      layout: of one of them.
      header: for all of them, but for the energy of the message.
      coded: the coded values of each section.
      message: that these decode to.
      valid: whether the packets may be accepted.
      origin: of them, whose ``number`` has an entry for each.
      extra: words for ``layout.extra``; none by default.
    """
    owners = len(origin.number)
    divided: Any = functools.partial(divide_rows, owners=owners)
    shares = jax.tree.map(divided, coded)
    energies = jnp.zeros(owners, jnp.float32)
    for values in message.values:
        energies += jnp.sum(jnp.square(divided(values)), (1, 2))
    positions = [
        divided(p, mode="edge")
        if section.selector.sends_positions
        else jnp.zeros((owners, 0), jnp.int32)
        for section, p in zip(layout.sections, message.positions, strict=True)
    ]

    def seal(
        energy: FloatScalar,
        positions: list[Int32[Array, "..."]],
        coded: list[CodedValues],
        number: Int32[Array, ""],
    ) -> UInt32[Array, "..."]:
        head = header._replace(message_energy=clamp_to_float32(energy))
        words = [jax.lax.bitcast_convert_type(x, jnp.uint32)[None] for x in head]
        words += [] if extra is None else [extra]
        for section, places, own in zip(layout.sections, positions, coded, strict=True):
            coding = section.value_coding
            if section.selector.sends_positions:
                words.append(section.selector.encode(places))
            words.append(pack_bits(own.scales, value_codings.scale_bits(coding)))
            words.append(pack_bits(own.values, value_codings.value_bits(coding)))
        rest = jnp.concatenate(words)
        rest = jnp.pad(rest, (0, layout.words - 1 - len(rest)))
        expected = _expected_checksum(layout, rest, Origin(origin.step, number))
        return jnp.concatenate([jnp.where(valid, expected, ~expected)[None], rest])

    return jax.vmap(seal)(energies, positions, shares, origin.number)


def parse_headers(
    layout: PacketLayout, packets: Packets, origin: Origin
) -> tuple[Header, UInt32[Array, "packets extra"], Bool[Array, "packets"]]:
    """The headers and extra words of untrusted packets, and whether they are intact.

    Intact is one whose checksum is right for its origin and whose header is finite.
    """

    def open_one(
        packet: UInt32[Array, "words"], number: Int32[Array, ""]
    ) -> tuple[Header, UInt32[Array, "extra"], BoolScalar]:
        expected = _expected_checksum(layout, packet[1:], Origin(origin.step, number))
        words = packet[1 : 1 + len(Header._fields)]
        fields = [jax.lax.bitcast_convert_type(w, t) for w, t in zip(words, _DTYPES, strict=True)]
        finite = [jnp.isfinite(x) for x in fields if x.dtype == jnp.float32]
        intact = (packet[0] == expected) & jnp.all(jnp.stack(finite))
        return Header(*fields), packet[1 + len(Header._fields) : layout.head], intact

    return jax.vmap(open_one)(packets, origin.number)


def decode(layout: PacketLayout, packets: Packets) -> tuple[Message, Bool[Array, "packets"]]:
    """Decodes untrusted packets.

    Returns:
      The messages, each array with an axis of packets in front, and whether every position lies
      where its selector may send one and every value is finite. Where not, positions may lie
      anywhere.
    """
    return jax.vmap(functools.partial(_decode, layout))(packets)


def _decode(layout: PacketLayout, packet: UInt32[Array, "words"]) -> tuple[Message, BoolScalar]:
    all_positions: list[Positions | None] = []
    all_values: list[Values] = []
    valid = jnp.array(True)
    rest = packet[layout.head :]
    for section in layout.sections:
        num_blocks, selector, coding = section.num_blocks, section.selector, section.value_coding
        for_positions, for_scales, _ = section.word_counts
        position_words, scale_words, value_words, rest = jnp.split(
            rest, [for_positions, for_positions + for_scales, sum(section.word_counts)]
        )
        positions = None
        if selector.sends_positions:
            positions, inside = selector.decode(position_words, num_blocks)
            valid &= inside
        scales = unpack_bits(scale_words, value_codings.scale_bits(coding), num_blocks)
        coded = unpack_bits(value_words, value_codings.value_bits(coding), num_blocks * selector.k)
        coded = CodedValues(scales, coded.reshape(num_blocks, selector.k))
        values, finite = value_codings.decode(coded, coding)
        valid &= finite
        all_positions.append(positions)
        all_values.append(values)
    return Message(tuple(all_positions), tuple(all_values)), valid


def divide_rows(
    x: Shaped[Array, "blocks *k"], owners: int, mode: str = "constant"
) -> Shaped[Array, "{owners} share *k"]:
    """Rows for each owner; where they are too few, zeros follow, or the last again ("edge")."""
    share = -(-len(x) // owners)
    padded = jnp.pad(x, [(0, owners * share - len(x))] + [(0, 0)] * (x.ndim - 1), mode)
    return padded.reshape(owners, share, *x.shape[1:])


def merge_rows(
    shares: Shaped[Array, "owners share k"], num_blocks: int
) -> Shaped[Array, "{num_blocks} k"]:
    """The rows of all owners: the inverse of `divide_rows`."""
    return shares.reshape(-1, shares.shape[2])[:num_blocks]


def _expected_checksum(
    layout: PacketLayout, rest: UInt32[Array, "words"], origin: Origin
) -> UInt32[Array, ""]:
    layout_hash = jnp.uint32(_layout_hash(layout))
    return checksum(rest) ^ checksum(jnp.stack(origin).astype(jnp.uint32)) ^ layout_hash


def _layout_hash(layout: PacketLayout) -> int:
    """CRC-32 of the layout, with its classes under their names in the packet format.

    So packets in a checkpoint or a store stay valid when a class is renamed.
    """
    text = repr(layout)
    for name, name_in_format in _NAMES_IN_FORMAT.items():
        text = text.replace(f"{name}(", f"{name_in_format}(")
    return zlib.crc32(text.encode())

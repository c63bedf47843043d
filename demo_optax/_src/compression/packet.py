"""The packet that a worker sends in one step, as one array of 32-bit words.

    | checksum | header | extra | section 0: positions, scales, values | section 1: ... | zeros |

A section holds the blocks of one shape of all tensors, in the order of the plan. Positions, scales
and values are fields of a fixed number of bits, packed without gaps, and each of the three begins
at a new word. The layout follows from shapes and settings alone. The length is a multiple of 128
words, since XLA would otherwise replace the all-gather by an all-reduce on TPUs.
"""

import dataclasses
import functools
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, Shaped, UInt32

from demo_optax._src.arrays import (
    BoolScalar,
    FloatScalar,
    IntScalar,
    Positions,
    Values,
    clamp_to_float32,
)
from demo_optax._src.compression import values as value_codings
from demo_optax._src.compression.bits import checksum, pack_bits, unpack_bits, words_of
from demo_optax._src.compression.values import CodedValues, Coding, ValueCoding, coding_of

MULTIPLE = 128

Packets = UInt32[Array, "packets words"]


class Header(NamedTuple):
    """A packet's report on its worker's step: scalars, or arrays with an axis of packets.

    Every field is one 32-bit word of the packet.

    Attributes:
      fingerprint: hash of the gradient; 0 for a gradient of zeros.
      received: digest of the packets that the worker accepted up to the previous step.
      restarted: number of blocks of the momentum that were reset to zero, plus the preconditioner.
      momentum_energy: sum of squares of the momentum before the subtraction.
      sent_energy: energy of the selected coefficients minus the energy of the rounding errors.
      residual_energy: energy of the momentum after the subtraction.
      message_energy: energy of the values in this packet.
      weight: weight of the message in the mean over workers; 1 unless the update was given a
        ``message_weight``.
    """

    fingerprint: UInt32[Array, "..."]
    received: UInt32[Array, "..."]
    restarted: UInt32[Array, "..."]
    momentum_energy: Float32[Array, "..."]
    sent_energy: Float32[Array, "..."]
    residual_energy: Float32[Array, "..."]
    message_energy: Float32[Array, "..."]
    weight: Float32[Array, "..."]


_HEADER_DTYPES = ("uint32",) * 3 + ("float32",) * 5


@dataclasses.dataclass(frozen=True)
class Section:
    """The blocks of one shape, the selector of their coefficients and the coding of the values."""

    num_blocks: int
    selector: Any
    value_coding: ValueCoding | Coding

    @property
    def word_counts(self) -> tuple[int, int, int]:
        """Returns how many words positions, scales and values take."""
        positions = (
            self.selector.position_words(self.num_blocks) if self.selector.sends_positions else 0
        )
        coding = coding_of(self.value_coding)
        scales = words_of(self.num_blocks, coding.scale_bits)
        return positions, scales, words_of(self.num_blocks * self.selector.k, coding.bits)


@dataclasses.dataclass(frozen=True)
class PacketLayout:
    """The layout of a packet, whose length is padded to a multiple of ``multiple`` words.

    An exchange puts ``extra`` words after the header.
    """

    sections: tuple[Section, ...]
    extra: int = 0
    multiple: int = MULTIPLE

    @property
    def header_words(self) -> int:
        return 1 + len(Header._fields) + self.extra

    @property
    def words(self) -> int:
        used = self.header_words + sum(sum(section.word_counts) for section in self.sections)
        return used + -used % self.multiple

    def per_owner(self, owners: int) -> "PacketLayout":
        """Returns the layout of an owner's share of the blocks; the last share may be padded."""

        def share_of(section: Section) -> Section:
            return dataclasses.replace(section, num_blocks=-(-section.num_blocks // owners))

        return dataclasses.replace(self, sections=tuple(map(share_of, self.sections)))


class Message(NamedTuple):
    """The coefficients of all sections, as values at positions.

    A section's selector defines its positions. They are None in a decoded packet if all workers
    know them.
    """

    positions: tuple[Any, ...]
    values: tuple[Values | Float32[Array, "workers _blocks _k"], ...]


class Origin(NamedTuple):
    """The step of a packet and its number among the packets of all workers.

    They are not sent, but enter the checksum.
    """

    step: IntScalar
    packet_id: Int32[Array, "..."]


def encode(sections: Sequence[Section], selected: Message) -> tuple[list[CodedValues], Message]:
    """Encodes the values of a message and also returns the message that the others decode."""
    coded = [
        value_codings.encode(values, section.value_coding)
        for section, values in zip(sections, selected.values, strict=True)
    ]
    decoded = [
        coding_of(section.value_coding).decode(*codes)[0]
        for section, codes in zip(sections, coded, strict=True)
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

    The first word of each packet is a checksum of the rest, of its layout and its origin. If
    ``valid`` is False, the inverted checksum is written, so that every receiver rejects the packet.
    A packet that was changed on the way or comes from a different step or worker is rejected too.
    All packets share the ``header``, except for the energy of their part of the message.
    """
    owners = len(origin.packet_id)
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
        packet_id: Int32[Array, ""],
    ) -> UInt32[Array, "..."]:
        packet_header = header._replace(message_energy=clamp_to_float32(energy))
        words = [jax.lax.bitcast_convert_type(x, jnp.uint32)[None] for x in packet_header]
        words += [] if extra is None else [extra]
        for section, places, codes in zip(layout.sections, positions, coded, strict=True):
            coding = coding_of(section.value_coding)
            if section.selector.sends_positions:
                words.append(section.selector.encode(places))
            words.append(pack_bits(codes.scales, coding.scale_bits))
            words.append(pack_bits(codes.values, coding.bits))
        rest = jnp.concatenate(words)
        rest = jnp.pad(rest, (0, layout.words - 1 - len(rest)))
        expected = _expected_checksum(layout, rest, Origin(origin.step, packet_id))
        return jnp.concatenate([jnp.where(valid, expected, ~expected)[None], rest])

    return jax.vmap(seal)(energies, positions, shares, origin.packet_id)


def parse_headers(
    layout: PacketLayout, packets: Packets, origin: Origin
) -> tuple[Header, UInt32[Array, "packets extra"], Bool[Array, "packets"]]:
    """Returns the headers and extra words of untrusted packets, and whether they are intact.

    A packet is intact if its checksum is right for its origin and its header is finite.
    """
    names = len(Header._fields)
    fields = [
        jax.lax.bitcast_convert_type(packets[:, 1 + place], dtype)
        for place, dtype in enumerate(_HEADER_DTYPES)
    ]

    checksum_of = functools.partial(_expected_checksum, layout)
    expected = jax.vmap(checksum_of, (0, Origin._make((None, 0))))(packets[:, 1:], origin)
    right = packets[:, 0] == expected
    finite = [jnp.isfinite(x) for x in fields if x.dtype == jnp.float32]
    intact = right & jnp.all(jnp.stack(finite), axis=0)
    return Header(*fields), packets[:, 1 + names : layout.header_words], intact


def decode(layout: PacketLayout, packets: Packets) -> tuple[Message, Bool[Array, "packets"]]:
    """Decodes untrusted packets into messages whose arrays have an axis of packets in front.

    It also tells for each packet whether its selectors could have sent all positions and all values
    are finite. Invalid positions are replaced by others that lie in their blocks.
    """
    return jax.vmap(functools.partial(_decode, layout))(packets)


def _decode(layout: PacketLayout, packet: UInt32[Array, "words"]) -> tuple[Message, BoolScalar]:
    all_positions: list[Positions | None] = []
    all_values: list[Values] = []
    valid = jnp.array(True)
    rest = packet[layout.header_words :]
    for section in layout.sections:
        num_blocks, selector = section.num_blocks, section.selector
        coding = coding_of(section.value_coding)
        for_positions, for_scales, _ = section.word_counts
        position_words, scale_words, value_words, rest = jnp.split(
            rest, [for_positions, for_positions + for_scales, sum(section.word_counts)]
        )
        positions = None
        if selector.sends_positions:
            positions, inside = selector.decode(position_words, num_blocks)
            valid &= inside
        scales = unpack_bits(scale_words, coding.scale_bits, num_blocks * bool(coding.scale_bits))
        coded = unpack_bits(value_words, coding.bits, num_blocks * selector.k)
        coded = coded.reshape(num_blocks, selector.k)
        values, finite = coding.decode(scales, coded)
        valid &= finite
        all_positions.append(positions)
        all_values.append(values)
    return Message(tuple(all_positions), tuple(all_values)), valid


def divide_rows(
    x: Shaped[Array, "blocks *k"], owners: int, mode: str = "constant"
) -> Shaped[Array, "{owners} share *k"]:
    """Divides rows among the owners and pads with zeros, or with the last row (``"edge"``)."""
    share = -(-len(x) // owners)
    padded = jnp.pad(x, [(0, owners * share - len(x))] + [(0, 0)] * (x.ndim - 1), mode)
    return padded.reshape(owners, share, *x.shape[1:])


def merge_rows(
    shares: Shaped[Array, "owners share k"], num_blocks: int
) -> Shaped[Array, "{num_blocks} k"]:
    """Inverts `divide_rows`."""
    return shares.reshape(-1, shares.shape[2])[:num_blocks]


def _expected_checksum(
    layout: PacketLayout, rest: UInt32[Array, "words"], origin: Origin
) -> UInt32[Array, ""]:
    layout_hash = jnp.uint32(zlib.crc32(repr(layout).encode()))
    return checksum(rest) ^ checksum(jnp.stack(origin).astype(jnp.uint32)) ^ layout_hash

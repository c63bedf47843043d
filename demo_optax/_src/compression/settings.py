"""Settings of the compression and of the format in which a momentum is stored.

A momentum means nothing without the transform, the blocks and the seed that it was made with, and a
message that is kept means nothing without its selection. A state, which holds arrays alone, has the
*word* of these settings, a checksum of their text.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from demo_optax._src import checks
from demo_optax._src.arrays import Coefficients, IntScalar
from demo_optax._src.compression import transforms
from demo_optax._src.compression.blocks import BLOCK_RULES, BlockGeometry, BlockRule, block_geometry
from demo_optax._src.compression.chosen import Choice, Chosen
from demo_optax._src.compression.selection import SELECTORS, Selection
from demo_optax._src.compression.sparse import AllCoefficients
from demo_optax._src.compression.transforms import TRANSFORMS, Basis, Transform, TransformName
from demo_optax._src.compression.values import VALUE_CODINGS, Coding, ValueCoding

KNOWN: dict[int, Any] = {}
"""The settings of every word that this process has made, for descriptions and messages."""


def word_of(settings: Any) -> np.uint32:
    """Returns the word of settings, which must have the same ``repr`` in every process."""
    word = zlib.crc32(repr(settings).encode())
    KNOWN[word] = settings
    return np.uint32(word)


def settings_of_text(text: str) -> Any:
    """Returns the settings whose ``repr`` this is, or None if this process has made none."""
    return KNOWN.get(zlib.crc32(text.encode()))


def require_words(
    what: str, words: Mapping[str, Any], settings: Mapping[str, Any], remedy: str
) -> None:
    """Refuses words other than those of the settings, where they are known.

    ``what`` begins the message and ``remedy`` ends it; both mappings are by the leaves' names.
    """
    for name, wanted in settings.items():
        given = words[name]
        if isinstance(given, (Tracer, jax.ShapeDtypeStruct)):
            continue
        if np.any(np.asarray(given) != word_of(wanted)):
            made = KNOWN.get(int(np.ravel(given)[0])) or "settings that this process does not know"
            raise ValueError(
                f"{what} was made for {made}, but {wanted} is needed: go back to the old settings. "
                f"{remedy}"
            )


@dataclasses.dataclass(frozen=True)
class MomentumFormat:
    """The settings of a compression that decide how a momentum is stored.

    The attributes are those of `demo_optax.Compression`, except that ``seed`` is 0 unless the
    transform is ``"random"``.
    """

    transform: TransformName | Transform
    block_side: int
    block_rule: BlockRule
    seed: int

    def geometry(self, shape: tuple[int, ...]) -> BlockGeometry:
        return block_geometry(shape, self.block_side, self.block_rule)

    def basis(self, step: IntScalar) -> Basis | None:
        """Returns the basis at a step, the same on all workers, or None for the identity."""
        if not isinstance(self.transform, str):
            return Basis(functools.partial(transforms.checked_matrix, self.transform))
        return TRANSFORMS[self.transform](self.seed, step)

    def advance(
        self, momentum: Coefficients, sides: Sequence[int], step: IntScalar
    ) -> Coefficients:
        """Changes blocks from the basis of the previous step to that of this step."""
        if not transforms.is_redrawn(self.transform):
            return momentum
        old, new = self.basis(step - 1), self.basis(step)
        assert old and new
        return transforms.change_basis(momentum, sides, old, new)


class StoredMomenta(NamedTuple):
    """The settings that decide what a stored momentum means, with the shapes of the tensors."""

    format: MomentumFormat
    shapes: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Compression:
    """The settings that decide which part of a momentum is sent, and in how many bits.

    An exchange such as `demo_optax.AllGather` decides how it travels.

    Attributes:
      topk: number of coefficients sent from each block; a block that has fewer sends all of them.
        It may be a function of a tensor's shape.
      block_side: largest number of elements per side of a block.
      value_coding: coding of the values in a packet, from 32 bits down to 1: ``"float32"``,
        ``"bfloat16"``, ``"int8"``, ``"int4"``, ``"int2"`` or ``"sign"``; or a
        `demo_optax.extend.Coding`.
      transform: ``"dct"``, ``"randomized-dct"``, ``"random"`` or ``"identity"``.
        ``"randomized-dct"`` first multiplies the elements by fixed random signs and is meant for
        shared positions. ``"random"`` draws new orthogonal matrices on each step. A function takes
        the side of a block, an int from 1 on, to an orthonormal matrix ``(side, side)`` of NumPy,
        with a basis vector in each row.
      block_rule: rule for a dimension that ``block_side`` does not divide. With ``"pad"`` it is
        padded with zeros. With ``"divisor"`` the side is a divisor of the dimension. With
        ``"stack"`` each parameter is a stack of blocks along its first dimension.
      selection: ``"topk"``, or ``"bins"`` for the largest coefficient in each of ``topk`` bins,
        which need no sort and take fewer bits; there ``topk`` should be a power of two. With the
        other selections all workers compute the positions from the step and none are sent:
        ``"random"``, ``"random-slicing"``, and FlexDeMo's ``"striding"`` and ``"slicing"``.
        ``"random-slicing"`` sends a contiguous slice of coefficients that starts at a random
        position, the same in all blocks. It needs only slices instead of gathers and scatters, and
        should be used with ``transform="randomized-dct"``. A function of coefficients, floats
        ``(blocks, n)``, and of ``topk`` returns positions, int32 ``(blocks, topk)``: those from 0
        to ``n - 1`` are unique in each block, and any other is ``n``, for a slot that stays empty.
      seed: random seed for drawn bases and positions.

    Functions are frozen dataclasses with ``__call__``, since their ``repr`` enters checksums that
    are equal in all processes. ``docs/how_to/extend.md`` has an example of each.

    Raises:
      ValueError: a setting is out of range. At the first step: what a function returns does not
        have the shape or dtype above; a matrix is not orthonormal.
      TypeError: an integer setting is an array, as under ``optax.inject_hyperparams``; the ``repr``
        of a function differs between processes.

    Example:
      >>> Compression(topk=8, value_coding="int4").block_side
      64
    """

    topk: int | Callable[[tuple[int, ...]], int] = 32
    block_side: int = 64
    value_coding: ValueCoding | Coding = "float32"
    transform: TransformName | Transform = "dct"
    block_rule: BlockRule = "pad"
    selection: Selection | Choice = "topk"
    seed: int = 0

    def __post_init__(self):
        for name, least in {"topk": 1, "block_side": 1, "seed": 0}.items():
            if name == "topk" and callable(self.topk):
                checks.lasting_text("topk", self.topk)
                continue
            checks.static_integer(name, getattr(self, name), at_least=least)
            object.__setattr__(self, name, int(getattr(self, name)))  # its repr enters a checksum
        if self.seed >= 2**64:
            raise ValueError(f"seed must be below 2**64, not {self.seed}: give a smaller one.")
        checks.named_or_own("value_coding", self.value_coding, VALUE_CODINGS, Coding)
        checks.named_or_own("transform", self.transform, TRANSFORMS)
        checks.one_of("block_rule", self.block_rule, BLOCK_RULES)
        checks.named_or_own("selection", self.selection, SELECTORS)
        for setting in (self.topk, self.value_coding, self.transform, self.selection):
            if not isinstance(setting, (int, str)):
                word_of(setting)  # a restore finds it again by its text

    @property
    def momentum_format(self) -> MomentumFormat:
        seed = self.seed if transforms.is_redrawn(self.transform) else 0
        return MomentumFormat(self.transform, self.block_side, self.block_rule, seed)

    def selector(self, geometry: BlockGeometry, stream: int) -> Any:
        """Returns the selector of the blocks of a tensor, which sends all if ``topk`` is as large.

        The ``stream`` is a number for each shape of blocks, so that each draws other positions.
        """
        n, k = geometry.block_size, self.topk
        if callable(k):
            k = k(geometry.shape)
            checks.static_integer(f"{self.topk!r} of a tensor {geometry.shape}", k, at_least=1)
        if k >= n:
            return AllCoefficients(n)
        if not isinstance(self.selection, str):
            return Chosen(n, int(k), self.selection)
        return SELECTORS[self.selection](n, int(k), self.seed, stream)

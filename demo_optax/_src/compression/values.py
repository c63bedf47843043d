"""Value codings, which turn coefficients into fields of a few bits and back.

The quantised codings have one scale per block, a float32 of which only the exponent and the first
two bits of the mantissa are sent. Each field names a *level*, a small integer, so that level times
scale is exact in float32. Sender and receivers therefore cannot disagree by a rounding, in whatever
order a compiler multiplies and adds.
"""

import dataclasses
import functools
from numbers import Integral
from typing import Literal, NamedTuple, Protocol, get_args, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Integer, UInt32

from demo_optax._src import checks
from demo_optax._src.arrays import BoolScalar

ValueCoding = Literal["float32", "bfloat16", "int8", "int4", "int2", "sign"]
VALUE_CODINGS = get_args(ValueCoding)

SCALE_BITS = 10  # 8 of a float32's exponent, 2 of its mantissa
_SCALE_SHIFT = 31 - SCALE_BITS
_FIRST_INFINITE_SCALE = 255 << (SCALE_BITS - 8)

_bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.uint32)
_float = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.float32)


class CodedValues(NamedTuple):
    """The values of some blocks as they are sent, as unsigned integers of a few bits.

    There is one scale per block, or none for a coding without scales.
    """

    scales: UInt32[Array, "scales"]
    values: UInt32[Array, "blocks k"]


@runtime_checkable
class Coding(Protocol):
    """Turns the selected values of each block into fields of a few bits, and back.

    Give one to `demo_optax.Compression` as ``value_coding``, as a frozen dataclass. The two numbers
    of bits decide all lengths.

    Attributes:
      bits: int from 1 to 32, the bits of a value's field.
      scale_bits: int from 0 to 32, the bits of a block's scale; 0 if blocks have none.

    Example:
      `demo_optax.extend.Quantiser` is one. ``docs/how_to/extend.md`` writes another.

      >>> import jax.numpy as jnp
      >>> from demo_optax.extend import Quantiser
      >>> ternary = Quantiser(2, (-1, 0, 1))
      >>> scales, fields = ternary.encode(jnp.array([[4.0, -3.0, 0.5]]))
      >>> values, valid = ternary.decode(scales, fields)
      >>> scales.shape, fields.tolist(), values.tolist()
      ((1,), [[2, 0, 1]], [[4.0, -4.0, 0.0]])
    """

    @property
    def bits(self) -> int: ...

    @property
    def scale_bits(self) -> int: ...

    def encode(
        self, values: Float32[Array, "blocks k"]
    ) -> tuple[UInt32[Array, "scales"], UInt32[Array, "blocks k"]]:
        """Returns the scale of each block and the field of each value.

        Both are uint32: scales ``(blocks,)`` below ``2**scale_bits``, or ``(0,)`` if there are
        none, and fields ``(blocks, k)`` below ``2**bits``.
        """
        ...

    def decode(
        self, scales: UInt32[Array, "scales"], fields: UInt32[Array, "blocks k"]
    ) -> tuple[Float32[Array, "blocks k"], BoolScalar]:
        """Returns float32 values, and False if `encode` cannot have made these scales and fields.

        They come from other workers and may hold any bits. A value must be exact, whatever XLA
        fuses, since what the sender decodes leaves its momentum and what the others decode enters
        the mean. Exact are a constant, the bits of a field, and a small integer times a scale of
        which only a few leading bits are sent.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Plain:
    """The coding of values as floats, without scales."""

    dtype: Literal["float32", "bfloat16"]
    scale_bits = 0

    @property
    def bits(self) -> int:
        return jnp.finfo(self.dtype).bits

    def encode(self, values: Float32[Array, "blocks k"]) -> CodedValues:
        words = _bits(values)
        if self.dtype == "bfloat16":
            words = (words + (jnp.uint32(0x7FFF) + ((words >> 16) & 1))) >> 16
        return CodedValues(jnp.zeros(0, jnp.uint32), words)

    def decode(
        self, scales: UInt32[Array, "0"], fields: UInt32[Array, "blocks k"]
    ) -> tuple[Float32[Array, "blocks k"], BoolScalar]:
        del scales
        values = _float(fields << (32 - self.bits))
        return values, jnp.all(jnp.isfinite(values))


@dataclasses.dataclass(frozen=True)
class Quantiser:
    """Codes each value as the nearest of a few levels, times a scale of its block of 10 bits.

    Attributes:
      bits: bits of a field, which is the index of a level.
      levels: at most ``2**bits`` ascending integers, of which the last has the largest magnitude,
        below ``2**21``.
      mean_level: the level to which the scale takes the mean magnitude of a block. None takes the
        largest magnitude to the largest level, for codings that are fine enough.

    Raises:
      ValueError: the levels are not such integers, there are other than 1 to 32 bits, or the mean
        level is not positive.

    Example:
      >>> import demo_optax
      >>> ternary = Quantiser(2, (-1, 0, 1), mean_level=0.8)
      >>> demo_optax.Compression(topk=8, value_coding=ternary).value_coding.bits
      2
    """

    bits: int
    levels: tuple[int, ...]
    mean_level: float | None = None
    scale_bits = SCALE_BITS

    def __post_init__(self):
        checks.static_integer("bits", self.bits, at_least=1)
        if self.mean_level is not None:
            checks.in_interval("mean_level", self.mean_level, "(0, inf)")
        levels, most = self.levels, 2**self.bits
        ascend = all(isinstance(x, Integral) for x in levels)
        ascend = ascend and list(levels) == sorted(set(levels))
        largest = max(map(abs, levels), default=0)
        may_be = self.bits <= 32 and 2 <= len(levels) <= most
        if not (may_be and ascend and levels[-1] == largest < 2**21):
            raise ValueError(
                f"levels must be 2 to {most} ascending integers, for bits={self.bits}, which must "
                "be at most 32, and the last must have the largest magnitude, below 2**21, not "
                f"{levels}."
            )

    def encode(self, values: Float32[Array, "blocks k"]) -> CodedValues:
        # Each block has one scale, which is rounded up where the largest magnitude must fit
        magnitudes, levels = jnp.abs(values), self.levels
        if self.mean_level is None:
            scale = jnp.max(magnitudes, axis=1) / levels[-1]
            rounding = (1 << _SCALE_SHIFT) - 1
        else:
            mean = jnp.mean(magnitudes, axis=1)
            scale = jnp.where(jnp.isfinite(mean), mean, 0.0) / self.mean_level
            rounding = 1 << (_SCALE_SHIFT - 1)
        scales = (_bits(scale) + jnp.uint32(rounding)) >> _SCALE_SHIFT
        # A denormal scale becomes zero
        scales = jnp.where(scales >> (SCALE_BITS - 8) > 0, scales, jnp.uint32(0))

        scale = _float(scales << _SCALE_SHIFT)[:, None]
        scaled = jnp.where(scale > 0, values / scale, 0.0)
        if len(levels) == levels[-1] - levels[0] + 1:  # all integers in between
            below = jnp.floor(scaled).astype(jnp.int32) - levels[0]
            below = jnp.clip(below, 0, len(levels) - 2)
        else:
            inner = jnp.asarray(levels[1:-1], jnp.float32)
            below = jnp.searchsorted(inner, scaled, side="right", method="compare_all")
        low, high = map(self._level, (below, below + 1))
        # Ties are broken alternately up and down, so that exact zeros do not all become the same
        # level in a coding that has no level at zero.
        odd = (jnp.arange(len(values))[:, None] + jnp.arange(values.shape[1])[None]) & 1
        half = jnp.where(odd == 0, np.float32(0.5), np.nextafter(np.float32(0.5), np.float32(0)))
        chosen = jnp.where((scaled - low) / (high - low) > half, below + 1, below)
        return CodedValues(scales, chosen.astype("uint32"))

    def decode(
        self, scales: UInt32[Array, "blocks"], fields: UInt32[Array, "blocks k"]
    ) -> tuple[Float32[Array, "blocks k"], BoolScalar]:
        last = len(self.levels) - 1
        valid = jnp.all(fields <= last) & jnp.all(scales < _FIRST_INFINITE_SCALE)
        chosen = self._level(jnp.minimum(fields, last))
        return chosen * _float(scales << _SCALE_SHIFT)[:, None], valid

    def _level(self, field: Integer[Array, "blocks k"]) -> Float32[Array, "blocks k"]:
        """Returns the level of each field, by arithmetic if possible; tables are slow to read."""
        levels = np.asarray(self.levels, np.float32)
        gaps = np.diff(levels)
        if np.all(gaps == gaps[0]):
            return levels[0] + gaps[0] * field.astype(jnp.float32)
        return jnp.asarray(levels)[field]


# The two coarsest codings have no level at zero, since few selected coefficients are zero. A zero,
# such as the largest of a bin of zeros, is sent as plus or minus a level, and the momentum keeps
# the error. The mean level 2.2 lost the least energy on the largest of normal, Laplace and
# Student-t coefficients.
CODINGS: dict[str, Coding] = {
    "float32": Plain("float32"),
    "bfloat16": Plain("bfloat16"),
    "int8": Quantiser(8, tuple(range(-127, 128))),
    "int4": Quantiser(4, tuple(range(-7, 8))),
    "int2": Quantiser(2, (-3, -2, 2, 3), mean_level=2.2),
    "sign": Quantiser(1, (-1, 1), mean_level=1.0),
}


def coding_of(setting: ValueCoding | Coding) -> Coding:
    return CODINGS[setting] if isinstance(setting, str) else setting


def encode(values: Float[Array, "blocks k"], setting: ValueCoding | Coding) -> CodedValues:
    """Rounds values to ones that a coding can represent."""
    coding = coding_of(setting)
    coded = CodedValues(*coding.encode(values.astype(jnp.float32)))
    if isinstance(setting, str):
        return coded
    scales = (len(values) if coding.scale_bits else 0,)
    checks.made_arrays("value_coding", setting, coded, (scales, values.shape), jnp.uint32)
    # More bits would spill into the next field, where the others decode them.
    widths = coding.scale_bits, coding.bits
    return CodedValues(*[x & jnp.uint32(2**n - 1) for x, n in zip(coded, widths, strict=True)])

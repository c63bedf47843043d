"""Value codings: coefficients as fields of a few bits, and how the others decode them.

The quantised codings share one scale per block, a float32 of which only the exponent and
the first two bits of the mantissa are sent. Each field names a *level*, a small integer, so
that level times scale is exact in float32: sender and receivers cannot disagree by a rounding, in
whatever order a compiler multiplies and adds.
"""

import dataclasses
import functools
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Integer, UInt32

from demo_optax._src.arrays import BoolScalar

ValueCoding = Literal["float32", "bfloat16", "int8", "int4", "int2", "sign"]
VALUE_CODINGS = get_args(ValueCoding)

SCALE_BITS = 10  # 8 of a float32's exponent, 2 of its mantissa
_SCALE_SHIFT = 31 - SCALE_BITS
_FIRST_INFINITE_SCALE = 255 << (SCALE_BITS - 8)

_bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.uint32)
_float = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.float32)


@dataclasses.dataclass(frozen=True)
class Quantiser:
    """Levels of a quantised coding, and where a block's values lie among them.

    Attributes:
      bits: bits per field.
      levels: the levels, ascending; a field is the index of its level.
      mean_level: the level at which a block's mean magnitude is put. None puts the largest
        magnitude at the largest level instead, for codings fine enough to cover the whole range.
    """

    bits: int
    levels: tuple[int, ...]
    mean_level: float | None = None


# The two coarsest have no level at zero, since few selected coefficients are zero. A zero, such as
# the largest of a bin of zeros, is sent as plus or minus a level, and the momentum keeps the error.
# 2.2 for the mean lost least energy on the largest of normal, Laplace and Student-t coefficients.
QUANTISERS = {
    "int8": Quantiser(8, tuple(range(-127, 128))),
    "int4": Quantiser(4, tuple(range(-7, 8))),
    "int2": Quantiser(2, (-3, -2, 2, 3), mean_level=2.2),
    "sign": Quantiser(1, (-1, 1), mean_level=1.0),
}


class CodedValues(NamedTuple):
    """Values of some blocks as they are sent: unsigned integers of a few bits.

    Attributes:
      scales: scales of `SCALE_BITS` bits, one per block; none for the plain codings.
      values: values of `value_bits` bits.
    """

    scales: UInt32[Array, "scales"]
    values: UInt32[Array, "blocks k"]


def value_bits(coding: ValueCoding) -> int:
    """Bits of one value, its share of the scale not included."""
    return QUANTISERS[coding].bits if coding in QUANTISERS else jnp.finfo(coding).bits


def scale_bits(coding: ValueCoding) -> int:
    """Bits for each block's scale: 0 for the codings that have none."""
    return SCALE_BITS if coding in QUANTISERS else 0


def encode(values: Float[Array, "blocks k"], coding: ValueCoding) -> CodedValues:
    """Rounds values to the nearest that their coding can represent.

    Args:
      values: the values of some blocks.
      coding: one of `VALUE_CODINGS`.
    """
    values = values.astype(jnp.float32)
    if coding == "float32":
        return CodedValues(jnp.zeros(0, jnp.uint32), _bits(values))
    if coding == "bfloat16":
        half = jnp.uint32(0x7FFF) + ((_bits(values) >> 16) & 1)
        return CodedValues(jnp.zeros(0, jnp.uint32), (_bits(values) + half) >> 16)

    # One scale for each block; it is rounded up where the largest magnitude must fit
    quantiser, magnitudes = QUANTISERS[coding], jnp.abs(values)
    if quantiser.mean_level is None:
        scale = jnp.max(magnitudes, axis=1) / quantiser.levels[-1]
        rounding = (1 << _SCALE_SHIFT) - 1
    else:
        mean = jnp.mean(magnitudes, axis=1)
        scale = jnp.where(jnp.isfinite(mean), mean, 0.0) / quantiser.mean_level
        rounding = 1 << (_SCALE_SHIFT - 1)
    scales = (_bits(scale) + jnp.uint32(rounding)) >> _SCALE_SHIFT
    scales = jnp.where(scales >> (SCALE_BITS - 8) > 0, scales, jnp.uint32(0))  # no denormal ones

    scale = _float(scales << _SCALE_SHIFT)[:, None]
    scaled = jnp.where(scale > 0, values / scale, 0.0)
    levels = jnp.asarray(quantiser.levels, jnp.float32)
    above = jnp.searchsorted(levels, scaled, side="right", method="compare_all")
    below = jnp.clip(above - 1, 0, len(levels) - 2)
    low, high = (_level(quantiser, field) for field in (below, below + 1))
    # Ties are broken alternately up and down, so that exact zeros do not all become the same level
    # in a coding that has no level at zero.
    even = (jnp.arange(len(values))[:, None] + jnp.arange(values.shape[1])[None]) % 2 == 0
    half = jnp.where(even, jnp.float32(0.5), jnp.nextafter(jnp.float32(0.5), jnp.float32(0)))
    chosen = jnp.where((scaled - low) / (high - low) > half, below + 1, below)
    return CodedValues(scales, chosen.astype("uint32"))


def decode(
    coded: CodedValues, coding: ValueCoding
) -> tuple[Float32[Array, "blocks k"], BoolScalar]:
    """Decodes untrusted values.

    Returns:
      The values, and whether every scale and value is finite and every code is valid.
    """
    if coding in ("float32", "bfloat16"):
        values = _float(coded.values << (32 - value_bits(coding)))
        return values, jnp.all(jnp.isfinite(values))
    quantiser = QUANTISERS[coding]
    last = len(quantiser.levels) - 1
    valid = jnp.all(coded.values <= last) & jnp.all(coded.scales < _FIRST_INFINITE_SCALE)
    chosen = _level(quantiser, jnp.minimum(coded.values, last))
    return chosen * _float(coded.scales << _SCALE_SHIFT)[:, None], valid


def _level(quantiser: Quantiser, field: Integer[Array, "blocks k"]) -> Float32[Array, "blocks k"]:
    """The level of each field, computed where they are evenly spaced: tables are slow to read."""
    levels = np.asarray(quantiser.levels, np.float32)
    gaps = np.diff(levels)
    if np.all(gaps == gaps[0]):
        return levels[0] + gaps[0] * field.astype(jnp.float32)
    return jnp.asarray(levels)[field]

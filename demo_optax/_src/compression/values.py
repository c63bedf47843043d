"""Value codings, which turn coefficients into fields of a few bits and back.

The quantised codings have one scale per block, a float32 of which only the exponent and the first
two bits of the mantissa are sent. Each field names a *level*, a small integer, so that level times
scale is exact in float32. Sender and receivers therefore cannot disagree by a rounding, in whatever
order a compiler multiplies and adds.
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
    """The ascending levels of a quantised coding; a field is the index of its level.

    The scale puts the mean magnitude of a block at ``mean_level``. If that is None, it puts the
    largest magnitude at the largest level, for codings fine enough to cover the whole range.
    """

    bits: int
    levels: tuple[int, ...]
    mean_level: float | None = None


# The two coarsest codings have no level at zero, since few selected coefficients are zero. A zero,
# such as the largest of a bin of zeros, is sent as plus or minus a level, and the momentum keeps
# the error. The mean level 2.2 lost the least energy on the largest of normal, Laplace and
# Student-t coefficients.
QUANTISERS = {
    "int8": Quantiser(8, tuple(range(-127, 128))),
    "int4": Quantiser(4, tuple(range(-7, 8))),
    "int2": Quantiser(2, (-3, -2, 2, 3), mean_level=2.2),
    "sign": Quantiser(1, (-1, 1), mean_level=1.0),
}


class CodedValues(NamedTuple):
    """The values of some blocks as they are sent, as unsigned integers of a few bits.

    There is one scale of `SCALE_BITS` bits per block, or none for the plain codings.
    """

    scales: UInt32[Array, "scales"]
    values: UInt32[Array, "blocks k"]


def value_bits(coding: ValueCoding) -> int:
    """Returns the number of bits of one value, without its share of the scale."""
    return QUANTISERS[coding].bits if coding in QUANTISERS else jnp.finfo(coding).bits


def scale_bits(coding: ValueCoding) -> int:
    """Returns the number of bits of each block's scale, 0 for codings that have none."""
    return SCALE_BITS if coding in QUANTISERS else 0


def encode(values: Float[Array, "blocks k"], coding: ValueCoding) -> CodedValues:
    """Rounds values to the nearest ones that a coding can represent."""
    values = values.astype(jnp.float32)
    if coding == "float32":
        return CodedValues(jnp.zeros(0, jnp.uint32), _bits(values))
    if coding == "bfloat16":
        half = jnp.uint32(0x7FFF) + ((_bits(values) >> 16) & 1)
        return CodedValues(jnp.zeros(0, jnp.uint32), (_bits(values) + half) >> 16)

    # Each block has one scale, which is rounded up where the largest magnitude must fit
    quantiser, magnitudes = QUANTISERS[coding], jnp.abs(values)
    if quantiser.mean_level is None:
        scale = jnp.max(magnitudes, axis=1) / quantiser.levels[-1]
        rounding = (1 << _SCALE_SHIFT) - 1
    else:
        mean = jnp.mean(magnitudes, axis=1)
        scale = jnp.where(jnp.isfinite(mean), mean, 0.0) / quantiser.mean_level
        rounding = 1 << (_SCALE_SHIFT - 1)
    scales = (_bits(scale) + jnp.uint32(rounding)) >> _SCALE_SHIFT
    # A denormal scale becomes zero
    scales = jnp.where(scales >> (SCALE_BITS - 8) > 0, scales, jnp.uint32(0))

    scale = _float(scales << _SCALE_SHIFT)[:, None]
    scaled = jnp.where(scale > 0, values / scale, 0.0)
    levels = quantiser.levels
    if len(levels) == levels[-1] - levels[0] + 1:  # all integers in between
        below = jnp.floor(scaled).astype(jnp.int32) - levels[0]
    else:
        ascending = jnp.asarray(levels, jnp.float32)
        below = jnp.searchsorted(ascending, scaled, side="right", method="compare_all") - 1
    below = jnp.clip(below, 0, len(levels) - 2)
    low, high = (_level(quantiser, field) for field in (below, below + 1))
    # Ties are broken alternately up and down, so that exact zeros do not all become the same level
    # in a coding that has no level at zero.
    odd = (jnp.arange(len(values))[:, None] + jnp.arange(values.shape[1])[None]) & 1
    half = jnp.where(odd == 0, np.float32(0.5), np.nextafter(np.float32(0.5), np.float32(0)))
    chosen = jnp.where((scaled - low) / (high - low) > half, below + 1, below)
    return CodedValues(scales, chosen.astype("uint32"))


def decode(
    coded: CodedValues, coding: ValueCoding
) -> tuple[Float32[Array, "blocks k"], BoolScalar]:
    """Decodes untrusted values and tells whether all are finite and all codes are valid."""
    if coding in ("float32", "bfloat16"):
        values = _float(coded.values << (32 - value_bits(coding)))
        return values, jnp.all(jnp.isfinite(values))
    quantiser = QUANTISERS[coding]
    last = len(quantiser.levels) - 1
    valid = jnp.all(coded.values <= last) & jnp.all(coded.scales < _FIRST_INFINITE_SCALE)
    chosen = _level(quantiser, jnp.minimum(coded.values, last))
    return chosen * _float(coded.scales << _SCALE_SHIFT)[:, None], valid


def _level(quantiser: Quantiser, field: Integer[Array, "blocks k"]) -> Float32[Array, "blocks k"]:
    """Returns the level of each field, by arithmetic if possible, since tables are slow to read."""
    levels = np.asarray(quantiser.levels, np.float32)
    gaps = np.diff(levels)
    if np.all(gaps == gaps[0]):
        return levels[0] + gaps[0] * field.astype(jnp.float32)
    return jnp.asarray(levels)[field]

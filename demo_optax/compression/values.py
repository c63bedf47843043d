"""Value codings: coefficients as fields of a few bits, and what the others decode from them."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp

ValueCoding = Literal["float32", "bfloat16"]
VALUE_CODINGS = get_args(ValueCoding)


def value_bits(coding: ValueCoding) -> int:
    """Bits per value."""
    return jnp.finfo(coding).bits


def encode(values: jax.Array, coding: ValueCoding) -> jax.Array:
    """Floating values as uint32 fields of ``value_bits(coding)`` bits, rounded to nearest."""
    rounded = values.astype(coding)
    unsigned = jnp.dtype(f"uint{value_bits(coding)}")
    return jax.lax.bitcast_convert_type(rounded, unsigned).astype(jnp.uint32)


def decode(fields: jax.Array, coding: ValueCoding) -> jax.Array:
    """The float32 values that fields stand for."""
    unsigned = jnp.dtype(f"uint{value_bits(coding)}")
    return jax.lax.bitcast_convert_type(fields.astype(unsigned), jnp.dtype(coding)).astype(
        jnp.float32
    )

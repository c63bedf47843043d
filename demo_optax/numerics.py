"""Arithmetic that several modules do in the same way."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp


def all_finite(tree) -> jax.Array:
    """Whether no element of any leaf is infinite or NaN, a bool scalar."""
    return jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)], bool).all()


def energy(arrays: Iterable[jax.Array]) -> jax.Array:
    """Sum of squares over all arrays, a float32 scalar; finite only where every element is."""
    squares = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in arrays]
    return sum(squares, jnp.zeros((), jnp.float32))


def upcast(x: jax.Array) -> jax.Array:
    """``x`` in the dtype to compute in: float32 at least."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))

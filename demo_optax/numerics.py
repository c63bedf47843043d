"""Finiteness, energies and dtypes: arithmetic that several modules share."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from demo_optax.arrays import BoolScalar, Coefficients, FloatScalar, IntScalar, Tensor


def all_finite(tree: Any) -> BoolScalar:
    """Whether no element of any leaf is infinite or NaN."""
    return jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)], bool).all()


def energy(arrays: Iterable[Tensor]) -> FloatScalar:
    """Sum of squares over all arrays; finite only where every element is."""
    squares = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in arrays]
    return sum(squares, jnp.zeros((), jnp.float32))


def restart_blocks(
    momenta: Sequence[Coefficients],
) -> tuple[list[Coefficients], tuple[FloatScalar, IntScalar]]:
    """Momenta whose blocks start from zero where their energy is not finite.

    Also the energy of all of them, and how many started anew.

    One flipped bit of an exponent would otherwise mute its worker for ever.
    """
    energies = [jnp.sum(jnp.square(m.astype(jnp.float32)), axis=1) for m in momenta]
    sound = list(map(jnp.isfinite, energies))
    total = jnp.zeros((), jnp.float32) + sum(map(jnp.sum, map(_or_zero, sound, energies)))
    restarted = jnp.zeros((), jnp.int32) + sum(jnp.sum(~s, dtype=jnp.int32) for s in sound)
    new = [_or_zero(s[:, None], m) for s, m in zip(sound, momenta, strict=True)]
    return new, (total, restarted)


def _or_zero(
    condition: Bool[Array, "blocks *one"], x: Float[Array, "blocks *n"]
) -> Float[Array, "blocks *n"]:
    return jnp.where(condition, x, 0)


def in_dtype_of(x: Array, reference: Array) -> Array:
    """``x`` in the dtype of another array."""
    return x if x.dtype == reference.dtype else x.astype(reference.dtype)


def choose(condition: BoolScalar, tree: Any, otherwise: Any) -> Any:
    """One of two trees, in the dtypes of the second."""
    return jax.tree.map(lambda x, y: in_dtype_of(jnp.where(condition, x, y), y), tree, otherwise)


def widest(*dtypes: DTypeLike) -> np.dtype:
    """The widest of some floating dtypes, float32 at least."""
    every = [jnp.dtype(dtype) for dtype in (jnp.float32, *dtypes)]
    return max(every, key=lambda dtype: jnp.finfo(dtype).bits)


def upcast(x: Tensor) -> Tensor:
    """``x`` in the dtype to compute in: float32 at least."""
    return x.astype(widest(x.dtype))


def round_stochastically(
    x: Float[Array, "*shape"], dtype: DTypeLike, key: PRNGKeyArray
) -> Float[Array, "*shape"]:
    """``x`` in a narrower dtype, at one of its two neighbours there, with the mean ``x``.

    Rounding to the nearest would swallow every change of less than half a step.
    """
    if jnp.finfo(dtype).bits >= jnp.finfo(x.dtype).bits:
        return x.astype(dtype)
    nearest = downcast(x, dtype)
    error = x - nearest.astype(x.dtype)
    other = jnp.nextafter(nearest, jnp.copysign(jnp.inf, error).astype(dtype))
    step = jnp.abs(other.astype(x.dtype) - nearest.astype(x.dtype))
    away = jax.random.uniform(key, x.shape, x.dtype) * step < jnp.abs(error)
    return jnp.where(away, other, nearest)


def downcast(x: Float[Array, "*shape"], dtype: DTypeLike) -> Float[Array, "*shape"]:
    """``x`` in a dtype, at its largest finite number where it ends before ``x`` does."""
    if x.dtype == dtype:
        return x
    largest = min(jnp.finfo(dtype).max, jnp.finfo(x.dtype).max, key=float)
    return jnp.clip(x, -largest.astype(x.dtype), largest.astype(x.dtype)).astype(dtype)

"""Types of arrays, dtypes to compute and store them in, Flax's boxes around them.

A dimension whose name begins with ``_`` may have a different length in each array of a list. The
tests check all annotations with beartype.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32, PRNGKeyArray, UInt32

IntScalar = Int32[Array, ""]
FloatScalar = Float32[Array, ""]
BoolScalar = Bool[Array, ""]
WordScalar = UInt32[Array, ""]

Positions = Int32[Array, "_blocks _places"]
Values = Float[Array, "_blocks _k"]
Coefficients = Float[Array, "_blocks _n"]
Blocks = Float[Array, "_blocks *_sides"]
Tensor = Float[Array, "..."]


def energy(arrays: Iterable[Tensor]) -> FloatScalar:
    """Sum of squares over all arrays; finite only where every element is."""
    squares = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in arrays]
    return sum(squares, jnp.zeros((), jnp.float32))


def clamp_to_float32(x: Float[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """``x`` as float32, at most float32's largest number."""
    return jnp.minimum(x, jnp.finfo(jnp.float32).max).astype(jnp.float32)


def in_dtype_of(x: Array, reference: Array) -> Array:
    """``x`` in the dtype of another array."""
    return x if x.dtype == reference.dtype else x.astype(reference.dtype)


def widest(*dtypes: DTypeLike) -> np.dtype:
    """The widest of some floating dtypes, float32 at least."""
    candidates = [jnp.dtype(dtype) for dtype in (jnp.float32, *dtypes)]
    return max(candidates, key=lambda dtype: jnp.finfo(dtype).bits)


def upcast(x: Tensor) -> Tensor:
    """``x`` in the dtype to compute in: float32 at least."""
    return x.astype(widest(x.dtype))


def reusable(x: Array) -> Array:
    """The same array; ``jax_debug_key_reuse`` allows its random keys to be used once more."""
    return jax.random.clone(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def round_stochastically(
    x: Float[Array, "*shape"], dtype: DTypeLike, key: PRNGKeyArray
) -> Float[Array, "*shape"]:
    """Rounds ``x`` to a narrower dtype, up or down at random, so that the mean is ``x``.

    Rounding to the nearest would swallow every change of less than half a step.
    """
    if jnp.finfo(dtype).bits >= jnp.finfo(x.dtype).bits:
        return x.astype(dtype)
    largest = min(jnp.finfo(dtype).max, jnp.finfo(x.dtype).max, key=float).astype(x.dtype)
    nearest = jnp.clip(x, -largest, largest).astype(dtype)
    error = x - nearest.astype(x.dtype)
    other = jnp.nextafter(nearest, jnp.copysign(jnp.inf, error).astype(dtype))
    step = jnp.abs(other.astype(x.dtype) - nearest.astype(x.dtype))
    away = jax.random.uniform(key, x.shape, x.dtype) * step < jnp.abs(error)
    return jnp.where(away, other, nearest)


def unboxed(tree):
    """The tree with each of Flax's boxes replaced by the array that it holds.

    ``nn.Partitioned`` and ``nnx.Variable`` carry how a parameter is partitioned. A momentum has
    a different shape and must not inherit that.
    """

    def content(x):
        leaves = jax.tree.leaves(x)
        return leaves[0] if _is_box(x) and len(leaves) == 1 else x

    return jax.tree.map(content, tree, is_leaf=_is_box)


def _is_box(x) -> bool:
    names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(x).__mro__}
    return bool(names & {"flax.AxisMetadata", "flax.Variable"})

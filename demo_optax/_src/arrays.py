"""Defines array types, the dtypes to compute and store in, and the handling of Flax's boxes.

A dimension whose name begins with ``_`` may differ in length between the arrays of a list. The
tests check every annotation with beartype.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

IntScalar = Int32[Array, ""]
FloatScalar = Float32[Array, ""]
BoolScalar = Bool[Array, ""]
WordScalar = UInt32[Array, ""]

Positions = Int32[Array, "_blocks _places"]
Values = Float[Array, "_blocks _k"]
Coefficients = Float[Array, "_blocks _n"]
Tensor = Float[Array, "..."]


def energy(arrays: Iterable[Tensor]) -> FloatScalar:
    """Returns the sum of squares over all arrays, which is finite only if every element is."""
    squares = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in arrays]
    return sum(squares, jnp.zeros((), jnp.float32))


def zero_unless(condition: BoolScalar, tree):
    return jax.tree.map(lambda x: jnp.where(condition, x, jnp.zeros_like(x)), tree)


def true_once_computed(arrays: Iterable[Tensor]) -> BoolScalar:
    """Returns True, but only after XLA has computed these arrays, whatever is in them.

    A single element of each would not do, as XLA would compute it without the others.
    """
    largest = jnp.array([jnp.max(x).astype(jnp.float32) for x in arrays if x.size], jnp.float32)
    return jnp.all((largest != -jnp.inf) | (largest < 0))  # which XLA does not know to be true


def clamp_to_float32(x: Float[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Returns ``x`` in float32, capped at the largest float32 number."""
    return jnp.minimum(x, jnp.finfo(jnp.float32).max).astype(jnp.float32)


def in_dtype_of(x: Array, reference: Array) -> Array:
    return x if x.dtype == reference.dtype else x.astype(reference.dtype)


def widest(*dtypes: DTypeLike) -> np.dtype:
    """Returns the widest of some floating dtypes and float32."""
    candidates = [jnp.dtype(dtype) for dtype in (jnp.float32, *dtypes)]
    return max(candidates, key=lambda dtype: jnp.finfo(dtype).bits)


def upcast(x: Tensor) -> Tensor:
    """Returns ``x`` in the dtype for computations, which is at least float32."""
    return x.astype(widest(x.dtype))


def reusable(x: Array) -> Array:
    """Clones random keys, so that ``jax_debug_key_reuse`` allows them to be used once more."""
    return jax.random.clone(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def unboxed(tree):
    """Replaces each of Flax's boxes in a tree by the array that it holds.

    ``nn.Partitioned`` and ``nnx.Variable`` record how a parameter is partitioned, which a momentum
    must not inherit because it has a different shape.
    """

    def content(x):
        children = jax.tree.leaves(x, is_leaf=lambda child: child is not x)
        return children[0] if _is_box(x) and len(children) == 1 else x

    return jax.tree.map(content, tree, is_leaf=_is_box)


def is_key(x) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def key_impl(keys) -> str:
    return str(jax.random.key_impl(jnp.empty((), keys.dtype)))


def unwrap_keys(x) -> Any:
    """Returns the data of random keys, or of their shape, and anything else as it is."""
    if not is_key(x):
        return x
    if isinstance(x, jax.Array):
        return jax.random.key_data(x)
    numbers = jax.eval_shape(jax.random.key_data, x)
    return jax.ShapeDtypeStruct(numbers.shape, numbers.dtype, sharding=x.sharding)


def wrap_keys(x, like) -> Any:
    return jax.random.wrap_key_data(x, impl=key_impl(like)) if is_key(like) else x


def boxed_inside(
    tx: optax.GradientTransformation, boxes: Any
) -> optax.GradientTransformationExtraArgs:
    """Wraps ``tx`` for callers with unboxed trees, while ``tx`` itself sees Flax's boxes.

    Masks and labels inside ``tx`` may then be trees that were made from boxed parameters. ``boxes``
    is a tree like the parameters, in their boxes.
    """
    tx = optax.with_extra_args_support(tx)
    if jax.tree.structure(unboxed(boxes)) == jax.tree.structure(boxes):
        return tx

    def boxed(tree, like):
        return jax.tree.map(put_in, tree, like, is_leaf=is_left_out)

    def is_left_out(x) -> bool:
        return x is None or isinstance(x, optax.MaskedNode)

    def put_in(x, box):
        return box if is_left_out(x) else jax.tree.unflatten(jax.tree.structure(box), [x])

    def update_fn(updates, state, params=None, **extra_args):
        updates = boxed(updates, boxes)
        params = None if params is None else boxed(params, boxes)
        state = boxed(state, jax.eval_shape(tx.init, updates))
        return unboxed(tx.update(updates, state, params, **extra_args))

    return optax.GradientTransformationExtraArgs(
        lambda params: unboxed(tx.init(boxed(params, boxes))), update_fn
    )


def _is_box(x) -> bool:
    names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(x).__mro__}
    return bool(names & {"flax.AxisMetadata", "flax.Variable"})

"""Leaves as Orbax stores them: by their paths, random keys as numbers, none that is empty."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr


def by_path(tree) -> dict:
    """The leaves of a tree, less those without elements, which Orbax cannot save."""
    leaves = ((keystr(path), _storable(x)) for path, x in jax.tree.leaves_with_path(tree))
    return {name: x for name, x in leaves if 0 not in np.shape(x)}


def from_paths(leaves: dict, like):
    """A tree like another one, of leaves by their paths."""

    def leaf(path, x):
        if 0 in np.shape(x):
            return jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding)
        return _like(leaves[keystr(path)], x)

    return jax.tree.map_with_path(leaf, like)


def _storable(x):
    """Random keys as their numbers; all else as it is."""
    if not _is_key(x):
        return x
    if isinstance(x, jax.Array):
        return jax.random.key_data(x)
    numbers = jax.eval_shape(jax.random.key_data, x)
    return jax.ShapeDtypeStruct(numbers.shape, numbers.dtype, sharding=x.sharding)


def in_memory(metadata) -> np.ndarray:
    return np.empty(metadata.shape, metadata.dtype)


def beside(step: int, extra) -> dict:
    """What is saved beside parameters and state; with an array, which Orbax warns without."""
    return by_path({"step": np.asarray(step), "tree": jax.tree.map(_plain, extra)})


def _is_key(x) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _plain(x):
    """Arrays and random keys as NumPy arrays; numbers and strings as they are."""
    x = _storable(x)
    return np.asarray(x) if isinstance(x, jax.Array) else x


def _like(x, original):
    """What was stored, as the kind of value that is wanted."""
    if _is_key(original):
        return jax.random.wrap_key_data(x, impl=jax.random.key_impl(jnp.empty((), original.dtype)))
    if not hasattr(original, "dtype"):
        return type(original)(x)
    if isinstance(original, jax.Array):
        return jnp.asarray(x, original.dtype)
    return x if x.dtype == original.dtype else x.astype(original.dtype)

"""Arguments of a train step, put where it wants them, whatever they are and wherever they lie."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import dtypes
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding


class Places:
    """Where arrays shall lie, and how those lay that did."""

    def __init__(self, shardings):
        self.shardings, self.accepted = shardings, shardings

    def put(self, leaves) -> list[jax.Array]:
        """Arrays with these shardings: those that have them stay, all others are copied.

        Copied, since the step donates what it is given: an array of the caller's, or one that is
        used for two leaves, must not be what it gives away.
        """
        given = [getattr(x, "sharding", None) for x in leaves]
        seen: set[int] = set()

        def place(x, given, wanted):
            if isinstance(x, Tracer):
                return jax.device_put(x, wanted)
            if id(x) not in seen and _lies_as(given, wanted, np.ndim(x)):
                seen.add(id(x))
                return x
            x = jnp.copy(x) if isinstance(x, jax.Array) else np.asarray(x)
            return jax.device_put(x, wanted)

        if given == self.accepted and len(set(map(id, leaves))) == len(leaves):
            return leaves
        placed = [place(*each) for each in zip(leaves, given, self.shardings, strict=True)]
        if all(x is y for x, y in zip(leaves, placed, strict=True)):
            self.accepted = given
        return placed


@functools.lru_cache(maxsize=4096)
def _lies_as(given, wanted: NamedSharding, ndim: int) -> bool:
    """Whether both are the same on the same mesh."""
    if not isinstance(given, NamedSharding) or given.mesh != wanted.mesh:
        return False
    return given.is_equivalent_to(wanted, ndim)


def put(tree, sharding: NamedSharding):
    """The tree, with every leaf placed so."""
    structure: Any
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(Places([sharding] * len(leaves)).put(leaves))


def shapes_of(leaves) -> tuple:
    """Shapes and dtypes."""
    return tuple([(np.shape(x), _dtype(x)) for x in leaves])


def _dtype(x):
    return x.dtype if isinstance(x, jax.Array) else dtypes.canonicalize_dtype(jnp.result_type(x))


def described(tree, mesh: Mesh, specs):
    """Shapes and dtypes of a tree, and how it lies on the mesh."""

    def describe(x, spec):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(describe, tree, specs)


def require_divisible(batch, devices):
    for path, leaf in jax.tree.leaves_with_path(batch):
        if not np.ndim(leaf) or np.shape(leaf)[0] % devices:
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} has shape {np.shape(leaf)}, whose first "
                f"dimension cannot be divided among {devices} devices: choose a batch size that is "
                "a multiple of their number."
            )


def require_global(batch):
    """With several processes no array of one of them alone can be the batch of all."""
    for path, leaf in jax.tree.leaves_with_path(batch):
        if isinstance(leaf, Tracer) or jax.process_count() == 1:
            continue
        if getattr(leaf, "is_fully_addressable", True):
            raise ValueError(
                f"with several processes a batch must be a global array, but batch"
                f"{jax.tree_util.keystr(path)} is of type {type(leaf).__name__} and shape "
                f"{np.shape(leaf)} of this process alone: make it of each process's own part with "
                "jax.make_array_from_process_local_data(jax.NamedSharding(mesh, spec), part)."
            )

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


def put(mesh: Mesh, tree, specs):
    """The tree, with every leaf placed as its spec says, or that of a prefix."""
    structure: Any
    leaves, structure = jax.tree.flatten(tree)
    wanted = jax.tree.leaves(jax.tree.broadcast(specs, tree))
    return structure.unflatten(Places([NamedSharding(mesh, x) for x in wanted]).put(leaves))


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


def require_global(batch, specs):
    """With several processes no array of one of them alone can be what all divide."""
    leaves = zip(jax.tree.leaves_with_path(batch), jax.tree.leaves(specs), strict=True)
    for (path, leaf), spec in leaves:
        if isinstance(leaf, Tracer) or jax.process_count() == 1 or not any(spec):
            continue
        if getattr(leaf, "is_fully_addressable", True):
            raise ValueError(
                f"with several processes a batch must be a global array, but batch"
                f"{jax.tree_util.keystr(path)} is of type {type(leaf).__name__} and shape "
                f"{np.shape(leaf)} of this process alone: make it of each process's own part with "
                "jax.make_array_from_process_local_data(jax.NamedSharding(mesh, spec), part)."
            )

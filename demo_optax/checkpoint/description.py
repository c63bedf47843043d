"""What a saved state is: its leaves by their paths, and in JSON what their numbers mean."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.tree_util import GetAttrKey, keystr

from demo_optax import axes
from demo_optax._decoupled_momentum import DecoupledMomentumState
from demo_optax.arrays import unboxed
from demo_optax.axes import AxisName
from demo_optax.checkpoint.digests import like
from demo_optax.exchange.delayed import DelayedState
from demo_optax.parallel import layout, shards

FORMAT = 6
"""Of what is saved; another one for each change of what the numbers of a state mean."""


def describe(
    tx: optax.GradientTransformation,
    params,
    opt_state,
    mesh: Mesh,
    axis_name: AxisName,
    param_specs,
) -> dict:
    """Describes a state, of arrays or shapes. A restore compares it with the state that it needs.

    Returns:
      ``format``, the number of ``workers``, and for each `DecoupledMomentumState`, by its path:

      * ``momenta``: for each leaf its coordinates, and the shape of its parameter, None where
        ``optax.flatten`` made one vector of all; the shards along each dimension, and the axes
        inside a worker that cut it;
      * ``kept``: for each leaf of the exchange's state its shape, and the ``[axis, size]`` inside a
        worker along which devices hold their own;
      * ``pending``: the format of pending packets, None without any.

      Axes are numbered in the order of the mesh, and ``cuts`` empty where nothing is kept.
    """
    specs = jax.tree.leaves(shards.leaf_specs(params, param_specs, mesh, axis_name))
    leaves = jax.tree.leaves_with_path(unboxed(params))
    found = {path: (x.shape, spec) for (path, x), spec in zip(leaves, specs, strict=True)}
    cut = {name for spec in specs for name in shards.axes_of(spec)}
    inner = [name for name in mesh.axis_names if name in cut]
    state_specs = layout.state_specs(tx, params, mesh, axis_name, param_specs)
    spec_of = dict(jax.tree.leaves_with_path(state_specs))

    def momentum(path, node, inside, kept) -> dict:
        shape, spec = found.get(inside, (None, jax.P()))
        cuts = [[inner.index(name) for name in axes.names(entry)] for entry in spec]
        return {
            "name": f"{keystr(path)}.momentum{keystr(inside)}",
            "count": f"{keystr(path)}.count",
            "coordinates": dataclasses.asdict(node.coordinates),
            "shape": shape,
            "shards": shards.counts(shape or (), spec, mesh),
            "cuts": [*cuts, *[[]] * (len(shape or ()) - len(cuts))] if kept else [],
        }

    def leaf(path, shape) -> dict:
        over = [name for name in shards.axes_of(spec_of[path]) if name in inner]
        sizes = [(inner.index(name), mesh.shape[name]) for name in over]
        return {"name": keystr(path), "shape": shape, "axes": sizes}

    def state(path, node) -> dict:
        kept = {}
        for inside, x in jax.tree.leaves_with_path(node.exchange):
            # A delayed exchange keeps what the exchange inside of it keeps, and more.
            key = keystr(tuple(key for key in inside if key != GetAttrKey("inner")))
            kept[key] = leaf((*path, GetAttrKey("exchange"), *inside), x.shape)
        paths = [inside for inside, _ in jax.tree.leaves_with_path(node.momentum)]
        delayed = isinstance(node.exchange, DelayedState)
        return {
            "momenta": [momentum(path, node, inside, kept) for inside in paths],
            "kept": kept,
            "pending": dataclasses.asdict(node.exchange.format) if delayed else None,
        }

    def is_momentum(x) -> bool:
        return isinstance(x, DecoupledMomentumState)

    nodes = jax.tree.leaves_with_path(opt_state, is_leaf=is_momentum)
    described = {
        "format": FORMAT,
        "workers": shards.num_workers(mesh, axis_name),
        "states": {keystr(path): state(path, node) for path, node in nodes if is_momentum(node)},
    }
    return json.loads(json.dumps(described, default=int))


def names_kept(described: dict) -> set[str]:
    """The names of the leaves that exchanges keep."""
    states = described["states"].values()
    return {kept["name"] for state in states for kept in state["kept"].values()}


def by_path(tree) -> dict:
    """The leaves of a tree, less those without elements, which Orbax cannot save."""
    leaves = {keystr(path): _storable(x) for path, x in jax.tree.leaves_with_path(tree)}
    return {name: x for name, x in leaves.items() if 0 not in np.shape(x)}


def from_paths(leaves: dict, like):
    """A tree like another one, of leaves by their paths."""

    def leaf(path, x):
        if 0 in np.shape(x):
            return jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding)
        return _like(leaves[keystr(path)], x)

    return jax.tree.map_with_path(leaf, like)


def placed(tree, shardings):
    """Shapes and dtypes with their shardings."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        tree,
        shardings,
    )


def stored_as(placed: dict, saved: dict) -> dict:
    """Shapes with their shardings, of the dtypes that were saved."""

    def stored(name, x):
        described: Any = like(saved[name])
        return jax.ShapeDtypeStruct(x.shape, described.dtype, sharding=x.sharding)

    return {name: stored(name, x) for name, x in placed.items()}


def require_same(what: str, wanted: dict, saved: dict, shapes: bool = True) -> None:
    """Refuses a checkpoint whose leaves, by their paths, are not the expected ones."""
    missing, unknown = sorted(wanted.keys() - saved.keys()), sorted(saved.keys() - wanted.keys())
    if missing or unknown:
        raise ValueError(
            f"the leaves of the checkpoint's {what} are not those that are expected: it lacks "
            f"{missing[:3] or 'nothing'} and holds {unknown[:3] or 'nothing'} beside them. Restore "
            "it with the model, the optimizer and an extra of the structure that it was saved "
            "with; for the parameters alone use demo_optax.checkpoint.load_params."
        )
    for name in wanted if shapes else ():
        given, held = np.shape(wanted[name]), np.shape(like(saved[name]))
        if given != held:
            raise ValueError(
                f"of the checkpoint's {what}, {name} has shape {held}, where {given} is expected. "
                "Restore it with the model and the optimizer that it was saved with."
            )


def extra_by_path(step: int, extra) -> dict:
    """The leaves of what is saved beside parameters and state: the step, and the user's tree."""

    def plain(x):
        x = _storable(x)
        return np.asarray(x) if isinstance(x, jax.Array) else x

    # Orbax warns of a tree without any array, so the step is one.
    return by_path({"step": np.asarray(step), "tree": jax.tree.map(plain, extra)})


def _is_key(x) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _storable(x):
    """Random keys as their numbers; all else as it is."""
    if not _is_key(x):
        return x
    if isinstance(x, jax.Array):
        return jax.random.key_data(x)
    numbers = jax.eval_shape(jax.random.key_data, x)
    return jax.ShapeDtypeStruct(numbers.shape, numbers.dtype, sharding=x.sharding)


def _like(x, original):
    """Converts what was stored to the kind of the original."""
    if _is_key(original):
        return jax.random.wrap_key_data(x, impl=jax.random.key_impl(jnp.empty((), original.dtype)))
    if not hasattr(original, "dtype"):
        return type(original)(x)
    if isinstance(original, jax.Array):
        return jnp.asarray(x, original.dtype)
    return x if x.dtype == original.dtype else x.astype(original.dtype)

"""How parameters and optimizer state lie on a mesh, found once for each tree of them."""

import weakref
from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jax.tree_util import GetAttrKey

from demo_optax import axes
from demo_optax._decoupled_momentum import DecoupledMomentumState
from demo_optax.axes import AxisName
from demo_optax.boxes import unboxed
from demo_optax.parallel import placement, shards
from demo_optax.parallel.variation import Variation, variation


def state_specs(
    tx: optax.GradientTransformation,
    params,
    mesh: Mesh | AbstractMesh,
    axis_name: AxisName = "data",
    param_specs=None,
):
    """PartitionSpecs of the state that `init_opt_state` makes, for any optax chain.

    Args:
      tx: any optax transformation that exchanges over ``axis_name``.
      params: arrays or shapes of the parameters.
      mesh: the workers' mesh.
      axis_name: the workers' axis, or axes.
      param_specs: PartitionSpecs or NamedShardings of the parameters inside a worker, a tree or a
        prefix of one.

    Returns:
      A tree like the state. Leaves with a leading worker axis have ``P(axis_name, ...)``, those
      that are the same on all workers have not; behind it stands the spec of the parameter whose
      path ends the leaf's, where the shards of a worker differ.

    Raises:
      ValueError: ``tx`` does not exchange over ``axis_name``; the mesh has no such axis; a leaf
        differs between the shards of a worker, but cannot be sharded like its parameter.

    Example:
      >>> import jax, jax.numpy as jnp, demo_optax
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> tx = demo_optax.demo_adamw(1e-3, axis_name="data")
      >>> momentum, (rms, *_) = state_specs(tx, {"w": jnp.ones((4, 4))}, mesh)
      >>> momentum.momentum, rms.nu
      ({'w': P('data',)}, {'w': P()})
    """
    return layout_of(tx, params, mesh, axis_name, param_specs).state


def state_shardings(
    tx: optax.GradientTransformation,
    params,
    mesh: Mesh,
    axis_name: AxisName = "data",
    param_specs=None,
):
    """``NamedSharding``s of the state, for ``jax.jit`` and checkpoints: those of `state_specs`.

    Args:
      tx: any optax transformation that exchanges over ``axis_name``.
      params: arrays or shapes of the parameters.
      mesh: the workers' mesh.
      axis_name: the workers' axis, or axes.
      param_specs: PartitionSpecs or NamedShardings of the parameters inside a worker, a tree or a
        prefix of one.

    Example:
      >>> import jax, jax.numpy as jnp, demo_optax
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> tx = demo_optax.demo(1e-3, axis_name="data")
      >>> state_shardings(tx, {"w": jnp.ones((4, 4))}, mesh)[0].momentum["w"].spec
      P('data',)
    """
    return shards.shardings(mesh, state_specs(tx, params, mesh, axis_name, param_specs))


class Layout(NamedTuple):
    """How parameters and state lie on a mesh.

    Attributes:
      params: PartitionSpecs of the parameters.
      state: PartitionSpecs of the state.
      variation: over which axes each leaf of state and updates differs.
      single: shapes of one worker's state.
    """

    params: Any
    state: Any
    variation: Variation
    single: Any


def layout_of(tx, params, mesh, axis_name, param_specs) -> Layout:
    """The layout of arrays or shapes of the whole parameters, found once for each tree of them."""
    require_plain(tx)
    shards.num_workers(mesh, axis_name)
    specs = shards.leaf_specs(params, param_specs, mesh, axis_name)
    leaves, structure = jax.tree.flatten(params)
    key = (
        tx.init,
        structure,
        placement.shapes_of(leaves),
        tuple(jax.tree.leaves(specs)),
        mesh,
        axis_name,
    )
    known = _layouts.setdefault(tx.update, {})
    if key not in known:
        known[key] = _layout(tx, *key[1:])
    return known[key]


_layouts: MutableMapping[Callable, dict] = weakref.WeakKeyDictionary()  # as long as optimizers live


def _layout(tx, structure, shapes, specs, mesh, axis_name) -> Layout:
    params = unboxed(structure.unflatten([jax.ShapeDtypeStruct(*leaf) for leaf in shapes]))
    specs = structure.unflatten(specs)
    parts = shards.shard_shapes(params, unboxed(specs), mesh)
    single = axes.shapes_of_worker(tx.init, mesh.shape, parts)
    found = variation(tx, parts, single, unboxed(specs), mesh.shape, axis_name)
    worker_axes = set(axes.names(axis_name))
    spec_at = dict(jax.tree.leaves_with_path(unboxed(specs)))

    of_devices = paths_of_devices(single)

    def inner_spec(path, varying_axes, leaf) -> P:
        if varying_axes <= worker_axes:
            return P()
        if path in of_devices:
            return P(tuple(name for name in mesh.axis_names if name in varying_axes - worker_axes))
        for start in range(len(path) + 1):
            spec = spec_at.get(path[start:])
            if spec is not None and len(spec) <= leaf.ndim:
                return spec
        if leaf.ndim == 0 and jnp.issubdtype(leaf.dtype, jnp.integer):
            return P()  # a counter, which all shards of a worker hold alike
        raise ValueError(
            f"the optimizer state{jax.tree_util.keystr(path)} of shape {leaf.shape} differs "
            f"between the shards of a worker, over {sorted(varying_axes - worker_axes)}, but "
            "cannot be sharded like a parameter. Leave its parameter whole (param_specs=P()), or "
            "use an optimizer whose state has the shapes of the parameters."
        )

    def whole_spec(path, varying_axes, leaf) -> P:
        spec = inner_spec(path, varying_axes, leaf)
        return P(axis_name, *spec) if varying_axes & worker_axes else spec

    state_specs = jax.tree.map_with_path(whole_spec, found.state, single)
    return Layout(specs, state_specs, found, single)


def paths_of_devices(state) -> list[tuple]:
    """Paths of the leaves that belong to a device, and to none of its parameters."""
    found = []

    def is_momentum(x) -> bool:
        return isinstance(x, DecoupledMomentumState)

    for path, node in jax.tree.leaves_with_path(state, is_leaf=is_momentum):
        if is_momentum(node):
            for name in ("residual", "waiting"):
                leaves = jax.tree.leaves_with_path(getattr(node, name))
                found += [(*path, GetAttrKey(name), *inside) for inside, _ in leaves]
    return found


class Stacked(optax.GradientTransformationExtraArgs):
    """What `stack_workers` makes."""


def require_plain(tx) -> None:
    """Refuses an optimizer that `stack_workers` made."""
    if isinstance(tx, Stacked):
        raise TypeError(
            "tx was made by demo_optax.stack_workers(...), which is called here by itself: "
            "pass the optimizer that was wrapped."
        )

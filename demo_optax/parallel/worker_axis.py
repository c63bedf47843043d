"""The worker axis: how state that differs between workers lives in global arrays.

A momentum that differs between workers must not be typed as replicated: a checkpoint would then
store a patchwork of all of them. Outside the step such leaves have a leading axis, one entry a
worker, sharded over the workers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from demo_optax import axes, participation
from demo_optax.arrays import unboxed
from demo_optax.axes import AxisName
from demo_optax.parallel import shards
from demo_optax.parallel.layout import Layout, Stacked, find_layout, require_plain


def stack_workers(
    tx: optax.GradientTransformation,
    mesh: Mesh,
    axis_name: AxisName = "data",
    param_specs=None,
) -> optax.GradientTransformationExtraArgs:
    """``tx`` with a state whose worker-local leaves carry a leading worker axis.

    ``init`` is called outside ``jax.shard_map`` and places the state on the mesh. ``update`` is
    called in any ``jax.jit``, as the outermost transformation, with *stacked* gradients
    ``(workers, *shape)`` as `worker_gradients` makes them: the optimizer alone runs in a
    ``jax.shard_map`` of its own, each device on its own shards. Or it is called inside of one over
    all axes of the mesh, where a device holds its worker's entry of that axis. With it a Flax
    ``TrainState``, ``nnx.Optimizer`` or any other holder of an optax transformation works
    unchanged. Parameters and gradients may be in Flax's boxes; the state has none, since an axis of
    workers would not be in their names. A worker whose gradient is not finite keeps its entries.

    Args:
      tx: any optax transformation that exchanges over ``axis_name``.
      mesh: the workers' mesh.
      axis_name: the workers' axis, or axes.
      param_specs: PartitionSpecs or NamedShardings of the parameters inside a worker, a tree or a
        prefix of one; by default each device of a worker holds all of them.

    Returns:
      An ``optax.GradientTransformationExtraArgs``.

    Example:
      >>> import jax, jax.numpy as jnp, demo_optax
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> tx = stack_workers(demo_optax.demo(1e-3, axis_name="data"), mesh)
      >>> tx.init({"w": jnp.ones((128, 64))})[0].momentum["w"].shape
      (1, 2, 1, 4096)
    """
    require_plain(tx)
    workers = shards.num_workers(mesh, axis_name)
    worker_axes = set(axes.names(axis_name))

    @functools.lru_cache(maxsize=8)
    def layout_of(structure, shapes) -> Layout:
        params = structure.unflatten([jax.ShapeDtypeStruct(*x) for x in shapes])
        return find_layout(tx, params, mesh, axis_name, param_specs)

    def layout_for(params) -> Layout:
        return layout_of(jax.tree.structure(params), shapes_of(jax.tree.leaves(params)))

    def init_fn(params):
        return init_stacked(tx, layout_for(params), mesh, axis_name, params)

    def update_fn(updates, state, params=None, **extra_args):
        manual = set(jax.sharding.get_abstract_mesh().manual_axes)
        if not worker_axes & manual:
            _require_outermost(updates)
            require_stacked(updates, workers, "gradients", "worker_gradients")
            one = jax.tree.map(lambda g: jax.ShapeDtypeStruct(g.shape[1:], g.dtype), updates)
            layout = layout_for(one)
            return update_stacked(tx, layout, mesh, axis_name, updates, state, params, extra_args)
        if left := [name for name in shards.inner_axes(mesh, axis_name) if name not in manual]:
            raise ValueError(
                f"update is called inside of a shard_map that leaves the axes {left} to the "
                "compiler: return its gradients from there, stacked (workers, *shape), and call "
                "update outside, or make that shard_map over all axes of the mesh."
            )
        specs = shards.leaf_specs(updates, param_specs, mesh, axis_name)
        layout = layout_for(shards.whole_shapes(updates, specs, mesh))
        own = unstack(state, layout, axis_name)
        updates, own = update_own(tx, layout, axis_name, updates, own, params, extra_args)
        return updates, stack(own, layout, axis_name)

    return Stacked(init_fn, update_fn)


def init_stacked(tx, layout: Layout, mesh: Mesh, axis_name: AxisName, params):
    """The state of ``tx`` for all workers, placed on the mesh."""
    specs = unboxed(layout.params)

    def init(params):
        return stack(tx.init(params), layout, axis_name)

    placed = jax.device_put(unboxed(params), shards.shardings(mesh, specs))
    sharded = jax.shard_map(init, mesh=mesh, in_specs=(specs,), out_specs=layout.state)
    return jax.jit(sharded, out_shardings=shards.shardings(mesh, layout.state))(placed)


def update_stacked(
    tx, layout: Layout, mesh: Mesh, axis_name: AxisName, updates, state, params, extra_args
):
    """Updates with stacked gradients, in a ``jax.shard_map`` around the optimizer alone."""
    of_params = P() if params is None else layout.params
    of_gradients = shards.stacked_specs(layout.params, axis_name)

    def update(updates, state, params, extra_args):
        gradient = jax.tree.map(lambda g: g[0], updates)
        own = unstack(state, layout, axis_name)
        updates, own = update_own(tx, layout, axis_name, gradient, own, params, extra_args)
        return updates, stack(own, layout, axis_name)

    return jax.shard_map(
        update,
        mesh=mesh,
        in_specs=(of_gradients, layout.state, of_params, P()),
        out_specs=(layout.params, layout.state),
    )(
        shards.constrain_sharding(updates, mesh, of_gradients),
        shards.constrain_sharding(state, mesh, layout.state),
        None if params is None else shards.constrain_sharding(params, mesh, layout.params),
        extra_args,
    )


def update_own(tx, layout: Layout, axis_name: AxisName, updates, old, params, extra_args):
    """Updates of one device, with its worker's own gradient and state."""
    structure: Any = jax.tree.structure(updates)
    specs, worker_axes = unboxed(layout.params), set(axes.names(axis_name))
    updates, params = unboxed(updates), unboxed(params)
    sharded = shards.sharded_axes(specs)
    participates = participation.decide(updates, axis_name, extra_args, sharded)
    extra_args = {**extra_args, participation.PARTICIPATES: participates}
    updates, new = optax.with_extra_args_support(tx).update(updates, old, params, **extra_args)

    def unless_frozen(x, frozen):
        return jnp.zeros(x.shape, x.dtype) if frozen else x

    def in_common(x, varying_axes, spec):
        copied_axes = varying_axes - set(shards.axes_of(spec)) - worker_axes
        return shards.from_first(x, tuple(sorted(copied_axes)))

    updates = jax.tree.map(unless_frozen, updates, layout.frozen)
    updates = jax.tree.map(in_common, updates, layout.update_axes, specs)
    new = shards.metrics_of_worker(new, old, sharded)
    new = jax.tree.map(in_common, new, layout.state_axes, layout.state)
    new = participation.keep_own(new, old, _is_own(layout, axis_name), participates, sharded)
    momenta = shards.momenta_of(new)
    if len(momenta) == 1 and len(jax.tree.leaves(momenta[0].momentum)) == structure.num_leaves:
        participants = momenta[0].metrics.participants
        updates = participation.zero_updates_if_nobody(updates, participants)
    return structure.unflatten(jax.tree.leaves(updates)), new


def stack(own, layout: Layout, axis_name: AxisName):
    """One worker's state with the worker axis in front of what differs between workers."""
    return jax.tree.map(lambda x, s: x[None] if s else x, own, _is_own(layout, axis_name))


def unstack(state, layout: Layout, axis_name: AxisName):
    """One worker's entries of a state, checked against the shapes of a single worker's."""
    return jax.tree.map(_own_entry, state, layout.single, _is_own(layout, axis_name))


def _is_own(layout: Layout, axis_name: AxisName):
    """A tree of bools: which leaves of the state differ between workers."""
    worker_axes = set(axes.names(axis_name))
    return jax.tree.map(lambda names: bool(names & worker_axes), layout.state_axes)


def shapes_of(leaves) -> tuple:
    """Shapes and dtypes."""
    return tuple((np.shape(x), dtype_of(x)) for x in leaves)


def dtype_of(x):
    """The dtype that JAX gives a value."""
    dtype = getattr(x, "dtype", None)
    return dtype if dtype is not None else jax.dtypes.canonicalize_dtype(jnp.result_type(x))


def init_opt_state(
    tx: optax.GradientTransformation,
    params,
    mesh: Mesh,
    axis_name: AxisName = "data",
    param_specs=None,
):
    """The state of ``tx`` for all workers of a mesh, placed on it.

    Args:
      tx: any optax transformation that exchanges over ``axis_name``.
      params: the parameters.
      mesh: the workers' mesh.
      axis_name: the workers' axis, or axes.
      param_specs: PartitionSpecs or NamedShardings of the parameters inside a worker, a tree or a
        prefix of one.

    Returns:
      ``tx.init(params)``, where each leaf that differs between workers has a leading axis of
      their number, sharded as `state_specs` says. Momenta are those of each device's shard of
      its parameter.

    Raises:
      ValueError: ``tx`` does not exchange over ``axis_name``; the mesh has no such axis; a
        parameter cannot be divided as ``param_specs`` says.

    Example:
      >>> import jax.numpy as jnp, demo_optax
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> tx = demo_optax.demo(1e-3, axis_name="data")
      >>> state = init_opt_state(tx, {"w": jnp.ones((64, 64))}, mesh)
      >>> state[0].momentum["w"].shape  # the number of workers comes first
      (1, 1, 1, 4096)
    """
    return stack_workers(tx, mesh, axis_name, param_specs).init(params)


def _require_outermost(updates) -> None:
    """Refuses gradients of which a part was masked away: the rest would stay stacked."""
    nodes = jax.tree.leaves(updates, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
    if any(isinstance(node, optax.MaskedNode) for node in nodes):
        raise ValueError(
            "demo_optax.stack_workers(...) stands inside optax.masked or optax.partition, whose "
            "other parts would see stacked gradients (workers, *shape): leave it outermost, and "
            "mask, partition and clip inside of it."
        )


def init_model_state(state, mesh: Mesh, axis_name: AxisName = "data"):
    """A model's state for all workers, placed on the mesh: each leaf ``(workers, *shape)``.

    Every worker begins with the same, but for typed random keys (``jax.random.key``), into which
    its number is folded: no two drop the same units. The devices of one worker share its keys. To
    evaluate, average the floats over their first axis, or take a worker's.

    Args:
      state: arrays and random keys, such as ``nnx.state(model, nnx.BatchStat)``.
      mesh: the workers' mesh.
      axis_name: the workers' axis, or axes.

    Example:
      >>> import jax.numpy as jnp
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> init_model_state({"mean": jnp.zeros(3)}, mesh)["mean"].shape
      (1, 3)
    """
    workers = shards.num_workers(mesh, axis_name)

    def stack(x):
        x = jnp.asarray(x)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.vmap(jax.random.fold_in, (None, 0))(x, jnp.arange(workers))
        return jnp.broadcast_to(x, (workers, *x.shape))

    stacked = jax.tree.map(stack, state)
    return jax.device_put(stacked, jax.NamedSharding(mesh, P(axis_name)))


def require_stacked(tree, workers: int, what: str, maker: str) -> None:
    """Refuses leaves that are not stacked, ``(workers, *shape)``."""
    for path, x in jax.tree.leaves_with_path(tree):
        if np.shape(x)[:1] != (workers,):
            raise ValueError(
                f"the {what} of {workers} workers are expected, stacked in front, but leaf"
                f"{jax.tree_util.keystr(path)} has shape {np.shape(x)}: make them with "
                f"demo_optax.{maker}."
            )


def require_state(opt_state, expected, workers: int) -> None:
    """Refuses a state made for another number of workers or another model."""
    given: Any = jax.tree.structure(opt_state)
    wanted: Any = jax.tree.structure(expected)
    if given != wanted:
        has, needs = _names(opt_state), _names(expected)
        if has == needs:
            one, other = (_static_parts(tree) for tree in (opt_state, expected))
            raise ValueError(
                f"the optimizer state is stored as {one}, but this optimizer needs {other}: "
                "transform, block_side or block_rule, or the parameters' shapes, changed since it "
                "was made. Go back to the old ones, make it anew with demo_optax.init_opt_state, "
                "or carry it over with demo_optax.checkpoint."
            )
        raise ValueError(
            "the optimizer state is not one of this optimizer and these parameters, or is stored "
            f"for another transform or blocks: it lacks {sorted(needs - has)[:3] or 'nothing'} "
            f"and holds {sorted(has - needs)[:3] or 'nothing'} beside what is needed. Make it with "
            "demo_optax.init_opt_state, or carry it over with demo_optax.checkpoint."
        )
    leaves = jax.tree.leaves_with_path(opt_state)
    for (path, leaf), single in zip(leaves, jax.tree.leaves(expected), strict=True):
        if leaf.shape != single.shape:
            raise ValueError(
                f"the optimizer state{jax.tree_util.keystr(path)} has shape {leaf.shape}, but "
                f"{workers} workers need {single.shape}: it was made for another number of "
                "workers or another model, or by tx.init alone. Make it with "
                "demo_optax.init_opt_state on the mesh that it is used on."
            )


def _static_parts(tree) -> str:
    """What the states of decoupled momentum say of how they are stored."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: hasattr(x, "coordinates"))
    found = [(x.coordinates, x.sides) for x in nodes if hasattr(x, "coordinates")]
    return ", ".join(f"{coordinates} with {sides}" for coordinates, sides in found) or "other nodes"


def _names(tree) -> set[str]:
    return {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)}


def _own_entry(x, single, stacked):
    """One worker's entry of a leaf, checked against the shape of a single worker's."""
    wanted = (1, *single.shape) if stacked else single.shape
    if x.shape == wanted:
        return x[0] if stacked else x
    raise ValueError(
        f"a leaf of the optimizer state has shape {x.shape} inside the step, but {wanted} is "
        f"expected ({single.shape} for one worker, behind an axis of length 1 where workers "
        "differ). The state was made for another number of workers, another model, or without "
        "the worker axis: make it with demo_optax.init_opt_state on the mesh that it is used on, "
        "and pass it with the specs of demo_optax.state_specs."
    )

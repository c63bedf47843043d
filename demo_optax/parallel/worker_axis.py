"""The worker axis: how state that differs between workers lives in global arrays.

A momentum that differs between workers must not be typed as replicated: a checkpoint would then
store a patchwork of all of them. Outside the step such leaves have a leading axis, one entry a
worker, sharded over the workers. Which leaves these are is read from JAX's types: one update is
evaluated abstractly, and what comes out varying over the axis belongs to a worker.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from demo_optax import axes
from demo_optax.axes import AxisName
from demo_optax.decoupled_momentum import DecoupledMomentumState
from demo_optax.parallel import shards


def num_workers(mesh: Mesh | AbstractMesh, axis_name: AxisName) -> int:
    """Workers along ``axis_name``: the product of the sizes of its axes."""
    missing = [name for name in axes.names(axis_name) if name not in mesh.shape]
    if missing or axis_name is None:
        raise ValueError(
            f"axis_name must be one or several of the mesh's axes {tuple(mesh.shape)}, not "
            f"{axis_name!r}."
        )
    size = 1
    for name in axes.names(axis_name):
        size *= mesh.shape[name]
    return size


class Variation(NamedTuple):
    """Over which of a mesh's axes the outcome of an update differs: trees of frozensets."""

    state: Any
    updates: Any


def variation(
    tx: optax.GradientTransformation,
    params,
    mesh: Mesh | AbstractMesh,
    axis_name: AxisName,
    specs,
) -> Variation:
    """Evaluates updates abstractly under ``jax.shard_map(check_vma=True)``.

    With gradients that vary over ``axis_name`` and the axes of their parameter's spec, until
    nothing more of the state comes out varying.

    Args:
      tx: any optax transformation that exchanges over ``axis_name``.
      params: arrays or shapes of the whole parameters.
      mesh: the workers' mesh.
      axis_name: the workers' axis, or axes.
      specs: the parameters' PartitionSpecs inside a worker.

    Raises:
      ValueError: the updates themselves differ between workers, because ``tx`` does not exchange.
    """
    num_workers(mesh, axis_name)
    parts = shards.shard_shapes(params, specs, mesh)
    leaves, structure = jax.tree.flatten(parts)
    return _variation(
        tx,
        structure,
        tuple((leaf.shape, leaf.dtype) for leaf in leaves),
        tuple(jax.tree.leaves(specs)),
        tuple(mesh.shape.items()),
        axis_name,
    )


@functools.lru_cache(maxsize=32)
def _variation(tx, structure, shapes, specs, mesh_shape, axis_name) -> Variation:
    tx = optax.with_extra_args_support(tx)
    parts = structure.unflatten([jax.ShapeDtypeStruct(*leaf) for leaf in shapes])
    specs = structure.unflatten(specs)
    sharded = shards.sharded_axes(specs)
    outcome: list[Variation] = []

    def probe(over):
        def update():
            values = jax.tree.map(
                lambda x, spec: axes.as_varying(jnp.zeros(x.shape, x.dtype), shards.axes_of(spec)),
                parts,
                specs,
            )
            state = jax.tree.map(
                lambda x, names: axes.as_varying(x, tuple(names)), tx.init(values), over
            )
            updates, state = tx.update(axes.as_varying(values, axis_name), state, values)
            state = shards.combine_metrics(state, sharded)
            outcome.append(Variation(*jax.tree.map(axes.varying, (state, updates))))

        axes.trace_worker(update, dict(mesh_shape))
        return outcome[-1]

    over = jax.tree.map(lambda _: frozenset(), jax.eval_shape(tx.init, parts))
    try:
        while (found := probe(over)).state != over:
            over = jax.tree.map(frozenset.union, over, found.state)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"{error}\n\nThis came up while an update was evaluated abstractly, to find which "
            "parts of the state differ between workers. optax.MultiSteps and "
            "optax.apply_if_finite cannot be evaluated so: accumulate with "
            "make_train_step(microbatches=...) instead; workers whose gradient is not finite are "
            "left out already."
        ) from error
    for path, names in jax.tree.leaves_with_path(found.updates):
        if names & set(axes.names(axis_name)):
            raise ValueError(
                f"the optimizer's updates differ between the workers of axis {axis_name!r} (first: "
                f"parameter{jax.tree_util.keystr(path)}), so their parameters would drift apart "
                "unseen. It must exchange over that axis: give demo_optax.decoupled_momentum (or "
                f"demo_optax.demo, ...) axis_name={axis_name!r}, or put "
                f"demo_optax.mean_over_workers({axis_name!r}) in front of an ordinary optimizer."
            )
    return found


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
      param_specs: PartitionSpecs of the parameters inside a worker, a tree or a prefix of one.

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
      >>> momentum, rms, *_ = state_specs(tx, {"w": jnp.ones((4, 4))}, mesh)
      >>> momentum.momentum, rms.nu
      ({'w': P('data',)}, {'w': P()})
    """
    specs = shards.leaf_specs(params, param_specs, mesh, axis_name)
    over = variation(tx, params, mesh, axis_name, specs).state
    return _specs_of_state(over, tx, params, specs, axis_name)


def _specs_of_state(over, tx, params, specs, axis_name):
    workers = set(axes.names(axis_name))
    of_params = {path: spec for path, spec in jax.tree.leaves_with_path(specs)}

    def inside(path, names, leaf) -> P:
        if names <= workers:
            return P()
        for start in range(len(path) + 1):
            spec = of_params.get(path[start:])
            if spec is not None and len(spec) <= leaf.ndim:
                return spec
        if leaf.ndim == 0 and jnp.issubdtype(leaf.dtype, jnp.integer):
            return P()  # a counter, which all shards of a worker hold alike
        raise ValueError(
            f"the optimizer state{jax.tree_util.keystr(path)} of shape {leaf.shape} differs "
            f"between the shards of a worker, over {sorted(names - workers)}, but cannot be "
            "sharded like a parameter. Leave its parameter whole (param_specs=P()), or use an "
            "optimizer whose state has the shapes of the parameters."
        )

    def spec_of(path, names, leaf) -> P:
        spec = inside(path, names, leaf)
        return P(axis_name, *spec) if names & workers else spec

    state = jax.eval_shape(tx.init, params)
    return jax.tree.map_with_path(spec_of, over, state)


def stack_workers(
    tx: optax.GradientTransformation,
    mesh: Mesh,
    axis_name: AxisName = "data",
    param_specs=None,
) -> optax.GradientTransformationExtraArgs:
    """``tx`` with a state whose worker-local leaves carry a leading worker axis.

    ``init`` is called outside ``jax.shard_map`` and places the state on the mesh. ``update`` is
    called inside, where each worker holds one entry of that axis. With it a Flax ``TrainState``
    or any other holder of an optax transformation works unchanged. A worker whose gradient is
    not finite keeps its entries as they were, so that no second moment is lost to one bad batch.

    Where the mesh has further axes, inside the workers, they may be manual around ``update``, or
    left to the compiler, ``jax.shard_map(axis_names={axis_name})``: then the optimizer alone runs
    in a ``jax.shard_map`` of its own over them, so that each device compresses its own shard.

    Args:
      tx: any optax transformation that exchanges over ``axis_name``.
      mesh: the workers' mesh.
      axis_name: the workers' axis, or axes.
      param_specs: PartitionSpecs of the parameters inside a worker, a tree or a prefix of one;
        by default each device of a worker holds all of them.

    Returns:
      An ``optax.GradientTransformationExtraArgs``.

    Example:
      >>> import jax, jax.numpy as jnp, demo_optax
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> tx = stack_workers(demo_optax.demo(1e-3, axis_name="data"), mesh)
      >>> tx.init({"w": jnp.ones((128, 64))})[0].momentum["w"].shape
      (1, 2, 1, 64, 64)
    """
    num_workers(mesh, axis_name)
    inner = shards.inner_axes(mesh, axis_name)
    tx = optax.with_extra_args_support(tx)

    def differs(spec):
        return bool(set(axes.names(axis_name)) & set(shards.axes_of(spec)))

    def init_fn(params):
        specs = shards.leaf_specs(params, param_specs, mesh, axis_name)
        of_state = state_specs(tx, params, mesh, axis_name, param_specs)

        def init(params):
            state = tx.init(params)
            return jax.tree.map(lambda x, spec: x[None] if differs(spec) else x, state, of_state)

        placed = jax.device_put(params, shards.shardings(mesh, specs))
        sharded = jax.shard_map(init, mesh=mesh, in_specs=(specs,), out_specs=of_state)
        return jax.jit(sharded, out_shardings=shards.shardings(mesh, of_state))(placed)

    def update_fn(updates, state, params=None, **extra_args):
        specs = shards.leaf_specs(updates, param_specs, mesh, axis_name)
        manual = jax.sharding.get_abstract_mesh().manual_axes
        to_compiler = {name for name in inner if name not in manual}
        if not to_compiler:
            whole = _whole_shapes(updates, specs, mesh)
            return update_shards(updates, state, params, whole, specs, extra_args)
        whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), updates)
        of_state = jax.tree.map(
            lambda spec: P(None, *spec[1:]) if differs(spec) else spec,
            state_specs(tx, whole, mesh, axis_name, param_specs),
        )

        def update_inside(updates, state, params):
            return update_shards(updates, state, params, whole, specs, extra_args)

        return jax.shard_map(
            update_inside,
            axis_names=to_compiler,
            check_vma=axes.types_are_tracked(axis_name),
            in_specs=(specs, of_state, P() if params is None else specs),
            out_specs=(specs, of_state),
        )(updates, state, params)

    def update_shards(updates, state, params, whole, specs, extra_args):
        over = variation(tx, whole, mesh, axis_name, specs)
        of_state = _specs_of_state(over.state, tx, whole, specs, axis_name)
        sharded = shards.sharded_axes(specs)
        stacked = jax.tree.map(differs, of_state)
        single = jax.eval_shape(tx.init, shards.shard_shapes(whole, specs, mesh))
        old = jax.tree.map(_own_entry, state, single, stacked)
        updates = shards.all_or_nothing(updates, sharded)
        finite = jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(updates)]).all()
        updates, new = tx.update(updates, old, params, **extra_args)

        def in_common(x, names, spec):
            rest = names - set(shards.axes_of(spec)) - set(axes.names(axis_name))
            return shards.from_first(x, tuple(sorted(rest)))

        def keep(new, old, stacked):
            if isinstance(new, DecoupledMomentumState):  # which protects itself
                return jax.tree.map(lambda x, s: x[None] if s else x, new, stacked)
            return jnp.where(finite, new, old)[None] if stacked else new

        updates = jax.tree.map(in_common, updates, over.updates, specs)
        new = shards.combine_metrics(new, sharded)
        new = jax.tree.map(in_common, new, over.state, of_state)
        return updates, jax.tree.map(
            keep, new, old, stacked, is_leaf=lambda x: isinstance(x, DecoupledMomentumState)
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _whole_shapes(parts, specs, mesh):
    """Shapes and dtypes of the whole arrays that these are the shards of."""

    def whole(x, spec):
        counts = shards.counts(x.shape, spec, mesh)
        shape = tuple(size * count for size, count in zip(x.shape, counts, strict=True))
        return jax.ShapeDtypeStruct(shape, x.dtype)

    return jax.tree.map(whole, parts, specs)


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
      param_specs: PartitionSpecs of the parameters inside a worker, a tree or a prefix of one.

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
      (1, 1, 1, 64, 64)
    """
    return stack_workers(tx, mesh, axis_name, param_specs).init(params)


def require_state(opt_state, expected, workers: int) -> None:
    """Refuses a state made for another number of workers or another model."""
    given: Any = jax.tree.structure(opt_state)
    wanted: Any = jax.tree.structure(expected)
    if given != wanted:
        has, needs = _names(opt_state), _names(expected)
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


def _names(tree) -> set[str]:
    return {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)}


def _own_entry(x, single, stacked):
    """One worker's entry of a leaf, checked against the shape of a single worker's."""
    wanted = (1, *single.shape) if stacked else single.shape
    if x.shape == wanted:
        return x[0] if stacked else x
    raise ValueError(
        f"a leaf of the optimizer state has shape {x.shape} inside the step, where {wanted} is "
        f"expected ({single.shape} for one worker, behind an axis of length 1 where workers "
        "differ). The state was made for another number of workers, another model, or without "
        "the worker axis: make it with demo_optax.init_opt_state on the mesh that it is used on, "
        "and pass it with the specs of demo_optax.state_specs."
    )

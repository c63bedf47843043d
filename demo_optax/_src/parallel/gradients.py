"""Divides a batch among the workers, and stacks the gradients of their own losses."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr

from demo_optax._src import axes
from demo_optax._src.axes import AxisName
from demo_optax._src.local_state import local_parameters
from demo_optax._src.parallel import shards, worker_axis
from demo_optax._src.parallel.worker_gradient import (
    gradients_on_device,
    require_differentiable,
    split_arguments,
    stack,
    stacked_results_specs,
)


def worker_gradients(
    loss_fn: Callable,
    mesh: Mesh | AbstractMesh,
    axis_name: AxisName = "data",
    *,
    microbatches: int = 1,
    clip_norm: float | None = None,
    stateful: bool = False,
    param_specs=None,
    batch_specs=None,
) -> Callable:
    """Computes stacked gradients for a program that leaves all shardings to the compiler.

    ``loss_fn`` is mapped over the workers by ``jax.vmap(spmd_axis_name=axis_name)``. It may contain
    any sharding constraints over the mesh's other axes, and a ``jax.shard_map`` of its own. Nothing
    is averaged over the workers.

    The arguments are those of `make_train_step`. If the result is called with a key, it calls
    ``loss_fn(params, batch, key)``.

    Returns:
      ``fn(params, [state,] batch[, key], *, opt_state) -> WorkerGradients``, for use inside
      ``jax.jit``. Each worker and microbatch gets a different key. ``opt_state`` is the state of
      the optimizer that will use the gradients. With local steps or a look-ahead in it, gradients
      are those at `local_parameters`; with ``()`` they are those at the shared parameters.

    Raises:
      TypeError: ``opt_state`` is not given.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
      >>> fn = worker_gradients(lambda w, x: w * x.sum(), mesh)
      >>> jax.jit(fn)(jnp.float32(1), jnp.ones(3), opt_state=()).gradients
      Array([3.], dtype=float32)
    """
    workers = shards.num_workers(mesh, axis_name)
    gradients_of = stacked_gradients(
        loss_fn,
        mesh,
        axis_name,
        manual=False,
        microbatches=microbatches,
        clip_norm=clip_norm,
        stateful=stateful,
        param_specs=param_specs,
        batch_specs=batch_specs,
    )

    def at_params(params, *args, opt_state=None):
        require_differentiable(params)
        state, batch, key = split_arguments(args, ("params",), stateful, (0, 1))
        worker_axis.require_stacked(state, workers, "model state", "init_model_state")
        specs = shards.leaf_specs(params, param_specs, mesh, axis_name)
        copies = shards.copies(params, mesh, axis_name, specs)
        if opt_state is None:
            raise TypeError(
                "worker_gradients got no opt_state, but with local steps or a look-ahead, as of "
                "demo_muon, each worker computes its gradient at a point of its own, which is in "
                "the optimizer's state: call gradients(params, batch, opt_state=opt_state). For "
                "gradients at the shared parameters give opt_state=()."
            )
        own = local_parameters(copies, opt_state)
        return gradients_of(own, state, batch, *key, params_are_replicated=own is params)

    return at_params


def stacked_gradients(
    loss_fn: Callable,
    mesh: Mesh | AbstractMesh,
    axis_name: AxisName,
    *,
    manual: bool,
    microbatches: int,
    clip_norm: float | None,
    stateful: bool,
    param_specs,
    batch_specs,
    check_vma: bool = True,
) -> Callable:
    """Returns ``fn(params, state, batch, *key, params_are_replicated) -> WorkerGradients``.

    The model state is stacked over the workers, and so are the parameters, unless simulated workers
    share one copy of them (``params_are_replicated``). If ``manual``, the loss runs in a
    ``jax.shard_map`` over all axes: each device gathers the parameters and sees its own part of the
    batch, and the devices of a worker average their gradients. Otherwise the loss is mapped over
    the workers.
    """
    on_device = gradients_on_device(
        loss_fn,
        axis_name if manual else None,
        shards.inner_axes(mesh, axis_name) if manual else (),
        microbatches=microbatches,
        clip_norm=clip_norm,
        stateful=stateful,
    )
    if not manual and isinstance(mesh, Mesh):
        _require_one_axis_type(mesh, microbatches)
    workers = shards.num_workers(mesh, axis_name)

    def in_shard_map(params, state, batch, key, specs, leaf_batch_specs, rows, _):
        def compute(params, state, batch, key):
            params, state = jax.tree.map(lambda x: x[0], (params, state))
            return stack(on_device(params, state, batch, key, specs, rows))

        stacked_specs = shards.stacked_specs(specs, axis_name)
        return jax.shard_map(
            compute,
            mesh=mesh,
            in_specs=(stacked_specs, P(axis_name), leaf_batch_specs, P()),
            out_specs=stacked_results_specs(specs, mesh, axis_name),
            check_vma=check_vma,
        )(params, state, batch, key)

    def mapped(params, state, batch, key, specs, leaf_batch_specs, rows, params_are_replicated):
        def compute_worker(params, state, batch, *key):
            whole = jax.tree.map(lambda _: P(), params)
            return on_device(params, state, batch, key, whole, rows)

        batch = split_workers(batch, leaf_batch_specs, rows, mesh, axis_name)
        keys = [jax.vmap(jax.random.fold_in, (None, 0))(k, jnp.arange(workers)) for k in key]
        keys = shards.constrain_sharding(keys, mesh, P(axis_name))
        structure: Any = jax.tree.structure(batch)
        batch_axes = structure.unflatten(rows)
        compute_workers = jax.vmap(
            compute_worker,
            (None if params_are_replicated else 0, 0, batch_axes, *[0 for _ in key]),
            spmd_axis_name=None if isinstance(mesh, AbstractMesh) else axis_name,
        )
        results = compute_workers(params, state, batch, *keys)
        stacked_specs = shards.stacked_specs(specs, axis_name)
        gradients = shards.constrain_sharding(results.gradients, mesh, stacked_specs)
        return results._replace(gradients=gradients)

    def compute(params, state, batch, *key, params_are_replicated):
        require_differentiable(params)
        batch, given = jax.tree.map(jnp.asarray, batch), batch_specs
        if given is None and not manual:
            given = typed_batch_specs(batch, mesh, axis_name)
        specs = shards.leaf_specs(params, param_specs, mesh, axis_name)
        leaf_batch_specs = shards.batch_leaf_specs(batch, given, mesh, axis_name)
        rows = shards.row_dimensions(leaf_batch_specs, axis_name)
        gradients_of = in_shard_map if manual else mapped
        return gradients_of(
            params, state, batch, key, specs, leaf_batch_specs, rows, params_are_replicated
        )

    return compute


def _require_one_axis_type(mesh: Mesh | AbstractMesh, microbatches: int) -> None:
    if len(set(mesh.axis_types)) > 1:
        raise ValueError(
            f"stacked gradients need a mesh whose axes are all Auto or all Explicit, not "
            f"{mesh.axis_types}: make it with one kind, as in jax.make_mesh(shape, names, "
            "(jax.sharding.AxisType.Auto,) * len(names))."
        )
    if microbatches > 1 and AxisType.Explicit in mesh.axis_types:
        raise ValueError(
            f"microbatches={microbatches} of stacked gradients need a mesh whose axes are Auto, "
            f"not {mesh.axis_types}: make it with jax.make_mesh(shape, names, "
            "(jax.sharding.AxisType.Auto,) * len(names)), or accumulate with "
            "demo_optax.multi_steps."
        )


def typed_batch_specs(batch, mesh: Mesh | AbstractMesh, axis_name: AxisName):
    """Returns PartitionSpecs that divide the first dimension of a traced batch among the workers.

    If a leaf's type already divides a dimension among them, they divide that dimension. On an
    Explicit mesh, where a loss sees the sharding of its batch, they keep the sharding inside a
    worker.
    """
    worker_axes = axes.names(axis_name)
    if AxisType.Explicit not in mesh.axis_types:
        return P(worker_axes)

    def typed_spec(x):
        if needs_device_put(x, mesh):
            return P(worker_axes)
        entries = [axes.names(entry) for entry in jax.typeof(x).sharding.spec] or [()]
        row = shards.row_dimensions(P(*entries), axis_name)[0] or 0
        inner = tuple(name for name in entries[row] if name not in worker_axes)
        entries[row] = worker_axes + inner
        return P(*entries)

    return jax.tree.map(typed_spec, batch)


def split_workers(batch, specs, rows, mesh: Mesh | AbstractMesh, axis_name: AxisName):
    """Adds an axis of workers before the rows of divided leaves, and puts all on the mesh."""
    workers, worker_axes = shards.num_workers(mesh, axis_name), axes.names(axis_name)

    def split(path, x, spec, row):
        if needs_device_put(x, mesh):
            given = jax.typeof(x).sharding.mesh
            if not given.empty and given.size != mesh.size:
                raise ValueError(
                    f"batch{keystr(path)} lies on {given}, but the workers' mesh is {mesh}, which "
                    f"has {mesh.size} devices and not {given.size}: give a batch on that mesh, as "
                    f"by jax.device_put(x, jax.NamedSharding(mesh, jax.P({axis_name!r})))."
                )
            x = jax.device_put(x, NamedSharding(mesh, spec))
        if row is None:
            return x
        shape = *x.shape[:row], workers, -1, *x.shape[row + 1 :]
        inner = tuple(name for name in axes.names(spec[row]) if name not in worker_axes)
        entries = *spec[:row], axis_name, inner or None, *spec[row + 1 :]
        if isinstance(mesh, AbstractMesh):
            return x.reshape(shape)
        if AxisType.Explicit in mesh.axis_types:
            return jnp.reshape(x, shape, out_sharding=NamedSharding(mesh, P(*entries)))
        # Auto axes may divide the rest.
        free = [P.UNCONSTRAINED if entry is None else entry for entry in entries]
        free += [P.UNCONSTRAINED] * (len(shape) - len(free))
        return jax.lax.with_sharding_constraint(x.reshape(shape), NamedSharding(mesh, P(*free)))

    structure: Any = jax.tree.structure(batch)
    leaves = zip(jax.tree.leaves_with_path(batch), jax.tree.leaves(specs), rows, strict=True)
    return structure.unflatten([split(path, x, spec, row) for (path, x), spec, row in leaves])


def needs_device_put(x, mesh: Mesh | AbstractMesh) -> bool:
    """Tells whether a traced array must be put on a mesh with devices before it is used there.

    It must if its type names no mesh or a different one, and one of the two meshes is Explicit.
    """
    given = jax.typeof(x).sharding.mesh
    same = (given.shape_tuple, given.axis_types) == (mesh.shape_tuple, mesh.axis_types)
    is_explicit = AxisType.Explicit in (*given.axis_types, *mesh.axis_types)
    simulated = isinstance(mesh, AbstractMesh)
    return is_explicit and not (same or simulated or given.manual_axes)

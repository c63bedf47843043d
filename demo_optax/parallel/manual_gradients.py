"""Stacked gradients of a loss that is called inside of ``jax.shard_map``."""

from collections.abc import Callable, Collection

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from demo_optax import axes
from demo_optax.axes import AxisName
from demo_optax.parallel import batches, shards
from demo_optax.parallel.worker_gradients import (
    WorkerGradients,
    accumulate,
    clipped,
    unless_broken,
)


def manual_gradients(
    whole_loss: Callable,
    mesh: Mesh,
    axis_name: AxisName,
    manual: Collection[str],
    *,
    microbatches: int,
    clip_norm: float | None,
    check_vma: bool,
    param_specs,
    batch_specs,
) -> Callable:
    """``fn(params, state, batch, *key) -> WorkerGradients``, for stacked parameters.

    Each device along the manual axes gathers the parameters and sees its own part of the batch;
    those of one worker average their gradients.
    """
    worker_axes = axes.names(axis_name)
    inner = tuple(name for name in shards.inner_axes(mesh, axis_name) if name in manual)
    own_axes = worker_axes + inner

    def handled(spec: P) -> P:
        kept = [tuple(n for n in axes.names(entry) if n in manual) for entry in spec]
        return P(*[entry or None for entry in kept])

    def find(params, state, batch, *key):
        specs = shards.leaf_specs(params, param_specs, mesh, axis_name)
        of_batch = batches.leaf_specs(batch, batch_specs, mesh, axis_name)
        rows = batches.rows_of(of_batch, axis_name)
        specs, of_batch = jax.tree.map(handled, (specs, of_batch))

        def loss_of_shards(params, *args):
            return whole_loss(shards.gather_params(params, specs), *args)

        def of_device(params, state, batch, key):
            own_key = [jax.random.fold_in(k, jax.lax.axis_index(own_axes)) for k in key]
            own, old = jax.tree.map(lambda x: x[0], (params, state))
            loss, state, aux, gradient = accumulate(
                loss_of_shards, own_axes, microbatches, rows, own, old, batch, *own_key
            )
            if inner:
                gradient = shards.mean_gradient(gradient, specs, inner)
                loss, state = jax.lax.pmean(loss, inner), shards.agreed(state, inner)
            norm = shards.norm(gradient, specs)
            gradient, state = clipped(gradient, norm, clip_norm), unless_broken(norm, state, old)
            found = WorkerGradients(loss, aux, state, norm, gradient)
            return jax.tree.map(lambda x: jnp.asarray(x)[None], found)

        of_worker = P(axis_name)
        of_params = shards.stacked_specs(specs, axis_name)
        of_found = WorkerGradients._make((of_worker, P(own_axes), of_worker, of_worker, of_params))
        return jax.shard_map(
            of_device,
            mesh=mesh,
            axis_names=set(manual),
            in_specs=(of_params, of_worker, of_batch, P()),
            out_specs=of_found,
            check_vma=check_vma,
        )(params, state, batch, key)

    return find


def manual_axes(axis_names: Collection[str] | None, mesh: Mesh, axis_name: AxisName) -> set[str]:
    """The axes that a step handles itself: all, those of the workers, or none."""
    given = mesh.axis_names if axis_names is None else axis_names
    manual = {given} if isinstance(given, str) else set(given)
    worker_axes = axes.names(axis_name)
    if manual not in (set(mesh.axis_names), set(worker_axes), set()):
        raise ValueError(
            f"axis_names must be all axes of the mesh {tuple(mesh.axis_names)}, the workers' axes "
            f"{worker_axes} alone, or (), with the others left to the compiler, not "
            f"{axis_names!r}."
        )
    left = [name for name in mesh.axis_names if manual and name not in manual]
    if len(left) > 1:
        raise ValueError(
            f"axis_names={tuple(manual)} leaves the axes {tuple(left)} to the compiler, but with "
            "more than one XLA may abort the process: use axis_names=()."
        )
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if any(kinds[name] == AxisType.Explicit for name in left):
        raise ValueError(
            f"the axes {left} are left to the compiler, but their type is Explicit, as "
            "jax.make_mesh makes them by default: use axis_names=(), or make the mesh with "
            "jax.make_mesh(shape, names, (jax.sharding.AxisType.Auto,) * len(names))."
        )
    return manual

"""The gradient of each worker's own part of a batch."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from demo_optax import axes, checks
from demo_optax.axes import AxisName
from demo_optax.numerics import energy, upcast
from demo_optax.parallel import batches, shards
from demo_optax.parallel.local_gradients import local_value_and_grad


class WorkerGradients(NamedTuple):
    """What `worker_gradients` gives.

    Attributes:
      loss: ``(workers,)``, each worker's own.
      aux: what the loss function returned beside it, with a leading axis of workers.
      state: each worker's model state, where the loss function has one.
      norm: float32 ``(workers,)``, of each worker's gradient before clipping.
      gradients: a tree like the parameters, each leaf ``(workers, *shape)``.

    Example:
      >>> mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
      >>> found = jax.jit(worker_gradients(lambda w, x: w * x.sum(), mesh))(2.0, jnp.ones(3))
      >>> found.loss, found.norm
      (Array([6.], dtype=float32), Array([3.], dtype=float32))
    """

    loss: jax.Array
    aux: Any
    state: Any
    norm: jax.Array
    gradients: Any


def worker_gradients(
    loss_fn: Callable,
    mesh: Mesh,
    axis_name: AxisName = "data",
    *,
    microbatches: int = 1,
    clip_norm: float | None = None,
    stateful: bool = False,
    param_specs=None,
    batch_specs=None,
) -> Callable:
    """Stacked gradients for a program that leaves all shardings to the compiler.

    ``loss_fn`` is mapped over the workers by ``jax.vmap(spmd_axis_name=axis_name)``. It may hold
    sharding constraints over the mesh's other axes, in any form, and a ``jax.shard_map`` of its
    own. Nothing is averaged over the workers.

    Args:
      loss_fn: ``loss_fn(params, batch)``, the loss of one worker's part of the batch: a scalar,
        or a tuple of a scalar and aux. With a key, ``loss_fn(params, batch, key)``.
      mesh: the workers' mesh.
      axis_name: the workers' axis, or axes.
      microbatches: parts into which each worker's batch is cut; gradients are averaged over them.
      clip_norm: largest global norm of each worker's gradient.
      stateful: whether the model has a state, as in `make_train_step`.
      param_specs: PartitionSpecs or NamedShardings of the parameters inside a worker, a tree or a
        prefix of one.
      batch_specs: PartitionSpecs of the batch, as in `make_train_step`.

    Returns:
      ``fn(params, [state,] batch[, key]) -> WorkerGradients``, for use inside ``jax.jit``. Each
      worker and microbatch gets another key.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
      >>> fn = worker_gradients(lambda w, x: w * x.sum(), mesh)
      >>> jax.jit(fn)(jnp.float32(1), jnp.ones(3)).gradients
      Array([3.], dtype=float32)
    """
    find = mapped_gradients(
        in_full(loss_fn, stateful),
        mesh,
        axis_name,
        microbatches=microbatches,
        clip_norm=clip_norm,
        param_specs=param_specs,
        batch_specs=batch_specs,
    )

    def at_shared(params, *args):
        state, (batch, *key) = (args[0], args[1:]) if stateful else ((), args)
        specs = shards.leaf_specs(params, param_specs, mesh, axis_name)
        return find(shards.copies(params, mesh, axis_name, specs), state, batch, *key)

    return at_shared


def mapped_gradients(
    whole_loss: Callable,
    mesh: Mesh,
    axis_name: AxisName,
    *,
    microbatches: int,
    clip_norm: float | None,
    param_specs,
    batch_specs,
) -> Callable:
    """``fn(params, state, batch, *key) -> WorkerGradients``, for stacked parameters."""
    require_options(microbatches, clip_norm)
    workers = shards.num_workers(mesh, axis_name)
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

    def of_worker(rows, params, state, batch, *key):
        loss, new, aux, gradient = accumulate(
            whole_loss, None, microbatches, rows, params, state, batch, *key
        )
        norm = jnp.sqrt(energy(jax.tree.leaves(gradient)))
        new = unless_broken(norm, new, state)
        return WorkerGradients(loss, aux, new, norm, clipped(gradient, norm, clip_norm))

    def find(params, state, batch, *key):
        batch = jax.tree.map(jnp.asarray, batch)
        given = batches.typed(batch, mesh, axis_name) if batch_specs is None else batch_specs
        of_batch = batches.leaf_specs(batch, given, mesh, axis_name)
        rows = batches.rows_of(of_batch, axis_name)
        batch = batches.divided(batch, of_batch, rows, mesh, axis_name)
        keys = [jax.vmap(jax.random.fold_in, (None, 0))(k, jnp.arange(workers)) for k in key]
        keys = shards.lay(keys, mesh, [P(axis_name) for _ in key])
        structure: Any = jax.tree.structure(batch)
        mapped = (0, 0, structure.unflatten(rows), *[0 for _ in key])
        found = jax.vmap(functools.partial(of_worker, rows), mapped, spmd_axis_name=axis_name)(
            params, state, batch, *keys
        )
        specs = shards.leaf_specs(params, param_specs, mesh, axis_name)
        of_gradients = shards.stacked_specs(specs, axis_name)
        return found._replace(gradients=shards.lay(found.gradients, mesh, of_gradients))

    return find


def require_options(microbatches: int, clip_norm: float | None) -> None:
    """Refuses options of the gradients that cannot be."""
    checks.static_integer("microbatches", microbatches, at_least=1)
    if clip_norm is not None:
        checks.in_interval("clip_norm", clip_norm, "(0, inf]")


def clipped(gradient, norm: jax.Array, limit: float | None):
    """The gradient, scaled down to a norm; NaN where its norm is not finite.

    A worker with NaNs sits the step out.
    """
    if limit is None:
        return gradient
    scale = jnp.where(norm > limit, limit / norm, 1.0)
    scale = jnp.where(jnp.isfinite(norm), scale, jnp.nan)
    return jax.tree.map(lambda g: (g * scale).astype(g.dtype), gradient)


def in_full(loss_fn: Callable, stateful: bool) -> Callable:
    """``fn(params, state, batch[, key]) -> (loss, (state, aux))``, of any form of loss function."""
    if stateful:
        return loss_fn

    def with_state(params, state, *args):
        out = loss_fn(params, *args)
        if not isinstance(out, (tuple, list)):
            return out, (state, None)
        if len(out) != 2:
            raise TypeError(
                f"the loss function must return a loss, or (loss, aux), not {len(out)} things: put "
                "whatever else it gives into aux, as a tuple or dict."
            )
        return out[0], (state, out[1])

    return with_state


def unless_broken(norm: jax.Array, new, old):
    """A worker's new model state; the old one where its gradient is not finite."""
    given: Any = jax.tree.structure(new)
    expected: Any = jax.tree.structure(old)
    if given != expected:
        raise ValueError(
            f"the loss function must return a model state of the structure {expected}, as it was "
            f"given, but returned {given}: return (loss, (state, aux)), where aux may be None."
        )
    return jax.tree.map(lambda x, y: jnp.where(jnp.isfinite(norm), x, y), new, old)


def accumulate(loss_fn, axis_name, microbatches, rows, params, state, batch, *key):
    """Loss, model state, aux and gradient of a worker's batch.

    Loss and gradient are averaged over its microbatches, the state goes through one after the
    other.
    """
    value_and_grad = local_value_and_grad(loss_fn, axis_name, has_aux=True)
    state = axes.as_varying(state, axis_name)
    if microbatches == 1:
        (loss, (state, aux)), gradient = value_and_grad(params, state, batch, *key)
        return loss, state, aux, gradient

    def add(carry, args):
        total, state = carry
        (loss, (state, aux)), gradient = value_and_grad(params, state, *args)
        total = jax.tree.map(lambda t, x: t + upcast(x), total, (loss, gradient))
        return (total, axes.as_varying(state, axis_name)), aux

    keys = [jax.random.split(k, microbatches) for k in key]
    parts = batches.microbatches_of(batch, rows, microbatches), *keys
    first = jax.tree.map(lambda x: x[0], parts)
    (loss, _), gradient = jax.eval_shape(value_and_grad, params, state, *first)
    zeros = jax.tree.map(lambda x: upcast(jnp.zeros(x.shape, x.dtype)), (loss, gradient))
    (total, state), aux = jax.lax.scan(add, (axes.as_varying(zeros, axis_name), state), parts)
    loss, gradient = jax.tree.map(
        lambda t, x: (t / microbatches).astype(x.dtype), total, (loss, gradient)
    )
    return loss, state, aux, gradient

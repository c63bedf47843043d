"""Gradients of each worker's own loss, on its own part of a batch."""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from demo_optax import axes, checks, participation
from demo_optax.arrays import energy, upcast
from demo_optax.axes import AxisName
from demo_optax.parallel import batches, shards


def local_value_and_grad(fun: Callable, axis_name: AxisName, **kwargs) -> Callable:
    """``jax.value_and_grad`` whose gradients stay local to each worker of ``axis_name``.

    Inside ``jax.shard_map``, ``jax.grad`` with respect to replicated parameters sums over the
    axis by itself, so that nothing would be left to exchange. Here the parameters are typed as
    varying first. Under ``pmap`` and ``vmap`` gradients are local anyway.

    Args:
      fun: the worker's loss; its first argument is differentiated, or ``argnums``. It must not
        average over ``axis_name`` itself.
      axis_name: the workers' axis, or axes.
      **kwargs: for ``jax.value_and_grad``, such as ``has_aux``.

    Returns:
      A function like that of ``jax.value_and_grad``. Value and gradient differ between workers.

    Raises:
      NameError: ``axis_name`` is not bound where the function is called.
      TypeError: what is differentiated was not given by position.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> def gradient(w, x):
      ...     return local_value_and_grad(lambda w, x: w * x.sum(), "data")(w, x)[1][None]
      >>> jax.jit(jax.shard_map(
      ...     gradient, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")
      ... ))(jnp.float32(1), jax.device_put(jnp.ones(3), jax.NamedSharding(mesh, P("data"))))
      Array([3.], dtype=float32)
    """
    argnums = kwargs.get("argnums", 0)
    if isinstance(argnums, Sequence):
        kwargs["argnums"] = argnums = tuple(argnums)
    value_and_grad = jax.value_and_grad(fun, **kwargs)
    differentiated = argnums if isinstance(argnums, tuple) else (argnums,)

    @functools.wraps(fun)
    def wrapped(*args, **kwds):
        axes.size(axis_name)  # which raises where it is not bound
        if max(differentiated) >= len(args):
            raise TypeError(
                f"argument {max(differentiated)} is differentiated, but only {len(args)} were "
                f"given by position, and {sorted(kwds)} by name: pass it by position."
            )
        local = list(args)
        for i in differentiated:
            local[i] = axes.as_varying(local[i], axis_name)
        return value_and_grad(*local, **kwds)

    return wrapped


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
        normalize_loss_fn(loss_fn, stateful),
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
        return finish(loss, aux, new, state, gradient, norm_of(gradient), clip_norm)

    def find(params, state, batch, *key):
        batch = jax.tree.map(jnp.asarray, batch)
        given = batches.typed(batch, mesh, axis_name) if batch_specs is None else batch_specs
        of_batch = batches.leaf_specs(batch, given, mesh, axis_name)
        rows = batches.rows_of(of_batch, axis_name)
        batch = batches.divided(batch, of_batch, rows, mesh, axis_name)
        keys = [jax.vmap(jax.random.fold_in, (None, 0))(k, jnp.arange(workers)) for k in key]
        keys = shards.constrain_sharding(keys, mesh, [P(axis_name) for _ in key])
        structure: Any = jax.tree.structure(batch)
        mapped = (0, 0, structure.unflatten(rows), *[0 for _ in key])
        found = jax.vmap(functools.partial(of_worker, rows), mapped, spmd_axis_name=axis_name)(
            params, state, batch, *keys
        )
        specs = shards.leaf_specs(params, param_specs, mesh, axis_name)
        of_gradients = shards.stacked_specs(specs, axis_name)
        return found._replace(
            gradients=shards.constrain_sharding(found.gradients, mesh, of_gradients)
        )

    return find


def require_options(microbatches: int, clip_norm: float | None) -> None:
    """Refuses options of the gradients that cannot be."""
    checks.static_integer("microbatches", microbatches, at_least=1)
    if clip_norm is not None:
        checks.in_interval("clip_norm", clip_norm, "(0, inf]")


def norm_of(gradient) -> jax.Array:
    """Global norm of a gradient, float32."""
    return jnp.sqrt(energy(jax.tree.leaves(gradient)))


def finish(loss, aux, new, old, gradient, norm, limit: float | None) -> WorkerGradients:
    """A worker's results: its gradient scaled down to a norm, and its model state.

    The state stays as it was where the gradient is not finite.
    """
    given: Any = jax.tree.structure(new)
    expected: Any = jax.tree.structure(old)
    if given != expected:
        raise ValueError(
            f"the loss function must return a model state of the structure {expected}, as it was "
            f"given, but returned {given}: return (loss, (state, aux)), where aux may be None."
        )
    state = participation.choose(jnp.isfinite(norm), new, old)
    if limit is not None:
        scale = jnp.where(norm > limit, limit / norm, 1.0)
        scale = jnp.where(jnp.isfinite(norm), scale, jnp.nan)  # or it would be clipped to zeros
        gradient = jax.tree.map(lambda g: (g * scale).astype(g.dtype), gradient)
    return WorkerGradients(loss, aux, state, norm, gradient)


def normalize_loss_fn(loss_fn: Callable, stateful: bool) -> Callable:
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


def device_gradients(
    whole_loss: Callable,
    mesh: Mesh,
    axis_name: AxisName,
    manual: Collection[str],
    specs,
    rows,
    *,
    microbatches: int,
    clip_norm: float | None,
) -> Callable:
    """``fn(params, state, batch, key) -> WorkerGradients`` of one device, inside a shard_map.

    Each device gathers the parameters, whose ``specs`` these are along the ``manual`` axes, and
    sees its own part of the batch, divided along ``rows``. Those of one worker average their
    gradients.
    """
    inner = tuple(name for name in shards.inner_axes(mesh, axis_name) if name in manual)
    own_axes = axes.names(axis_name) + inner

    def loss_of_shards(params, *args):
        return whole_loss(shards.gather_params(params, specs), *args)

    def of_device(params, state, batch, key):
        own_key = [jax.random.fold_in(k, jax.lax.axis_index(own_axes)) for k in key]
        loss, new, aux, gradient = accumulate(
            loss_of_shards, own_axes, microbatches, rows, params, state, batch, *own_key
        )
        if inner:
            gradient = shards.mean_gradient(gradient, specs, inner)
            loss, new = jax.lax.pmean(loss, inner), shards.agreed(new, inner)
        norm = shards.norm(gradient, specs)
        return finish(loss, aux, new, state, gradient, norm, clip_norm)

    return of_device


def found_specs(specs, mesh: Mesh, axis_name: AxisName, manual: Collection[str]):
    """PartitionSpecs of stacked `WorkerGradients` that leave a shard_map."""
    inner = tuple(name for name in shards.inner_axes(mesh, axis_name) if name in manual)
    of_worker = P(axis_name)
    of_params = shards.stacked_specs(specs, axis_name)
    every = P(axes.names(axis_name) + inner)
    return WorkerGradients._make((of_worker, every, of_worker, of_worker, of_params))


def manual_gradients(
    whole_loss: Callable,
    mesh: Mesh,
    axis_name: AxisName,
    manual: Collection[str],
    *,
    check_vma: bool,
    param_specs,
    batch_specs,
    **options,
) -> Callable:
    """``fn(params, state, batch, *key) -> WorkerGradients``, for stacked parameters."""

    def handled(spec: P) -> P:
        kept = [tuple(n for n in axes.names(entry) if n in manual) for entry in spec]
        return P(*[entry or None for entry in kept])

    def find(params, state, batch, *key):
        specs = shards.leaf_specs(params, param_specs, mesh, axis_name)
        of_batch = batches.leaf_specs(batch, batch_specs, mesh, axis_name)
        rows = batches.rows_of(of_batch, axis_name)
        specs, of_batch = jax.tree.map(handled, (specs, of_batch))
        fn = device_gradients(whole_loss, mesh, axis_name, manual, specs, rows, **options)

        def of_device(params, state, batch, key):
            params, state = jax.tree.map(lambda x: x[0], (params, state))
            return jax.tree.map(lambda x: jnp.asarray(x)[None], fn(params, state, batch, key))

        of_worker = P(axis_name)
        return jax.shard_map(
            of_device,
            mesh=mesh,
            axis_names=set(manual),
            in_specs=(shards.stacked_specs(specs, axis_name), of_worker, of_batch, P()),
            out_specs=found_specs(specs, mesh, axis_name, manual),
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

"""Computes gradients that are local to a worker, of one worker or stacked over all of them.

A worker's loss sees its own part of the batch. `gradients_on_device` differentiates it on one
device, and `stacked_gradients` maps that over the workers.
"""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from demo_optax._src import axes, checks, participation
from demo_optax._src.arrays import energy, in_dtype_of, upcast
from demo_optax._src.axes import AxisName, axes_of
from demo_optax._src.local_state import local_parameters
from demo_optax._src.parallel import shards, worker_axis


def local_value_and_grad(fun: Callable, axis_name: AxisName, **kwargs) -> Callable:
    """Wraps ``jax.value_and_grad`` so that gradients stay local to each worker of ``axis_name``.

    Inside ``jax.shard_map``, ``jax.grad`` with respect to replicated parameters sums over the axis
    by itself, which leaves nothing to exchange. Here they are first typed as varying.

    Args:
      fun: the worker's loss, which is differentiated by its first argument or by ``argnums``. It
        must not average over ``axis_name`` itself.
      axis_name: the workers' axis, or axes.
      **kwargs: options of ``jax.value_and_grad``, such as ``has_aux``.

    Returns:
      A function like that of ``jax.value_and_grad``. Value and gradient differ between workers.

    Raises:
      NameError: ``axis_name`` is not bound where the function is called.
      TypeError: a differentiated argument was not given by position.
      ValueError: JAX's types say that the value is the same on all workers, as after a ``pmean``.

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
    value_and_grad = jax.value_and_grad(fun, **kwargs)
    differentiated = np.atleast_1d(kwargs.get("argnums", 0)).tolist()

    @functools.wraps(fun)
    def wrapped(*args, **kwds):
        axes.size(axis_name)  # it raises a NameError if it is not bound
        if max(differentiated) >= len(args):
            raise TypeError(
                f"argument {max(differentiated)} is differentiated, but only {len(args)} were "
                f"given by position, and {sorted(kwds)} by name: pass it by position."
            )
        local = list(args)
        for i in differentiated:
            checks.real_leaves(f"argument {i}", local[i])
            local[i] = axes.as_varying(local[i], axis_name)
        with _explained():
            results = value_and_grad(*local, **kwds)
        value = results[0][0] if kwargs.get("has_aux") else results[0]
        same = set(axes.names(axis_name)) - axes.varying(value)
        if same and axes.types_are_tracked(axis_name):
            raise ValueError(
                f"the loss is the same on all workers of {axis_name!r}: it averages or sums over "
                "them, which would scale every gradient, or depends on neither parameters nor "
                "batch. Leave out pmean and psum: the loss is that of one worker, and the "
                "optimizer exchanges."
            )
        return results

    return wrapped


_ADVICE = {
    ("{V:", "varying", "manual axis"): (
        "The types of values that differ between devices name the axes, and JAX compares types in "
        "loops, branches and custom derivatives, so that a loop that starts from zeros fails. Give "
        "make_train_step sharding='auto' if a worker has several devices, or a jax.shard_map of "
        "your own check_vma=False. See docs/how_to/troubleshoot.md for what they cost."
    ),
    ("unbound axis name",): (
        "The loss is that of one worker, and the workers' axis is not bound in it: leave out pmean "
        "and psum over the workers, since the optimizer exchanges. The results have the losses and "
        "the aux of all workers."
    ),
    ("of type Auto",): (
        "The loss is mapped over the workers on a mesh whose axes are all Auto: leave out "
        "out_sharding and jax.sharding.reshard, or use jax.lax.with_sharding_constraint instead."
    ),
    ("context mesh",): (
        "The loss is mapped over the workers on a mesh whose axes are all Auto, and what it closes "
        "over is not moved there: pass such arrays as parameters or in the batch, or use a mesh of "
        "Auto axes."
    ),
}
"""What to do about errors of JAX, by words in their texts."""


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except (NameError, TypeError, ValueError) as error:
        for words, advice in _ADVICE.items():
            if any(word in str(error) for word in words):
                error.add_note(advice)
        raise


class WorkerGradients(NamedTuple):
    """Holds the results of `worker_gradients`, stacked over the workers.

    Attributes:
      loss: ``(workers,)``, loss of each worker.
      aux: the aux of the loss function, with a leading axis of workers. With ``microbatches`` above
        1, an axis of microbatches follows.
      state: each worker's model state, if the loss function has one.
      gradient_norm: float32 ``(workers,)``, norm of each worker's gradient before clipping.
      gradients: a tree like the parameters, each leaf ``(workers, *shape)``.

    Example:
      >>> import demo_optax
      >>> mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
      >>> gradients_of = demo_optax.worker_gradients(lambda w, x: w * x.sum(), mesh)
      >>> results = jax.jit(gradients_of)(2.0, jnp.ones(3), opt_state=())
      >>> results.loss, results.gradient_norm
      (Array([6.], dtype=float32), Array([3.], dtype=float32))
    """

    loss: jax.Array
    aux: Any
    state: Any
    gradient_norm: jax.Array
    gradients: Any


def _gradients_on_device(
    loss_fn: Callable,
    device_axes: tuple[str, ...],
    inner: tuple[str, ...],
    microbatches: int,
    clip_norm: float | None,
    stateful: bool,
) -> Callable:
    """Returns ``fn(params, state, batch, key, specs, rows) -> WorkerGradients``, not stacked.

    It runs on each device, inside a ``jax.shard_map`` over ``device_axes``, of which ``inner`` lie
    inside a worker, or without any axes on a whole worker. A device gathers the worker's parameters
    and sees its own part of the batch.
    """

    def on_device(params, state, batch, key, specs, rows) -> WorkerGradients:
        def loss_of_shards(params, state, *args):
            params = jax.tree.map(_gather, params, specs)
            args = (state, *args) if stateful else args
            try:
                out = loss_fn(params, *args)
            except TypeError as error:
                if error.__traceback__ and error.__traceback__.tb_next is None:  # of the call
                    error.add_note(_ARGUMENTS)
                raise
            if stateful:
                return out
            if not isinstance(out, (tuple, list)):
                return out, (state, None)
            if len(out) != 2:
                raise TypeError(
                    f"the loss function must return a loss, or (loss, aux), not {len(out)} values: "
                    "put all further results into aux, as a tuple or dict."
                )
            return out[0], (state, out[1])

        if device_axes:
            key = [jax.random.fold_in(k, jax.lax.axis_index(device_axes)) for k in key]
        loss, new, aux, gradient = _accumulate(
            loss_of_shards, device_axes, microbatches, rows, params, state, batch, *key
        )
        given: Any = jax.tree.structure(new)
        expected: Any = jax.tree.structure(state)
        if given != expected:
            raise ValueError(
                f"the loss function must return a model state of the structure {expected}, as it "
                f"was given, but returned {given}: return (loss, (state, aux)), where aux may be "
                "None."
            )
        if inner:
            gradient = _mean_gradient(gradient, specs, inner)
            loss, new = jax.lax.pmean(loss, inner), _mean_state(new, inner)
        norm = _norm(gradient, specs)
        state = participation.choose(jnp.isfinite(norm), new, state)
        if clip_norm is not None:
            scale = jnp.where(norm > clip_norm, clip_norm / norm, 1.0)
            # An infinite norm must not clip the gradient to zeros.
            scale = jnp.where(jnp.isfinite(norm), scale, jnp.nan)
            gradient = jax.tree.map(
                lambda g: in_dtype_of(upcast(g) * scale.astype(upcast(g).dtype), g), gradient
            )
        return WorkerGradients(loss, aux, state, norm, gradient)

    return on_device


_ARGUMENTS = (
    "A loss function is called with the parameters and each worker's own part of the batch. With "
    "stateful=True a model state stands between them. A key comes last, with "
    "make_train_step(random_key=True), or if one is given after the batch of worker_gradients."
)


def _results_specs(specs, axis_name: AxisName, inner: tuple[str, ...] = ()):
    """Returns the specs of stacked results, with an aux of each worker or each of its devices."""
    of_worker, of_device = P(axis_name), P((*axes.names(axis_name), *inner))
    gradients = shards.stacked_specs(specs, axis_name)
    return WorkerGradients._make((of_worker, of_device, of_worker, of_worker, gradients))


def split_arguments(args: tuple, first: tuple[str, ...], stateful: bool, keys: Collection[int]):
    """Returns the model state, the batch and the keys, whose number must be one of ``keys``."""
    if len(args) - 1 - stateful not in keys:
        names = [*first, *["state"] * stateful, "batch", *["key"] * min(keys)]
        optional = "[, key]" * (max(keys) - min(keys))
        raise TypeError(
            f"the arguments must be ({', '.join(names)}{optional}), but {len(first) + len(args)} "
            "arguments were given. A batch is one pytree: pass several arrays as a tuple or dict, "
            "as in (x, y). A step takes a key with make_train_step(random_key=True), and a model "
            "state is taken with stateful=True."
        )
    *state, batch = args[: 1 + stateful]
    return state[0] if stateful else (), batch, args[1 + stateful :]


def _accumulate(loss_fn, axis_name, microbatches, rows, params, state, batch, *key):
    """Computes loss, model state, aux and gradient of a worker's batch.

    Loss and gradient are averaged over microbatches; the model state passes from one to the next.
    """
    value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
    params, state = axes.as_varying((params, state), axis_name)
    if microbatches == 1:
        (loss, (state, aux)), gradient = value_and_grad(params, state, batch, *key)
        return loss, state, aux, gradient

    def of_part(state, part, number):
        keys = [jax.random.fold_in(k, number) for k in key]
        return value_and_grad(params, state, part, *keys)

    def add(carry, args):
        total, state = carry
        (loss, (state, aux)), gradient = of_part(state, *args)
        total = jax.tree.map(lambda t, x: t + upcast(x), total, (loss, gradient))
        return (total, axes.as_varying(state, axis_name)), aux

    parts = _split_microbatches(batch, rows, microbatches), jnp.arange(microbatches)
    (loss, _), gradient = jax.eval_shape(
        lambda parts: of_part(state, *jax.tree.map(lambda x: x[0], parts)), parts
    )
    zeros = jax.tree.map(lambda x: upcast(jnp.zeros(x.shape, x.dtype)), (loss, gradient))
    (total, state), aux = jax.lax.scan(add, (axes.as_varying(zeros, axis_name), state), parts)
    loss, gradient = jax.tree.map(
        lambda t, x: (t / microbatches).astype(x.dtype), total, (loss, gradient)
    )
    return loss, state, aux, gradient


def _split_microbatches(batch, rows, number: int):
    """Splits one worker's batch along its rows, ``(number, ...)``, and repeats undivided leaves."""

    def split(x, row):
        if row is None:
            return jnp.broadcast_to(x, (number, *np.shape(x)))
        if x.shape[row] % number:
            raise ValueError(
                f"a part of the batch has {x.shape[row]} rows, which cannot be cut into {number} "
                "equal microbatches: choose a batch size that is a multiple of the devices that "
                "divide it x microbatches."
            )
        return jnp.moveaxis(_split_rows(x, row, number), row, 0)

    return jax.tree.map(split, batch, rows)


def _split_rows(x: jax.Array, row: int, number: int) -> jax.Array:
    return x.reshape(*x.shape[:row], number, -1, *x.shape[row + 1 :])


def _gather(x, spec):
    """Gathers a whole parameter from a device's shards; its gradient sums over the shards."""
    for dimension, entry in enumerate(spec):
        if entry is not None:
            x = jax.lax.all_gather(x, entry, axis=dimension, tiled=True)
    return x


def _mean_gradient(gradient, specs, inner: tuple[str, ...]):
    """Averages the gradients of a worker's devices on their parts of its batch, in their dtype."""

    def mean(g, spec):
        sharded = axes_of(spec)
        rest = tuple(name for name in inner if name not in sharded)
        g = jax.lax.pmean(g, rest) if rest else g
        return (g / axes.size(sharded)).astype(g.dtype) if sharded else g

    return jax.tree.map(mean, gradient, specs)


def _mean_state(state, inner: tuple[str, ...]):
    """Averages the floats of a model state over a worker's devices; the rest is the first's."""

    def mean(x):
        x = axes.as_varying(x, inner)
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return jax.lax.pmean(x, inner)
        return shards.from_first(x, inner)

    return jax.tree.map(mean, state)


def _norm(gradient, specs) -> jax.Array:
    sharded: dict[tuple[str, ...], list[jax.Array]] = {}
    for x, spec in zip(jax.tree.leaves(gradient), jax.tree.leaves(specs), strict=True):
        sharded.setdefault(axes_of(spec), []).append(x)
    energies = [
        jax.lax.psum(energy(x), names) if names else energy(x) for names, x in sharded.items()
    ]
    return jnp.sqrt(sum(energies))


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

    ``loss_fn`` is mapped over the workers by ``jax.vmap(spmd_axis_name=axis_name)``, and nothing is
    averaged over them. It may contain any sharding constraints over the mesh's other axes, and a
    ``jax.shard_map`` of its own. The arguments are those of `make_train_step`.

    Returns:
      ``fn(params, [state,] batch[, key], *, opt_state) -> WorkerGradients``, for use inside
      ``jax.jit``. With a key it calls ``loss_fn(params, batch, key)``, where each worker and
      microbatch has its own. ``opt_state`` is the state of the optimizer that will use the
      gradients, which are those at `local_parameters`; with ``()`` those at the shared parameters.

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
        checks.floating_leaves(params)
        state, batch, key = split_arguments(args, ("params",), stateful, (0, 1))
        worker_axis.require_stacked(state, workers, "model state", "init_model_state")
        if opt_state is None:
            raise TypeError(
                "worker_gradients got no opt_state, but with local steps or a look-ahead, as of "
                "demo_muon, each worker computes its gradient at a point of its own, which is in "
                "the optimizer's state: call gradients(params, batch, opt_state=opt_state). For "
                "gradients at the shared parameters give opt_state=()."
            )
        return gradients_of(params, opt_state, state, batch, *key)

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
) -> Callable:
    """Returns ``fn(params, opt_state, state, batch, *key) -> WorkerGradients``.

    Each worker has its entry of the stacked model state, and differentiates at its own parameters,
    of which ``opt_state`` holds the displacement. If ``manual``, the loss runs in a
    ``jax.shard_map`` over all axes: each device gathers the parameters and sees its own part of the
    batch, and the devices of a worker average their gradients. Otherwise the loss is mapped over
    the workers, on a mesh whose axes are all Auto.
    """
    checks.static_integer("microbatches", microbatches, at_least=1)
    if clip_norm is not None:
        checks.in_interval("clip_norm", clip_norm, "(0, inf]")
    inner = shards.inner_axes(mesh, axis_name) if manual else ()
    every = axes.names(axis_name) + inner
    on_device = _gradients_on_device(
        loss_fn, every if manual else (), inner, microbatches, clip_norm, stateful
    )
    workers = shards.num_workers(mesh, axis_name)

    def over_devices(params, state, batch, key, specs, leaf_batch_specs, rows):
        def compute(params, state, batch, key):
            params, state = jax.tree.map(lambda x: x[0], (params, state))
            fn = jax.jit(lambda *args: on_device(*args, specs, rows), inline=True)
            args = params, state, batch, key
            if axes.bytes_handed_over(fn.trace(*args).jaxpr, axis_name) != 0:
                raise ValueError(
                    f"the loss hands values to a collective over the workers of {axis_name!r}, but "
                    "it is that of one worker, and the optimizer exchanges. Leave out pmean and "
                    "psum over the workers: the results have the losses and the aux of all of them."
                )
            return jax.tree.map(lambda x: x[None], fn(*args))

        return jax.shard_map(
            compute,
            mesh=mesh,
            in_specs=(shards.stacked_specs(specs, axis_name), P(axis_name), leaf_batch_specs, P()),
            out_specs=_results_specs(specs, axis_name, inner),
            # Types tell which sums in a loss over a worker's own devices its gradient repeats.
            check_vma=any(mesh.shape[name] > 1 for name in inner),
        )(params, state, batch, key)

    def over_workers(params, state, batch, key, specs, leaf_batch_specs, rows, are_shared):
        def compute_worker(params, state, batch, *key):
            whole = jax.tree.map(lambda _: P(), params)
            return on_device(params, state, batch, key, whole, rows)

        with shards.auto_axes(mesh) as (auto, on_auto):
            params, state, batch, key = on_auto((params, state, batch, key))
            batch = _split_workers(batch, leaf_batch_specs, rows, auto, axis_name)
            keys = [jax.vmap(jax.random.fold_in, (None, 0))(k, jnp.arange(workers)) for k in key]
            results = jax.vmap(
                compute_worker,
                (None if are_shared else 0, 0, rows, *[0 for _ in key]),
                spmd_axis_name=None if isinstance(mesh, AbstractMesh) else axis_name,
            )(params, state, batch, *shards.constrain_sharding(keys, auto, P(axis_name)))
            results_specs = _results_specs(specs, axis_name)
            gradients = shards.constrain_sharding(results.gradients, auto, results_specs.gradients)
            results = results._replace(gradients=gradients)
        return results if mesh == auto else shards.constrain_sharding(results, mesh, results_specs)

    def compute(params, opt_state, state, batch, *key):
        batch = jax.tree.map(jnp.asarray, batch)
        # The dimension that the type of an array on an Explicit mesh divides, or the first one.
        rows = jax.tree.map(
            lambda x: shards.row_dimension(jax.typeof(x).sharding.spec, axis_name) or 0, batch
        )
        by_type = jax.tree.map(lambda row: P(*[None] * row, every), rows)
        given = by_type if batch_specs is None else batch_specs
        specs = shards.leaf_specs(params, param_specs, mesh, axis_name)
        leaf_batch_specs = shards.batch_leaf_specs(batch, given, mesh, axis_name)
        rows = jax.tree.map(lambda spec: shards.row_dimension(spec, axis_name), leaf_batch_specs)
        own = local_parameters(shards.copies(params, mesh, axis_name, specs), opt_state)
        args = own, state, batch, key, specs, leaf_batch_specs, rows
        with _explained():
            # Simulated workers share one copy of the parameters, unless they have their own.
            return over_devices(*args) if manual else over_workers(*args, own is params)

    return compute


def _split_workers(batch, specs, rows, mesh: Mesh | AbstractMesh, axis_name: AxisName):
    """Adds an axis of workers before the rows of divided leaves, on a mesh of Auto axes."""
    workers, worker_axes = shards.num_workers(mesh, axis_name), axes.names(axis_name)

    def split(x, spec, row):
        if row is None:
            return x
        x = _split_rows(x, row, workers)
        if isinstance(mesh, AbstractMesh):
            return x
        inner = tuple(name for name in axes.names(spec[row]) if name not in worker_axes)
        entries = *spec[:row], axis_name, inner or None, *spec[row + 1 :]
        # The compiler may divide the rest.
        free = [P.UNCONSTRAINED if entry is None else entry for entry in entries]
        free += [P.UNCONSTRAINED] * (x.ndim - len(free))
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*free)))

    return jax.tree.map(split, batch, specs, rows)

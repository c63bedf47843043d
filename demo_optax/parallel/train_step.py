"""A ready-made train step: local gradients, one exchange, the same parameters everywhere."""

import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from demo_optax._local_steps import has_exchanged, own_parameters
from demo_optax.axes import AxisName
from demo_optax.metrics import ExchangeMetrics, exchange_metrics, if_anyone_took_part
from demo_optax.parallel import batches, placement, shards, worker_axis
from demo_optax.parallel.layout import layout_of
from demo_optax.parallel.manual_gradients import manual_axes, manual_gradients
from demo_optax.parallel.worker_gradients import in_full, mapped_gradients, require_options


class TrainMetrics(NamedTuple):
    """What one step tells, without a collective of its own.

    Attributes:
      loss: float ``(workers,)``, each worker's own.
      gradient_norm: float32 ``(workers,)``, of each worker's gradient before clipping.
      aux: what the loss function returned beside the loss, with a leading axis of workers, or of
        all devices where a worker has several that the step handles itself.
      custom: what ``metrics_fn`` returned, with a leading axis of workers; None without one.
      exchanged: bool, whether the workers exchanged on this step; with `local_steps` only on the
        last of a round.
      exchange: `demo_optax.ExchangeMetrics` of the last exchange, or None where the optimizer keeps
        none.
      packet_bytes: int, the bytes that each worker, with all its devices, hands to an exchange.

    Example:
      >>> import jax.numpy as jnp, demo_optax
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> tx, params = demo_optax.demo(1e-3, axis_name="data"), jnp.ones(8)
      >>> step = make_train_step(lambda params, batch: jnp.mean(batch @ params), tx, mesh)
      >>> opt_state = demo_optax.init_opt_state(tx, params, mesh)
      >>> params, opt_state, metrics = step(params, opt_state, jnp.ones((4, 8)))
      >>> metrics.loss, int(metrics.exchange.participants)
      (Array([8.], dtype=float32), 1)
    """

    loss: jax.Array
    gradient_norm: jax.Array
    aux: Any
    custom: Any
    exchanged: jax.Array
    exchange: ExchangeMetrics | None
    packet_bytes: int


def make_train_step(
    loss_fn: Callable,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    axis_name: AxisName = "data",
    *,
    microbatches: int = 1,
    clip_norm: float | None = None,
    random_key: bool = False,
    stateful: bool = False,
    check_vma: bool = True,
    param_specs=None,
    batch_specs=None,
    metrics_fn: Callable | None = None,
    axis_names: Collection[str] | None = None,
    donate: bool = True,
) -> Callable:
    """A jitted step that trains with one DeMo worker on each device along ``axis_name``.

    Further axes of the mesh lie inside the workers: the devices along them share the worker's
    batch, average their gradients in the parameters' dtype, and hold its parameters whole, or
    sharded as ``param_specs`` say (FlexDeMo). Only packets cross from one worker to another.

    Args:
      loss_fn: ``loss_fn(params, batch)``, the loss of one worker's part of the batch: a scalar,
        or a tuple of a scalar and aux.
      tx: any optax transformation that exchanges over ``axis_name``.
      mesh: the workers' mesh.
      axis_name: the workers' axis, or axes.
      microbatches: parts into which each worker's batch is cut to save memory; gradients are
        averaged over them, and there is one exchange.
      clip_norm: largest global norm of each worker's local gradient.
      random_key: whether the step takes a key, for ``loss_fn(params, batch, key)``: another one for
        each worker and microbatch.
      stateful: whether the model has a state beside its parameters (statistics of BatchNorm, keys
        of Dropout, caches): ``loss_fn(params, state, batch) -> (loss, (state, aux))``. Each worker
        keeps its own, made by `init_model_state`, and nothing of it crosses to the others; the
        devices of one worker average its floats. It stays as it was on a step whose gradient is
        not finite, and goes from one microbatch to the next.
      check_vma: as in ``jax.shard_map``. With False, JAX's types no longer prove that gradients
        are local and parameters replicated; for models whose operations do not support them.
      param_specs: PartitionSpecs or NamedShardings of the parameters over the axes inside a worker,
        a tree or a prefix of one; by default each device holds all of them.
      batch_specs: PartitionSpecs of the batch, a tree or a prefix of one. By default the first
        dimension of each leaf is divided among all devices. ``P(axis_name)`` gives all devices of
        a worker the same rows, ``P(None, axis_name)`` is for batches with time in front, ``P()``
        for what all workers share: scalars, masks.
      metrics_fn: ``metrics_fn(gradients, updates, params)``, a tree of whatever is to be measured
        of one worker's clipped gradients, the updates and the parameters before the step, in their
        whole shapes, sharded as the parameters are (on an Explicit mesh in their types as well);
        it comes back as ``metrics.custom``.
      axis_names: as in ``jax.shard_map``, the axes that the step handles itself. All by default:
        ``loss_fn`` then sees one device's part of the batch and whole parameters, which are
        gathered for it, while gradients are scattered. With the workers' axis alone, one other
        is left to the compiler: ``loss_fn`` is a program for a whole worker, with constraints in
        the form of PartitionSpecs; the axis' ``jax.sharding.AxisType`` must be ``Auto``. With
        none, ``()``, all are: ``loss_fn`` is mapped over the workers (`worker_gradients`), and may
        hold constraints of every form and a ``jax.shard_map`` of its own; only the optimizer runs
        in one of ours.
      donate: whether parameters and state are given away to the step, so that it needs less memory.

    Returns:
      ``step(params, opt_state, batch[, key], **extra_args) -> (params, opt_state, metrics)``, or
      where ``stateful`` ``step(params, opt_state, state, batch[, key], **extra_args) -> (params,
      opt_state, state, metrics)``, compiled once. ``batch`` is a tree of arrays, ``opt_state``
      comes from `init_opt_state`, ``extra_args`` go to the transformation, the same for all
      workers, and ``metrics`` is a `TrainMetrics`. What does not lie on the mesh as it should is
      placed. The step has ``lower`` as jitted functions have, and may be called inside ``jax.jit``
      and ``jax.lax.scan``.

      If no worker takes part in an exchange, since no gradient was finite, the parameters stay as
      they are: with a delay one step later. Optimizers behind `mean_over_workers` get zeros then,
      and may still move by their own momentum and weight decay.

    Raises:
      ValueError: when called, if ``tx`` does not exchange over ``axis_name``, the state was made
        for another number of workers, or the batch cannot be divided.

    Example:
      >>> import jax, jax.numpy as jnp, demo_optax
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> tx = demo_optax.demo(1e-2, axis_name="data")
      >>> params = {"w": jnp.ones((8, 8))}
      >>> opt_state = demo_optax.init_opt_state(tx, params, mesh)
      >>> step = make_train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2), tx, mesh)
      >>> params, opt_state, metrics = step(params, opt_state, jnp.ones((4, 8)))
      >>> metrics.loss
      Array([64.], dtype=float32)
    """
    require_options(microbatches, clip_norm)
    workers = shards.num_workers(mesh, axis_name)
    stacked = worker_axis.stack_workers(tx, mesh, axis_name, param_specs)
    manual = manual_axes(axis_names, mesh, axis_name)
    options: dict[str, Any] = dict(
        microbatches=microbatches,
        clip_norm=clip_norm,
        param_specs=param_specs,
        batch_specs=batch_specs,
    )
    whole_loss = in_full(loss_fn, stateful)
    if manual:
        options |= dict(manual=manual, check_vma=check_vma)
        gradients_of = manual_gradients(whole_loss, mesh, axis_name, **options)
    else:
        gradients_of = mapped_gradients(whole_loss, mesh, axis_name, **options)

    def measured(gradients, updates, params):
        if metrics_fn is not None:
            measure = jax.vmap(metrics_fn, (0, None, None), spmd_axis_name=axis_name)
            return measure(gradients, updates, params)

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2) if donate else ())
    def placed_step(params, opt_state, state, batch, key, extra_args):
        layout = layout_of(tx, params, mesh, axis_name, param_specs)
        copies = shards.copies(params, mesh, axis_name, layout.params)
        found = gradients_of(own_parameters(copies, opt_state), state, batch, *key)
        updates, opt_state = stacked.update(found.gradients, opt_state, params, **extra_args)
        updates = if_anyone_took_part(updates, opt_state)
        custom = measured(found.gradients, updates, params)
        params = shards.lay(optax.apply_updates(params, updates), mesh, layout.params)
        exchanged = exchange_metrics(opt_state)
        metrics = TrainMetrics(
            found.loss, found.norm, found.aux, custom, has_exchanged(opt_state), exchanged, 0
        )
        return params, opt_state, found.state, metrics

    @functools.lru_cache(maxsize=8)
    def prepare(structure: Any, shapes, state_structure: Any, state_shapes):
        """Places of parameters and state, and bytes of packets, once for each tree of shapes."""
        params = structure.unflatten([jax.ShapeDtypeStruct(*x) for x in shapes])
        layout = layout_of(tx, params, mesh, axis_name, param_specs)
        state = state_structure.unflatten([jax.ShapeDtypeStruct(*x) for x in state_shapes])
        worker_axis.require_state(state, jax.eval_shape(stacked.init, params), workers)
        shardings = jax.tree.leaves(shards.shardings(mesh, (layout.params, layout.state)))
        return placement.Places(shardings), layout.variation.sent * mesh.size // workers

    def parts_of(args):
        """Model state, batch and key, of what stands behind the optimizer state."""
        expected = stateful + 1 + random_key
        if len(args) != expected:
            raise TypeError(
                f"the step takes params, opt_state, {'state, ' * stateful}batch"
                f"{', key' * random_key}, but got {len(args) - expected:+d} arguments beside them. "
                "A batch is one pytree: pass several arrays as a tuple or dict, "
                "step(params, opt_state, (x, y)), a key with make_train_step(random_key=True), and "
                "a model state with make_train_step(stateful=True)."
            )
        state, (batch, *key) = (args[0], args[1:]) if stateful else ((), args)
        return state, batch, tuple(key)

    def placed(params, opt_state, args, extra_args):
        """What ``placed_step`` is called with, and the bytes of its packets."""
        state, batch, key = parts_of(args)
        leaves, structure = jax.tree.flatten(params)
        state_leaves, state_structure = jax.tree.flatten(opt_state)
        places, packet_bytes = prepare(
            structure,
            placement.shapes_of(leaves),
            state_structure,
            placement.shapes_of(state_leaves),
        )
        of_batch = batches.leaf_specs(batch, batch_specs, mesh, axis_name)
        placement.require_global(batch, of_batch)
        everything: Any = jax.tree.structure((params, opt_state))
        params, opt_state = everything.unflatten(places.put(leaves + state_leaves))
        worker_axis.require_stacked(state, workers, "model state", "init_model_state")
        rest = state, batch, (key, extra_args)
        state, batch, (key, extra_args) = map(
            functools.partial(placement.put, mesh), rest, (P(axis_name), of_batch, P())
        )
        return (params, opt_state, state, batch, key, extra_args), packet_bytes

    def step(params, opt_state, *args, **extra_args):
        whole, packet_bytes = placed(params, opt_state, args, extra_args)
        params, opt_state, state, metrics = placed_step(*whole)
        metrics = metrics._replace(packet_bytes=packet_bytes)
        return params, opt_state, *([state] if stateful else []), metrics

    def lower(params, opt_state, *args, **extra_args):
        whole = params, opt_state, *parts_of(args), extra_args
        shapes = jax.eval_shape(lambda *whole: whole, *whole)
        layout = layout_of(tx, shapes[0], mesh, axis_name, param_specs)
        of_batch = batches.leaf_specs(shapes[3], batch_specs, mesh, axis_name)
        specs = layout.params, layout.state, P(axis_name), of_batch, P(), P()
        specs = tuple(map(jax.tree.broadcast, specs, shapes))
        params, opt_state, state, batch, key, extra_args = placement.described(shapes, mesh, specs)
        state = [state] if stateful else []
        given = 2 + stateful
        donated = tuple(range(given)) if donate else ()
        jitted = jax.jit(lambda *args, **named: step(*args, **named), donate_argnums=donated)
        return jitted.lower(params, opt_state, *state, batch, *key, **extra_args)

    step.lower = lower  # type: ignore[attr-defined]
    return step

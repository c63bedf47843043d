"""A ready-made train step: local gradients, one exchange, the same parameters everywhere."""

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from demo_optax import participation
from demo_optax._rounds import has_exchanged, own_parameters
from demo_optax.axes import AxisName
from demo_optax.metrics import ExchangeMetrics, exchange_metrics
from demo_optax.parallel import batches, shards, worker_axis
from demo_optax.parallel.gradients import (
    device_gradients,
    found_specs,
    manual_axes,
    manual_gradients,
    mapped_gradients,
    normalize_loss_fn,
    require_options,
)
from demo_optax.parallel.layout import Layout, find_layout, require_plain


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
    require_plain(tx)
    workers = shards.num_workers(mesh, axis_name)
    manual = manual_axes(axis_names, mesh, axis_name)
    whole_loss = normalize_loss_fn(loss_fn, stateful)
    options: dict[str, Any] = dict(microbatches=microbatches, clip_norm=clip_norm)
    in_one = check_vma and manual == set(mesh.axis_names)
    takes = Takes(stateful, random_key)

    def update_in_one(layout, params, opt_state, state, batch, key, extra_args):
        """Gradient, exchange and step of each device, in one ``jax.shard_map``."""
        of_batch = batches.leaf_specs(batch, batch_specs, mesh, axis_name)
        rows = batches.rows_of(of_batch, axis_name)
        gradients_of = device_gradients(
            whole_loss, mesh, axis_name, manual, layout.params, rows, **options
        )

        def of_device(params, opt_state, state, batch, key, extra_args):
            own = worker_axis.unstack(opt_state, layout, axis_name)
            state = jax.tree.map(lambda x: x[0], state)
            found = gradients_of(own_parameters(params, own), state, batch, key)
            extra_args = {**extra_args, participation.PARTICIPATES: jnp.isfinite(found.norm)}
            updates, own = worker_axis.update_own(
                tx, layout, axis_name, found.gradients, own, params, extra_args
            )
            measured = updates if metrics_fn else None
            found = found._replace(gradients=found.gradients if metrics_fn else None)
            return (
                optax.apply_updates(params, updates),
                worker_axis.stack(own, layout, axis_name),
                jax.tree.map(lambda x: jnp.asarray(x)[None], found),
                measured,
            )

        of_found = found_specs(layout.params, mesh, axis_name, manual)
        of_worker = P(axis_name)
        return jax.shard_map(
            of_device,
            mesh=mesh,
            in_specs=(layout.params, layout.state, of_worker, of_batch, P(), P()),
            out_specs=(
                layout.params,
                layout.state,
                of_found if metrics_fn else of_found._replace(gradients=None),
                layout.params if metrics_fn else None,
            ),
        )(params, opt_state, state, batch, key, extra_args)

    def update_apart(layout, params, opt_state, state, batch, key, extra_args):
        """The same where the compiler has axes: the optimizer in a ``jax.shard_map`` of its own."""
        make, own_options = mapped_gradients, {}
        if manual:
            make, own_options = manual_gradients, dict(manual=manual, check_vma=check_vma)
        gradients_of = make(
            whole_loss,
            mesh,
            axis_name,
            **own_options,
            **options,
            param_specs=param_specs,
            batch_specs=batch_specs,
        )
        copies = shards.copies(params, mesh, axis_name, layout.params)
        found = gradients_of(own_parameters(copies, opt_state), state, batch, *key)
        updates, opt_state = worker_axis.update_stacked(
            tx, layout, mesh, axis_name, found.gradients, opt_state, params, extra_args
        )
        params = optax.apply_updates(params, updates)
        params = shards.constrain_sharding(params, mesh, layout.params)
        return params, opt_state, found, updates

    def measured(found, updates, params):
        if metrics_fn is not None:
            measure = jax.vmap(metrics_fn, (0, None, None), spmd_axis_name=axis_name)
            return measure(found.gradients, updates, params)

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2, 3) if donate else ())
    def placed_step(prepared, params, opt_state, state, batch, key, extra_args):
        update = update_in_one if in_one else update_apart
        new, opt_state, found, updates = update(
            prepared.layout, params, opt_state, state, batch, key, extra_args
        )
        metrics = TrainMetrics(
            found.loss,
            found.norm,
            found.aux,
            measured(found, updates, params),
            has_exchanged(opt_state),
            exchange_metrics(opt_state),
            0,
        )
        return new, opt_state, found.state, metrics

    @functools.lru_cache(maxsize=8)
    def prepare(structure: Any, shapes, state_structure: Any, state_shapes) -> Prepared:
        """The layout of parameters and state, found once for each tree of shapes."""
        params = structure.unflatten([jax.ShapeDtypeStruct(*x) for x in shapes])
        layout = find_layout(tx, params, mesh, axis_name, param_specs)
        state = state_structure.unflatten([jax.ShapeDtypeStruct(*x) for x in state_shapes])
        init = functools.partial(worker_axis.init_stacked, tx, layout, mesh, axis_name)
        worker_axis.require_state(state, jax.eval_shape(init, params), workers)
        return Prepared(layout, layout.sent * mesh.size // workers)

    def prepared_for(params, opt_state) -> Prepared:
        trees = [
            (jax.tree.structure(x), worker_axis.shapes_of(jax.tree.leaves(x)))
            for x in (params, opt_state)
        ]
        return prepare(*trees[0], *trees[1])

    def placed(params, opt_state, args, extra_args):
        """What ``placed_step`` is called with."""
        state, batch, key = takes.parts_of(args)
        require_alive(params, opt_state, state)
        require_in_order(params, opt_state)
        prepared = prepared_for(params, opt_state)
        of_batch = batches.leaf_specs(batch, batch_specs, mesh, axis_name)
        batches.require_global(batch, of_batch)
        worker_axis.require_stacked(state, workers, "model state", "init_model_state")
        layout, of_worker = prepared.layout, P(axis_name)
        put = functools.partial(batches.put, mesh)
        (params, opt_state), state, batch, (key, extra_args) = (
            put((params, opt_state), (layout.params, layout.state)),
            put(state, of_worker),
            put(batch, of_batch),
            put((key, extra_args), P()),
        )
        return prepared, params, opt_state, state, batch, key, extra_args

    def step(params, opt_state, *args, **extra_args):
        prepared, *rest = placed(params, opt_state, args, extra_args)
        params, opt_state, state, metrics = placed_step(prepared, *rest)
        metrics = metrics._replace(packet_bytes=prepared.packet_bytes)
        return params, opt_state, *([state] if stateful else []), metrics

    def lower(params, opt_state, *args, **extra_args):
        whole = params, opt_state, *takes.parts_of(args), extra_args
        shapes = jax.eval_shape(lambda *whole: whole, *whole)
        layout = prepared_for(shapes[0], shapes[1]).layout
        of_batch = batches.leaf_specs(shapes[3], batch_specs, mesh, axis_name)
        specs = layout.params, layout.state, P(axis_name), of_batch, P(), P()
        specs = tuple(map(jax.tree.broadcast, specs, shapes))
        described = batches.described(shapes, mesh, specs)
        params, opt_state, state, batch, key, extra_args = described
        donated = tuple(range(2 + stateful)) if donate else ()
        jitted = jax.jit(lambda *args, **named: step(*args, **named), donate_argnums=donated)
        state = [state] if stateful else []
        return jitted.lower(params, opt_state, *state, batch, *key, **extra_args)

    step.lower = lower  # type: ignore[attr-defined]
    return step


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """What a step needs to know of its trees.

    Attributes:
      layout: how parameters and state lie on the mesh.
      packet_bytes: that each worker hands to an exchange.
    """

    layout: Layout
    packet_bytes: int


class Takes(NamedTuple):
    """Which arguments a step takes behind the optimizer state."""

    stateful: bool
    random_key: bool

    def parts_of(self, args):
        """Model state, batch and key."""
        expected = self.stateful + 1 + self.random_key
        if len(args) != expected:
            raise TypeError(
                f"the step takes params, opt_state, {'state, ' * self.stateful}batch"
                f"{', key' * self.random_key}, but {2 + len(args)} arguments were given. "
                "A batch is one pytree: pass several arrays as a tuple or dict, "
                "step(params, opt_state, (x, y)), a key with make_train_step(random_key=True), and "
                "a model state with make_train_step(stateful=True)."
            )
        state, (batch, *key) = (args[0], args[1:]) if self.stateful else ((), args)
        return state, batch, tuple(key)


def require_alive(*trees) -> None:
    """Refuses arrays that were donated: used again, they end the process on several devices."""
    for path, x in jax.tree.leaves_with_path(trees):
        if isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_deleted():
            raise RuntimeError(
                f"an array of the step's arguments{jax.tree_util.keystr(path[1:])}, of shape "
                f"{x.shape}, was given away to an earlier step and is deleted: go on with the "
                "parameters and states that the step returned, or make the step with donate=False."
            )


def require_in_order(params, opt_state) -> None:
    """Refuses an optimizer state in the place of the parameters."""

    def holds_metrics(tree) -> bool:
        return exchange_metrics(tree) is not None

    if holds_metrics(params) and not holds_metrics(opt_state):
        raise TypeError(
            "the step takes params, opt_state, batch, but the optimizer state came first: call "
            "step(params, opt_state, batch)."
        )

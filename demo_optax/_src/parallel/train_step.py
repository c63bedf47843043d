"""Makes a train step with local gradients, one exchange, and the same parameters everywhere."""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from demo_optax._src import checks
from demo_optax._src.axes import AxisName
from demo_optax._src.local_state import has_exchanged
from demo_optax._src.metrics import ExchangeMetrics, exchange_metrics
from demo_optax._src.parallel import gradients, shards, worker_axis
from demo_optax._src.parallel.worker_axis import StateLayout, find_layout

Sharding = Literal["manual", "auto"]


@jax.tree_util.register_static
class StaticInt(int):
    """Passes through ``jax.jit`` as an integer of any size, because it is not a leaf."""


class TrainMetrics(NamedTuple):
    """Holds the metrics of one step, which need no extra collective.

    Attributes:
      loss: float ``(workers,)``, loss of each worker where it computes its gradient.
      gradient_norm: float32 ``(workers,)``, norm of each worker's gradient before clipping.
      aux: the aux of the loss function, with a leading axis of workers, or of all devices if
        ``sharding`` is ``"manual"`` and a worker has several. With ``microbatches`` above 1, an
        axis of microbatches follows.
      exchanged: bool, whether the workers exchanged on this step; with `local_steps` only on the
        last step of a round.
      exchange: `demo_optax.ExchangeMetrics` of the last exchange; None if the optimizer has none.
      packet_bytes: int, bytes that all devices of a worker together send in an exchange. It is a
        Python integer even inside ``jax.jit``, and ``jax.lax.scan`` does not stack it. It is None
        if an exchange stands in a ``while`` loop, whose number of iterations is unknown.

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
    exchanged: jax.Array
    exchange: ExchangeMetrics | None
    packet_bytes: int | None


def make_train_step(
    loss_fn: Callable,
    tx: optax.GradientTransformation,
    mesh: Mesh | AbstractMesh,
    axis_name: AxisName = "data",
    *,
    microbatches: int = 1,
    clip_norm: float | None = None,
    random_key: bool = False,
    stateful: bool = False,
    param_specs=None,
    batch_specs=None,
    sharding: Sharding = "manual",
    donate: bool = True,
) -> Callable:
    """Makes a jitted step that trains with one DeMo worker on each device along ``axis_name``.

    Further axes of the mesh lie inside the workers (FlexDeMo). The devices along them share the
    worker's batch, average their gradients in the parameters' dtype, and shard its parameters.

    Args:
      loss_fn: ``loss_fn(params, batch)``, the loss of one worker's part of the batch: a scalar,
        or a tuple of a scalar and aux.
      tx: any optax transformation that exchanges over ``axis_name``.
      mesh: the workers' mesh. With a ``jax.sharding.AbstractMesh`` of their axis alone, which has
        no devices, all workers are simulated on one device by ``jax.vmap``.
      axis_name: the workers' axis, or axes.
      microbatches: number of parts into which each worker's batch is divided to save memory;
        gradients are averaged over the parts and exchanged once. ``aux`` then has an entry for
        each microbatch.
      clip_norm: largest global norm of each worker's local gradient.
      random_key: whether the step takes a key, for ``loss_fn(params, batch, key)``. Each worker and
        microbatch gets its own key.
      stateful: whether the model has a state besides its parameters, such as statistics of
        BatchNorm: ``loss_fn(params, state, batch) -> (loss, (state, aux))``. Each worker keeps its
        own state, made by `init_model_state`; the devices of one worker average its floats. It
        passes from one microbatch to the next, and stays on a step whose gradient is not finite.
      param_specs: PartitionSpecs or NamedShardings of the parameters over the axes inside a worker:
        a tree or a prefix of one. By default each device holds all parameters.
      batch_specs: PartitionSpecs of the batch, a tree or a prefix of one. By default the first
        dimension of each leaf is divided among all devices. ``P(axis_name)`` gives all devices of
        a worker the same rows. ``P(None, axis_name)`` is for batches whose first dimension is
        time. ``P()`` is for leaves that are the same for all workers, such as scalars and masks.
      sharding: what divides the work of ``loss_fn`` among the devices of a worker. With
        ``"manual"`` the step does: ``loss_fn`` runs in a ``jax.shard_map`` over all axes of the
        mesh, and sees one device's part of the batch and whole parameters. With ``"auto"`` the
        compiler does: ``loss_fn`` is mapped over the workers, as by `worker_gradients`, on a mesh
        whose axes are all Auto. If a worker has several devices, loops of the loss that start from
        zeros, such as those of RNNs, need ``"auto"``.
      donate: whether parameters and state are donated to the step, so that it needs less memory.

    Returns:
      ``step(params, opt_state, batch[, key], **extra_args) -> (params, opt_state, metrics)``, or
      ``step(params, opt_state, state, batch[, key], **extra_args) -> (params, opt_state, state,
      metrics)`` if ``stateful``, compiled once. ``opt_state`` comes from `init_opt_state`, and
      ``metrics`` is a `TrainMetrics`. ``extra_args`` go to the transformation, the same for all
      workers. Arguments with a different sharding are moved. The step has a method ``lower``, as
      jitted functions have, and may be called inside ``jax.jit`` and ``jax.lax.scan``.

      The parameters do not change inside a round of `local_steps` or `multi_steps`, or if no worker
      takes part in an exchange, since no gradient was finite. Transformations after the exchange
      in a chain then get zeros, and their results are ignored.

    Raises:
      ValueError: when called, if ``tx`` does not exchange over ``axis_name``, the state was made
        for a different number of workers, or the batch cannot be divided.

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
    checks.require_unwrapped(tx)
    checks.one_of("sharding", sharding, get_args(Sharding))
    workers = shards.num_workers(mesh, axis_name)
    simulated = shards.is_simulated(mesh, axis_name)
    manual = sharding == "manual" and not simulated
    # Virtual devices share the threads of a CPU, where programs with collectives can deadlock if
    # several of them run at the same time.
    one_at_a_time = isinstance(mesh, Mesh) and (
        mesh.devices.flat[0].platform == "cpu" and len(mesh.local_devices) > 1
    )

    gradients_of = gradients.stacked_gradients(
        loss_fn,
        mesh,
        axis_name,
        manual=manual,
        microbatches=microbatches,
        clip_norm=clip_norm,
        stateful=stateful,
        param_specs=param_specs,
        batch_specs=batch_specs,
    )

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2, 3) if donate else ())
    def placed_step(layout, params, opt_state, state, batch, key, extra_args):
        results = gradients_of(params, opt_state, state, batch, *key)
        updates, opt_state, sent = worker_axis.update_stacked(
            tx, layout, results.gradients, opt_state, params, extra_args
        )
        params = optax.apply_updates(params, updates)
        metrics = TrainMetrics(
            loss=results.loss,
            gradient_norm=results.gradient_norm,
            aux=results.aux,
            exchanged=has_exchanged(opt_state),
            exchange=exchange_metrics(opt_state),
            packet_bytes=None if sent is None else StaticInt(sent * mesh.size // workers),
        )
        params = shards.constrain_sharding(params, mesh, layout.params)
        return params, opt_state, *([results.state] if stateful else []), metrics

    find = functools.cache(  # a dtype of numbers alone depends on JAX's settings
        lambda structure, shapes, _: find_layout(
            tx, structure.unflatten(shapes), mesh, axis_name, param_specs
        )
    )

    def layout_for(params, opt_state) -> StateLayout:
        shapes, structure = jax.tree.flatten(checks.shapes_of("parameter", params))
        layout = find(structure, tuple(shapes), jnp.result_type(float))
        worker_axis.require_state(opt_state, layout)
        return layout

    signature = ("params", "opt_state"), stateful, (random_key,)
    accepted: Any = (None, None)  # holds the signature of the arrays placed last, and their layout

    def step(params, opt_state, *args, **extra_args):
        nonlocal accepted
        state, batch, key = gradients.split_arguments(args, *signature)
        carried, others = (params, opt_state, state), (batch, key, extra_args)
        placed, (known, layout) = shards.signature(mesh, carried), accepted
        if placed is None or placed != known:
            require_not_donated(*carried)
            worker_axis.require_stacked(state, workers, "model state", "init_model_state")
            layout = layout_for(params, opt_state)
            specs = layout.params, layout.state, P(axis_name)
            # A new state of simulated workers lies anywhere, and is consumed there.
            kept = True, not simulated, not simulated
            carried = shards.put(mesh, carried, specs, donated=donate, kept=kept)
            accepted = shards.signature(mesh, carried), layout
        leaf_batch_specs = shards.batch_leaf_specs(batch, batch_specs, mesh, axis_name)
        if not simulated:
            shards.require_global(batch, leaf_batch_specs)
        specs, beside = (leaf_batch_specs, P(), P()), carried if donate else ()
        others = shards.put(mesh, others, specs, donated=False, beside=beside)
        results = tuple(placed_step(layout, *carried, *others))
        if one_at_a_time and not isinstance(results[-1].loss, Tracer):
            jax.block_until_ready(results[-1].loss)
        return results

    def lower(params, opt_state, *args, **extra_args):
        state, batch, key = gradients.split_arguments(args, *signature)
        given = params, opt_state, state, batch, key, extra_args
        shapes = jax.eval_shape(lambda *given: given, *given)
        layout = layout_for(*shapes[:2])
        of_batch = shards.batch_leaf_specs(shapes[3], batch_specs, mesh, axis_name)
        specs = layout.params, layout.state, P(axis_name), of_batch, P(), P()
        shardings = shards.shardings(mesh, jax.tree.broadcast(specs, shapes))
        placed = jax.tree.map(lambda x, y: x.update(sharding=y, weak_type=False), shapes, shardings)
        lowered = placed_step.lower(layout, *placed)
        called: Any = jax.tree.structure(((params, opt_state, *args), extra_args))
        lowered.args_info = called.unflatten(jax.tree.leaves(lowered.args_info))
        return lowered

    step.lower = lower  # type: ignore[attr-defined]
    return step


def require_not_donated(*trees) -> None:
    """Refuses donated arrays, whose reuse would end the process on several devices."""
    for path, x in jax.tree.leaves_with_path(trees):
        if isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_deleted():
            raise RuntimeError(
                f"leaf{jax.tree_util.keystr(path[1:])} of the step's arguments, of shape "
                f"{x.shape}, was given away to an earlier step and is deleted: go on with the "
                "parameters and states that the step returned, or make the step with donate=False."
            )

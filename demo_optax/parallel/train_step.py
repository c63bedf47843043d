"""A ready-made train step: local gradients, one exchange, the same parameters everywhere."""

import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from demo_optax import accounting, axes, checks
from demo_optax.axes import AxisName
from demo_optax.metrics import ExchangeMetrics, all_metrics, exchange_metrics
from demo_optax.numerics import upcast
from demo_optax.parallel import shards, worker_axis
from demo_optax.parallel.local_gradients import local_value_and_grad


class TrainMetrics(NamedTuple):
    """What one step tells, without a collective of its own.

    Attributes:
      loss: float ``(workers,)``, each worker's own.
      gradient_norm: float32 ``(workers,)``, of each worker's gradient before clipping.
      aux: what the loss function returned beside the loss, with a leading axis of workers, or of
        all devices where a worker has several that the step handles itself.
      exchange: `demo_optax.ExchangeMetrics`, or None where the optimizer keeps none.
      packet_bytes: int, the bytes that each worker, with all its devices, handed to the exchange.

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
    check_vma: bool = True,
    param_specs=None,
    axis_names: Collection[str] | None = None,
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
      check_vma: as in ``jax.shard_map``. With False, JAX's types no longer prove that gradients
        are local and parameters replicated; for models whose operations do not support them.
      param_specs: PartitionSpecs of the parameters over the axes inside a worker, a tree or a
        prefix of one; by default each device holds all of them.
      axis_names: as in ``jax.shard_map``, the axes that the step handles itself. All by default:
        ``loss_fn`` then sees one device's part of the batch and whole parameters, which are
        gathered for it, while gradients are scattered. With the workers' axis alone, the others
        are left to the compiler: ``loss_fn`` is a program for a whole worker, with whatever
        shardings it states itself. Their ``jax.sharding.AxisType`` must then be ``Auto``.

    Returns:
      ``step(params, opt_state, batch[, key]) -> (params, opt_state, metrics)``, compiled once,
      which donates parameters and state once they lie on the mesh. ``batch`` is a tree of arrays
      whose first dimension is divided among all devices, ``opt_state`` comes from
      `init_opt_state`, and ``metrics`` is a `TrainMetrics`.

      If no worker has a finite gradient, the parameters stay as they are.

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
    checks.static_integer("microbatches", microbatches, at_least=1)
    workers = shards.num_workers(mesh, axis_name)
    stacked = worker_axis.stack_workers(tx, mesh, axis_name, param_specs)
    worker_axes = axes.names(axis_name)
    inner = shards.inner_axes(mesh, axis_name)
    manual = _manual_axes(axis_names, mesh, worker_axes)
    inner_manual = tuple(name for name in inner if name in manual)
    if clip_norm is not None:
        checks.in_interval("clip_norm", clip_norm, "(0, inf]")

    def worker_step(specs, params, opt_state, batch, *key):
        def loss_of_shards(params, *args):
            return loss_fn(shards.gather_params(params, specs), *args)

        own = worker_axes + inner_manual
        own_key = [jax.random.fold_in(k, jax.lax.axis_index(own)) for k in key]
        (loss, aux), gradient = _accumulate(
            loss_of_shards if inner_manual else loss_fn, own, microbatches, params, batch, *own_key
        )
        if inner_manual:
            gradient = shards.mean_gradient(gradient, specs, inner)
            loss = jax.lax.pmean(loss, inner)
        norm = shards.norm(gradient, specs)
        if clip_norm is not None:
            # A norm that is not finite makes NaNs, and the worker sits the step out.
            scale = jnp.where(norm > clip_norm, clip_norm / norm, 1.0)
            scale = jnp.where(jnp.isfinite(norm), scale, jnp.nan)
            gradient = jax.tree.map(lambda g: (g * scale).astype(g.dtype), gradient)
        updates, opt_state = stacked.update(gradient, opt_state, params)
        exchanged = exchange_metrics(opt_state)
        if exchanged is not None:
            took_part = [m.participants > 0 for m in all_metrics(opt_state)]
            any_did = jnp.any(jnp.array(took_part))
            updates = jax.tree.map(lambda u: jnp.where(any_did, u, jnp.zeros_like(u)), updates)
        loss, norm, aux = jax.tree.map(lambda x: jnp.asarray(x)[None], (loss, norm, aux))
        return optax.apply_updates(params, updates), opt_state, (loss, norm), aux, exchanged

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def placed_step(params, opt_state, batch, *key):
        layout = worker_axis.layout_of(tx, params, mesh, axis_name, param_specs)
        whole = layout.params, layout.state
        specs, state_specs = jax.tree.map(functools.partial(_handled, manual), whole)
        sharded = jax.shard_map(
            functools.partial(worker_step, specs),
            mesh=mesh,
            axis_names=manual,
            in_specs=(specs, state_specs, P(worker_axes + inner_manual), *[P() for _ in key]),
            out_specs=(specs, state_specs, P(axis_name), P(worker_axes + inner_manual), P()),
            check_vma=check_vma,
        )
        params, opt_state, (loss, norm), aux, exchanged = sharded(params, opt_state, batch, *key)
        if manual != set(mesh.axis_names):
            params, opt_state = jax.lax.with_sharding_constraint(
                (params, opt_state), shards.shardings(mesh, whole)
            )
        return params, opt_state, TrainMetrics(loss, norm, aux, exchanged, packet_bytes=0)

    @functools.lru_cache(maxsize=8)
    def prepare(structure: Any, shapes, state_structure: Any, state_shapes) -> tuple[_Places, int]:
        """Places of the parameters and bytes of the packets, once for each tree of shapes."""
        params = structure.unflatten([jax.ShapeDtypeStruct(*x) for x in shapes])
        layout = worker_axis.layout_of(tx, params, mesh, axis_name, param_specs)
        state = state_structure.unflatten([jax.ShapeDtypeStruct(*x) for x in state_shapes])
        worker_axis.require_state(state, jax.eval_shape(stacked.init, params), workers)
        shardings = jax.tree.leaves(shards.shardings(mesh, layout.params))
        sent = layout.variation.sent
        if not check_vma:  # types do not tell which devices hold the same: each sends all
            parts = shards.shard_shapes(params, layout.params, mesh)
            sent = accounting.packet_bytes(tx, parts, axis_name)
        return _Places(shardings), sent * mesh.size // workers

    over_all = NamedSharding(mesh, P(worker_axes + inner))

    def step(params, opt_state, batch, *key):
        structure: Any
        batch_structure: Any
        if len(key) != random_key:
            raise TypeError(
                f"the step takes params, opt_state, batch{', key' * random_key}, but got "
                f"{len(key) - random_key:+d} arguments beside them. A batch is one pytree: pass "
                "several arrays as a tuple or dict, step(params, opt_state, (x, y)), and a key "
                "with make_train_step(random_key=True)."
            )
        leaves, structure = jax.tree.flatten(params)
        state_leaves, state_structure = jax.tree.flatten(opt_state)
        places, packet_bytes = prepare(
            structure, _shapes(leaves), state_structure, _shapes(state_leaves)
        )
        _require_divisible(batch, mesh.size)
        _require_global(batch)
        params = structure.unflatten(places.put(leaves))
        rows, batch_structure = jax.tree.flatten(batch)
        batch = batch_structure.unflatten(_Places([over_all] * len(rows)).put(rows))
        params, opt_state, metrics = placed_step(params, opt_state, batch, *key)
        return params, opt_state, metrics._replace(packet_bytes=packet_bytes)

    return step


def _manual_axes(axis_names, mesh, worker_axes) -> set[str]:
    """The axes that a step handles itself: all, or those of the workers."""
    manual = set(mesh.axis_names if axis_names is None else axis_names)
    if manual not in (set(mesh.axis_names), set(worker_axes)):
        raise ValueError(
            f"axis_names must be the workers' axes {worker_axes} alone, with all others left to "
            f"the compiler, or all axes of the mesh {tuple(mesh.axis_names)}, not "
            f"{tuple(axis_names)}."
        )
    explicit = [
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if name not in manual and kind == AxisType.Explicit
    ]
    if explicit:
        raise ValueError(
            f"the axes {explicit} are left to the compiler, but their type is Explicit, as "
            "jax.make_mesh makes them by default: make the mesh with jax.make_mesh(shape, names, "
            "(jax.sharding.AxisType.Auto,) * len(names))."
        )
    return manual


def _handled(manual, spec: P) -> P:
    """The part of a spec that is over manual axes."""
    return P(*(entry if set(axes.names(entry)) <= manual else None for entry in spec))


def _shapes(leaves) -> tuple:
    """Shapes and dtypes."""
    return tuple([(x.shape, x.dtype) for x in map(_array_like, leaves)])


def _array_like(x):
    return x if hasattr(x, "dtype") else np.asarray(x)


class _Places:
    """Where arrays shall lie, and how those lay that did."""

    def __init__(self, shardings):
        self.shardings, self.accepted = shardings, shardings

    def put(self, leaves) -> list[jax.Array]:
        """Arrays with these shardings: those that have them stay, all others are copied.

        Copied, since the step donates what it is given: an array of the caller's, or one that is
        used for two leaves, must not be what it gives away.
        """
        given = [getattr(x, "sharding", None) for x in leaves]
        seen: set[int] = set()

        def place(x, given, wanted):
            if isinstance(x, jax.core.Tracer):
                return jax.device_put(x, wanted)
            if id(x) not in seen and _lies_as(given, wanted, np.ndim(x)):
                seen.add(id(x))
                return x
            return jax.device_put(jnp.copy(x) if isinstance(x, jax.Array) else x, wanted)

        if given == self.accepted and len(set(map(id, leaves))) == len(leaves):
            return leaves
        placed = [place(*each) for each in zip(leaves, given, self.shardings, strict=True)]
        if all(x is y for x, y in zip(leaves, placed, strict=True)):
            self.accepted = given
        return placed


@functools.lru_cache(maxsize=4096)
def _lies_as(given, wanted: NamedSharding, ndim: int) -> bool:
    """Whether both are the same on the same mesh."""
    if not isinstance(given, NamedSharding) or given.mesh != wanted.mesh:
        return False
    return given.is_equivalent_to(wanted, ndim)


def _require_divisible(batch, devices):
    for path, leaf in jax.tree.leaves_with_path(batch):
        if not np.ndim(leaf) or np.shape(leaf)[0] % devices:
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} has shape {np.shape(leaf)}, whose first "
                f"dimension cannot be divided among {devices} devices: choose a batch size that is "
                "a multiple of their number."
            )


def _require_global(batch):
    """With several processes no array of one of them alone can be the batch of all."""
    for path, leaf in jax.tree.leaves_with_path(batch):
        if jax.process_count() > 1 and getattr(leaf, "is_fully_addressable", True):
            raise ValueError(
                f"with several processes a batch must be a global array, but batch"
                f"{jax.tree_util.keystr(path)} is of type {type(leaf).__name__} and shape "
                f"{np.shape(leaf)} of this process alone: make it of each process's own part with "
                "jax.make_array_from_process_local_data(jax.NamedSharding(mesh, spec), part)."
            )


def _accumulate(loss_fn, axis_name, microbatches, params, batch, *key):
    """Loss, aux and gradient of a worker's batch, averaged over its microbatches."""

    def loss_and_aux(*args):
        out = loss_fn(*args)
        return tuple(out) if isinstance(out, (tuple, list)) else (out, None)

    value_and_grad = local_value_and_grad(loss_and_aux, axis_name, has_aux=True)
    if microbatches == 1:
        return value_and_grad(params, batch, *key)

    def cut(x):
        if x.shape[0] % microbatches:
            raise ValueError(
                f"a worker's part of the batch has {x.shape[0]} rows, which cannot be cut into "
                f"{microbatches} equal microbatches: choose a batch size that is a multiple of "
                "workers x microbatches."
            )
        return x.reshape(microbatches, -1, *x.shape[1:])

    def add(total, args):
        (loss, aux), gradient = value_and_grad(params, *args)
        return jax.tree.map(lambda t, x: t + upcast(x), total, (loss, gradient)), aux

    parts = jax.tree.map(cut, batch), *[jax.random.split(k, microbatches) for k in key]
    first = jax.tree.map(lambda x: x[0], parts)
    (loss, _), gradient = jax.eval_shape(value_and_grad, params, *first)
    zeros = jax.tree.map(lambda x: upcast(jnp.zeros(x.shape, x.dtype)), (loss, gradient))
    total, aux = jax.lax.scan(add, axes.as_varying(zeros, axis_name), parts)
    loss, gradient = jax.tree.map(
        lambda t, x: (t / microbatches).astype(x.dtype), total, (loss, gradient)
    )
    return (loss, aux), gradient

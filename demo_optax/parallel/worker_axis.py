"""The worker axis: how state that differs between workers lives in global arrays.

A momentum that differs between workers must not be typed as replicated: a checkpoint would then
store a patchwork of all of them. Outside the step such leaves have a leading axis, one entry a
worker, sharded over the workers. Which leaves these are is read from JAX's types: one update is
evaluated abstractly, and what comes out varying over the axis belongs to a worker.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from demo_optax import axes
from demo_optax.axes import AxisName
from demo_optax.decoupled_momentum import DecoupledMomentumState


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


def worker_local(
    tx: optax.GradientTransformation, params, mesh: Mesh | AbstractMesh, axis_name: AxisName
):
    """Which leaves of ``tx``'s state differ between workers.

    Evaluates updates abstractly under ``jax.shard_map(check_vma=True)``, with gradients that
    vary over ``axis_name``, until no further leaf comes out varying.

    Args:
      tx: any optax transformation that exchanges over ``axis_name``.
      params: arrays or shapes of the parameters.
      mesh: the workers' mesh.
      axis_name: the workers' axis, or axes.

    Returns:
      A tree of booleans like ``tx.init(params)``.

    Raises:
      ValueError: the updates themselves differ between workers, because ``tx`` does not exchange.
    """
    num_workers(mesh, axis_name)
    tx = optax.with_extra_args_support(tx)
    outcome: dict[str, Any] = {}

    def differs(x):
        return any(name in axes.varying(x) for name in axes.names(axis_name))

    def probe(local):
        def update():
            values = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
            state = jax.tree.map(
                lambda x, varies: axes.as_varying(x, axis_name) if varies else x,
                tx.init(values),
                local,
            )
            updates, state = tx.update(axes.as_varying(values, axis_name), state, values)
            outcome["state"] = jax.tree.map(differs, state)
            outcome["updates"] = jax.tree.map(differs, updates)

        axes.trace_worker(update, mesh.shape)
        return jax.tree.map(lambda a, b: a or b, local, outcome["state"])

    local = jax.tree.map(lambda _: False, jax.eval_shape(tx.init, params))
    try:
        while jax.tree.leaves(found := probe(local)) != jax.tree.leaves(local):
            local = found
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"{error}\n\nThis came up while an update was evaluated abstractly, to find which "
            "parts of the state differ between workers. optax.MultiSteps and "
            "optax.apply_if_finite cannot be evaluated so: accumulate with "
            "make_train_step(microbatches=...) instead; workers whose gradient is not finite are "
            "left out already."
        ) from error
    drifting = [
        jax.tree_util.keystr(path)
        for path, varies in jax.tree.leaves_with_path(outcome["updates"])
        if varies
    ]
    if drifting:
        raise ValueError(
            f"the optimizer's updates differ between the workers of axis {axis_name!r} (first: "
            f"parameter{drifting[0]}), so their parameters would drift apart unseen. It must "
            f"exchange over that axis: give demo_optax.decoupled_momentum (or demo_optax.demo, "
            f"...) axis_name={axis_name!r}, or put demo_optax.mean_over_workers({axis_name!r}) in "
            "front of an ordinary optimizer."
        )
    return local


def state_specs(
    tx: optax.GradientTransformation,
    params,
    mesh: Mesh | AbstractMesh,
    axis_name: AxisName = "data",
):
    """PartitionSpecs of the state that `init_opt_state` makes, for any optax chain.

    Args:
      tx: any optax transformation that exchanges over ``axis_name``.
      params: arrays or shapes of the parameters.
      mesh: the workers' mesh.
      axis_name: the workers' axis, or axes.

    Returns:
      A tree like the state: ``P(axis_name)`` for leaves with a leading worker axis, ``P()`` for
      those that are the same on all workers.

    Raises:
      ValueError: ``tx`` does not exchange over ``axis_name``; the mesh has no such axis.

    Example:
      >>> import jax, jax.numpy as jnp, demo_optax
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> tx = demo_optax.demo_adamw(1e-3, axis_name="data")
      >>> momentum, rms, *_ = state_specs(tx, {"w": jnp.ones((4, 4))}, mesh)
      >>> momentum.momentum, rms.nu
      ({'w': P('data',)}, {'w': P()})
    """
    local = worker_local(tx, params, mesh, axis_name)
    return jax.tree.map(lambda varies: P(axis_name) if varies else P(), local)


def stack_workers(
    tx: optax.GradientTransformation, mesh: Mesh, axis_name: AxisName = "data"
) -> optax.GradientTransformationExtraArgs:
    """``tx`` with a state whose worker-local leaves carry a leading worker axis.

    ``init`` is called outside ``jax.shard_map`` and places the state on the mesh. ``update`` is
    called inside, where each worker holds one entry of that axis. With it a Flax ``TrainState``
    or any other holder of an optax transformation works unchanged. A worker whose gradient is
    not finite keeps its entries as they were, so that no second moment is lost to one bad batch.

    Args:
      tx: any optax transformation that exchanges over ``axis_name``.
      mesh: the workers' mesh.
      axis_name: the workers' axis, or axes.

    Returns:
      An ``optax.GradientTransformationExtraArgs``.

    Example:
      >>> import jax, jax.numpy as jnp, demo_optax
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> tx = stack_workers(demo_optax.demo(1e-3, axis_name="data"), mesh)
      >>> tx.init({"w": jnp.ones((128, 64))})[0].momentum["w"].shape
      (1, 2, 1, 64, 64)
    """
    workers = num_workers(mesh, axis_name)
    tx = optax.with_extra_args_support(tx)

    def init_fn(params):
        local = worker_local(tx, params, mesh, axis_name)

        def init(params):
            return jax.tree.map(
                lambda x, varies: jnp.broadcast_to(x, (workers, *x.shape)) if varies else x,
                tx.init(params),
                local,
            )

        shardings = jax.tree.map(
            lambda varies: NamedSharding(mesh, P(axis_name) if varies else P()), local
        )
        return jax.jit(init, out_shardings=shardings)(params)

    def update_fn(updates, state, params=None, **extra_args):
        like = updates if params is None else params
        single = jax.eval_shape(tx.init, like)
        stacked = worker_local(tx, like, mesh, axis_name)
        old = jax.tree.map(_own_entry, state, single, stacked)
        finite = jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(updates)]).all()
        updates, new = tx.update(updates, old, params, **extra_args)

        def keep(new, old, stacked):
            if isinstance(new, DecoupledMomentumState):  # which protects itself
                return jax.tree.map(lambda x, s: x[None] if s else x, new, stacked)
            return jnp.where(finite, new, old)[None] if stacked else new

        return updates, jax.tree.map(
            keep, new, old, stacked, is_leaf=lambda x: isinstance(x, DecoupledMomentumState)
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def init_opt_state(
    tx: optax.GradientTransformation, params, mesh: Mesh, axis_name: AxisName = "data"
):
    """The state of ``tx`` for all workers of a mesh, placed on it.

    Args:
      tx: any optax transformation that exchanges over ``axis_name``.
      params: the parameters.
      mesh: the workers' mesh.
      axis_name: the workers' axis, or axes.

    Returns:
      ``tx.init(params)``, where each leaf that differs between workers has a leading axis of
      their number, sharded as `state_specs` says.

    Raises:
      ValueError: ``tx`` does not exchange over ``axis_name``; the mesh has no such axis.
    """
    return stack_workers(tx, mesh, axis_name).init(params)


def require_state(opt_state, expected, workers: int) -> None:
    """Refuses a state made for another number of workers or another model."""
    given: Any = jax.tree.structure(opt_state)
    if given != jax.tree.structure(expected):
        raise ValueError(
            "the optimizer state is not one of this optimizer and these parameters: make it with "
            "demo_optax.init_opt_state."
        )
    leaves = jax.tree.leaves_with_path(opt_state)
    for (path, leaf), wanted in zip(leaves, jax.tree.leaves(expected), strict=True):
        if leaf.shape != wanted.shape:
            raise ValueError(
                f"the optimizer state{jax.tree_util.keystr(path)} has shape {leaf.shape}, but "
                f"{workers} workers need {wanted.shape}: it was made for another number of "
                "workers or another model, or by tx.init alone. Make it with "
                "demo_optax.init_opt_state on the mesh that it is used on."
            )


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

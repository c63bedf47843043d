"""The sharding of parameters and optimizer state: which leaves differ between workers.

JAX's types tell it. One update is traced under ``jax.shard_map`` without computing anything. A
result whose type varies over an axis differs along that axis.
"""

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.interpreters import partial_eval
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jax.tree_util import GetAttrKey, keystr

from demo_optax import axes, checks
from demo_optax.arrays import boxed_inside, is_key, unboxed
from demo_optax.axes import TRACING_ARGUMENTS, AxisName
from demo_optax.checks import require_unwrapped
from demo_optax.parallel import shards
from demo_optax.specs import PARAM_SPECS, axes_of, sharded_axes


@dataclasses.dataclass(frozen=True, eq=False)
class StateLayout:
    """The sharding of parameters and optimizer state on a mesh.

    Attributes:
      mesh: the workers' mesh.
      axis_name: the workers' axis, or axes.
      params: PartitionSpecs of the parameters.
      state: PartitionSpecs of the state.
      worker_state_shapes: shapes of one worker's state.
      varies_over_workers: bools, whether each leaf of the state differs between workers.
      state_replicated_axes: frozensets, for each leaf of the state the axes along which a worker's
        devices hold copies of it that should be equal, though their types do not say so.
      update_replicated_axes: the same for the updates.
      frozen: bools, whether each update is zero whatever the gradient is.
      sent: int, bytes that one device sends by collectives between workers; None if unknown.
    """

    mesh: Mesh | AbstractMesh
    axis_name: AxisName
    params: Any
    state: Any
    worker_state_shapes: Any
    varies_over_workers: Any
    state_replicated_axes: Any
    update_replicated_axes: Any
    frozen: Any
    sent: int | None


def state_specs(
    tx: optax.GradientTransformation,
    params,
    mesh: Mesh | AbstractMesh,
    axis_name: AxisName = "data",
    param_specs=None,
):
    """PartitionSpecs of the state that `init_opt_state` makes, for any optax chain.

    Args:
      tx: any optax transformation that exchanges over ``axis_name``.
      params: arrays or shapes of the parameters.
      mesh: the workers' mesh.
      axis_name: the workers' axis, or axes.
      param_specs: PartitionSpecs or NamedShardings of the parameters inside a worker, a tree or a
        prefix of one.

    Returns:
      A tree like the state. A leaf that differs between workers has a leading worker axis, so
      its spec is ``P(axis_name, ...)``. If it also differs between the shards of a worker, the rest
      of the spec is that of its parameter. The path of a leaf ends with the path of its parameter.

    Raises:
      ValueError: ``tx`` does not exchange over ``axis_name``; the mesh has no such axis; a leaf
        differs between the shards of a worker, but cannot be sharded like its parameter.

    Example:
      >>> import jax, jax.numpy as jnp, demo_optax
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> tx = demo_optax.demo_adamw(1e-3, axis_name="data")
      >>> momentum, (rms, *_) = state_specs(tx, {"w": jnp.ones((4, 4))}, mesh)
      >>> momentum.momentum, rms.nu
      ({'w': P('data',)}, {'w': P()})
    """
    return find_layout(tx, params, mesh, axis_name, param_specs).state


def state_shardings(
    tx: optax.GradientTransformation,
    params,
    mesh: Mesh,
    axis_name: AxisName = "data",
    param_specs=None,
):
    """NamedShardings of the state that `init_opt_state` makes.

    Arguments and errors are those of `state_specs`.

    Example:
      >>> import jax, jax.numpy as jnp, demo_optax
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> tx = demo_optax.demo(1e-3, axis_name="data")
      >>> state_shardings(tx, {"w": jnp.ones((4, 4))}, mesh)[0].momentum["w"].spec
      P('data',)
    """
    return shards.shardings(mesh, state_specs(tx, params, mesh, axis_name, param_specs))


_LAYOUTS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
"""For each ``tx.update`` its layouts; to compute one, the update is traced."""


def find_layout(tx, params, mesh, axis_name: AxisName, param_specs) -> StateLayout:
    """The layout for arrays or shapes of the whole parameters, traced once for each optimizer.

    Raises:
      ValueError: the updates differ between workers, because ``tx`` does not exchange.
    """
    require_unwrapped(tx)
    checks.real_leaves("parameter", params)
    params = checks.shapes_of("parameter", params)
    leaves, structure = jax.tree.flatten((params, param_specs))
    context = mesh, axis_name, axes.platform(), jnp.result_type(float)
    key = tx.init, structure, tuple(leaves), context
    layouts = _LAYOUTS.setdefault(tx.update, {})
    if key not in layouts:
        layouts[key] = _trace_layout(tx, params, mesh, axis_name, param_specs)
    return layouts[key]


def _trace_layout(tx, params, mesh, axis_name: AxisName, param_specs) -> StateLayout:
    shards.num_workers(mesh, axis_name)
    specs = shards.leaf_specs(params, param_specs, mesh, axis_name)
    inner, tx = unboxed(specs), boxed_inside(tx, specs)
    parts = shards.shard_shapes(jax.tree.map(jax.typeof, unboxed(params)), inner, mesh)
    worker_state_shapes = axes.shapes_of_worker(tx.init, mesh.shape, parts)
    state_axes, update_axes, sent = _varying_axes(
        tx, parts, worker_state_shapes, inner, mesh.shape, axis_name
    )
    worker_axes = set(axes.names(axis_name))
    varies_over_workers = jax.tree.map(lambda names: bool(names & worker_axes), state_axes)
    state = _state_specs(state_axes, worker_state_shapes, inner, mesh, axis_name)

    def copied_axes(names, spec):
        return names - set(axes_of(spec)) - worker_axes

    return StateLayout(
        mesh=mesh,
        axis_name=axis_name,
        params=specs,
        state=state,
        worker_state_shapes=worker_state_shapes,
        varies_over_workers=varies_over_workers,
        state_replicated_axes=jax.tree.map(copied_axes, state_axes, state),
        update_replicated_axes=jax.tree.map(copied_axes, update_axes, inner),
        frozen=_frozen_updates(
            tx,
            parts,
            inner,
            worker_state_shapes,
            varies_over_workers,
            update_axes,
            mesh,
            axis_name,
        ),
        sent=sent,
    )


def _varying_axes(tx, parts, worker_state_shapes, specs, mesh_shape, axis_name: AxisName):
    """The axes over which leaves of the state and of the updates differ, and the bytes sent.

    The gradients vary over ``axis_name`` and the axes of their parameter's spec. The trace is
    repeated until the varying axes of the state stop changing.
    """
    outcome = []

    def probe(varying_axes):
        def zeros(x, spec):
            return axes.as_varying(jnp.zeros(x.shape, x.dtype), axes_of(spec))

        def vary(x, names):
            return axes.as_varying(x, tuple(names))

        def update():
            values = jax.tree.map(zeros, parts, specs)
            old = jax.tree.map(vary, tx.init(values), varying_axes)
            gradient = axes.as_varying(values, axis_name)
            known = {**TRACING_ARGUMENTS, PARAM_SPECS: specs}
            updates, state = tx.update(gradient, old, values, **known)
            state = shards.merge_shard_metrics(state, old, sharded_axes(specs))
            outcome.append(jax.tree.map(axes.varying, (old, state, updates)))

        program = axes.trace_worker(update, mesh_shape)
        old, state, updates = outcome[-1]
        state = jax.tree.map(frozenset.union, old, state)
        return old, state, updates, axes.bytes_handed_over(program, axis_name)

    try:
        old, state, updates, sent = probe(jax.tree.map(lambda _: frozenset(), worker_state_shapes))
        while jax.tree.leaves(old) != jax.tree.leaves(state):
            old, state, updates, sent = probe(state)
    except (TypeError, ValueError) as error:
        if "required keyword-only argument" in str(error):
            raise TypeError(
                f"{error}, and is evaluated abstractly before any step. Of extra arguments only "
                f"{', '.join(TRACING_ARGUMENTS)} is known then: give the others a default."
            ) from error
        if not (kind := _decides_alone(worker_state_shapes)):
            raise
        raise type(error)(
            f"{error}\n\n{kind} lets each worker decide alone whether it takes part in a step: "
            "accumulate with make_train_step(microbatches=...) or demo_optax.multi_steps instead, "
            "and leave conditions on the gradient out; workers whose gradient is not finite are "
            "left out already."
        ) from error
    return state, updates, sent


_ALONE = {
    optax.MultiStepsState: "optax.MultiSteps",
    optax.ApplyIfFiniteState: "optax.apply_if_finite",
    optax.ConditionallyTransformState: "optax.conditionally_transform",
    optax.ConditionallyMaskState: "optax.conditionally_mask",
}


def _decides_alone(state) -> str:
    """The name of a wrapper that lets a worker decide alone, from its state; "" without one."""
    nodes = jax.tree.leaves(state, is_leaf=lambda x: type(x) in _ALONE)
    return next((_ALONE[type(node)] for node in nodes if type(node) in _ALONE), "")


def _frozen_updates(
    tx,
    parts,
    specs,
    worker_state_shapes,
    varies_over_workers,
    update_axes,
    mesh,
    axis_name: AxisName,
):
    """Bools, which updates are zero although their type says that they differ between workers.

    An update is taken for zero if it depends on no gradient, no parameter and no local state, as
    with ``optax.set_to_zero``.

    Raises:
      ValueError: an update that is not zero differs between workers.
    """
    worker_axes = axes.names(axis_name)
    differs = jax.tree.map(lambda names: not names.isdisjoint(worker_axes), update_axes)
    if not any(jax.tree.leaves(differs)):
        return differs

    def update(gradient, state, params):
        known = {**TRACING_ARGUMENTS, PARAM_SPECS: specs}
        return tx.update(gradient, state, params, **known)[0]

    on_devices = jax.shard_map(
        update,
        mesh=AbstractMesh(tuple(mesh.shape.values()), tuple(mesh.shape)),
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        program = jax.make_jaxpr(on_devices)(parts, worker_state_shapes, parts)
    all_true = jax.tree.map(lambda _: True, parts)
    local = jax.tree.leaves((all_true, varies_over_workers, all_true))

    def depends(number: int) -> bool:
        wanted = [i == number for i in range(len(program.jaxpr.outvars))]
        _, used = partial_eval.dce_jaxpr(program.jaxpr, wanted)
        return any(a and b for a, b in zip(used, local, strict=True))

    for number, (path, varies) in enumerate(jax.tree.leaves_with_path(differs)):
        if varies and depends(number):
            raise ValueError(
                f"the optimizer's updates differ between the workers of axis {axis_name!r} (first: "
                f"parameter{keystr(path)}), so their parameters would drift apart "
                "unseen. It must exchange over that axis: give demo_optax.decoupled_momentum (or "
                f"demo_optax.demo, ...) axis_name={axis_name!r}, or put "
                f"demo_optax.mean_over_workers({axis_name!r}) in front of an ordinary optimizer. "
                "To freeze parameters, leave optax.partition with optax.set_to_zero outermost."
            )
    return differs


def _state_specs(state_axes, worker_state_shapes, param_specs, mesh, axis_name: AxisName):
    """A PartitionSpec for each leaf of the state."""
    worker_axes = set(axes.names(axis_name))
    spec_at = dict(jax.tree.leaves_with_path(param_specs))
    device_paths = _device_paths(worker_state_shapes)

    def inner_spec(path, varying_axes, leaf) -> P:
        if varying_axes <= worker_axes:
            return P()
        if path in device_paths:
            inner = tuple(name for name in mesh.axis_names if name in varying_axes - worker_axes)
            return P(inner) if leaf.ndim else P()
        for start in range(len(path) + 1):
            spec = spec_at.get(path[start:])
            if spec is not None and len(spec) <= leaf.ndim:
                return spec
        if leaf.ndim == 0 and (jnp.issubdtype(leaf.dtype, jnp.integer) or is_key(leaf)):
            return P()  # a counter or a random key is the same on all shards of a worker
        raise ValueError(
            f"the optimizer state{keystr(path)} of shape {leaf.shape} differs "
            f"between the shards of a worker, over {sorted(varying_axes - worker_axes)}, but "
            "cannot be sharded like a parameter. Leave its parameter whole (param_specs=P()), or "
            "use an optimizer whose state has the shapes of the parameters."
        )

    def whole_spec(path, varying_axes, leaf) -> P:
        spec = inner_spec(path, varying_axes, leaf)
        return P(axis_name, *spec) if varying_axes & worker_axes else spec

    return jax.tree.map_with_path(whole_spec, state_axes, worker_state_shapes)


def _device_paths(state) -> list[tuple]:
    """Paths of the leaves that each device has, without a parameter that they belong to."""
    return [
        (*path, GetAttrKey("exchange"), *inside)
        for path, node in jax.tree.leaves_with_path(state, is_leaf=shards.is_momentum)
        if shards.is_momentum(node)
        for inside, _ in jax.tree.leaves_with_path(node.exchange)
    ]


class Stacked(optax.GradientTransformationExtraArgs):
    """A transformation that `stack_workers` made."""

    state_shardings: Callable

    @classmethod
    def make(cls, init: Callable, update: Callable, state_shardings: Callable) -> "Stacked":
        made = cls(init, update)
        made.state_shardings = state_shardings
        return made

    def __iter__(self):
        raise TypeError(
            "demo_optax.stack_workers(...) stands inside another optax transformation, such as "
            "optax.chain, which would see stacked gradients (workers, *shape): leave it outermost, "
            "and chain inside of it, as in stack_workers(optax.chain(...), mesh)."
        )

"""Finds the sharding of parameters and optimizer state, and which leaves differ between workers.

JAX's types tell which: one update is traced under ``jax.shard_map`` without computing anything, and
a result whose type varies over an axis differs along that axis. Declarations of our own states
would not be enough, because in ``optax.chain(optax.ema(0.9), demo_optax.demo(...))`` the state of
optax's link differs between workers as well.
"""

import dataclasses
import functools
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

from demo_optax._src import axes, checks
from demo_optax._src.arrays import boxed_inside, is_key, unboxed
from demo_optax._src.axes import PARAM_SPECS, TRACING_ARGUMENTS, AxisName, axes_of, sharded_axes
from demo_optax._src.parallel import shards
from demo_optax._src.participation import PARTICIPATES


@dataclasses.dataclass(frozen=True, eq=False)
class StateLayout:
    """Holds the sharding of parameters and optimizer state on a mesh.

    Attributes:
      update: ``update(gradient, state, params, extra_args)`` of a worker, which is not traced again
        for the types that it was traced for here.
      params, state: PartitionSpecs of the parameters and of the state.
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
    update: Callable
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
    """Returns PartitionSpecs of the state that `init_opt_state` makes, for any optax chain.

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
    """Returns NamedShardings of the state that `init_opt_state` makes.

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
"""The layouts of each ``tx.update``, which live as long as the optimizer does."""


def find_layout(tx, params, mesh, axis_name: AxisName, param_specs) -> StateLayout:
    """Returns the layout for arrays or shapes of the whole parameters.

    The update is traced once for each optimizer.

    Raises:
      ValueError: the updates differ between workers, because ``tx`` does not exchange.
    """
    checks.require_unwrapped(tx)
    checks.real_leaves("parameter", params)
    shards.num_workers(mesh, axis_name)
    params = checks.shapes_of("parameter", params)
    leaves, structure = jax.tree.flatten((params, param_specs))
    context = mesh, axis_name, axes.platform(), jnp.result_type(float)
    key = tx.init, structure, tuple(leaves), context
    layouts = _LAYOUTS.setdefault(tx.update, {})
    if key not in layouts:
        layouts[key] = _trace_layout(tx, params, mesh, axis_name, param_specs)
    return layouts[key]


def update_with_specs(tx, specs) -> Callable:
    """Returns ``update(gradient, state, params, extra_args)``, which tells ``tx`` the specs."""
    tx, inner = boxed_inside(tx, specs), unboxed(specs)

    def update(gradient, state, params, extra_args):
        return tx.update(gradient, state, params, **{**extra_args, PARAM_SPECS: inner})

    return update


def _traced_once(tx, specs) -> Callable:
    """Jits `update_with_specs`, without a reference that would keep ``tx`` alive."""
    if not isinstance(tx, optax.GradientTransformation):  # but has methods, as optax.MultiSteps
        return jax.jit(update_with_specs(tx, specs))
    kind, init, reference = type(tx), tx.init, weakref.ref(tx.update)

    @jax.jit
    def update(*args):
        return update_with_specs(kind(init, reference()), specs)(*args)  # type: ignore[arg-type]

    return update


def _trace_layout(tx, params, mesh, axis_name: AxisName, param_specs) -> StateLayout:
    specs = shards.leaf_specs(params, param_specs, mesh, axis_name)
    inner, init = unboxed(specs), boxed_inside(tx, specs).init
    parts = shards.shard_shapes(jax.tree.map(jax.typeof, unboxed(params)), inner, mesh)
    update = _traced_once(tx, specs)
    program, state_shapes, state_axes, update_axes = _trace_update(
        init, update, parts, inner, mesh, axis_name
    )
    worker_axes = set(axes.names(axis_name))
    varies_over_workers = jax.tree.map(lambda names: bool(names & worker_axes), state_axes)
    state = _state_specs(state_axes, state_shapes, inner, mesh, axis_name)

    def copied_axes(names, spec):
        return names - set(axes_of(spec)) - worker_axes

    return StateLayout(
        mesh=mesh,
        axis_name=axis_name,
        update=update,
        params=specs,
        state=state,
        worker_state_shapes=state_shapes,
        varies_over_workers=varies_over_workers,
        state_replicated_axes=jax.tree.map(copied_axes, state_axes, state),
        update_replicated_axes=jax.tree.map(copied_axes, update_axes, inner),
        frozen=_frozen_updates(program.jaxpr, update_axes, varies_over_workers, axis_name),
        sent=axes.bytes_handed_over(program, axis_name),
    )


_TRACED = (
    "The update is traced before any step, to find out which leaves of its state differ between "
    f"workers. Of extra arguments only {', '.join(TRACING_ARGUMENTS)} is known then: give the "
    "others a default."
)
_DECIDE_ALONE = (
    optax.MultiStepsState,
    optax.ApplyIfFiniteState,
    optax.ConditionallyTransformState,
    optax.ConditionallyMaskState,
)
_ALONE = (
    "optax.MultiSteps, apply_if_finite, conditionally_transform and conditionally_mask let each "
    "worker decide alone whether it takes part in a step: accumulate with "
    "make_train_step(microbatches=...) or demo_optax.multi_steps instead, and leave conditions on "
    "the gradient out; workers whose gradient is not finite are left out already."
)


def _trace_update(init, update, parts, specs, mesh, axis_name: AxisName):
    """Traces an update until the axes that its state varies over stop changing.

    The gradients vary over ``axis_name`` and the axes of their parameter's spec. The results are
    the program, which maps gradient, state, parameters and extra arguments to updates and state,
    the shapes of one worker's state, and the axes over which the leaves of state and updates vary.
    """
    abstract = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh

    def empty(x, names):
        return axes.as_varying(jnp.empty(x.shape, x.dtype), tuple(names))

    def values():
        return jax.tree.map(lambda x, spec: empty(x, axes_of(spec)), parts, specs)

    def updated(gradient, old, params, extra_args):
        updates, state = update(gradient, old, params, extra_args)
        return updates, shards.merge_shard_metrics(state, old, sharded_axes(specs))

    def is_alone(x) -> bool:
        return isinstance(x, _DECIDE_ALONE)

    def trace(state_axes, extra_args):
        local = axes.as_varying((values(), jnp.array(True)), axis_name)
        old = jax.tree.map(empty, shapes, state_axes)
        args = local[0], old, values(), {PARTICIPATES: local[1], **extra_args}
        return jax.make_jaxpr(updated, return_shape=True)(*args)

    _, types = axes.trace_worker(lambda: jax.eval_shape(init, values()), abstract)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), types)
    new_axes, extra_args = jax.tree.map(axes.varying, types), {}
    if not jax.tree.leaves(parts):  # as with the placeholders of optax.tree.map_params
        return jax.make_jaxpr(tuple)(), shapes, new_axes, parts
    while True:
        run = functools.partial(trace, state_axes := new_axes, extra_args)
        try:
            _, (program, types) = axes.trace_worker(run, abstract)
        except (TypeError, ValueError) as error:
            lacks_argument = "required keyword-only argument" in str(error)
            if lacks_argument and not extra_args:
                extra_args = TRACING_ARGUMENTS
                continue
            if lacks_argument:
                error.add_note(_TRACED)
            if any(map(is_alone, jax.tree.leaves(shapes, is_leaf=is_alone))):
                error.add_note(_ALONE)
            raise
        update_axes, new_axes = jax.tree.map(axes.varying, types)
        new_axes = jax.tree.map(frozenset.union, state_axes, new_axes)
        if jax.tree.leaves(new_axes) == jax.tree.leaves(state_axes):
            return program, shapes, state_axes, update_axes


def _frozen_updates(jaxpr, update_axes, varies_over_workers, axis_name: AxisName):
    """Tells which updates are zero although their type says that they differ between workers.

    An update counts as zero if it depends on no parameter and on no argument that differs between
    workers, as with ``optax.set_to_zero``. Any other that differs between workers is refused.
    """
    worker_axes = axes.names(axis_name)
    differs = jax.tree.map(lambda names: not names.isdisjoint(worker_axes), update_axes)
    local = jax.tree.leaves((jax.tree.map(lambda _: True, differs), varies_over_workers))
    local += [True] * (len(jaxpr.invars) - len(local))

    for number, (path, varies) in enumerate(jax.tree.leaves_with_path(differs)):
        if not varies:
            continue
        wanted = [i == number for i in range(len(jaxpr.outvars))]
        _, used = partial_eval.dce_jaxpr(jaxpr, wanted)
        if any(a and b for a, b in zip(used, local, strict=True)):
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
    worker_axes = set(axes.names(axis_name))
    spec_at = dict(jax.tree.leaves_with_path(param_specs))
    momenta = jax.tree.leaves_with_path(worker_state_shapes, is_leaf=shards.is_momentum)
    paths_of_devices = [
        (*path, GetAttrKey(name), *inside)
        for path, node in momenta
        if shards.is_momentum(node)
        for name in ("exchange", "pending")
        for inside, _ in jax.tree.leaves_with_path(getattr(node, name))
    ]

    def spec_of(path, varying_axes, leaf) -> P:
        front = (axis_name,) if varying_axes & worker_axes else ()
        over = tuple(name for name in mesh.axis_names if name in varying_axes - worker_axes)
        if not over:
            return P(*front)
        if path in paths_of_devices:  # it belongs to a device and not to a parameter
            return P(*front, over) if leaf.ndim else P(*front)
        for start in range(len(path) + 1):
            spec = spec_at.get(path[start:])
            if spec is not None and len(spec) <= leaf.ndim:
                entries = [entry if {*axes.names(entry)} <= {*over} else None for entry in spec]
                return without_trailing_nones(P(*front, *entries))
        if leaf.ndim == 0 and (jnp.issubdtype(leaf.dtype, jnp.integer) or is_key(leaf)):
            return P(*front)  # a counter or a random key is the same on all shards of a worker
        raise ValueError(
            f"leaf{keystr(path)} of the optimizer state, of shape {leaf.shape}, differs between "
            f"the shards of a worker, over {sorted(over)}, but cannot be sharded "
            "like a parameter. Leave its parameter whole (param_specs=P()), or use an "
            "optimizer whose state has the shapes of the parameters."
        )

    return jax.tree.map_with_path(spec_of, state_axes, worker_state_shapes)


def without_trailing_nones(spec: P) -> P:
    """Removes them as JAX does for results, so that ``jax.jit`` finds the same sharding again."""
    named = [i for i, entry in enumerate(spec, 1) if entry is not None]
    return P(*spec[: max(named, default=0)])

"""Finds the sharding of parameters and optimizer state, and which leaves differ between workers.

The types of states say so, without any update being traced. A state of ours names its local
fields, and a state that exchanges is marked by ``exchanges``. In the tuples of ``optax.chain``, all
that stands before an exchange is local, since it sees local gradients; what follows it is shared.
JAX's types refuse any leaf for which this is wrong, since it would drift apart unseen.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core
from jax.interpreters import partial_eval
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import GetAttrKey, keystr

from demo_optax._src import axes, checks
from demo_optax._src.arrays import boxed_inside, unboxed
from demo_optax._src.axes import AxisName, sharded_axes
from demo_optax._src.compression.settings import KNOWN
from demo_optax._src.parallel import shards


@dataclasses.dataclass(frozen=True, eq=False)
class StateLayout:
    """Holds the sharding of parameters and optimizer state on a mesh.

    Attributes:
      params, state: PartitionSpecs of the parameters and of the state.
      parts: shapes of one device's shards of the parameters.
      worker_state_shapes: shapes of one worker's state.
      varies_over_workers: bools, whether each leaf of the state differs between workers.
      copied_axes: frozensets, for each leaf of the state the axes along which a worker's devices
        may hold copies of it.
      settings: the settings that the words in the state stand for, by the paths of these leaves.
    """

    mesh: Mesh | AbstractMesh
    axis_name: AxisName
    params: Any
    parts: Any
    state: Any
    worker_state_shapes: Any
    varies_over_workers: Any
    copied_axes: Any
    settings: dict[str, Any]


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
      its spec is ``P(axis_name, ...)``. If its path ends with the path of a parameter, the rest of
      the spec is that of the parameter, without the dimensions that the leaf has reduced to 1.

    Raises:
      ValueError: the mesh has no such axis; ``param_specs`` do not fit.

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


def find_layout(tx, params, mesh, axis_name: AxisName, param_specs) -> StateLayout:
    """Returns the layout for arrays or shapes of the whole parameters."""
    checks.require_unwrapped(tx)
    checks.real_leaves("parameter", params)
    shards.num_workers(mesh, axis_name)
    params = checks.shapes_of("parameter", params)
    specs = shards.leaf_specs(params, param_specs, mesh, axis_name)
    inner, init = unboxed(specs), boxed_inside(tx, specs).init
    parts = jax.tree.map(
        lambda x, spec: x.update(shape=NamedSharding(mesh, spec).shard_shape(x.shape)),
        unboxed(params),
        inner,
    )
    trace = jax.make_jaxpr(init, return_shape=True)
    _, (program, made) = axes.trace_worker(lambda: trace(jax.tree.map(jnp.zeros_like, parts)), mesh)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), made)
    # Alone, a worker has no axis along which its state could differ.
    alone = jax.tree.map(lambda _: False, shapes)
    is_local = local_leaves(shapes) if axes.names(axis_name) else alone
    state, copied_axes = _state_specs(shapes, is_local, parts, inner, mesh, axis_name)
    return StateLayout(
        mesh=mesh,
        axis_name=axis_name,
        params=specs,
        parts=parts,
        state=state,
        worker_state_shapes=shapes,
        varies_over_workers=is_local,
        copied_axes=copied_axes,
        settings=_settings_in(program, shapes),
    )


def _settings_in(program, shapes) -> dict[str, Any]:
    """Returns the settings of the words in a state, which are constants of its traced ``init``."""
    leaves, found = jax.tree.leaves_with_path(shapes), {}
    for number, (path, _) in enumerate(leaves):
        if path[-1:] == (GetAttrKey("format"),):
            wanted = [i == number for i in range(len(leaves))]
            kept, _ = partial_eval.dce_jaxpr(program.jaxpr, wanted)
            with jax.ensure_compile_time_eval():
                (word,) = core.jaxpr_as_fun(core.ClosedJaxpr(kept, program.consts))()
            found[keystr(path)] = KNOWN[int(np.ravel(word)[0])]
    return found


_DECIDE_ALONE = (
    optax.MultiStepsState,
    optax.ApplyIfFiniteState,
    optax.ConditionallyTransformState,
    optax.ConditionallyMaskState,
)


def local_leaves(state, fields: tuple[str, ...] = ("local_fields",)) -> Any:
    """Tells which leaves of a worker's state differ between workers.

    ``fields`` are the attributes by which a state's type names local fields.
    """

    def mark(node):
        if type(node) in _DECIDE_ALONE and _exchanges(node):
            raise ValueError(
                f"{type(node).__name__} is a state of optax.MultiSteps, apply_if_finite, "
                "conditionally_transform or conditionally_mask, which let each worker decide alone "
                "whether it takes part in a step: accumulate with "
                "make_train_step(microbatches=...) or demo_optax.multi_steps instead, and leave "
                "conditions on the gradient out. Workers whose gradient is not finite are left out "
                "already."
            )
        names = [name for key in fields for name in getattr(type(node), key, ())]
        if names:
            marks = {name: local_leaves(x, fields) for name, x in node._asdict().items()}
            local = {name: jax.tree.map(lambda _: True, getattr(node, name)) for name in names}
            return node._replace(**(marks | local))
        if type(node) is tuple:
            exchanging = [number for number, part in enumerate(node) if _exchanges(part)]
            return tuple(
                jax.tree.map(lambda _: True, part)
                if number < max(exchanging, default=0) and number not in exchanging
                else local_leaves(part, fields)
                for number, part in enumerate(node)
            )
        return jax.tree.map(lambda _: False, node)

    return jax.tree.map(
        mark,
        state,
        is_leaf=lambda node: (
            any(hasattr(type(node), key) for key in fields) or type(node) in (tuple, *_DECIDE_ALONE)
        ),
    )


def _exchanges(state) -> bool:
    nodes = jax.tree.leaves(state, is_leaf=lambda node: hasattr(type(node), "exchanges"))
    return any(hasattr(type(node), "exchanges") for node in nodes)


def _state_specs(shapes, is_local, params, param_specs, mesh, axis_name: AxisName):
    """Returns the spec of each leaf of a state, and the axes along which it may be copied.

    ``shapes`` and ``params`` are those of one device's shards.
    """
    inner, sharded = {*shards.inner_axes(mesh, axis_name)}, sharded_axes(param_specs)
    specs = zip(jax.tree.leaves_with_path(params), jax.tree.leaves(param_specs), strict=True)
    of_path = {path: (x.shape, spec) for (path, x), spec in specs}
    of_devices = {
        (*path, GetAttrKey(name), *inside)
        for path, node in jax.tree.leaves_with_path(shapes, is_leaf=shards.is_momentum)
        if shards.is_momentum(node)
        for name in ("exchange", "pending")
        for inside, _ in jax.tree.leaves_with_path(getattr(node, name))
    }

    def spec_of(path, leaf, is_local) -> tuple[P, frozenset]:
        front = (axis_name,) if is_local else ()
        if path in of_devices:  # it belongs to a device and not to a parameter
            return P(*front, *[sharded] * bool(leaf.ndim and sharded)), frozenset(inner)
        for start in range(len(path) + 1):
            shape, spec = of_path.get(path[start:], ((), None))
            if spec is not None and len(spec) <= leaf.ndim:
                same_rank = leaf.ndim == len(shape)
                reduced = [
                    same_rank and n == 1 < whole
                    for n, whole in zip(leaf.shape, shape, strict=False)
                ]
                entries = [None if gone else e for e, gone in zip(spec, reduced, strict=False)]
                # Without trailing Nones, as in results, ``jax.jit`` finds the same sharding again.
                named = max([i for i, e in enumerate(entries, 1) if e is not None], default=0)
                own = P(*front, *entries[:named])
                return own, frozenset(inner - {*axes.axes_of(own)})
        is_number = leaf.ndim == 0 and not jnp.issubdtype(leaf.dtype, jnp.inexact)
        return P(*front), frozenset(inner if is_number else ())

    structure: Any
    leaves, structure = jax.tree.flatten_with_path(shapes)
    pairs = [
        spec_of(path, x, own)
        for (path, x), own in zip(leaves, jax.tree.leaves(is_local), strict=True)
    ]
    return tuple(structure.unflatten([pair[i] for pair in pairs]) for i in (0, 1))

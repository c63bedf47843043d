"""Finds the sharding of parameters and optimizer state, and which leaves differ between workers.

The types of states say so, without any update being traced. A state of ours names its local
fields, and a state that exchanges is marked by ``exchanges``. In the tuples of ``optax.chain``, all
that stands before an exchange is local, since it sees local gradients; what follows it is shared.
JAX's types refuse any leaf for which this is wrong, since it would drift apart unseen.
"""

import dataclasses
import math
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
      param_shapes, state_shapes: shapes of the parameters, and of the state of all workers.
      varies_over_workers: bools, whether each leaf of the state differs between workers.
      may_have_copies: bools, whether several devices of a worker may hold copies of each leaf.
      settings: the settings that the words in the state stand for, by the paths of these leaves.
    """

    mesh: Mesh | AbstractMesh
    axis_name: AxisName
    params: Any
    param_shapes: Any
    state: Any
    state_shapes: Any
    varies_over_workers: Any
    may_have_copies: Any
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
    traced = []

    def init_worker():  # the size of an axis decides about the shares of owners
        traced.append(trace(jax.tree.map(jnp.zeros_like, parts)))

    abstract = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):  # whatever mesh is in context
        jax.eval_shape(jax.shard_map(init_worker, mesh=abstract, in_specs=(), out_specs=P()))
    program, made = traced[-1]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), made)
    # Alone, a worker has no axis along which its state could differ.
    alone = jax.tree.map(lambda _: False, shapes)
    is_local = local_leaves(shapes) if axes.names(axis_name) else alone

    def of_all_workers(x, spec, is_local):
        shape = (1,) * is_local + x.shape
        pairs = zip(shape, shards.counts(shape, spec, mesh), strict=True)
        return x.update(shape=tuple(map(math.prod, pairs)))

    state, may_have_copies = _state_specs(shapes, is_local, parts, inner, axis_name)
    return StateLayout(
        mesh=mesh,
        axis_name=axis_name,
        params=specs,
        param_shapes=params,
        state=state,
        state_shapes=jax.tree.map(of_all_workers, shapes, state, is_local),
        varies_over_workers=is_local,
        may_have_copies=may_have_copies,
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

    def marked(tree, is_local: bool = True):
        return jax.tree.map(lambda _: is_local, tree)

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
        local = {name for key in fields for name in getattr(type(node), key, ())}
        if local:
            marks = [
                marked(x) if name in local else local_leaves(x, fields)
                for name, x in zip(node._fields, node, strict=True)
            ]
            return node._make(marks)
        if type(node) is tuple:
            exchanging = [i for i, part in enumerate(node) if _exchanges(part)]
            in_front = {*range(max(exchanging, default=0))} - {*exchanging}
            return tuple(
                marked(part) if i in in_front else local_leaves(part, fields)
                for i, part in enumerate(node)
            )
        return marked(node, False)

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


def _state_specs(shapes, is_local, params, param_specs, axis_name: AxisName):
    """Returns the spec of each leaf of a state, and whether a worker's devices may hold copies.

    ``shapes`` and ``params`` are those of one device's shards.
    """
    sharded, leaf_specs = sharded_axes(param_specs), jax.tree.leaves(param_specs)
    of_path = {
        path: (x.shape, spec)
        for (path, x), spec in zip(jax.tree.leaves_with_path(params), leaf_specs, strict=True)
    }
    of_devices = {  # what belongs to a device and not to a parameter
        (*path, GetAttrKey(name))
        for path, node in jax.tree.leaves_with_path(shapes, is_leaf=shards.is_momentum)
        if shards.is_momentum(node)
        for name in ("exchange", "pending")
    }

    def entries_of(path, leaf) -> list | None:
        """Returns the entries of a leaf's spec, or None if it is not like a parameter."""
        if any(path[:end] in of_devices for end in range(len(path) + 1)):
            return [sharded] if leaf.ndim and sharded else []
        for start in range(len(path) + 1):
            shape, spec = of_path.get(path[start:], ((), None))
            if spec is not None and len(spec) <= leaf.ndim:
                reduced = [n == 1 < whole for n, whole in zip(leaf.shape, shape, strict=False)]
                is_whole = len(shape) != leaf.ndim
                pairs = zip(spec, reduced, strict=False)
                entries = [entry if is_whole or not gone else None for entry, gone in pairs]
                # Without trailing Nones, as in results, ``jax.jit`` finds the same sharding again.
                while entries and entries[-1] is None:
                    entries.pop()
                return entries
        return None

    def spec_of(path, leaf, is_local) -> P:
        return P(*[axis_name] * is_local, *(entries_of(path, leaf) or []))

    def may_have_copies(path, leaf) -> bool:
        is_number = leaf.ndim == 0 and not jnp.issubdtype(leaf.dtype, jnp.inexact)
        return is_number or entries_of(path, leaf) is not None

    specs = jax.tree.map_with_path(spec_of, shapes, is_local)
    return specs, jax.tree.map_with_path(may_have_copies, shapes)

"""Reads from JAX's types how values vary over named axes, and handles the specs of these axes.

Under ``jax.shard_map(check_vma=True)`` the type of every value lists the axes over which it varies.
Under ``check_vma=False``, ``pmap`` and ``vmap`` the types carry no varying-axes (VMA) information.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend import core
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr
from jax.typing import ArrayLike

from demo_optax._src.arrays import reusable, true_once_computed, unboxed

AxisName = str | tuple[str, ...] | None

PARAM_SPECS = "param_specs"
"""This extra argument of an update holds the specs of the parameters whose shards it sees."""

_SENDS_NOTHING = (
    "axis_index", "precv", "preduced", "pvary", "reduced_vary_cast", "vary_unreduced_cast",
)  # fmt: skip
"""These primitives of JAX name an axis but send nothing: they cast types or receive."""


def names(axis_name: AxisName) -> tuple[str, ...]:
    """Returns the axis names as a tuple, which is empty for None."""
    if isinstance(axis_name, list):
        raise TypeError(
            f"axis_name is the list {axis_name}: several axes are named by a tuple, "
            f"axis_name={tuple(axis_name)}."
        )
    if axis_name is None:
        return ()
    all_names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if wrong := [name for name in all_names if not isinstance(name, str)]:
        raise TypeError(
            f"axis_name must be the name of an axis, a tuple of names or None, not {wrong[0]!r}: "
            "name the mesh's axis of the workers, as in axis_name='data'."
        )
    return all_names


def manual_names(axis_name: AxisName) -> tuple[str, ...]:
    """Returns the names that ``shard_map`` or ``pmap`` binds, since ``vmap`` leaves types alone."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(name for name in names(axis_name) if name in manual)


def varying(x: ArrayLike | jax.ShapeDtypeStruct) -> frozenset:
    return jax.typeof(x).manual_axis_type.varying


def as_varying(tree, axis_name: AxisName):
    """Types every leaf as varying over ``axis_name``, without changing any value.

    Leaves that vary already are left alone, and so are all leaves if the types carry no
    varying-axes (VMA) information.

    >>> import jax, jax.numpy as jnp
    >>> jax.vmap(lambda x: as_varying(x, "data"), axis_name="data")(jnp.ones(2)).tolist()
    [1.0, 1.0]
    """
    manual = manual_names(axis_name)

    def cast(x):
        missing = tuple(name for name in manual if name not in varying(x))
        return reusable(jax.lax.pcast(x, missing, to="varying")) if missing else x

    return jax.tree.map(cast, tree) if manual else tree


def varying_like(tree, reference: ArrayLike | jax.ShapeDtypeStruct) -> Any:
    """Types leaves as varying over the axes of ``reference``, as a scan's first carry must be."""
    return as_varying(tree, tuple(varying(reference)))


def after(arrays: Sequence[jax.Array], tree: Any) -> Any:
    """Returns a tree whose floats XLA computes only after those arrays that may enter their types.

    A select orders the two, since ``optimization_barrier`` has an effect on TPUs alone.
    """
    leaves, structure = jax.tree.flatten(tree)
    floats = [jnp.issubdtype(x.dtype, jnp.floating) for x in leaves]
    computed = {
        over: true_once_computed([y for y in arrays if varying(y) <= over])
        for over in dict.fromkeys(map(varying, itertools.compress(leaves, floats)))
    }
    return structure.unflatten(
        [
            jnp.where(computed[varying(x)], x, jnp.zeros_like(x)) if is_float else x
            for x, is_float in zip(leaves, floats, strict=True)
        ]
    )


def largest(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the largest of the arrays that vary over the same axes, for each set of axes."""
    return list({varying(x): x for x in sorted(arrays, key=lambda x: x.size)}.values())


def branches_of_one_type(one: Callable, other: Callable, *args) -> tuple[Callable, Callable]:
    """Returns two branches for ``jax.lax.cond`` whose results vary over the same axes."""
    one, other = (jax.jit(fn, inline=True) for fn in (one, other))  # so that each is traced once
    types = [jax.eval_shape(fn, *args) for fn in (one, other)]
    over = jax.tree.map(lambda x, y: tuple(varying(x) | varying(y)), *types)

    def typed(fn):
        return lambda *args: jax.tree.map(as_varying, fn(*args), over)

    return typed(one), typed(other)


def on_all_devices(
    condition: jax.Array, axis_name: AxisName, extra_args: Mapping[str, Any]
) -> jax.Array:
    """Tells whether a condition holds on all devices of this worker.

    These devices lie along the axes over which the condition's type varies. If the types carry no
    varying-axes (VMA) information, they lie along the axes that shard the parameters, according to
    ``param_specs`` in the extra arguments.
    """
    inner = varying(condition) - set(names(axis_name))
    sharded = manual_names(sharded_axes(extra_args.get(PARAM_SPECS, ())))
    if not types_are_tracked(sharded):
        inner |= set(sharded)
    if not inner:
        return condition
    return jax.lax.pmin(condition.astype(jnp.int32), tuple(sorted(inner))) > 0


def size(axis_name: AxisName) -> int:
    if axis_name is None:
        return 1
    try:
        return jax.lax.axis_size(axis_name)
    except NameError as error:
        there = jax.sharding.get_abstract_mesh().manual_axes
        bound = f" (bound are {there})" if there else ""
        raise NameError(
            f"the workers' axis is {axis_name!r}, which is not bound here{bound}. Give the name of "
            "an axis of the mesh, and call this inside jax.shard_map, jax.pmap or "
            "jax.vmap(axis_name=...) with that axis: demo_optax.make_train_step does. In a loop of "
            "jax.jit use demo_optax.stack_workers(tx, mesh), with the gradients of "
            "demo_optax.worker_gradients. Pass axis_name=None to train a single worker."
        ) from error


def index(axis_name: AxisName) -> jax.Array:
    number = jnp.zeros((), jnp.int32)
    for name in names(axis_name):
        number = number * size(name) + jax.lax.axis_index(name)
    return number


def types_are_tracked(axis_name: AxisName) -> bool:
    """Tells whether types distinguish local from replicated values over ``axis_name`` here."""
    return all(name in varying(jax.lax.axis_index(name)) for name in names(axis_name))


def bytes_handed_over(program: core.ClosedJaxpr, axis_name: AxisName) -> int | None:
    """Returns the bytes that one device hands to a traced program's collectives on ``axis_name``.

    A collective in a scan counts once per iteration, and a conditional counts as its branch that
    hands over the most. The result is None if a collective stands in a ``while`` loop, whose number
    of iterations is unknown.
    """
    worker_axes = set(names(axis_name))

    def count(jaxpr: core.Jaxpr) -> float:
        total = 0.0
        for equation in jaxpr.eqns:
            primitive, params = equation.primitive.name, equation.params
            inner = [count(x) for x in core.jaxprs_in_params(params)]
            passes = math.inf if primitive == "while" and any(inner) else 1
            passes = params["length"] if primitive == "scan" else passes
            total += max(inner) if primitive == "cond" else passes * sum(inner)
            along = params.get("axes", params.get("axis_name", ()))
            along = along if isinstance(along, tuple) else (along,)
            if worker_axes & set(along) and not primitive.startswith(_SENDS_NOTHING):
                # Any further operands are offsets, or buffers for a result.
                operands: list[Any] = [x.aval for x in equation.invars[: len(equation.outvars)]]
                total += sum(math.prod(x.shape) * x.dtype.itemsize for x in operands)
        return total

    total = count(program.jaxpr)
    return None if math.isinf(total) else int(total)


def axes_of(spec: P) -> tuple[str, ...]:
    return tuple(name for entry in spec for name in names(entry))


def sharded_axes(specs) -> tuple[str, ...]:
    """Returns all axes that any of the specs shards over, in the order of their first use."""
    leaves = jax.tree.leaves(unboxed(specs))
    return tuple(dict.fromkeys(name for spec in leaves for name in axes_of(spec)))


def specs_of_leaves(tree: Any, extra_args: Mapping[str, Any]) -> list[P]:
    """Returns each leaf's spec according to the extra arguments, or ``P()`` if they name none.

    Leaves that ``optax.masked`` or ``optax.partition`` left out of the tree have no spec.
    """
    specs = unboxed(extra_args.get(PARAM_SPECS, P()))
    if not sharded_axes(specs):  # the tree may have another structure then
        return [P()] * len(jax.tree.leaves(tree))

    def is_masked(x) -> bool:  # such a node may replace a whole subtree
        return isinstance(x, optax.MaskedNode)

    try:
        kept = jax.tree.map(
            lambda x, spec: x if is_masked(x) else spec, unboxed(tree), specs, is_leaf=is_masked
        )
        return per_leaf(kept, unboxed(tree), lambda x: isinstance(x, P))
    except ValueError:
        raise ValueError(
            f"param_specs are {specs}, but the gradients have another structure, "
            f"{jax.tree.structure(tree)}: shards cannot be flattened, so leave out optax.flatten."
        ) from None


def per_leaf(prefix: Any, tree: Any, is_value: Callable[[Any], bool]) -> list:
    """Returns, for each leaf of a tree, the value that a prefix of the tree has for it."""
    return jax.tree.leaves(jax.tree.broadcast(prefix, tree, is_leaf=is_value), is_leaf=is_value)


def broadcast_specs(what: str, prefix: Any, tree: Any) -> Any:
    """Returns a PartitionSpec for each leaf, from a prefix of specs, NamedShardings and None."""
    structure: Any
    leaves, structure = jax.tree.flatten_with_path(unboxed(prefix), is_leaf=lambda x: x is None)
    specs = []
    for path, x in leaves:
        spec = x.spec if isinstance(x, NamedSharding) else x
        if spec is not None and not isinstance(spec, P):
            raise TypeError(
                f"{what}{keystr(path)} must be a jax.P or a jax.NamedSharding, not "
                f"{x!r}: name the axes that divide each dimension, as in jax.P('fsdp')."
            )
        specs.append(spec or P())
    return jax.tree.broadcast(structure.unflatten(specs), tree)

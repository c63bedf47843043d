"""What JAX's types say about a named axis: which values differ between workers.

Under ``jax.shard_map(check_vma=True)`` the type of every value lists the axes it varies
over. Under ``check_vma=False``, ``pmap`` and ``vmap`` the types carry no varying-axes (VMA)
information.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from demo_optax._src.arrays import reusable

AxisName = str | tuple[str, ...] | None

TRACING_ARGUMENTS = {"value": np.float32(0)}
"""Extra arguments of a traced update; ``optax.contrib.reduce_on_plateau`` requires ``value``."""

_CONTROL_FLOW = ("cond", "scan", "while")

_SENDS_NOTHING = (
    "axis_index", "precv", "preduced", "pvary", "reduced_vary_cast", "vary_unreduced_cast",
)  # fmt: skip
"""Primitives of JAX that name an axis but are no collectives: casts of types, and a receipt."""


def names(axis_name: AxisName) -> tuple[str, ...]:
    """The axis names as a tuple: ``()`` for None, ``(name,)`` for a single name."""
    if axis_name is None:
        return ()
    if isinstance(axis_name, list):
        raise TypeError(
            f"axis_name is the list {axis_name}: several axes are named by a tuple, "
            f"axis_name={tuple(axis_name)}."
        )
    all_names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if wrong := [name for name in all_names if not isinstance(name, str)]:
        raise TypeError(
            f"axis_name must be the name of an axis, a tuple of names or None, not {wrong[0]!r}: "
            "name the mesh's axis of the workers, as in axis_name='data'."
        )
    return all_names


def manual_names(axis_name: AxisName) -> tuple[str, ...]:
    """The names among these that ``shard_map`` or ``pmap`` binds; ``vmap`` leaves types alone."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(name for name in names(axis_name) if name in manual)


def varying(x: ArrayLike | jax.ShapeDtypeStruct) -> frozenset:
    """The axes over which the type of ``x`` says that it differs between workers."""
    return jax.typeof(x).manual_axis_type.varying


def as_varying(tree, axis_name: AxisName):
    """Types every leaf as differing between the workers of ``axis_name``; values do not change.

    Leaves that vary already are left alone, and so are all leaves where the types carry no
    varying-axes (VMA) information.

    >>> import jax, jax.numpy as jnp
    >>> jax.vmap(lambda x: as_varying(x, "data"), axis_name="data")(jnp.ones(2)).tolist()
    [1.0, 1.0]
    """

    def cast(x):
        missing = tuple(name for name in manual_names(axis_name) if name not in varying(x))
        return reusable(jax.lax.pcast(x, missing, to="varying")) if missing else x

    return jax.tree.map(cast, tree)


def trace_worker(fn: Callable[[], Any], mesh: AbstractMesh | None) -> tuple[Any, Any]:
    """The program of a function without arguments, traced as a worker on a mesh, and its results.

    Nothing is computed or allocated, and the mesh in context is ignored. Without a mesh there is no
    axis, and the worker is the only one.
    """
    results = []

    def worker():
        results.append(fn())
        return jnp.zeros(())

    program = jax.shard_map(worker, mesh=mesh, in_specs=(), out_specs=P()) if mesh else worker
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return jax.make_jaxpr(program)(), results[-1]


def bytes_handed_over(program, axis_name: AxisName) -> int | None:
    """Bytes that one device hands to a traced program's collectives along ``axis_name``.

    The operands of a collective count each time that it runs: on every pass of a scan, and in the
    branch of a condition that hands over the most. The result is None if a collective stands in a
    ``while`` loop, whose number of passes nobody knows.
    """
    total = _bytes_along(set(names(axis_name)), program.jaxpr)
    return None if math.isinf(total) else int(total)


def _bytes_along(worker_axes: set[str], jaxpr: core.Jaxpr) -> int | float:
    total = 0
    for equation in _equations(jaxpr):
        primitive, params = equation.primitive.name, equation.params
        if primitive in _CONTROL_FLOW:
            inner = [_bytes_along(worker_axes, x) for x in core.jaxprs_in_params(params)]
            passes = math.inf if primitive == "while" and any(inner) else params.get("length", 1)
            total += max(inner) if primitive == "cond" else passes * sum(inner)
        along = params.get("axes", params.get("axis_name", ()))
        along = along if isinstance(along, tuple) else (along,)
        if worker_axes & set(along) and not primitive.startswith(_SENDS_NOTHING):
            # What comes after the operands of the results are offsets, or room for a result.
            operands = equation.invars[: len(equation.outvars)]
            avals: list[Any] = [operand.aval for operand in operands]
            total += sum(math.prod(x.shape) * x.dtype.itemsize for x in avals)
    return total


def _equations(jaxpr: core.Jaxpr):
    """The equations of a program and of all that it calls, but not those of its control flow."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name not in _CONTROL_FLOW:
            for inner in core.jaxprs_in_params(equation.params):
                yield from _equations(inner)


def varying_like(x: jax.Array, reference: ArrayLike | jax.ShapeDtypeStruct) -> jax.Array:
    """``x`` typed as varying over the axes of ``reference``, as a scan's first carry must be."""
    return as_varying(x, tuple(varying(reference)))


def branches_of_one_type(one: Callable, other: Callable, *args) -> tuple[Callable, Callable]:
    """Two branches for ``jax.lax.cond``, whose results are cast to the same varying axes."""
    types = [jax.eval_shape(fn, *args) for fn in (one, other)]
    over = jax.tree.map(lambda x, y: varying(x) | varying(y), *types)

    def typed(fn):
        return lambda *args: jax.tree.map(
            lambda x, names: as_varying(x, tuple(names)), fn(*args), over
        )

    return typed(one), typed(other)


def on_all_devices(
    condition: jax.Array, axis_name: AxisName, sharded: tuple[str, ...] = ()
) -> jax.Array:
    """Whether a condition holds on all devices of this worker.

    The devices lie along the axes over which its type varies. ``sharded`` names them where types
    carry no varying-axes (VMA) information.
    """
    typed = varying(condition) - set(names(axis_name))
    untyped = () if types_are_tracked(manual_names(sharded)) else manual_names(sharded)
    inner = tuple(sorted(typed | set(untyped)))
    return jax.lax.pmin(condition.astype(jnp.int32), inner) > 0 if inner else condition


def platform() -> str:
    """The platform that this trace is for: that of the mesh in context, else JAX's default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (device and device.platform) or jax.default_backend()


def size(axis_name: AxisName) -> int:
    """The number of workers on ``axis_name`` (1 for None); NameError where it is not bound."""
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
    """This worker's number on ``axis_name`` (0 for None)."""
    number = jnp.zeros((), jnp.int32)
    for name in names(axis_name):
        number = number * size(name) + jax.lax.axis_index(name)
    return number


def types_are_tracked(axis_name: AxisName) -> bool:
    """Whether the types tell local from replicated values over ``axis_name`` in this trace."""
    return all(name in varying(jax.lax.axis_index(name)) for name in names(axis_name))


def replicated_axes(x: jax.Array, axis_name: AxisName) -> tuple[str, ...]:
    """The axes other than the workers' over which the types say that ``x`` is the same."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    others = tuple(n for n in manual if n not in names(axis_name) and n not in varying(x))
    return others if types_are_tracked(manual) else ()

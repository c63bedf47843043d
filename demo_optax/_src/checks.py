"""Checks settings, parameters, gradients and states.

Each message tells what was given, what was expected and what to change.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from demo_optax._src import axes
from demo_optax._src.axes import AxisName

LARGEST_RATE = 1e9
"""Learning rates and weights above this would make sums of squares overflow float32."""


def static_integer(name: str, value: Any, *, at_least: int) -> None:
    """Requires a Python integer, since it decides shapes and so cannot be traced."""
    if isinstance(value, jax.Array):
        raise TypeError(
            f"{name} must be a Python integer, because it decides the shapes of what is sent, but "
            f"it is an array ({value}): give an int."
        )
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an integer of at least {at_least}, not {value!r}.")
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, not {value}.")


def momentum_dtype(name: str, value: Any) -> None:
    """Requires a dtype of momenta, which ``optax.inject_hyperparams`` would call as a schedule."""
    dtypes = "bfloat16", "float32", "float64", jnp.bfloat16, jnp.float32, jnp.float64
    if isinstance(value, jax.Array) or value not in dtypes:
        raise TypeError(
            f"{name} must be 'bfloat16', 'float32' or 'float64', not {value!r}. Give the name, as "
            f"in {name}='float32', since optax.inject_hyperparams calls every callable, including "
            "jnp.float32."
        )


def in_interval(name: str, value: Any, interval: str) -> None:
    """Requires a number in an interval such as ``"[0, 1)"``; traced values pass."""
    dtype = getattr(value, "dtype", None)
    if dtype in (jnp.bfloat16, jnp.float16):
        raise TypeError(
            f"{name} has dtype {dtype}, in which 0.999 is 1. optax.inject_hyperparams takes the "
            "parameters' dtype: pass it hyperparam_dtype=jnp.float32."
        )
    if isinstance(value, Tracer):
        return
    if not isinstance(value, (int, float, np.number, jax.Array, np.ndarray)) or np.ndim(value):
        raise TypeError(f"{name} must be a number in {interval}, not {value!r}.")
    value = float(value)
    low, high = map(float, interval[1:-1].split(","))
    at_limit = (value == low and interval[0] == "[") or (value == high and interval[-1] == "]")
    if not (low < value < high or at_limit):
        raise ValueError(f"{name} must lie in {interval}, not {value}.")


def one_of(name: str, value: object, choices: Collection[Any]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}.")


def named_or_own(name: str, value: Any, choices: Collection[str], kind: Any = Callable) -> None:
    """Requires one of our names, or a value of the user's own of some kind."""
    if not isinstance(value, kind):
        one_of(name, value, choices)
    else:
        lasting_text(name, value)


def lasting_text(name: str, value: Any) -> None:
    """Requires a value that is hashable and whose ``repr`` holds no address."""
    try:
        hash(value)
        lasts = " at 0x" not in repr(value)
    except TypeError:  # of a frozen dataclass too, if a field of it cannot be hashed
        lasts = False
    if not lasts:
        raise TypeError(
            f"{name}={value!r} must be hashable, and its repr must be the same in every process, "
            "because it enters the checksums of packets: make it a frozen dataclass, with a method "
            "__call__ in place of a function."
        )


def made_arrays(
    name: str, setting: Any, made: Iterable[Any], shapes: Iterable[tuple], dtype: Any
) -> None:
    """Refuses what a setting of the user's own has made unless its shapes and dtypes are right."""
    given = [f"{getattr(x, 'dtype', type(x).__name__)} {np.shape(x)}" for x in made]
    needed = [f"{jnp.dtype(dtype)} {shape}" for shape in shapes]
    if given != needed:
        raise ValueError(
            f"{name}={setting!r} returned {', '.join(given)}, but {', '.join(needed)} is needed: "
            "it must return these shapes and dtypes, whatever the numbers are."
        )


def require_rate(name: str, value: Any) -> None:
    """Requires a number from 0 to `LARGEST_RATE`, or a schedule; traced values pass."""
    if callable(value) or isinstance(value, Tracer):
        return
    is_array = isinstance(value, (jax.Array, np.ndarray)) and not np.ndim(value)
    in_interval(name, float(value) if is_array else value, f"[0, {LARGEST_RATE:g}]")


def evaluate_schedule(name: str, value: Any, step: jax.Array) -> Any:
    """Returns the value of a number or schedule at a step, which must be a scalar."""
    value = value(step) if callable(value) else value
    if np.ndim(value):
        raise ValueError(
            f"{name} must be one number at each step, but its schedule returns an array of shape "
            f"{np.shape(value)}: return a scalar. For rates of their own use optax.partition."
        )
    return value


SPLIT = (
    "pass arrays of floating-point numbers alone. Split a model first, graph, params, state = "
    "flax.nnx.split(model, flax.nnx.Param, ...), or params, rest = equinox.partition(model, "
    "equinox.is_inexact_array), and let the loss take the rest from its closure, or as a model "
    "state, by stateful=True."
)
"""This advice ends the messages about leaves that are not parameters."""


def require_unwrapped(tx) -> None:
    if not hasattr(tx, "update"):
        raise TypeError(
            f"an optax transformation is needed, not {tx!r}: call what makes one, as in "
            "optax.adamw(1e-3)."
        )
    if hasattr(tx, "state_shardings"):
        raise TypeError(
            "tx was made by demo_optax.stack_workers(...), which must be the outermost "
            "transformation: pass the optimizer that was wrapped."
        )


def shapes_of(what: str, tree) -> Any:
    """Returns the shapes and dtypes of arrays, and refuses leaves that are not arrays."""

    def shape_of(path, leaf):
        try:
            x = jax.typeof(leaf)
        except TypeError:
            name, kind = f"{what}{jax.tree_util.keystr(path)}", type(leaf).__name__
            raise TypeError(f"{name} is of type {kind}, which is no array: {SPLIT}") from None
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    return jax.tree.map_with_path(shape_of, tree)


def floating_leaves(params) -> None:
    real_leaves("parameter", params)
    shapes = jax.tree.leaves(shapes_of("parameter", params))
    for (path, leaf), x in zip(jax.tree.leaves_with_path(params), shapes, strict=True):
        if not hasattr(leaf, "shape") or not jnp.issubdtype(x.dtype, jnp.floating):
            given = f"the dtype {x.dtype}" if hasattr(leaf, "shape") else "no shape"
            raise TypeError(
                f"parameter{jax.tree_util.keystr(path)} has {given}, but only arrays "
                f"of real floating-point numbers are exchanged: {SPLIT}"
            )


_OVERWRITTEN = "_overwrite_with_gradient"  # Flax's name of a collection, as of FP8's scales


def real_leaves(what: str, tree) -> None:
    """Refuses leaves whose gradients cannot be exchanged.

    They are complex numbers, whose imaginary parts would be lost in norms and sums, and the
    variables of Flax whose gradients are no directions but their next values.
    """
    for path, leaf in jax.tree.leaves_with_path(tree):
        name = f"{what}{jax.tree_util.keystr(path)}"
        if _OVERWRITTEN in name:
            raise ValueError(
                f"{name} belongs to Flax's collection "
                f"{_OVERWRITTEN!r} (such as the scales of FP8), whose gradient is its next value, "
                "so that it cannot be trained with the parameters: pass variables['params'] alone, "
                "and the collection as a model state, by stateful=True. docs/how_to/loop.md shows "
                "the loss."
            )
        if np.iscomplexobj(leaf):
            raise TypeError(
                f"{name} has the complex dtype "
                f"{jnp.result_type(leaf)}, but demo_optax takes real numbers only: give the real "
                "and the imaginary part as two parameters, and put them together inside the loss "
                "with jax.lax.complex."
            )


def require_local_gradient(updates, axis_name: AxisName) -> None:
    """Refuses gradients whose VMA types say that they are the same on all workers."""
    axes.size(axis_name)
    if axis_name is None or not axes.types_are_tracked(axis_name):
        return
    for path, leaf in jax.tree.leaves_with_path(updates):
        if missing := [name for name in axes.names(axis_name) if name not in axes.varying(leaf)]:
            raise ValueError(
                f"the gradient{jax.tree_util.keystr(path)} is not local: its type "
                f"{jax.typeof(leaf)} says that it is the same on all workers of axis "
                f"{missing[0]!r}, so it was summed over them already. jax.grad does so by "
                "itself inside jax.shard_map for parameters that are replicated. Take gradients "
                f"with demo_optax.local_value_and_grad(loss_fn, {missing[0]!r}), or call "
                f"jax.lax.pcast(params, {missing[0]!r}, to='varying') before jax.grad."
            )


def require_unsent(state: Any) -> None:
    """Refuses a second ``send`` or an ``update`` in one step, if the state is known."""
    if not isinstance(state.sent, Tracer) and state.sent:
        raise ValueError(
            f"send() was called in step {state.count} before, and its message has left the "
            "momentum: call apply() with the outbox that it returned, and go on from there."
        )


def state_fits(what: str, given: Any, expected: Any, remedy: str) -> None:
    """Refuses a state whose paths, shapes or structure differ from the expected ones.

    ``what`` begins the message and ``remedy`` ends it.
    """
    has, needs = (
        {  # a state that tx.init has made of Flax's boxes has boxes as well
            jax.tree_util.keystr(path).removesuffix(".value"): np.shape(x)
            for path, x in jax.tree.leaves_with_path(tree)
        }
        for tree in (given, expected)
    )
    structures: list[Any] = [jax.tree.structure(tree) for tree in (given, expected)]
    if has == needs and structures[0] == structures[1]:
        return
    if lacking := sorted(needs.keys() - has.keys()) + sorted(has.keys() - needs.keys()):
        raise ValueError(
            f"{what} lacks {sorted(needs.keys() - has.keys())[:3] or 'nothing'} and holds "
            f"{sorted(has.keys() - needs.keys())[:3] or 'nothing'} besides: it was made for other "
            f"parameters or settings ({len(lacking)} leaves differ). {remedy}"
        )
    for name in needs:
        if has[name] != needs[name]:
            raise ValueError(
                f"leaf{name} of {what} has shape {has[name]}, but {needs[name]} is needed: the "
                "parameters, the settings or the number of workers changed since it was made. "
                f"{remedy}"
            )
    raise ValueError(
        f"{what} has the structure {structures[0]}, but {structures[1]} is needed: pass the "
        f"containers that tx.init made. {remedy}"
    )

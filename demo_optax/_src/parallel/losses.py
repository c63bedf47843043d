"""Checks of loss functions: their arguments, their results and what is differentiated."""

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

from demo_optax._src import axes, checks
from demo_optax._src.axes import AxisName


def normalize_loss_fn(loss_fn: Callable, stateful: bool) -> Callable:
    """Wraps any loss function as ``fn(params, state, batch[, key]) -> (loss, (state, aux))``."""

    def normalized(params, state, *args):
        given = (params, state, *args) if stateful else (params, *args)
        _require_signature(loss_fn, given, stateful)
        out = loss_fn(*given)
        if stateful:
            return out
        if not isinstance(out, (tuple, list)):
            return out, (state, None)
        if len(out) != 2:
            raise TypeError(
                f"the loss function must return a loss, or (loss, aux), not {len(out)} things: put "
                "whatever else it gives into aux, as a tuple or dict."
            )
        return out[0], (state, out[1])

    return normalized


def _require_signature(loss_fn: Callable, given: tuple, stateful: bool) -> None:
    """Refuses a loss function that cannot be called with these arguments."""
    try:
        signature = inspect.signature(loss_fn)
    except ValueError:  # of a builtin
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        names = ("params", *["state"] * stateful, "batch", "key")[: len(given)]
        raise TypeError(
            f"loss_fn must take ({', '.join(names)}), but takes {signature}: {error}. Each worker "
            "sees its own part of the batch, so give the loss the batch as an argument, not by a "
            "closure. A loss with a random key needs make_train_step(random_key=True), or a key "
            "after the batch of worker_gradients; one with a model state needs stateful=True."
        ) from error


def split_arguments(args: tuple, first: tuple[str, ...], stateful: bool, keys: Collection[int]):
    """Returns model state, batch and key, the arguments after those that are named ``first``.

    ``keys`` are the numbers of keys that may be given.
    """
    if len(args) - 1 - stateful not in keys:
        names = [*first, *["state"] * stateful, "batch", *["key"] * min(keys)]
        optional = "[, key]" * (max(keys) - min(keys))
        raise TypeError(
            f"the arguments must be ({', '.join(names)}{optional}), but {len(first) + len(args)} "
            "arguments were given. A batch is one pytree: pass several arrays as a tuple or dict, "
            "as in (x, y). A step takes a key with make_train_step(random_key=True), and a model "
            "state is taken with stateful=True."
        )
    state, (batch, *key) = (args[0], args[1:]) if stateful else ((), args)
    return state, batch, tuple(key)


def require_differentiable(params) -> None:
    """Refuses leaves that have no real gradient, such as the random keys of a whole model."""
    checks.real_leaves("params", params)
    for path, x in jax.tree.leaves_with_path(checks.shapes_of("params", params)):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise TypeError(
                f"params{keystr(path)} has the dtype {x.dtype}, which has no gradient: "
                f"{checks.SPLIT}"
            )


def require_local_loss(loss, axis_name: AxisName) -> None:
    """Refuses a loss that is the same on all workers, where types have VMA information."""
    if axes.types_are_tracked(axis_name) and not set(axes.names(axis_name)) <= axes.varying(loss):
        raise ValueError(
            f"the loss is the same on all workers of {axis_name!r}: it averages or sums over them, "
            "which would scale every gradient, or depends on neither parameters nor batch. Leave "
            "out pmean and psum: the loss is that of one worker, and the optimizer exchanges."
        )


@contextlib.contextmanager
def explain_varying_types(axis_name: AxisName) -> Iterator[None]:
    """Adds a note to JAX's errors about types that vary over the workers' axis."""
    try:
        yield
    except (TypeError, ValueError) as error:
        about_types = any(word in str(error) for word in ("{V:", "varying", "manual axis types"))
        if about_types and axes.manual_names(axis_name):
            error.add_note(
                "The types of values that differ between workers name the workers' axis, and JAX "
                "compares types in loops, branches and custom derivatives, so that a loop that "
                "starts from zeros fails. Give make_train_step either check_vma=False, which "
                "SwarmWorker and jax.shard_map take too, or sharding='auto'. See "
                "docs/how_to/troubleshoot.md for what they cost."
            )
        raise

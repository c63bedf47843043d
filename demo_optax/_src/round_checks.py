"""Refuses optimizers that cannot take, or exchange, rounds of local steps."""

from typing import Any

import jax
import jax.numpy as jnp

from demo_optax._src import axes
from demo_optax._src.axes import AxisName
from demo_optax._src.exchange import Exchange


def require_axis(exchange: Exchange | None, axis_name: AxisName) -> None:
    """Refuses an outer optimizer of this library that exchanges over another axis."""
    if exchange is not None and axes.names(exchange.axis_name) != axes.names(axis_name):
        raise ValueError(
            f"outer exchanges over axis_name={exchange.axis_name!r}, but local_steps has "
            f"axis_name={axis_name!r}: give both the axis of the workers, as in "
            f"local_steps(inner, outer, every, axis_name={exchange.axis_name or axis_name!r})."
        )


def require_no_other_axis(gradient, updates, axis_name: AxisName) -> None:
    """Refuses updates whose VMA types say that they are the same along a further axis."""
    pairs = zip(*map(jax.tree.leaves, (gradient, updates)), strict=True)
    exchanged = frozenset().union(*(axes.varying(g) - axes.varying(u) for g, u in pairs))
    if others := sorted(exchanged - set(axes.names(axis_name))):
        raise ValueError(
            f"outer exchanges over the axes {others}, but local_steps has axis_name="
            f"{axis_name!r}, so that it cannot tell these workers apart: give local_steps the "
            f"axis_name={others[0]!r}."
        )


def require_linear(base: Any, params) -> None:
    """Refuses bases of an outer optimizer by which a round cannot begin at the residual."""
    shapes = jax.eval_shape(lambda x: x, params)

    def steps(gradient):
        return base.update(gradient, base.init(params), params)[0]

    if base is None:
        reason: Any = "this outer optimizer is wrapped, so that its base is not known"
    else:
        kept = [x.shape for x in jax.tree.leaves(jax.eval_shape(base.init, params)) if x.ndim]
        reason = f"its state has arrays of the shapes {kept}" if kept else None
        try:
            transposed = jax.linear_transpose(steps, shapes)
            jax.eval_shape(transposed, jax.eval_shape(steps, shapes))
            if _moves_without_gradient(base, shapes):
                reason = "it moves the parameters without a gradient too, as a weight decay does"
        except Exception as error:  # JAX has no error of its own for what is not linear
            reason = error
    if reason:
        raise ValueError(
            "with local steps, look_ahead lets a round begin at what its worker has not delivered, "
            f"which needs a linear base without a state such as optax.sgd(1.0), but {reason}: give "
            "outer such a base, or leave out look_ahead."
        )


def _moves_without_gradient(base: Any, shapes) -> bool:
    """Tells so from small parameters, all of them 1, of the same structure."""
    with jax.ensure_compile_time_eval():
        ones = jax.tree.map(lambda x: jnp.ones([min(n, 2) for n in x.shape], x.dtype), shapes)
        steps, _ = base.update(jax.tree.map(jnp.zeros_like, ones), base.init(ones), ones)
        return any(bool(jnp.any(x)) for x in jax.tree.leaves(steps))


def require_no_exchange(steps, axis_name: AxisName) -> None:
    """Refuses inner steps whose VMA types say that they are the same on all workers."""
    workers = set(axes.names(axis_name))
    if axes.types_are_tracked(axis_name) and not any(
        workers <= axes.varying(x) for x in jax.tree.leaves(steps)
    ):
        raise ValueError(
            f"the inner optimizer of local_steps exchanges over {axis_name!r} on every step, so "
            "that all workers have the same parameters: give inner an ordinary optimizer, such as "
            "optax.adamw, and let outer exchange."
        )

"""Checks of parameters, gradients and states. Each message says what to change."""

from typing import Any

import jax
import jax.numpy as jnp

from demo_optax import axes
from demo_optax.axes import AxisName
from demo_optax.boxes import unboxed
from demo_optax.compression import Plan


def floating_leaves(params) -> None:
    """Requires real floating-point leaves."""
    for path, leaf in jax.tree.leaves_with_path(params):
        dtype = jnp.result_type(leaf)
        if not hasattr(leaf, "shape") or not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"parameter{jax.tree_util.keystr(path)} is of type {type(leaf).__name__} and dtype "
                f"{dtype}, but decoupled momentum takes arrays of real floating-point numbers "
                "only. Leave other leaves out with optax.masked or optax.partition, or by "
                "splitting the model "
                "(flax.nnx.split(model, flax.nnx.Param, ...))."
            )


def usable(updates, state, expected: dict, plan: Plan, axis_name: AxisName) -> None:
    """Requires a local gradient of the tree, and in the blocks, that the state was made for.

    And, by name, the shapes that are expected of what the state holds beside the momentum.
    """
    axes.size(axis_name)
    _same_structure(updates, state.momentum)
    require_local(updates, axis_name)
    _same_blocks(updates, state.momentum, plan)
    _same_coordinates(state.coordinates, plan.compression.coordinates)
    for name, shapes in expected.items():
        _same_shapes(name, getattr(state, name), shapes)


def require_local(updates, axis_name: AxisName) -> None:
    """Refuses gradients that are the same on all workers, where the types can tell."""
    if axis_name is None or not axes.types_are_tracked(axis_name):
        return
    for path, leaf in jax.tree.leaves_with_path(updates):
        missing = [name for name in axes.names(axis_name) if name not in axes.varying(leaf)]
        if missing:
            raise ValueError(
                f"the gradient{jax.tree_util.keystr(path)} is not local: its type "
                f"{jax.typeof(leaf)} says that it is the same on all workers of axis "
                f"{missing[0]!r}, so it was summed over them already. jax.grad does so by "
                "itself inside jax.shard_map for parameters that are replicated. Take gradients "
                f"with demo_optax.local_value_and_grad(loss_fn, {missing[0]!r}), or call "
                f"jax.lax.pcast(params, {missing[0]!r}, to='varying') before jax.grad."
            )


def _same_structure(updates, momentum) -> None:
    """Requires the gradient's tree to be the one that the state was made for."""
    given: Any = jax.tree.structure(unboxed(updates))
    expected: Any = jax.tree.structure(momentum)
    if given != expected:
        raise ValueError(
            f"the gradient's tree is not the one that the state was made for: {given} was given, "
            f"the state has {expected}. Make the state anew from the parameters that are trained "
            "now, or pass the gradient of those that it was made for."
        )


def _same_blocks(updates, momentum, plan: Plan) -> None:
    """Requires every momentum to have the blocks that the gradient's shape and settings give."""
    leaves = zip(
        jax.tree.leaves_with_path(updates),
        jax.tree.leaves(momentum),
        plan.geometries,
        strict=True,
    )
    for (path, gradient), stored, geometry in leaves:
        expected = geometry.stored_shape
        if stored.shape == expected:
            continue
        name = jax.tree_util.keystr(path)
        if stored.shape[1:] == expected:
            raise ValueError(
                f"the momentum of gradient{name} has shape {stored.shape}: {expected} behind an "
                f"axis of {stored.shape[0]} workers. One worker's own momentum is expected here. "
                "Wrap the optimizer with demo_optax.stack_workers, which takes the worker axis "
                "off inside the step, or use demo_optax.make_train_step."
            )
        raise ValueError(
            f"the state does not match: gradient{name} of shape {gradient.shape} is compressed in "
            f"blocks {geometry.sides}, for which its momentum has shape {expected}, but the "
            f"state holds {stored.shape}. The parameter's shape, block_side or block_rule changed "
            "since the state was made: go back to the old ones, or make the state anew."
        )


def _same_coordinates(given, expected) -> None:
    """Requires the momentum to be stored as the compression reads it."""
    if given != expected:
        raise ValueError(
            f"the state's momentum is stored as {given}, but the optimizer was made for "
            f"{expected}: go back to the old settings, make the state anew, or convert it with "
            "demo_optax.checkpoint, which carries a momentum over when it restores."
        )


def _same_shapes(name: str, given, expected) -> None:
    """Requires what an exchange keeps to be of this exchange."""
    has, needs = ([x.shape for x in jax.tree.leaves(tree)] for tree in (given, expected))
    if has != needs:
        raise ValueError(
            f"the state's {name} has the shapes {has}, but this exchange needs {needs}: exchange, "
            "topk, codings, delay or the number of workers changed since the state was made. Go "
            "back to the old ones, make the state anew, or convert it with demo_optax.checkpoint."
        )

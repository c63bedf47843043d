"""Checks of settings; each message says what was given, what is expected and what to change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from demo_optax.compression.blocks import BlockGeometry


def static_integer(name: str, value, *, at_least: int) -> None:
    """Requires a Python integer: it decides shapes, so it cannot be traced."""
    if isinstance(value, jax.Array):
        raise TypeError(
            f"{name} must be a Python integer, because it decides the shapes of what is sent, but "
            f"it is an array ({value}). optax.inject_hyperparams makes arrays of all numbers: name "
            "it among its static_args, as in optax.inject_hyperparams(demo_optax.demo, "
            'static_args=("topk", "chunk_size"))(...).'
        )
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an integer of at least {at_least}, not {value!r}.")
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, not {value}.")


def static_dtype(name: str, value) -> None:
    """Requires a floating dtype, which ``optax.inject_hyperparams`` would call as a schedule."""
    if isinstance(value, jax.Array):
        raise TypeError(
            f"{name} must be a dtype, not an array. optax.inject_hyperparams calls whatever can be "
            f"called, jnp.float32 included: give the dtype's name, as in {name}='float32'."
        )
    if not jnp.issubdtype(value, jnp.floating) or jnp.finfo(value).bits < 16:
        raise TypeError(f"{name} must be a floating-point dtype of 16 bits or more, not {value!r}.")


def in_interval(name: str, value: Any, interval: str) -> None:
    """Requires a number inside ``"[low, high)"`` or the like; traced values pass."""
    dtype = getattr(value, "dtype", None)
    if dtype in (jnp.bfloat16, jnp.float16):
        raise TypeError(
            f"{name} has dtype {dtype}, in which 0.999 is 1. optax.inject_hyperparams takes the "
            "parameters' dtype: pass it hyperparam_dtype=jnp.float32."
        )
    if isinstance(value, jax.core.Tracer):
        return
    if not isinstance(value, (int, float, np.number, jax.Array, np.ndarray)) or np.ndim(value):
        raise TypeError(f"{name} must be a number in {interval}, not {value!r}.")
    value = float(value)
    low, high = (float(bound) for bound in interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    if not (above and below):
        raise ValueError(f"{name} must lie in {interval}, not {value}.")


def one_of(name: str, value, choices) -> None:
    """Requires one of some names."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}.")


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


def same_structure(updates, momentum) -> None:
    """Requires the gradient's tree to be the one that the state was made for."""
    given: Any = jax.tree.structure(updates)
    expected: Any = jax.tree.structure(momentum)
    if given != expected:
        raise ValueError(
            f"the gradient's tree is not the one that the state was made for: {given} was given, "
            f"the state has {expected}. Make the state anew from the parameters that are trained "
            "now, or pass the gradient of those that it was made for."
        )


def same_blocks(updates, momentum, geometries: Sequence[BlockGeometry]) -> None:
    """Requires every momentum to have the blocks that the gradient's shape and settings give."""
    leaves = zip(
        jax.tree.leaves_with_path(updates), jax.tree.leaves(momentum), geometries, strict=True
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
            f"blocks {geometry.block_shape}, for which its momentum has shape {expected}, but the "
            f"state holds {stored.shape}. The parameter's shape, chunk_size or block_rule changed "
            "since the state was made: go back to the old ones, or make the state anew."
        )


def same_coordinates(given, expected) -> None:
    """Requires the momentum to be stored as the compression reads it."""
    if given != expected:
        raise ValueError(
            f"the state's momentum is stored as {given}, but the optimizer was made for "
            f"{expected}: go back to the old settings, make the state anew, or convert it with "
            "demo_optax.checkpoint, which carries a momentum over when it restores."
        )

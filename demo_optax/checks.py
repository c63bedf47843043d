"""Checks of settings. Each message says what was given, what is expected and what to change."""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def static_integer(name: str, value: Any, *, at_least: int) -> None:
    """Requires a Python integer: it decides shapes, so it cannot be traced."""
    if isinstance(value, jax.Array):
        raise TypeError(
            f"{name} must be a Python integer, because it decides the shapes of what is sent, but "
            f"it is an array ({value}): give an int."
        )
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an integer of at least {at_least}, not {value!r}.")
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, not {value}.")


def static_dtype(name: str, value: Any) -> None:
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
    if isinstance(value, Tracer):
        return
    if not isinstance(value, (int, float, np.number, jax.Array, np.ndarray)) or np.ndim(value):
        raise TypeError(f"{name} must be a number in {interval}, not {value!r}.")
    value = float(value)
    low, high = (float(bound) for bound in interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    if not (above and below):
        raise ValueError(f"{name} must lie in {interval}, not {value}.")


def one_of(name: str, value: object, choices: Collection[Any]) -> None:
    """Requires one of some names."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}.")

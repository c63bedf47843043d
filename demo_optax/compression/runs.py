"""Runs of coefficients, the same in all blocks: slices, where other positions gather and scatter."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from demo_optax.arrays import IntScalar

Rows = Shaped[Array, "blocks n"]


class Run(NamedTuple):
    """The ``k`` coefficients of every block from ``start`` on; behind its end come the first."""

    start: IntScalar
    k: int


def take(blocks: Rows, run: Run) -> Shaped[Array, "blocks k"]:
    """The elements of a run in each block."""
    last, beyond = _ends(run, blocks.shape[1])
    both = jnp.concatenate([_slice(blocks, last, run.k), blocks[:, : run.k]], axis=1)
    return _slice(both, beyond, run.k)


def add(
    blocks: Float[Array, "blocks n"], run: Run, values: Float[Array, "blocks k"]
) -> Float[Array, "blocks n"]:
    """Adds values to a run in each block."""
    last, beyond = _ends(run, blocks.shape[1])
    both = jnp.concatenate([jnp.zeros_like(values)] * 2, axis=1)
    at_last, at_front = jnp.split(_put(both, values, beyond), 2, axis=1)
    blocks = _put(blocks, _slice(blocks, last, run.k) + at_last, last)
    return _put(blocks, blocks[:, : run.k] + at_front, 0)


def _ends(run: Run, n: int) -> tuple[IntScalar, IntScalar]:
    """Where the last ``k`` elements begin, or the run before them, and how far it goes beyond."""
    last = jnp.minimum(run.start, n - run.k)
    return last, run.start - last


def _slice(x: Rows, start: IntScalar, size: int) -> Rows:
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)


def _put(x: Rows, part: Rows, start: IntScalar | int) -> Rows:
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, axis=1)

"""Runs of coefficients, the same in all blocks: slices, where others gather and scatter."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from demo_optax.arrays import IntScalar

_slice = functools.partial(jax.lax.dynamic_slice_in_dim, axis=1)
_put = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=1)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["start"], meta_fields=["k"])
@dataclasses.dataclass(frozen=True)
class Run:
    """The ``k`` coefficients of every block from ``start`` on; behind its end come the first."""

    start: IntScalar
    k: int


def take(blocks: Shaped[Array, "blocks n"], run: Run) -> Shaped[Array, "blocks k"]:
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

"""Runs of coefficients, the same in all blocks: slices, where other positions gather and scatter."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from demo_optax.arrays import IntScalar


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["start"], meta_fields=["parts", "width"]
)
@dataclasses.dataclass(frozen=True)
class Run:
    """``parts * width`` coefficients of every block, which is cut into equal parts.

    Attributes:
      start: in each part, where the run begins; behind the part's end it goes on at its front.
      parts: of a block.
      width: coefficients of each part.
    """

    start: IntScalar
    parts: int
    width: int


def take(blocks: Shaped[Array, "blocks n"], run: Run) -> Shaped[Array, "blocks k"]:
    """The elements of a run in each block."""
    x = blocks.reshape(len(blocks), run.parts, -1)
    last, beyond = _ends(run, x.shape[2])
    both = jnp.concatenate([_slice(x, last, run.width), x[:, :, : run.width]], axis=2)
    return _slice(both, beyond, run.width).reshape(len(blocks), -1)


def add(
    blocks: Float[Array, "blocks n"], run: Run, values: Float[Array, "blocks k"]
) -> Float[Array, "blocks n"]:
    """Adds values to a run in each block."""
    x = blocks.reshape(len(blocks), run.parts, -1)
    last, beyond = _ends(run, x.shape[2])
    values = values.reshape(len(values), run.parts, run.width)
    both = jnp.concatenate([jnp.zeros_like(values)] * 2, axis=2)
    at_last, at_front = jnp.split(_put(both, values, beyond), 2, axis=2)
    x = _put(x, _slice(x, last, run.width) + at_last, last)
    return _put(x, x[:, :, : run.width] + at_front, 0).reshape(blocks.shape)


def _ends(run: Run, size: int) -> tuple[IntScalar, IntScalar]:
    """Where the slice begins that ends no later than a part of this size, and what it leaves."""
    last = jnp.minimum(run.start, size - run.width)
    return last, run.start - last


def _slice(x: Shaped[Array, "blocks parts n"], start, width: int) -> Shaped[Array, "..."]:
    return jax.lax.dynamic_slice_in_dim(x, start, width, axis=2)


def _put(x: Shaped[Array, "blocks parts n"], part, start) -> Shaped[Array, "blocks parts n"]:
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, axis=2)

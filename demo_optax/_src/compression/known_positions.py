"""Selectors whose positions every worker knows from the step alone, so that none are sent.

They follow FlexDeMo (From et al., arXiv 2502.06728). Because all workers send the same
coefficients, the mean over the senders is the mean over all workers. A set has different positions
in each block and needs gathers and scatters, while a contiguous slice is the same in all blocks and
needs only slices.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from demo_optax._src.arrays import IntScalar
from demo_optax._src.compression import sparse
from demo_optax._src.compression.sparse import Dense, Picked
from demo_optax._src.compression.transforms import POSITIONS_STREAM, key_of

Starts = Int32[Array, "blocks 1"]

_slice = functools.partial(jax.lax.dynamic_slice_in_dim, axis=1)
_put = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=1)


@dataclasses.dataclass(frozen=True)
class SharedSet:
    """Selector of ``k`` of ``n`` coefficients at positions that follow from the step.

    The rule ``"random"`` draws ``k`` positions and shifts them by a different random offset in each
    block; ``"striding"`` takes every ``n / k``-th position and moves on by one each step. The
    ``stream`` is the section's number, so that each section draws different positions.
    """

    n: int
    k: int
    rule: str
    seed: int
    stream: int
    sends_positions = False
    take = staticmethod(sparse.take)
    add = staticmethod(sparse.add)

    @jax.threefry_partitionable(True)
    def positions(self, num_blocks: int, step: IntScalar) -> Int32[Array, "{num_blocks} k"]:
        if self.rule == "striding":
            places = jnp.asarray(np.arange(self.k) * self.n // self.k, jnp.int32)
            return jnp.broadcast_to((places + step % self.n) % self.n, (num_blocks, self.k))
        draw, shift = jax.random.split(_key(self, step))
        chosen = jax.random.permutation(draw, self.n)[: self.k]
        offsets = jax.random.randint(shift, (num_blocks, 1), 0, self.n, jnp.int32)
        return (chosen[None].astype(jnp.int32) + offsets) % self.n


@dataclasses.dataclass(frozen=True)
class SharedSlice(SharedSet):
    """Selector of a contiguous slice of ``k`` of ``n`` coefficients, the same in all blocks.

    Its positions are the slice's start, once for each block. The rule ``"random-slicing"`` starts
    anywhere; ``"slicing"`` moves on by ``k`` each step, so that it visits every coefficient within
    ``ceil(n / k)`` steps.
    """

    @jax.threefry_partitionable(True)
    def positions(self, num_blocks: int, step: IntScalar) -> Int32[Array, "{num_blocks} 1"]:
        """Returns the start of a step's slice, which wraps around at the end of the block."""
        if self.rule == "slicing":  # this is step * k modulo n, without overflow
            start = step % (self.n // math.gcd(self.n, self.k)) * self.k % self.n
        else:
            start = jax.random.randint(_key(self, step), (), 0, self.n, jnp.int32)
        return jnp.broadcast_to(start.astype(jnp.int32), (num_blocks, 1))

    def take(self, blocks: Dense, starts: Starts) -> Picked:
        last, beyond = self._ends(starts)
        both = jnp.concatenate([_slice(blocks, last, self.k), blocks[:, : self.k]], axis=1)
        return _slice(both, beyond, self.k)

    def add(self, blocks: Dense, starts: Starts, values: Picked) -> Dense:
        values = values.astype(blocks.dtype)
        last, beyond = self._ends(starts)
        both = jnp.concatenate([jnp.zeros_like(values)] * 2, axis=1)
        at_last, at_front = jnp.split(_put(both, values, beyond), 2, axis=1)
        blocks = _put(blocks, _slice(blocks, last, self.k) + at_last, last)
        return _put(blocks, blocks[:, : self.k] + at_front, 0)

    def _ends(self, starts: Starts) -> tuple[IntScalar, IntScalar]:
        """Returns the start, moved back so that ``k`` elements fit, and how many wrap around."""
        start = starts[0, 0]
        last = jnp.minimum(start, self.n - self.k)
        return last, start - last


def _key(selector: SharedSet, step: IntScalar) -> jax.Array:
    return jax.random.fold_in(key_of(selector.seed, step, POSITIONS_STREAM), selector.stream)

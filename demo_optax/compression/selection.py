"""Which coefficients of each block are sent.

``"topk"`` takes the largest, and their positions travel with them. The others take positions
that every worker knows from the step alone (FlexDeMo, From et al., arXiv 2502.06728), so that
none travel; the mean over the senders is then the mean over all workers.
"""

import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

Selection = Literal["topk", "random", "striding", "slicing"]
SELECTIONS = get_args(Selection)


def top_k(coefficients: jax.Array, k: int, real: jax.Array | None = None) -> jax.Array:
    """Positions of the ``k`` largest magnitudes of each block.

    Args:
      coefficients: ``(blocks, n)``; compared in float32, the only dtype that XLA's fast path of
        ``top_k`` takes.
      k: how many, at most ``n``.
      real: ``(blocks, n)`` booleans; positions that are padding are taken only where a block has
        fewer than ``k`` others, as places in the message that nobody reads.

    Returns:
      int32 ``(blocks, k)``, ascending in each block.
    """
    magnitudes = jnp.abs(coefficients.astype(jnp.float32))
    if real is not None:
        magnitudes = jnp.where(real, magnitudes, -1.0)
    return jnp.sort(jax.lax.top_k(magnitudes, k)[1], axis=-1)


def shared(
    selection: Selection, blocks: int, n: int, k: int, step: jax.Array, key: jax.Array
) -> jax.Array:
    """Positions that follow from the step, the same on all workers.

    Args:
      selection: ``"random"`` draws ``k`` positions, shifted by another random offset in each
        block; ``"striding"`` takes every ``n / k``-th and moves on by one each step;
        ``"slicing"`` takes a run of ``k`` and moves on by ``k``. The latter two visit every
        position within ``ceil(n / k)`` steps.
      blocks: number of blocks.
      n: positions in a block.
      k: how many of them.
      step: int32 scalar.
      key: of the random draw.

    Returns:
      int32 ``(blocks, k)``, unique in each block.
    """
    if selection == "random":
        draw, shift = jax.random.split(key)
        chosen = jax.random.permutation(draw, n)[:k]
        offsets = jax.random.randint(shift, (blocks, 1), 0, n)
        return (chosen[None] + offsets).astype(jnp.int32) % n
    start, move = (np.arange(k) * n // k, 1) if selection == "striding" else (np.arange(k), k)
    moved = (step % (n // math.gcd(n, move)) * move) % n
    positions = (jnp.asarray(start, jnp.int32) + moved) % n
    return jnp.broadcast_to(positions.astype(jnp.int32), (blocks, k))

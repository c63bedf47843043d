"""Which coefficients of each block are sent.

``"topk"`` takes the largest and ``"bins"`` the largest of each bin; their positions travel with
them. The others take positions that every worker knows from the step alone (FlexDeMo, From et al.,
arXiv 2502.06728), so that none travel; the mean over the senders is then the mean over all workers.
"""

import functools
import math
from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int32, PRNGKeyArray, Shaped

from demo_optax.arrays import IntScalar
from demo_optax.compression import bins, runs
from demo_optax.compression.bins import Bins
from demo_optax.compression.runs import Run

Selection = Literal["topk", "bins", "random", "random-slicing", "striding", "slicing"]
SELECTIONS = get_args(Selection)

_STRANDS = 8
_GPU_KERNEL_K = 16  # coefficients up to which XLA has a kernel of its own for GPUs


def top_k(coefficients: Float[Array, "blocks n"], k: int) -> Int32[Array, "blocks {k}"]:
    """Positions of the ``k`` largest magnitudes of each block, exactly, ascending."""
    # In float32, the only dtype that XLA's fast paths take.
    magnitudes = jnp.abs(coefficients.astype(jnp.float32))
    slow = ["cpu"] if k <= _GPU_KERNEL_K else ["cpu", "cuda", "rocm"]
    chosen = jax.lax.platform_dependent(
        magnitudes,
        default=functools.partial(_by_kernel, k=k),
        **dict.fromkeys(slow, functools.partial(_by_strands, k=k)),
    )
    return jnp.sort(chosen, axis=-1)


def largest_of_bins(coefficients: Float[Array, "blocks n"], k: int) -> Bins:
    """The largest magnitude of each of ``k`` bins; of equal ones any."""
    magnitudes = jnp.abs(coefficients.astype(jnp.float32))
    at_once = functools.partial(bins.largest, k=k)
    if magnitudes.shape[1] % (_STRANDS * k):  # strands would belong to several bins
        return at_once(magnitudes)

    def by_strands(magnitudes: Float32[Array, "blocks n"]) -> Bins:
        chosen = _of_strands(magnitudes, lambda x: bins.largest(x, k).positions)
        return Bins(chosen // k)

    return jax.lax.platform_dependent(magnitudes, cpu=by_strands, default=at_once)


def _by_kernel(magnitudes: Float32[Array, "blocks n"], k: int) -> Int32[Array, "blocks {k}"]:
    return jax.lax.top_k(magnitudes, k)[1]


def _by_strands(magnitudes: Float32[Array, "blocks n"], k: int) -> Int32[Array, "blocks {k}"]:
    """Like `_by_kernel`, for devices that are slow on long rows (GPUs sort them whole)."""
    n = magnitudes.shape[1]
    if n % _STRANDS or n // _STRANDS < 4 * k:
        return _by_kernel(magnitudes, k)
    return _of_strands(magnitudes, functools.partial(_by_kernel, k=k))


def _of_strands(
    magnitudes: Float32[Array, "blocks n"],
    largest: Callable[[Float32[Array, "_blocks _n"]], Int32[Array, "_blocks _k"]],
) -> Int32[Array, "blocks _k"]:
    """The positions of the largest, by two selections in rows that are shorter.

    A strand is every ``n / 8``-th element. The strands with the largest maxima hold the largest
    elements.
    """
    width = magnitudes.shape[1] // _STRANDS
    rows = [magnitudes[:, i * width : (i + 1) * width] for i in range(_STRANDS)]
    strands = largest(functools.reduce(jnp.maximum, rows))
    candidates = strands[:, None, :] + width * jnp.arange(_STRANDS, dtype=jnp.int32)[None, :, None]
    candidates = candidates.reshape(len(magnitudes), -1)
    return take(candidates, largest(take(magnitudes, candidates)))


def take(
    blocks: Shaped[Array, "blocks n"], positions: Int[Array, "blocks k"] | Run | Bins
) -> Shaped[Array, "blocks k"]:
    """The elements at these positions of each block."""
    if isinstance(positions, Run):
        return runs.take(blocks, positions)
    if isinstance(positions, Bins):
        return jax.lax.platform_dependent(blocks, positions, tpu=bins.take, default=_take_by_gather)
    return _take_by_gather(blocks, positions)


def _take_by_gather(
    blocks: Shaped[Array, "blocks n"], positions: Int[Array, "blocks k"] | Bins
) -> Shaped[Array, "blocks k"]:
    places = bins.in_block(positions)
    return jnp.take_along_axis(blocks, places, axis=-1, mode="promise_in_bounds")


def shared(
    selection: Selection, blocks: int, n: int, k: int, step: IntScalar, key: PRNGKeyArray
) -> Int32[Array, "{blocks} {k}"] | Run:
    """Positions that follow from the step, the same on all workers.

    Args:
      selection: ``"random"`` draws ``k`` positions, shifted by another random offset in each
        block; ``"random-slicing"`` a run of ``k``, the same in all blocks, from a random one on;
        ``"striding"`` takes every ``n / k``-th and moves on by one each step; ``"slicing"`` takes
        a run of ``k`` and moves on by ``k``. The latter two visit every position within
        ``ceil(n / k)`` steps.
      blocks: number of blocks.
      n: positions in a block.
      k: how many of them.
      step: updates so far.
      key: of the random draw.

    Returns:
      Positions, unique in each block.
    """
    if selection == "random":
        draw, shift = jax.random.split(key)
        chosen = jax.random.permutation(draw, n)[:k]
        offsets = jax.random.randint(shift, (blocks, 1), 0, n)
        return (chosen[None] + offsets).astype(jnp.int32) % n
    if selection == "random-slicing":
        return Run(jax.random.randint(key, (), 0, n), k)
    if selection == "slicing":
        return Run(_moved(step, k, n), k)
    positions = (jnp.asarray(np.arange(k) * n // k, jnp.int32) + step % n) % n
    return jnp.broadcast_to(positions.astype(jnp.int32), (blocks, k))


def _moved(step: IntScalar, by: int, n: int) -> IntScalar:
    """``step * by`` modulo ``n``, which no long run overflows."""
    return step % (n // math.gcd(n, by)) * by % n

"""Blockwise orthonormal transforms, as one matrix product over columns and one over rows.

All blocks of one shape are transformed together, whatever tensors they come from. The last side of
a block is its columns and all others are its rows. The coefficients come out with rows and columns
swapped, which saves a transpose in each direction.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, PRNGKeyArray

from demo_optax._src.arrays import IntScalar

Matrix = Float[Array, "_i _j"] | Float[np.ndarray, "_i _j"]

BASIS_STREAM, POSITIONS_STREAM = range(2)
"""Streams of random numbers for redrawn bases and shared positions."""


def key_of(seed: int, step: IntScalar, purpose: int) -> PRNGKeyArray:
    """Returns the random key of a step and a stream, the same on all workers.

    The key ``jax.random.key(seed)`` depends on JAX's settings, which may differ between workers and
    when a run resumes; this key depends on none. To keep draws independent of them too, draw under
    ``jax.threefry_partitionable(True)`` and name the dtype.
    """
    words = jnp.array([seed >> 32, seed & 0xFFFFFFFF], jnp.uint32)
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    return jax.random.fold_in(jax.random.fold_in(key, step), purpose)


class Basis(NamedTuple):
    """An orthonormal basis of every block.

    The matrix of a side has one basis vector per row. If ``randomized``, a block's elements are
    first multiplied by fixed random signs.
    """

    matrix: Callable[[int], Matrix]
    randomized: bool = False


def dct_basis(n: int) -> Float[np.ndarray, "{n} {n}"]:
    """Returns the orthonormal DCT-II matrix of ``scipy.fft.dct``, one basis vector per row."""
    frequency, position = np.arange(n)[:, None], np.arange(n)[None, :]
    basis = np.sqrt(2 / n) * np.cos(np.pi * frequency * (2 * position + 1) / (2 * n))
    basis[0] /= np.sqrt(2)
    return basis


@jax.threefry_partitionable(True)
def random_basis(key: PRNGKeyArray, n: int) -> Float32[Array, "{n} {n}"]:
    # Under jax.vmap one matrix is made after another, since several batched QR decompositions of
    # one program wait for each other on a CPU of few cores.
    @jax.custom_batching.sequential_vmap
    def orthogonal(key: PRNGKeyArray) -> Float32[Array, "_n _n"]:
        return jax.random.orthogonal(key, n, dtype=jnp.float32)

    return orthogonal(jax.random.fold_in(key, n))


TransformName = Literal["dct", "randomized-dct", "random", "identity"]
Transform = Callable[[int], Any]
"""Takes a side to its orthonormal matrix, with one basis vector per row."""

TRANSFORMS: dict[str, Callable[[int, IntScalar], Basis | None]] = {
    "dct": lambda seed, step: Basis(dct_basis),
    "randomized-dct": lambda seed, step: Basis(dct_basis, randomized=True),
    "random": lambda seed, step: Basis(
        functools.partial(random_basis, key_of(seed, step, BASIS_STREAM))
    ),
    "identity": lambda seed, step: None,
}
"""Functions that make the basis of each transform; only ``"random"`` uses the seed and the step."""


@functools.cache
def checked_matrix(transform: Transform, n: int) -> Float[np.ndarray, "{n} {n}"]:
    """Returns the matrix of a transform of the user's own, which must be orthonormal."""
    with jax.ensure_compile_time_eval():
        matrix = np.asarray(transform(n), np.float64)
    if matrix.shape != (n, n) or not np.allclose(matrix @ matrix.T, np.eye(n), atol=1e-5):
        raise ValueError(
            f"transform={transform!r} gives a matrix of shape {matrix.shape} for blocks of side "
            f"{n}, but it must be ({n}, {n}) and orthonormal to 1e-5, so that its transpose is its "
            "inverse: divide each row by its norm, and make rows orthogonal to each other."
        )
    return matrix


def signs(sides: Sequence[int]) -> Float32[np.ndarray, "*sides"]:
    """Returns fixed random signs for a block's elements.

    With them any set of coefficients, even neighbouring ones, has a component in every direction of
    a block, as in the subsampled randomized transforms of Ailon and Chazelle (STOC 2006).
    """
    # The stream of RandomState is the same in all versions of NumPy.
    return np.asarray(2 * np.random.RandomState(0).randint(2, size=tuple(sides)) - 1, np.float32)


def is_redrawn(name: TransformName | Transform) -> bool:
    """Tells whether the basis changes on every step, so that momenta must change theirs."""
    return name == "random"


def forward(
    blocks: Float[Array, "blocks *sides"], sides: Sequence[int], basis: Basis | None
) -> Float[Array, "blocks columns rows"]:
    if basis and basis.randomized:
        blocks = blocks * jnp.asarray(signs(sides), blocks.dtype)[None]
    x = blocks.reshape(len(blocks), -1, sides[-1])
    return _multiply(x, *_matrices(sides, basis.matrix)) if basis else x.swapaxes(1, 2)


def inverse(
    coefficients: Float[Array, "blocks n"], sides: Sequence[int], basis: Basis | None
) -> Float[Array, "blocks *sides"]:
    """Returns the blocks that have these coefficients, by the transpose of `forward`."""
    x = coefficients.reshape(len(coefficients), sides[-1], -1)
    if basis is None:
        return x.swapaxes(1, 2).reshape(-1, *sides)
    columns, rows = _matrices(sides, basis.matrix)
    blocks = _multiply(x, rows.T, columns.T).reshape(-1, *sides)
    return blocks * jnp.asarray(signs(sides), blocks.dtype)[None] if basis.randomized else blocks


def change_basis(
    coefficients: Float[Array, "blocks n"], sides: Sequence[int], old: Basis, new: Basis
) -> Float[Array, "blocks n"]:
    """Converts coefficients from one basis to another at the cost of one transform."""

    def between(n: int) -> Matrix:
        matrices = new.matrix(n), old.matrix(n).T
        return jnp.matmul(*matrices, precision=jax.lax.Precision.HIGHEST)

    x = coefficients.reshape(len(coefficients), sides[-1], -1)
    columns, rows = _matrices(sides, between)
    return _multiply(x, rows, columns, exact=True).swapaxes(1, 2).reshape(coefficients.shape)


def _multiply(
    x: Float[Array, "blocks i j"], last: Matrix, middle: Matrix, exact: bool = False
) -> Float[Array, "blocks j i"]:
    """Multiplies the last dimension by a matrix, then the middle one, and swaps the two."""
    if x.shape[2] > 1:
        x = product("bij,kj->bik", x, jnp.asarray(last, x.dtype), exact=exact)
    if x.shape[1] == 1:
        return x.swapaxes(1, 2)
    return product("bij,ki->bjk", x, jnp.asarray(middle, x.dtype), exact=exact)


def _matrices(sides: Sequence[int], matrix: Callable[[int], Matrix]) -> tuple[Matrix, Matrix]:
    """Returns the matrices by which columns and rows are multiplied."""
    rows = np.ones((1, 1))
    for side in sides[:-1]:
        factor = matrix(side)
        rows = (jnp if isinstance(factor, jax.Array) else np).kron(rows, factor)
    return matrix(sides[-1]), rows


def product(
    subscripts: str, x: Float[Array, "..."], y: Float[Array, "..."], *, exact: bool = False
) -> Float[Array, "..."]:
    """Computes ``jnp.einsum`` in float32 or, unless ``exact``, in three bfloat16 products on TPUs.

    Three products have errors of about ``2**-16`` at half the cost of float32's six. This is enough
    for gradients and updates, whose errors do not accumulate, but stored momenta need exact ones.
    """
    einsum = functools.partial(jnp.einsum, subscripts)
    highest = functools.partial(einsum, precision=jax.lax.Precision.HIGHEST)
    if exact:
        return highest(x, y)
    high = functools.partial(einsum, precision=jax.lax.Precision.HIGH)
    return jax.lax.platform_dependent(x, y, tpu=high, default=highest)

"""Blockwise orthonormal transforms: a matrix product over the columns, one over the rows.

All blocks of one shape are transformed together, whatever tensors they come from. A block's
columns are its last side, its rows all others. Its coefficients come out with the two exchanged,
so that neither direction needs a transposition of its own.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from demo_optax.numerics import energy

TransformName = Literal["dct", "hadamard", "random", "identity"]
TRANSFORMS = get_args(TransformName)

Basis = Callable[[int], np.ndarray | jax.Array]


def dct_basis(n: int) -> np.ndarray:
    """Orthonormal DCT-II matrix ``(n, n)``, one basis vector a row (``scipy.fft.dct``, "ortho")."""
    frequency, position = np.arange(n)[:, None], np.arange(n)[None, :]
    basis = np.sqrt(2 / n) * np.cos(np.pi * frequency * (2 * position + 1) / (2 * n))
    basis[0] /= np.sqrt(2)
    return basis


def hadamard_basis(n: int) -> np.ndarray:
    """Orthonormal Hadamard matrix ``(n, n)``.

    For an ``n`` that is no power of two, a block-diagonal of the powers of two that sum to it.
    """
    basis, start = np.zeros((n, n)), 0
    for bit in reversed(range(n.bit_length())):
        if n >> bit & 1:
            size = 1 << bit
            block = np.ones((1, 1))
            for _ in range(bit):
                block = np.block([[block, block], [block, -block]]) / np.sqrt(2)
            basis[start : start + size, start : start + size] = block
            start += size
    return basis


def make_basis(name: TransformName, key: jax.Array) -> Basis | None:
    """The transform's basis for every side; None where it is the identity.

    Only ``"random"`` depends on the key, from which all workers draw the same matrices.
    """
    if name == "random":
        return lambda n: jax.random.orthogonal(jax.random.fold_in(key, n), n)
    return {"dct": dct_basis, "hadamard": hadamard_basis, "identity": None}[name]


def is_redrawn(name: TransformName) -> bool:
    """Whether the basis changes from step to step, so that a momentum must be carried over."""
    return name == "random"


def forward(
    blocks: jax.Array, sides: Sequence[int], basis: Basis | None
) -> tuple[jax.Array, jax.Array]:
    """Coefficients ``(blocks, columns, rows)`` of blocks ``(blocks, *sides)``, and their energy.

    The energy (sum of squares, float32) is that of the blocks as well, since the products are
    orthonormal. It is taken between them, where XLA fuses the sum with the first.
    """
    columns, rows = _matrices(sides, basis)
    x = _last(blocks.reshape(len(blocks), -1, sides[-1]), columns)
    return _middle(x, rows), energy([x])


def inverse(coefficients: jax.Array, sides: Sequence[int], basis: Basis | None) -> jax.Array:
    """Blocks ``(blocks, *sides)`` of coefficients ``(blocks, n)``: the transpose of `forward`."""
    x = coefficients.reshape(len(coefficients), sides[-1], -1)
    columns, rows = _matrices(sides, basis)
    return _middle(_last(x, _transposed(rows)), _transposed(columns)).reshape(-1, *sides)


def change_basis(
    coefficients: jax.Array, sides: Sequence[int], old: Basis | None, new: Basis | None
) -> jax.Array:
    """Coefficients ``(blocks, n)`` of the same blocks in another basis, at one transform's cost."""
    assert old is not None and new is not None
    x = coefficients.reshape(len(coefficients), sides[-1], -1)
    columns, rows = _matrices(sides, lambda n: _multiply(new(n), old(n).T))
    turned = _middle(_last(x, rows, exact=True), columns, exact=True)
    return turned.swapaxes(1, 2).reshape(coefficients.shape)


def _last(x, matrix, exact=False):
    """``(blocks, i, j)`` with its last dimension multiplied by a matrix, or by None."""
    if matrix is None or x.shape[2] == 1:
        return x
    return product("bij,kj->bik", x, jnp.asarray(matrix, x.dtype), exact=exact)


def _middle(x, matrix, exact=False):
    """``(blocks, i, j)`` to ``(blocks, j, i)``, with ``i`` multiplied by a matrix, or by None."""
    if matrix is None or x.shape[1] == 1:
        return x.swapaxes(1, 2)
    return product("bij,ki->bjk", x, jnp.asarray(matrix, x.dtype), exact=exact)


def product(subscripts: str, x: jax.Array, y: jax.Array, *, exact: bool = False) -> jax.Array:
    """``jnp.einsum`` in float32; unless ``exact``, in three products of bfloat16 on TPUs.

    Three are right to about ``2**-16``, at half the cost of float32's six. That is enough for
    gradients and updates, whose errors are not carried on; stored momenta take exact ones.
    """
    einsum = functools.partial(jnp.einsum, subscripts)
    highest = functools.partial(einsum, precision=jax.lax.Precision.HIGHEST)
    if exact:
        return highest(x, y)
    high = functools.partial(einsum, precision=jax.lax.Precision.HIGH)
    return jax.lax.platform_dependent(x, y, tpu=high, default=highest)


def _matrices(sides, basis):
    """What columns and rows are multiplied by."""
    if basis is None:
        return None, None
    rows = functools.reduce(_kronecker, map(basis, sides[:-1]), np.ones((1, 1)))
    return basis(sides[-1]), rows


def _transposed(matrix):
    return None if matrix is None else matrix.T


def _kronecker(a, b):
    return (jnp if isinstance(b, jax.Array) else np).kron(a, b)


def _multiply(a, b):
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)

"""Blockwise orthonormal transforms, as two matrix products per tensor.

A block is transformed along its columns and along its rows. Each is one large product of a
``(many, side)`` array with a ``(side, side)`` basis, which is what XLA is fastest at; between
the two lies a single transposition, which leaves the coefficients stored as
``(*grid, columns, rows)``. Where a dimension ends inside a block, that block gets a basis of
its true size, so that no energy leaks into what is stored beyond the edge.
"""

from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from demo_optax.compression.blocks import BlockGeometry

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


def forward(x: jax.Array, geometry: BlockGeometry, basis: Basis | None) -> jax.Array:
    """Coefficients ``geometry.stored_shape`` of a tensor ``geometry.shape``, in the same dtype."""
    if not geometry.num_blocks:
        return jnp.zeros(geometry.stored_shape, x.dtype)
    grid, sides = _core(geometry)
    rank = len(grid)
    dims = [dim for dim, _ in geometry.core]
    x = x.reshape(dims)
    if geometry.ragged:
        x = jnp.pad(x, [(0, g * s - dim) for g, s, dim in zip(grid, sides, dims, strict=True)])
    x = x.reshape([n for pair in zip(grid, sides, strict=True) for n in pair])
    x = _columns(x, geometry, basis, grid_axis=-2)
    x = x.transpose([*range(0, 2 * rank, 2), 2 * rank - 1, *range(1, 2 * rank - 1, 2)])
    x = _rows(x.reshape(*grid, *geometry.block_shape), geometry, basis)
    return x.reshape(geometry.stored_shape)


def inverse(coefficients: jax.Array, geometry: BlockGeometry, basis: Basis | None) -> jax.Array:
    """The tensor ``geometry.shape`` whose coefficients these are: the transpose of `forward`."""
    if not geometry.num_blocks:
        return jnp.zeros(geometry.shape, coefficients.dtype)
    grid, sides = _core(geometry)
    rank = len(grid)
    transposed = basis and (lambda n: basis(n).T)
    x = _rows(coefficients.reshape(*grid, *geometry.block_shape), geometry, transposed)
    x = x.reshape(*grid, sides[-1], *sides[:-1])
    within = [*range(rank + 1, 2 * rank), rank]
    x = x.transpose([axis for pair in zip(range(rank), within, strict=True) for axis in pair])
    x = _columns(x, geometry, transposed, grid_axis=-2)
    x = x.reshape([g * s for g, s in zip(grid, sides, strict=True)])
    return x[tuple(slice(dim) for dim, _ in geometry.core)].reshape(geometry.shape)


def change_basis(
    coefficients: jax.Array, geometry: BlockGeometry, old: Basis | None, new: Basis | None
) -> jax.Array:
    """The coefficients of the same tensor in another basis, at the cost of one transform."""
    assert old is not None and new is not None
    if not geometry.num_blocks:
        return coefficients
    grid, _ = _core(geometry)

    def turn(n):
        return _product(new(n), old(n).T)

    x = _rows(coefficients.reshape(*grid, *geometry.block_shape), geometry, turn)
    x = _columns(x.swapaxes(-1, -2), geometry, turn, grid_axis=-3).swapaxes(-1, -2)
    return x.reshape(geometry.stored_shape)


def real_positions(geometry: BlockGeometry) -> jax.Array:
    """Which stored coefficients exist, as booleans ``geometry.stored_shape``: not the padding."""
    grid, sides = _core(geometry)
    rank = len(grid)
    real = jnp.ones((1,) * 2 * rank, bool)
    for axis, (dim, _) in enumerate(geometry.core):
        shape = [1] * (2 * rank)
        within = rank if axis == rank - 1 else rank + 1 + axis
        shape[axis], shape[within] = grid[axis], sides[axis]
        real &= (jnp.arange(grid[axis] * sides[axis]) < dim).reshape(shape)
    stored = (*grid, sides[-1], *sides[:-1])
    return jnp.broadcast_to(real, stored).reshape(geometry.stored_shape)


def _core(geometry: BlockGeometry) -> tuple[list[int], list[int]]:
    """Grid and sides of the dimensions that hold blocks."""
    return [-(-dim // side) for dim, side in geometry.core], [side for _, side in geometry.core]


def _columns(x, geometry, basis, grid_axis):
    """Transforms the last dimension, a block's columns."""
    return _along_last(x, geometry.core[-1:], basis, grid_axis)


def _rows(x, geometry, basis):
    """Transforms the last dimension of ``(*grid, columns, rows)``."""
    return _along_last(x, geometry.core[:-1], basis, grid_axis=-4)


def _along_last(x, dims, basis, grid_axis):
    """``x @ basis.T`` over the last dimension, with a smaller basis at the end of ``grid_axis``.

    ``dims`` are the ``(dimension, side)`` that the last dimension of ``x`` is made of; at most
    the last of them is not divided by its side.
    """
    if basis is None or not dims:
        return x
    matrix = _kronecker(dims, basis, x.dtype)
    dim, side = dims[-1]
    if dim % side == 0:
        return _product(x, matrix.T)
    last_matrix = _kronecker([*dims[:-1], (dim % side, side)], basis, x.dtype)
    whole, last = jnp.split(x, [dim // side], axis=grid_axis)
    parts = [_product(whole, matrix.T), _product(last, last_matrix.T)]
    return jnp.concatenate(parts, axis=grid_axis)


def _kronecker(dims, basis, dtype):
    """The basis of several dimensions at once; a dimension smaller than its side is padded."""
    matrix = jnp.ones((1, 1), dtype)
    for dim, side in dims:
        real = min(dim, side)
        factor = jnp.asarray(basis(real), dtype)
        matrix = jnp.kron(matrix, jnp.pad(factor, (0, side - real)))
    return matrix


def _product(x, matrix):
    """``x @ matrix`` as one two-dimensional product, in full precision on every device."""
    flat = jnp.matmul(x.reshape(-1, x.shape[-1]), matrix, precision=jax.lax.Precision.HIGHEST)
    return flat.reshape(*x.shape[:-1], matrix.shape[-1])

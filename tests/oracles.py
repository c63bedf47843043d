"""What blocks and their transforms are, written down a second time: NumPy float64 and SciPy.

Shares nothing with the library. The stored layout is the documented one: the grid of blocks, then
a block's coefficients, columns first, where its columns are its last side larger than 1. Blocks
that end at an edge are followed by zeros.
"""

import numpy as np
import scipy.fft


def block_sides(shape, chunk, rule):
    """Sides of a block: the last two dimensions larger than 1 first, then what still fits."""

    def divisor(dim, limit):
        return max(side for side in range(1, dim + 1) if dim % side == 0 and side <= limit)

    sides = [1] * len(shape)
    axes = [axis for axis in range(len(shape)) if shape[axis] > 1][::-1]
    for place, axis in enumerate(axes):
        if place >= 2:
            rows = int(np.prod(sides)) // sides[axes[0]]
            room = min(chunk, chunk * chunk // int(np.prod(sides)), 4 * chunk // rows)
            sides[axis] = divisor(shape[axis], max(room, 1))
        elif rule == "divisor":
            sides[axis] = divisor(shape[axis], chunk)
        elif shape[axis] <= chunk:
            sides[axis] = shape[axis]
        else:  # of sides that need the fewest blocks, the least multiple of 8
            fewest = -(-shape[axis] // chunk)
            enough = [n for n in range(1, chunk + 1) if n * fewest >= shape[axis]]
            sides[axis] = next((n for n in enough if n % 8 == 0), chunk)
    return tuple(sides)


def dct(block):
    return scipy.fft.dctn(block, norm="ortho") if block.ndim else block


def inverse_dct(block):
    return scipy.fft.idctn(block, norm="ortho") if block.ndim else block


def fixed_signs(block):
    """The signs that the randomized DCT gives to a block's elements."""
    return 2.0 * np.random.RandomState(0).randint(2, size=block.shape) - 1


def randomized_dct(block):
    return dct(block * fixed_signs(block))


def inverse_randomized_dct(block):
    return inverse_dct(block) * fixed_signs(block)


def to_coefficients(tensor, sides, transform):
    """The stored coefficients of a tensor, float64 ``(*grid, n)``."""
    tensor = np.asarray(tensor, np.float64)
    grid = _grid(tensor.shape, sides)
    whole = np.zeros([n * side for n, side in zip(grid, sides, strict=True)])
    whole[tuple(map(slice, tensor.shape))] = tensor
    stored = np.zeros((*grid, int(np.prod(sides))))
    for where in np.ndindex(*grid):
        block = transform(whole[_region(where, sides)])
        block = np.moveaxis(block, _last(block.shape), 0) if block.ndim else block
        stored[where] = block.reshape(-1)
    return stored


def to_tensor(stored, shape, sides, inverse):
    """The tensor of stored coefficients, float64."""
    whole = np.zeros([n * side for n, side in zip(_grid(shape, sides), sides, strict=True)])
    for where in np.ndindex(*_grid(shape, sides)):
        block = np.asarray(stored[where], np.float64)
        if sides:
            last = _last(sides)
            block = block.reshape(sides[last], *sides[:last], *sides[last + 1 :])
            block = np.moveaxis(block, 0, last)
        whole[_region(where, sides)] = inverse(block.reshape(sides))
    return whole[tuple(map(slice, shape))]


def _grid(shape, sides):
    return tuple(-(-dim // side) for dim, side in zip(shape, sides, strict=True))


def _region(where, sides):
    return tuple(slice(g * s, (g + 1) * s) for g, s in zip(where, sides, strict=True))


def _last(shape):
    """The last dimension larger than 1."""
    return max((axis for axis, dim in enumerate(shape) if dim > 1), default=0)

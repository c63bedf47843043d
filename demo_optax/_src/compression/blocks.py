"""Blocks: how a tensor of any rank is cut into the blocks that are compressed.

A block has one side per dimension and at most ``block_side**2`` elements, so that ``topk``
coefficients of a block are about the same share of every large tensor:

* The last two dimensions larger than 1 get sides of at most ``block_side``. A matrix is cut into
  ``64 x 64`` blocks and a vector into slices of 64.
* Where those two leave room, the dimensions in front join the block, each with the largest of its
  divisors that still fits, up to ``4 * block_side`` rows. A convolution kernel ``(3, 3, 3, 64)`` is
  one block of 1728 elements, and an attention kernel ``(768, 12, 64)`` has blocks of
  ``(4, 12, 64)``. Layers stacked by a scan, ``(layers, 512, 512)``, are compressed layer by layer.

All blocks of a tensor have equal sides. If the block side does not divide a dimension, the tensor
is padded with zeros (``block_rule="pad"``).

A tensor may also be a stack of blocks already, along its first dimension (``block_rule="stack"``).
"""

import math
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from demo_optax._src.arrays import Tensor

BlockRule = Literal["pad", "divisor", "stack"]
BLOCK_RULES = get_args(BlockRule)


class BlockGeometry(NamedTuple):
    """The blocks of one tensor: their sides, and how many there are along each dimension.

    Attributes:
      block_shape: the sides larger than 1, or ``(1,)`` if there are none.
      stored_shape: shape of the coefficients, which is the grid followed by a block. The first
        ``len(shape)`` dimensions match the tensor's, so that its PartitionSpec applies.
    """

    shape: tuple[int, ...]
    sides: tuple[int, ...]
    grid: tuple[int, ...]
    num_blocks: int
    block_size: int
    block_shape: tuple[int, ...]
    stored_shape: tuple[int, ...]

    def cut(self, tensor: Tensor) -> Float[Array, "_blocks *_sides"]:
        """Cuts a tensor into its blocks."""
        sizes = zip(self.shape, self.grid, self.sides, strict=True)
        beyond = [(0, n * side - size, 0) for size, n, side in sizes]
        if any(missing for _, missing, _ in beyond):
            tensor = jax.lax.pad(tensor, jnp.zeros((), tensor.dtype), beyond)
        pairs = zip(self.grid, self.sides, strict=True)
        x = tensor.reshape([n for pair in pairs for n in pair])
        x = x.transpose([*range(0, x.ndim, 2), *range(1, x.ndim, 2)])
        return x.reshape(self.num_blocks, *self.block_shape)

    def join(self, blocks: Float[Array, "_blocks *_sides"]) -> Tensor:
        """Inverts `cut`."""
        rank = len(self.shape)
        x = blocks.reshape(*self.grid, *self.sides)
        x = x.transpose([axis for i in range(rank) for axis in (i, rank + i)])
        x = x.reshape([n * side for n, side in zip(self.grid, self.sides, strict=True)])
        return x if x.shape == self.shape else x[tuple(map(slice, self.shape))]


def block_geometry(
    shape: tuple[int, ...], block_side: int = 64, rule: BlockRule = "pad"
) -> BlockGeometry:
    """Chooses the blocks of a tensor.

    Args:
      shape: the tensor's shape, of any rank.
      block_side: largest number of elements per side of a block.
      rule: with ``"pad"`` a longer dimension is divided into as few blocks as possible, with a side
        that is a multiple of 8 or ``block_side``, and is padded with zeros to whole blocks. With
        ``"divisor"`` a side is the largest divisor of the dimension up to ``block_side``, as in the
        published code, so that a large prime gives blocks of one element. Both rules agree where
        ``block_side`` divides the dimension. With ``"stack"`` the first dimension counts the
        blocks, which have the other dimensions whatever ``block_side`` is.

    Example:
      >>> block_geometry((50257, 512)).sides, block_geometry((50257, 512)).grid
      ((64, 64), (786, 8))
      >>> block_geometry((50257, 512), rule="divisor").sides
      (29, 64)
      >>> block_geometry((100, 10)).sides
      (56, 10)
      >>> block_geometry((768, 12, 64)).sides
      (4, 12, 64)
    """
    is_stack = rule == "stack"
    sides = [1, *shape[1:]][: len(shape)] if is_stack else [1] * len(shape)
    large = [axis for axis, dim in enumerate(shape) if dim > 1 and not is_stack]
    for axis in large[-2:]:
        if rule == "divisor":
            sides[axis] = _largest_divisor(shape[axis], block_side)
        else:
            fewest = math.ceil(shape[axis] / block_side)
            sides[axis] = min(8 * math.ceil(shape[axis] / fewest / 8), block_side, shape[axis])
    for axis in reversed(large[:-2]):
        rows = math.prod(sides) // sides[large[-1]]
        room = min(block_side**2 // math.prod(sides), 4 * block_side // rows, block_side)
        sides[axis] = _largest_divisor(shape[axis], max(room, 1))
    grid = [math.ceil(dim / max(side, 1)) for dim, side in zip(shape, sides, strict=True)]
    return BlockGeometry(
        shape=tuple(shape),
        sides=tuple(sides),
        grid=tuple(grid),
        num_blocks=math.prod(grid),
        block_size=math.prod(sides),
        block_shape=tuple(side for side in sides if side > 1) or (1,),
        stored_shape=(*grid, math.prod(sides)),
    )


def _largest_divisor(dim: int, limit: int) -> int:
    return next(side for side in range(min(dim, limit), 0, -1) if dim % side == 0)

"""Block geometry: how a tensor of any rank is cut into the blocks that are compressed.

A block has one side per dimension and at most ``block_side**2`` elements, so that ``topk``
coefficients of a block mean about the same share of every large tensor:

* The last two dimensions larger than 1 get sides of ``block_side`` (or the dimension, where
  that is smaller). A matrix is cut into ``64 x 64`` blocks, a vector into slices of 64.
* Where those two leave room, the dimensions in front join the block, each with the largest
  of its divisors that still fits, up to ``4 * block_side`` rows: a convolution kernel
  ``(3, 3, 3, 64)`` is one block of 1728 elements, and an attention kernel ``(768, 12, 64)`` has
  blocks of ``(4, 12, 64)``. Layers stacked by a scan, ``(layers, 512, 512)``, are compressed
  layer by layer.

If the block side does not divide a dimension, the last block is smaller (``block_rule="pad"``).
Smaller blocks are transformed and compressed without padding, with as many coefficients as they
have elements. Only where a momentum is stored are they padded with zeros to the size of the others.
"""

import dataclasses
import itertools
import math
from typing import Literal, get_args

BlockRule = Literal["pad", "divisor"]
BLOCK_RULES = get_args(BlockRule)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Blocks of equal shape in one tensor: the interior, or one edge.

    Attributes:
      first: position of the first of them in the tensor's grid.
      grid: blocks along each dimension.
      sides: elements per side of each of them.
    """

    first: tuple[int, ...]
    grid: tuple[int, ...]
    sides: tuple[int, ...]

    @property
    def num_blocks(self) -> int:
        return math.prod(self.grid)

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Sides larger than 1, at least one."""
        return tuple(side for side in self.sides if side > 1) or (1,)

    @property
    def block_size(self) -> int:
        return math.prod(self.sides)

    @property
    def in_grid(self) -> tuple[slice, ...]:
        """Slices of the grid in which its blocks are stored."""
        return tuple(slice(a, a + n) for a, n in zip(self.first, self.grid, strict=True))

    def in_tensor(self, sides: tuple[int, ...]) -> tuple[slice, ...]:
        """Slices of the tensor that hold its elements; the interior blocks have these sides."""
        starts = [a * side for a, side in zip(self.first, sides, strict=True)]
        sizes = [n * side for n, side in zip(self.grid, self.sides, strict=True)]
        return tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))


@dataclasses.dataclass(frozen=True)
class BlockGeometry:
    """Blocks of one tensor.

    Attributes:
      shape: the tensor's shape.
      sides: elements per side of a block, one for each dimension.
    """

    shape: tuple[int, ...]
    sides: tuple[int, ...]

    @property
    def grid(self) -> tuple[int, ...]:
        """Blocks along each dimension."""
        return tuple(-(-dim // side) for dim, side in zip(self.shape, self.sides, strict=True))

    @property
    def num_blocks(self) -> int:
        return math.prod(self.grid)

    @property
    def block_size(self) -> int:
        """Elements of the largest block."""
        return math.prod(self.sides)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the coefficients: the grid, then those of a block.

        The first ``len(shape)`` dimensions match the tensor's, so that its PartitionSpec applies.
        """
        return (*self.grid, self.block_size)

    @property
    def segments(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """Per dimension ``(first block, blocks, side)`` of the full blocks and of the remainder."""
        dims = zip(self.shape, self.sides, strict=True)
        both = [((0, n // side, side), (n // side, 1, n % side)) for n, side in dims]
        return tuple(tuple(s for s in pair if s[1] * s[2]) for pair in both)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The blocks grouped by shape, in the order of the grid; none if the tensor is empty."""
        columns = (zip(*segments, strict=True) for segments in itertools.product(*self.segments))
        if not self.shape:
            return (Piece((), (), ()),)
        return tuple(Piece(*map(tuple, column)) for column in columns)


def block_geometry(
    shape: tuple[int, ...], block_side: int = 64, rule: BlockRule = "pad"
) -> BlockGeometry:
    """Chooses the blocks of a tensor.

    Args:
      shape: the tensor's shape, of any rank.
      block_side: elements per side of a block at most.
      rule: with ``"pad"`` the last block of a dimension may be smaller. With ``"divisor"`` a side
        is the largest divisor of the dimension up to ``block_side``, as in the published code (a
        large prime then gives blocks of one element). Both agree where ``block_side`` divides the
        dimension.

    Example:
      >>> block_geometry((50257, 512)).sides, block_geometry((50257, 512)).grid
      ((64, 64), (786, 8))
      >>> block_geometry((50257, 512), rule="divisor").sides
      (29, 64)
      >>> block_geometry((768, 12, 64)).sides
      (4, 12, 64)
    """
    side_of = _largest_divisor if rule == "divisor" else min
    sides = [1] * len(shape)
    large = [axis for axis, dim in enumerate(shape) if dim > 1]
    for axis in large[-2:]:
        sides[axis] = side_of(shape[axis], block_side)
    for axis in reversed(large[:-2]):
        rows = math.prod(sides) // sides[large[-1]]
        room = min(block_side**2 // math.prod(sides), 4 * block_side // rows, block_side)
        sides[axis] = _largest_divisor(shape[axis], max(room, 1))
    return BlockGeometry(tuple(shape), tuple(sides))


def _largest_divisor(dim: int, limit: int) -> int:
    return next(side for side in range(min(dim, limit), 0, -1) if dim % side == 0)

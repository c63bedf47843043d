"""Block geometry: how a tensor of any rank is cut into the blocks that are compressed.

A block has one side per dimension and at most ``block_side**2`` elements, so that ``topk``
coefficients of a block are about the same share of every large tensor:

* The last two dimensions larger than 1 get sides of ``block_side``, or of the dimension where it is
  smaller. A matrix is cut into ``64 x 64`` blocks and a vector into slices of 64.
* Where those two leave room, the dimensions in front join the block, each with the largest of its
  divisors that still fits, up to ``4 * block_side`` rows. A convolution kernel ``(3, 3, 3, 64)`` is
  one block of 1728 elements, and an attention kernel ``(768, 12, 64)`` has blocks of
  ``(4, 12, 64)``. Layers stacked by a scan, ``(layers, 512, 512)``, are compressed layer by layer.

If the block side does not divide a dimension, the last block is smaller (``block_rule="pad"``).
Smaller blocks are transformed and compressed without padding, and are padded with zeros to the size
of the others only where a momentum is stored.

A tensor may also be a stack of blocks already, along its first dimension (``block_rule="stack"``).
"""

import itertools
import math
from typing import Literal, NamedTuple, get_args

BlockRule = Literal["pad", "divisor", "stack"]
BLOCK_RULES = get_args(BlockRule)


class Piece(NamedTuple):
    """Blocks of equal shape in one tensor, either its interior or one edge.

    Attributes:
      first: position of the first block in the tensor's grid.
      in_grid: bounds of the part of the tensor's grid where the blocks are stored.
      in_tensor: bounds of the part of the tensor that holds their elements.
      block_shape: the sides larger than 1, or ``(1,)`` if there are none.
    """

    first: tuple[int, ...]
    grid: tuple[int, ...]
    sides: tuple[int, ...]
    in_grid: tuple[tuple[int, int], ...]
    in_tensor: tuple[tuple[int, int], ...]
    num_blocks: int
    block_shape: tuple[int, ...]
    block_size: int


class BlockGeometry(NamedTuple):
    """The blocks of one tensor.

    Attributes:
      block_size: number of elements in the largest block.
      stored_shape: shape of the coefficients, which is the grid followed by a block. The first
        ``len(shape)`` dimensions match the tensor's, so that its PartitionSpec applies.
      pieces: the blocks grouped by shape, in the order of the grid; none if the tensor is empty.
      cuts: number of pieces along each dimension.
    """

    shape: tuple[int, ...]
    sides: tuple[int, ...]
    grid: tuple[int, ...]
    num_blocks: int
    block_size: int
    stored_shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    cuts: tuple[int, ...]


def block_geometry(
    shape: tuple[int, ...], block_side: int = 64, rule: BlockRule = "pad"
) -> BlockGeometry:
    """Chooses the blocks of a tensor.

    Args:
      shape: the tensor's shape, of any rank.
      block_side: largest number of elements per side of a block.
      rule: with ``"pad"`` the last block of a dimension may be smaller. With ``"divisor"`` a side
        is the largest divisor of the dimension up to ``block_side``, as in the published code, so
        that a large prime gives blocks of one element. Both rules agree where ``block_side``
        divides the dimension. With ``"stack"`` the first dimension counts the blocks, which have
        the other dimensions whatever ``block_side`` is.

    Example:
      >>> block_geometry((50257, 512)).sides, block_geometry((50257, 512)).grid
      ((64, 64), (786, 8))
      >>> block_geometry((50257, 512), rule="divisor").sides
      (29, 64)
      >>> block_geometry((768, 12, 64)).sides
      (4, 12, 64)
    """
    side_of = _largest_divisor if rule == "divisor" else min
    is_stack = rule == "stack"
    sides = [1, *shape[1:]][: len(shape)] if is_stack else [1] * len(shape)
    large = [axis for axis, dim in enumerate(shape) if dim > 1 and not is_stack]
    for axis in large[-2:]:
        sides[axis] = side_of(shape[axis], block_side)
    for axis in reversed(large[:-2]):
        rows = math.prod(sides) // sides[large[-1]]
        room = min(block_side**2 // math.prod(sides), 4 * block_side // rows, block_side)
        sides[axis] = _largest_divisor(shape[axis], max(room, 1))

    grid, segments = [], []  # a dimension has full blocks and a remainder
    for dim, side in zip(shape, sides, strict=True):
        full, rest = divmod(dim, side)
        grid.append(full + bool(rest))
        segments.append([s for s in ((0, full, side), (full, 1, rest)) if s[1] * s[2]])
    pieces = []
    for segment in itertools.product(*segments):
        starts, counts, lengths = zip(*segment, strict=True) if shape else ((), (), ())
        offsets = [first * side for first, side in zip(starts, sides, strict=True)]
        pieces.append(
            Piece(
                first=starts,
                grid=counts,
                sides=lengths,
                in_grid=tuple((a, a + n) for a, n in zip(starts, counts, strict=True)),
                in_tensor=tuple(
                    (a, a + n * side) for a, n, side in zip(offsets, counts, lengths, strict=True)
                ),
                num_blocks=math.prod(counts),
                block_shape=tuple(side for side in lengths if side > 1) or (1,),
                block_size=math.prod(lengths),
            )
        )
    return BlockGeometry(
        shape=tuple(shape),
        sides=tuple(sides),
        grid=tuple(grid),
        num_blocks=math.prod(grid),
        block_size=math.prod(sides),
        stored_shape=(*grid, math.prod(sides)),
        pieces=tuple(pieces),
        cuts=tuple(map(len, segments)),
    )


def _largest_divisor(dim: int, limit: int) -> int:
    return next(side for side in range(min(dim, limit), 0, -1) if dim % side == 0)

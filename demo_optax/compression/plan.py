"""The plan of a tree of tensors: a few arrays of equal blocks, and back.

    tensor ── blocks ──► (blocks, *sides) ── transform ──► (blocks, n) ── stored ──► (*grid, n)
           ◄─ tensors ──                  ◄── inverse ────             ◄─ stacked ──

Decided once for each list of shapes. What follows works on one array ``(blocks, n)`` for each shape
of blocks, however many tensors they come from.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from demo_optax.arrays import Blocks, Coefficients, FloatScalar, IntScalar, Tensor
from demo_optax.compression import indices, transforms
from demo_optax.compression.blocks import BlockGeometry, Piece
from demo_optax.compression.packet import MULTIPLE, Layout, Section
from demo_optax.compression.settings import Compression
from demo_optax.numerics import upcast, widest

Shape = tuple[int, ...]
Stored = Float[Array, "*_grid _n"]


@dataclasses.dataclass(frozen=True)
class Group:
    """All blocks of one shape.

    Attributes:
      sides: of each block.
      members: the tensors, by their numbers, and the pieces of them that hold such blocks.
      section: of the packet.
    """

    sides: Shape
    members: tuple[tuple[int, Piece], ...]
    section: Section


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a list of tensors is compressed.

    Attributes:
      compression: the settings.
      geometries: one for each tensor.
      groups: the blocks of all tensors, by their shapes. Empty tensors have none.
    """

    compression: Compression
    geometries: tuple[BlockGeometry, ...]
    groups: tuple[Group, ...]

    @property
    def layout(self) -> Layout:
        """Of the packet; parts for owners are dealt out, which no device wants in multiples."""
        sections = tuple(group.section for group in self.groups)
        dealt = self.compression.exchange == "two-phase"
        return Layout(sections, multiple=1 if dealt else MULTIPLE)

    def blocks(self, tensors: Sequence[Tensor]) -> list[Blocks]:
        """For each group its blocks, cut out of the tensors.

        In float32, or the widest dtype of any tensor that is wider.
        """
        dtype = widest(*[x.dtype for x in tensors])

        def cut(number: int, piece: Piece) -> Blocks:
            x = tensors[number].astype(dtype)[piece.in_tensor(self.geometries[number].sides)]
            x = x.reshape(_interleaved(piece.grid, piece.sides))
            x = x.transpose([*range(0, x.ndim, 2), *range(1, x.ndim, 2)])
            return x.reshape(piece.num_blocks, *piece.block_shape)

        return [_concatenated(itertools.starmap(cut, group.members)) for group in self.groups]

    def tensors(self, blocks: Sequence[Blocks]) -> list[Tensor]:
        """The tensors of such blocks: the inverse of `blocks`."""

        def paste(x: Blocks, piece: Piece, _: Shape) -> Tensor:
            rank = len(piece.grid)
            x = x.reshape(*piece.grid, *piece.sides)
            x = x.transpose(_interleaved(range(rank), range(rank, 2 * rank)))
            return x.reshape([n * side for n, side in zip(piece.grid, piece.sides, strict=True)])

        return self._assembled(blocks, paste, [geometry.shape for geometry in self.geometries])

    def transform(
        self, blocks: Sequence[Blocks], step: IntScalar
    ) -> tuple[list[Float[Array, "_blocks _columns _rows"]], FloatScalar]:
        """The coefficients of each group's blocks, and their energy."""
        basis = self.compression.coordinates.basis(step)
        pairs = zip(blocks, self.groups, strict=True)
        transformed = [transforms.forward(x, group.sides, basis) for x, group in pairs]
        return [x for x, _ in transformed], sum(
            (e for _, e in transformed), jnp.zeros((), jnp.float32)
        )

    def inverse(self, coefficients: Sequence[Coefficients], step: IntScalar) -> list[Blocks]:
        """The blocks of each group's coefficients."""
        basis = self.compression.coordinates.basis(step)
        pairs = zip(coefficients, self.groups, strict=True)
        return [transforms.inverse(x, group.sides, basis) for x, group in pairs]

    def rebased(self, momenta: Sequence[Coefficients], step: IntScalar) -> list[Coefficients]:
        """The coefficients of a step's basis, of those of the step before."""
        if not transforms.is_redrawn(self.compression.transform):
            return list(momenta)
        last, now = (self.compression.coordinates.basis(s) for s in (step - 1, step))
        return [
            transforms.change_basis(x, group.sides, last, now)
            for x, group in zip(momenta, self.groups, strict=True)
        ]

    def stacked(self, stored: Sequence[Stored]) -> list[Coefficients]:
        """For each group the coefficients of what tensors store, in float32 or wider."""

        def take(number: int, piece: Piece) -> Coefficients:
            x = stored[number][(*piece.in_grid, slice(piece.block_size))]
            return x.reshape(piece.num_blocks, piece.block_size)

        return [
            upcast(_concatenated(itertools.starmap(take, group.members))) for group in self.groups
        ]

    def stored(self, coefficients: Sequence[Coefficients]) -> list[Stored]:
        """What tensors store of such coefficients: the inverse of `stacked`, padded with zeros."""

        def put(x: Coefficients, piece: Piece, shape: Shape) -> Stored:
            x = jnp.pad(x, ((0, 0), (0, shape[-1] - piece.block_size)))
            return x.reshape(*piece.grid, shape[-1])

        shapes = [geometry.stored_shape for geometry in self.geometries]
        return self._assembled(coefficients, put, shapes)

    def _assembled(
        self,
        groups: Sequence[Tensor],
        restore: Callable[[Tensor, Piece, Shape], Tensor],
        shapes: Sequence[Shape],
    ) -> list[Tensor]:
        """The tensors of these shapes, each joined of its pieces."""
        parts: dict[tuple[int, Piece], Tensor] = {}
        for group, x in zip(self.groups, groups, strict=True):
            ends = itertools.accumulate(piece.num_blocks for _, piece in group.members)
            parts |= zip(group.members, jnp.split(x, list(ends)[:-1]), strict=True)
        tensors: list[Tensor] = []
        for number, (geometry, shape) in enumerate(zip(self.geometries, shapes, strict=True)):
            pieces = [restore(parts[number, piece], piece, shape) for piece in geometry.pieces]
            for axis, segments in reversed(list(enumerate(geometry.segments))):
                starts = range(0, len(pieces), max(len(segments), 1))
                pieces = [_concatenated(pieces[i : i + len(segments)], axis) for i in starts]
            tensors.append(pieces[0] if pieces else jnp.zeros(shape))
        return tensors


@functools.lru_cache(maxsize=64)
def make_plan(compression: Compression, shapes: tuple[Shape, ...]) -> Plan:
    """The plan of tensors of these shapes."""
    geometries = tuple(map(compression.coordinates.geometry, shapes))
    members: dict[Shape, list[tuple[int, Piece]]] = {}
    for number, geometry in enumerate(geometries):
        for piece in geometry.pieces:
            members.setdefault(piece.block_shape, []).append((number, piece))

    def group(sides: Shape, of_shape: Sequence[tuple[int, Piece]]) -> Group:
        blocks = sum(piece.num_blocks for _, piece in of_shape)
        return Group(
            sides, tuple(of_shape), section_of(compression, blocks, of_shape[0][1].block_size)
        )

    return Plan(compression, geometries, tuple(itertools.starmap(group, members.items())))


def section_of(compression: Compression, blocks: int, block_size: int) -> Section:
    """The section of so many blocks of one size."""
    k = min(compression.topk, block_size)
    coding = compression.index_coding
    if compression.selection == "bins":
        coding = "bins"
    elif coding == "auto":
        coding = indices.cheapest(block_size, k)
    if k == block_size:
        return Section(blocks, block_size, k, None, compression.value_coding)
    if compression.positions_travel:
        return Section(blocks, block_size, k, coding, compression.value_coding)
    draw = compression.selection, compression.seed
    return Section(blocks, block_size, k, None, compression.value_coding, draw)


def _concatenated(arrays: Iterable[Tensor], axis: int = 0) -> Tensor:
    arrays = list(arrays)
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis)


def _interleaved(one: Iterable[int], other: Iterable[int]) -> list[int]:
    return [n for pair in zip(one, other, strict=True) for n in pair]

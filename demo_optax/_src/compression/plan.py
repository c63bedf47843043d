"""The plan of a tree of tensors: a few arrays of equal blocks, and back, part by part.

tensor ── blocks ───► (blocks, *sides) ── transform ──► (blocks, n) ── pack ──► (*grid, n)
       ◄ to_tensors ─                  ◄── inverse ────             ◄─ unpack ─

part     some consecutive tensors; parts are computed one after another
piece    the blocks of one shape in one tensor
group    the blocks of one shape in all tensors of a part, as one array
section  the blocks of one shape in all parts; they are contiguous in the packet
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from demo_optax._src.arrays import (
    Blocks,
    Coefficients,
    IntScalar,
    Positions,
    Tensor,
    Values,
    upcast,
    widest,
)
from demo_optax._src.compression import transforms
from demo_optax._src.compression.bits import true_once_computed
from demo_optax._src.compression.blocks import BlockGeometry, Piece
from demo_optax._src.compression.packet import Message, Section
from demo_optax._src.compression.selection import make_selector, select, shared_positions
from demo_optax._src.compression.settings import Compression, MomentumFormat

Shape = tuple[int, ...]
Stored = Float[Array, "*_grid _n"]
Momenta = list[list[Coefficients]]


@dataclasses.dataclass(frozen=True)
class Group:
    """All blocks of one shape in a part.

    Attributes:
      sides: sides of each block.
      members: pairs of a tensor's index in the part and a piece of it with such blocks.
      selector: which of their coefficients are sent.
      section: index of the packet's section that they belong to.
      first: index of their first row in that section.
    """

    sides: Shape
    members: tuple[tuple[int, Piece], ...]
    selector: Any
    section: int
    first: int

    @property
    def num_blocks(self) -> int:
        return sum(piece.num_blocks for _, piece in self.members)


@dataclasses.dataclass(frozen=True)
class Part:
    """How some neighbouring tensors are cut into blocks and transformed.

    Attributes:
      momentum_format: transform and blocks.
      tensors: start and stop (exclusive) of the tensors' indices.
      geometries: the block geometry of each tensor.
      groups: their blocks, by shape. Empty tensors have none.
      merged: whether the momenta of a group are one array; otherwise each piece has one.
    """

    momentum_format: MomentumFormat
    tensors: tuple[int, int]
    geometries: tuple[BlockGeometry, ...]
    groups: tuple[Group, ...]
    merged: bool

    def blocks(self, tensors: Sequence[Tensor]) -> list[Blocks]:
        """Cuts the tensors into blocks: one array for each group.

        The dtype is the widest of the tensors' dtypes, and float32 at least.
        """
        dtype = widest(*[x.dtype for x in tensors])

        def cut(number: int, piece: Piece) -> Blocks:
            x = tensors[number].astype(dtype)[piece.in_tensor(self.geometries[number].sides)]
            x = x.reshape(_interleaved(piece.grid, piece.sides))
            x = x.transpose([*range(0, x.ndim, 2), *range(1, x.ndim, 2)])
            return x.reshape(piece.num_blocks, *piece.block_shape)

        return [_concatenated(itertools.starmap(cut, group.members)) for group in self.groups]

    def to_tensors(self, blocks: Sequence[Blocks]) -> list[Tensor]:
        """Puts blocks back into tensors: the inverse of `blocks`."""

        def paste(x: Blocks, piece: Piece, _: Shape) -> Tensor:
            rank = len(piece.grid)
            x = x.reshape(*piece.grid, *piece.sides)
            x = x.transpose(_interleaved(range(rank), range(rank, 2 * rank)))
            return x.reshape([n * side for n, side in zip(piece.grid, piece.sides, strict=True)])

        shapes = [geometry.shape for geometry in self.geometries]
        return self._assembled(_members(self.groups, blocks), paste, shapes)

    def transform(
        self, blocks: Sequence[Blocks], step: IntScalar
    ) -> list[Float[Array, "_blocks _columns _rows"]]:
        """The coefficients of each group's blocks."""
        basis = self.momentum_format.basis(step)
        pairs = zip(blocks, self.groups, strict=True)
        return [transforms.forward(x, group.sides, basis) for x, group in pairs]

    def inverse(self, coefficients: Sequence[Coefficients], step: IntScalar) -> list[Blocks]:
        """The blocks of each group's coefficients."""
        basis = self.momentum_format.basis(step)
        pairs = zip(coefficients, self.groups, strict=True)
        return [transforms.inverse(x, group.sides, basis) for x, group in pairs]

    def split(self, by_group: Sequence[Any]) -> list[list[Any]]:
        """Divides each group's rows in the same way as its momenta."""
        return [[tree] for tree in by_group] if self.merged else _members(self.groups, by_group)

    def unpack(self, stored: Sequence[Stored]) -> Momenta:
        """Unpacks the stored arrays into momenta for each group, in float32 or wider."""

        def take(number: int, piece: Piece) -> Coefficients:
            x = stored[number][(*piece.in_grid, slice(piece.block_size))]
            return upcast(x.reshape(piece.num_blocks, piece.block_size))

        pieces = [list(itertools.starmap(take, group.members)) for group in self.groups]
        return [[_concatenated(x)] for x in pieces] if self.merged else pieces

    def pack(self, momenta: Momenta) -> list[Stored]:
        """The arrays to store for each tensor, padded with zeros: the inverse of `unpack`."""

        def put(x: Coefficients, piece: Piece, shape: Shape) -> Stored:
            x = jnp.pad(x, ((0, 0), (0, shape[-1] - piece.block_size)))
            return x.reshape(*piece.grid, shape[-1])

        shapes = [geometry.stored_shape for geometry in self.geometries]
        pieces = _members(self.groups, [x for (x,) in momenta]) if self.merged else momenta
        return self._assembled(pieces, put, shapes)

    def advance_basis(self, momenta: Momenta, step: IntScalar) -> Momenta:
        """Changes momenta from the basis of the step before to that of this step."""
        return [
            advance_basis(self.momentum_format, pieces, group.sides, step)
            for group, pieces in zip(self.groups, momenta, strict=True)
        ]

    def select(self, momenta: Momenta, shared: Sequence[Positions | None]) -> Message:
        """For each group the coefficients to send, at shared positions or at chosen ones."""
        selectors = [group.selector for group in self.groups]
        return select(selectors, list(map(_concatenated, momenta)), shared)

    def subtract(
        self,
        momenta: Momenta,
        message: Sequence[tuple[Positions, Values, Float[Array, "_blocks 1"]]],
        step: IntScalar,
        delay: int,
    ) -> Momenta:
        """Subtracts a message, for each group positions, values and factors, from the momenta."""
        redrawn = delay and transforms.is_redrawn(self.momentum_format.transform)

        def less(
            group: Group,
            m: Coefficients,
            positions: Positions,
            values: Values,
            factors: Float[Array, "_blocks 1"],
        ) -> Coefficients:
            if not redrawn:
                return group.selector.add(m, positions, -factors * values)
            sent = group.selector.add(jnp.zeros_like(m), positions, factors * values)
            return m - advance_basis(self.momentum_format, [sent], group.sides, step)[0]

        return [
            [less(group, m, *row) for m, row in zip(pieces, rows, strict=True)]
            for group, pieces, rows in zip(self.groups, momenta, self.split(message), strict=True)
        ]

    def _assembled(
        self,
        by_group: Sequence[Sequence[Tensor]],
        restore: Callable[[Tensor, Piece, Shape], Tensor],
        shapes: Sequence[Shape],
    ) -> list[Tensor]:
        """The tensors of these shapes, each concatenated from its pieces."""
        piece_of: dict[tuple[int, Piece], Tensor] = {}
        for group, pieces in zip(self.groups, by_group, strict=True):
            piece_of |= zip(group.members, pieces, strict=True)
        tensors: list[Tensor] = []
        for number, (geometry, shape) in enumerate(zip(self.geometries, shapes, strict=True)):
            pieces = [restore(piece_of[number, piece], piece, shape) for piece in geometry.pieces]
            for axis, segments in reversed(list(enumerate(geometry.segments))):
                starts = range(0, len(pieces), max(len(segments), 1))
                pieces = [_concatenated(pieces[i : i + len(segments)], axis) for i in starts]
            tensors.append(pieces[0] if pieces else jnp.zeros(shape))
        return tensors


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a list of tensors is compressed.

    Attributes:
      compression: the settings.
      parts: the tensors, divided into parts of about equal size.
      sections: the packet's sections, one for each shape of blocks.
      sides: the sides of the blocks of each section.
    """

    compression: Compression
    parts: tuple[Part, ...]
    sections: tuple[Section, ...]
    sides: tuple[Shape, ...]

    @property
    def geometries(self) -> tuple[BlockGeometry, ...]:
        """The block geometry of each tensor."""
        return tuple(geometry for part in self.parts for geometry in part.geometries)

    def shared_positions(self, step: IntScalar) -> list[Positions | None]:
        """For each section the positions that all workers know; None where each sends its own."""
        return shared_positions(self.sections, step)

    def per_part(self, tree: Any) -> list[list[Any]]:
        """For each part the leaves of its tensors."""
        leaves = jax.tree.leaves(tree)
        return [leaves[slice(*part.tensors)] for part in self.parts]

    def rows_per_part(self, trees: Iterable[Any], axis: int = 0) -> list[list[Any]]:
        """Divides each section's rows, along an axis, among the parts and their groups."""

        def rows(group: Group, tree: Any) -> Any:
            first, last = group.first, group.first + group.num_blocks
            rows = functools.partial(
                jax.lax.slice_in_dim, start_index=first, limit_index=last, axis=axis
            )
            return jax.tree.map(rows, tree)

        trees = list(trees)
        return [[rows(group, trees[group.section]) for group in p.groups] for p in self.parts]

    def join(self, messages: Sequence[Message]) -> Message:
        """Joins the parts' messages, section by section."""
        rows: list[list[tuple[Any, Any]]] = [[] for _ in self.sections]
        for part, message in zip(self.parts, messages, strict=True):
            for group, row in zip(part.groups, zip(*message, strict=True), strict=True):
                rows[group.section].append(row)
        joined = [tuple(map(_concatenated, zip(*section, strict=True))) for section in rows]
        return Message(*zip(*joined, strict=True)) if joined else Message((), ())


@functools.lru_cache(maxsize=64)
def make_plan(compression: Compression, shapes: tuple[Shape, ...], platform: str = "cpu") -> Plan:
    """The plan of tensors of these shapes. Packets are the same on all platforms."""
    momentum_format = compression.momentum_format
    geometries = tuple(map(momentum_format.geometry, shapes))
    sides_of: list[Shape] = []
    filled: list[int] = []
    parts: list[Part] = []

    def group(sides: Shape, members_of_shape: Sequence[tuple[int, Piece]]) -> Group:
        if sides not in sides_of:
            sides_of.append(sides)
            filled.append(0)
        number = sides_of.index(sides)
        result = Group(sides, tuple(members_of_shape), selector_of(number), number, filled[number])
        filled[number] += result.num_blocks
        return result

    def selector_of(number: int) -> Any:
        n, k, seed = math.prod(sides_of[number]), compression.topk, compression.seed
        return make_selector(compression.selection, n, k, seed, number)

    for start, stop in _part_bounds([math.prod(shape) for shape in shapes], platform):
        members: dict[Shape, list[tuple[int, Piece]]] = {}
        for number in range(start, stop):
            for piece in geometries[number].pieces:
                members.setdefault(piece.block_shape, []).append((number - start, piece))
        groups = tuple(itertools.starmap(group, members.items()))
        tensors = (start, stop), geometries[start:stop]
        parts.append(Part(momentum_format, *tensors, groups, merged=platform == "tpu"))

    sections = [
        Section(blocks, selector_of(number), compression.value_coding)
        for number, blocks in enumerate(filled)
    ]
    return Plan(compression, tuple(parts), tuple(sections), tuple(sides_of))


_PARTS = {"cpu": 16, "tpu": 8}  # elsewhere, on GPUs, 4
_SMALLEST_PART = 2**20  # elements; below, a part's own programs cost more than they save


def _part_bounds(sizes: Sequence[int], platform: str) -> list[tuple[int, int]]:
    """The tensors of each part, as start and stop (exclusive).

    At most `_PARTS` parts of about equal size. Only the last may be below `_SMALLEST_PART`.
    """
    target = max(sum(sizes) / _PARTS.get(platform, 4), _SMALLEST_PART)
    bounds, start, size = [], 0, 0
    for number, elements in enumerate(sizes):
        if size and size + elements / 2 > target:
            bounds.append((start, number))
            start, size = number, 0
        size += elements
    return [*bounds, (start, len(sizes))]


def sequentially(
    fn: Callable[..., Any], parts: Sequence[Part], *arguments: Sequence[Any]
) -> list[list[Any]]:
    """Calls ``fn(part, after_previous, *arguments)`` for one part after another.

    ``after_previous(small, large)`` returns its one or two trees unchanged, as a pair, and makes
    them depend on the results of the previous part (on CPUs and GPUs only ``small``). So XLA does
    not hold the temporary arrays of all parts in memory, nor merge their products.

    Args:
      fn: returns a tuple of results, and arrays that are computed together with them.
      parts: a plan's parts.
      arguments: for each further argument of ``fn``, one tree per part.

    Returns:
      For each result of ``fn``, a list with one entry per part.
    """
    results, previous = [], []
    for part, *part_arguments in zip(parts, *arguments, strict=True):
        result, computed = fn(
            part, functools.partial(_after_previous, previous, part.merged), *part_arguments
        )
        previous = [x for x in computed if x.size]
        results.append(result)
    return [list(x) for x in zip(*results, strict=True)]


def _after_previous(
    previous: Sequence[Array], merged: bool, small: Any, large: Any = ()
) -> tuple[Any, Any]:
    """Two trees, unchanged, that depend on the ``previous`` arrays.

    On TPUs by a barrier. XLA removes barriers for CPUs and GPUs: there only the first tree depends
    on the arrays, by a select.
    """
    if not previous:
        return small, large
    if merged:
        first = [x.reshape(-1)[0] for x in previous]
        return jax.lax.optimization_barrier((small, large, first))[:2]
    computed = true_once_computed(previous)

    def use(x: Array) -> Array:
        return jnp.where(computed, x, jnp.zeros_like(x))

    return jax.tree.map(use, small), large


def _members(groups: Sequence[Group], by_group: Sequence[Any]) -> list[list[Any]]:
    """Divides each group's rows among its pieces."""

    def members(group: Group, tree: Any) -> list[Any]:
        if len(group.members) == 1:
            return [tree]
        ends = [0, *itertools.accumulate(piece.num_blocks for _, piece in group.members)]
        rows = itertools.starmap(slice, itertools.pairwise(ends))
        return [jax.tree.map(operator.itemgetter(row), tree) for row in rows]

    return list(itertools.starmap(members, zip(groups, by_group, strict=True)))


def advance_basis(
    momentum_format: MomentumFormat, momenta: Sequence[Coefficients], sides: Shape, step: IntScalar
) -> list[Coefficients]:
    """Changes momenta from the basis of the step before to that of this step."""
    if not transforms.is_redrawn(momentum_format.transform):
        return list(momenta)
    old, new = (momentum_format.basis(s) for s in (step - 1, step))
    return [transforms.change_basis(x, sides, old, new) for x in momenta]


def _concatenated(arrays: Iterable[Any], axis: int = 0) -> Any:
    arrays = list(arrays)
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis)


def _interleaved(one: Iterable[int], other: Iterable[int]) -> list[int]:
    return [n for pair in zip(one, other, strict=True) for n in pair]

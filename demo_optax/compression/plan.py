"""The plan of a tree of tensors: a few arrays of equal blocks, and back, part by part.

tensor ── blocks ───► (blocks, *sides) ── transform ──► (blocks, n) ── stored ──► (*grid, n)
       ◄ to_tensors ─                  ◄── inverse ────             ◄─ momenta ──

part     a run of neighbouring tensors; one part is computed after the other
piece    the blocks of one shape in a tensor
group    the blocks of one shape in a part, of all its tensors: one array
section  the blocks of one shape in all parts: one stretch of the packet
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

from demo_optax.arrays import (
    Blocks,
    Coefficients,
    IntScalar,
    Positions,
    Tensor,
    Values,
    upcast,
    widest,
)
from demo_optax.compression import transforms
from demo_optax.compression.bits import true_once_computed
from demo_optax.compression.blocks import BlockGeometry, Piece
from demo_optax.compression.packet import Message, Section
from demo_optax.compression.selection import make_selector, select, shared_positions
from demo_optax.compression.settings import Compression, MomentumFormat

Shape = tuple[int, ...]
Stored = Float[Array, "*_grid _n"]
Momenta = list[list[Coefficients]]


@dataclasses.dataclass(frozen=True)
class Group:
    """All blocks of one shape in a part.

    Attributes:
      sides: of each block.
      members: the tensors, by their numbers in the part, and the pieces that hold such blocks.
      selector: which of their coefficients are sent.
      section: number of the packet's section that they belong to.
      first: the first of its rows that is theirs.
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
      tensors: start and stop (exclusive) of their numbers.
      geometries: one for each.
      groups: their blocks, by shape. Empty tensors have none.
      merged: whether the momenta of a group are one array, and not one for each piece.
    """

    momentum_format: MomentumFormat
    tensors: tuple[int, int]
    geometries: tuple[BlockGeometry, ...]
    groups: tuple[Group, ...]
    merged: bool

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

    def to_tensors(self, blocks: Sequence[Blocks]) -> list[Tensor]:
        """The tensors of such blocks: the inverse of `blocks`."""

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
        """Cuts each group's rows as its momenta are cut."""
        return [[tree] for tree in by_group] if self.merged else _members(self.groups, by_group)

    def unpack(self, stored: Sequence[Stored]) -> Momenta:
        """Unpacks the stored arrays into momenta for each group, in float32 or wider."""

        def take(number: int, piece: Piece) -> Coefficients:
            x = stored[number][(*piece.in_grid, slice(piece.block_size))]
            return upcast(x.reshape(piece.num_blocks, piece.block_size))

        pieces = [list(itertools.starmap(take, group.members)) for group in self.groups]
        return [[_concatenated(x)] for x in pieces] if self.merged else pieces

    def pack(self, momenta: Momenta) -> list[Stored]:
        """What tensors store of such momenta: the inverse of `momenta`, padded with zeros."""

        def put(x: Coefficients, piece: Piece, shape: Shape) -> Stored:
            x = jnp.pad(x, ((0, 0), (0, shape[-1] - piece.block_size)))
            return x.reshape(*piece.grid, shape[-1])

        shapes = [geometry.stored_shape for geometry in self.geometries]
        pieces = _members(self.groups, [x for (x,) in momenta]) if self.merged else momenta
        return self._assembled(pieces, put, shapes)

    def advance_basis(self, momenta: Momenta, step: IntScalar) -> Momenta:
        """Carries momenta from the basis of the step before into that of this step."""
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
        """Takes a message, for each group positions, values and factors, out of the momenta."""
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
            [less(group, m, *own) for m, own in zip(pieces, rows, strict=True)]
            for group, pieces, rows in zip(self.groups, momenta, self.split(message), strict=True)
        ]

    def _assembled(
        self,
        by_group: Sequence[Sequence[Tensor]],
        restore: Callable[[Tensor, Piece, Shape], Tensor],
        shapes: Sequence[Shape],
    ) -> list[Tensor]:
        """The tensors of these shapes, each joined of its pieces."""
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
      parts: the tensors, in runs of about equal size.
      sections: of the packet, one for each shape of blocks.
      sides: of the blocks of each section.
    """

    compression: Compression
    parts: tuple[Part, ...]
    sections: tuple[Section, ...]
    sides: tuple[Shape, ...]

    @property
    def geometries(self) -> tuple[BlockGeometry, ...]:
        """One for each tensor."""
        return tuple(geometry for part in self.parts for geometry in part.geometries)

    def shared_positions(self, step: IntScalar) -> list[Positions | None]:
        """For each section the positions that all workers know; None where each sends its own."""
        return shared_positions(self.sections, step)

    def per_part(self, tree: Any) -> list[list[Any]]:
        """For each part the leaves of its tensors."""
        leaves = jax.tree.leaves(tree)
        return [leaves[slice(*part.tensors)] for part in self.parts]

    def rows_per_part(self, trees: Iterable[Any], axis: int = 0) -> list[list[Any]]:
        """Cuts each section's rows, along an axis, into those of each part and group."""

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
            for group, own in zip(part.groups, zip(*message, strict=True), strict=True):
                rows[group.section].append(own)
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

    def group(sides: Shape, of_shape: Sequence[tuple[int, Piece]]) -> Group:
        if sides not in sides_of:
            sides_of.append(sides)
            filled.append(0)
        number = sides_of.index(sides)
        made = Group(sides, tuple(of_shape), selector_of(number), number, filled[number])
        filled[number] += made.num_blocks
        return made

    def selector_of(number: int) -> Any:
        n, k, seed = math.prod(sides_of[number]), compression.topk, compression.seed
        return make_selector(compression.selection, n, k, seed, number)

    for start, stop in _runs([math.prod(shape) for shape in shapes], platform):
        members: dict[Shape, list[tuple[int, Piece]]] = {}
        for number in range(start, stop):
            for piece in geometries[number].pieces:
                members.setdefault(piece.block_shape, []).append((number - start, piece))
        groups = tuple(itertools.starmap(group, members.items()))
        of_tensors = (start, stop), geometries[start:stop]
        parts.append(Part(momentum_format, *of_tensors, groups, merged=platform == "tpu"))

    sections = [
        Section(blocks, selector_of(number), compression.value_coding)
        for number, blocks in enumerate(filled)
    ]
    return Plan(compression, tuple(parts), tuple(sections), tuple(sides_of))


_PARTS = {"cpu": 16, "tpu": 8}  # elsewhere, on GPUs, 4
_SMALLEST_PART = 2**20  # elements; below, a part's own programs cost more than they save


def _runs(sizes: Sequence[int], platform: str) -> list[tuple[int, int]]:
    """The tensors of each part, as start and stop (exclusive).

    At most `_PARTS` of about equal size, none smaller than `_SMALLEST_PART` but the last.
    """
    target = max(sum(sizes) / _PARTS.get(platform, 4), _SMALLEST_PART)
    runs, start, size = [], 0, 0
    for number, own in enumerate(sizes):
        if size and size + own / 2 > target:
            runs.append((start, number))
            start, size = number, 0
        size += own
    return [*runs, (start, len(sizes))]


def sequentially(
    fn: Callable[..., Any], parts: Sequence[Part], *arguments: Sequence[Any]
) -> list[list[Any]]:
    """Calls ``fn(part, wait, *own)`` for one part after the other.

    ``wait(small, large)`` returns its one or two trees unchanged, as a pair. XLA computes with them
    only when the previous part is computed. So it cannot keep the temporary arrays of all parts, or
    merge their products. On CPUs and GPUs only the first tree waits.

    Args:
      fn: returns a tuple of results, and arrays that are computed when the results are.
      parts: a plan's parts.
      arguments: for each further argument of ``fn`` a tree for each part.

    Returns:
      For each result a list with an entry for each part.
    """
    results, previous = [], []
    for part, *own in zip(parts, *arguments, strict=True):
        result, computed = fn(part, functools.partial(_wait, previous, part.merged), *own)
        previous = [x for x in computed if x.size]
        results.append(result)
    return [list(x) for x in zip(*results, strict=True)]


def _wait(previous: Sequence[Array], merged: bool, small: Any, large: Any = ()) -> tuple[Any, Any]:
    """Two trees, unchanged, with which XLA computes only after the ``previous`` arrays.

    A barrier does it on TPUs. XLA removes barriers for CPUs and GPUs: there the first tree depends
    on the arrays by a select.
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
    """Cuts each group's rows into those of its pieces."""

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
    """Carries momenta from the basis of the step before into that of this step."""
    if not transforms.is_redrawn(momentum_format.transform):
        return list(momenta)
    last, now = (momentum_format.basis(s) for s in (step - 1, step))
    return [transforms.change_basis(x, sides, last, now) for x in momenta]


def _concatenated(arrays: Iterable[Any], axis: int = 0) -> Any:
    arrays = list(arrays)
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis)


def _interleaved(one: Iterable[int], other: Iterable[int]) -> list[int]:
    return [n for pair in zip(one, other, strict=True) for n in pair]

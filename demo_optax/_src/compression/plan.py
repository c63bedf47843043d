"""The plan by which tensors become a few arrays of equal blocks, and back, part by part.

tensor ── forward ─► (blocks, n) ── pack ──► (*grid, n)
       ◄─ inverse ──             ◄─ unpack ─

part     some consecutive tensors; parts are computed one after another
group    the blocks of one shape in a part's tensors, as one array, if equally many are sent of each
section  the same in all parts, contiguous in the packet
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped, UInt32

from demo_optax._src import axes
from demo_optax._src.arrays import Coefficients, IntScalar, Positions, Tensor, Values, upcast
from demo_optax._src.compression import transforms
from demo_optax._src.compression.bits import (
    checksum,
    contiguous_strides,
    hashed,
    positions,
    round_stochastically,
)
from demo_optax._src.compression.blocks import BlockGeometry
from demo_optax._src.compression.packet import Message, Section
from demo_optax._src.compression.settings import Compression, MomentumFormat, StoredMomenta
from demo_optax._src.compression.sparse import AllCoefficients

Shape = tuple[int, ...]
Rows = tuple[Positions, Values, Float[Array, "_blocks 1"]]
"""Positions, values and factors of a message, with a row for each block of a group."""
Stored = Float[Array, "*_grid _n"]
Momenta = list[Coefficients]


@dataclasses.dataclass(frozen=True)
class Group:
    """The blocks of one shape and selector in a part, which fill ``rows`` of a packet's section.

    The rows are a start and an exclusive stop. The tensors are indices in the part.
    """

    sides: Shape
    tensors: tuple[int, ...]
    selector: Any
    section: int
    rows: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Part:
    """Some neighbouring tensors, cut into blocks and transformed together.

    ``tensors`` is the start and stop (exclusive) of their indices. Empty tensors belong to no
    group.
    """

    momentum_format: MomentumFormat
    tensors: tuple[int, int]
    geometries: tuple[BlockGeometry, ...]
    groups: tuple[Group, ...]

    def forward(
        self, tensors: Sequence[Tensor], step: IntScalar, dtype: DTypeLike
    ) -> list[Float[Array, "_blocks _columns _rows"]]:
        """Returns the coefficients of each group, computed in this dtype."""
        basis, coefficients = self.momentum_format.basis(step), []
        for group in self.groups:
            own = [(self.geometries[number], tensors[number]) for number in group.tensors]
            blocks = jnp.concatenate([geometry.cut(x.astype(dtype)) for geometry, x in own])
            coefficients.append(transforms.forward(blocks, group.sides, basis))
        return coefficients

    def inverse(self, coefficients: Sequence[Coefficients], step: IntScalar) -> list[Tensor]:
        """Inverts `forward`."""
        basis = self.momentum_format.basis(step)
        blocks = [
            transforms.inverse(x, group.sides, basis)
            for group, x in zip(self.groups, coefficients, strict=True)
        ]
        pairs = zip(self.geometries, self._of_tensors(blocks), strict=True)
        return [geometry.join(x) for geometry, x in pairs]

    def cut(self, stored: Sequence[Shaped[Array, "*_grid _n"]]) -> list[Any]:
        """Returns the stored arrays of each group's tensors as one array of blocks."""
        return [
            jnp.concatenate([stored[i].reshape(-1, stored[i].shape[-1]) for i in group.tensors])
            for group in self.groups
        ]

    def unpack(self, stored: Sequence[Stored], step: IntScalar | None = None) -> Momenta:
        """Returns the stored momenta of each group, in float32 or wider.

        Given a step, it also changes them from the basis of the previous step to that of this one.
        """
        momenta = list(map(upcast, self.cut(stored)))
        if step is None:
            return momenta
        pairs = zip(self.groups, momenta, strict=True)
        return [self.momentum_format.advance(m, group.sides, step) for group, m in pairs]

    def pack(self, momenta: Momenta, stored: Sequence[Stored]) -> list[Stored]:
        """Returns momenta as one array per tensor, in place of the stored ones; inverts `cut`."""
        pairs = zip(stored, self._of_tensors(momenta), strict=True)
        return [x.reshape(old.shape) if old.size else old for old, x in pairs]

    def add(self, momenta: Momenta, message: Sequence[Rows]) -> Momenta:
        """Adds a message to the momenta."""
        return [
            group.selector.add(m, positions, factors * values)
            for group, m, (positions, values, factors) in zip(
                self.groups, momenta, message, strict=True
            )
        ]

    def add_to_stored(
        self,
        stored: Sequence[Stored],
        message: Sequence[Rows],
        bits: Sequence[UInt32[Array, "_blocks _n"]],
        step: IntScalar | None = None,
    ) -> list[Stored]:
        """Adds a message to stored momenta, of which nothing else is computed or rounded.

        The sums are rounded with random ``bits``. Given a step, the message is in the basis of the
        previous one, and the momenta in its own.
        """
        result = []
        each = zip(self.groups, self.cut(stored), bits, message, strict=True)
        for group, m, drawn, (at, values, factors) in each:
            selector, added = group.selector, factors * values
            if step is not None:
                dense = selector.add(jnp.zeros(m.shape, added.dtype), at, added)
                added = self.momentum_format.advance(dense, group.sides, step)
                selector, at = AllCoefficients(m.shape[1]), at[:, :0]
            old, noise = selector.take(m, at), selector.take(drawn, at)
            wide = upcast(old)
            new = round_stochastically(wide + added.astype(wide.dtype), noise, m.dtype)
            # The difference of two integers is exact, unlike that of two floats.
            words, old, new = (x.view(f"uint{8 * x.dtype.itemsize}") for x in (m, old, new))
            result.append(selector.add(words, at, new - old).view(m.dtype))
        return self.pack(result, stored)

    def random_bits(
        self, seeds: UInt32[Array, "seeds"], specs: Sequence[Any]
    ) -> list[UInt32[Array, "_blocks _n"]]:
        """Returns random bits for the coefficients of each group.

        They follow from the seeds, the tensor and the place in the whole tensor, so that devices
        that hold copies of a shard draw alike. ``specs`` has a partition spec for each tensor of
        the plan.
        """
        seed, result = checksum(seeds), []
        first_places = [
            _first_places(geometry, spec)
            for geometry, spec in zip(self.geometries, specs[slice(*self.tensors)], strict=True)
        ]
        for group in self.groups:
            firsts = [first_places[number].reshape(-1, 1) for number in group.tensors]
            numbers = [
                jnp.full_like(first, self.tensors[0] + number)
                for number, first in zip(group.tensors, firsts, strict=True)
            ]
            of_tensors = hashed(seed, jnp.concatenate(numbers))
            of_blocks = hashed(of_tensors, jnp.concatenate(firsts))
            places = jnp.arange(math.prod(group.sides), dtype=jnp.uint32)
            result.append(hashed(of_blocks, places[None]))
        return result

    def _of_tensors(self, blocks: Sequence[Array]) -> list[Array]:
        """Divides the blocks of all groups among the tensors."""
        tensors = [jnp.zeros(0)] * len(self.geometries)
        for group, x in zip(self.groups, blocks, strict=True):
            counts = [self.geometries[number].num_blocks for number in group.tensors]
            ends = list(itertools.accumulate(counts[:-1]))
            for number, own in zip(group.tensors, jnp.split(x, ends), strict=True):
                tensors[number] = own
        return tensors


@dataclasses.dataclass(frozen=True)
class Plan:
    """The compression of a list of tensors, with sections and the ``sides`` of their blocks."""

    compression: Compression
    geometries: tuple[BlockGeometry, ...]
    parts: tuple[Part, ...]
    sections: tuple[Section, ...]
    sides: tuple[Shape, ...]
    stored: StoredMomenta

    def map_parts(
        self, stage: Callable[..., Any], *arguments: Sequence[Any], after: Sequence[Array] = ()
    ) -> list[Any]:
        """Calls ``stage(part, *its_arguments)`` for one part after another, and ``after`` arrays.

        A stage returns its results, and arrays that are computed before the next part's arguments,
        one tree of each, are used. So XLA neither holds the temporary arrays of all parts in memory
        nor merges their products.
        """
        results = []
        for part, *trees in zip(self.parts, *arguments, strict=True):
            result, after = stage(part, *axes.after(after, trees))
            results.append(result)
        return results

    def per_part(self, tree: Any) -> list[list[Any]]:
        leaves = jax.tree.leaves(tree)
        return [leaves[slice(*part.tensors)] for part in self.parts]

    def split_rows(self, trees: Iterable[Any], axis: int = 0) -> list[list[Any]]:
        """Divides each section's rows, along an axis, among the parts and their groups."""
        trees, by_part = list(trees), []
        for part in self.parts:
            rows = [
                functools.partial(
                    jax.lax.slice_in_dim, start_index=start, limit_index=stop, axis=axis
                )
                for start, stop in (group.rows for group in part.groups)
            ]
            sections = [trees[group.section] for group in part.groups]
            by_part.append(list(map(jax.tree.map, rows, sections)))
        return by_part

    def join(self, by_part: Iterable[Iterable[Any]]) -> list[Any]:
        """Joins the rows of each section; inverts `split_rows`."""
        rows: list[list[Any]] = [[] for _ in self.sections]
        for part, trees in zip(self.parts, by_part, strict=True):
            for group, tree in zip(part.groups, trees, strict=True):
                rows[group.section].append(tree)
        return [jax.tree.map(lambda *x: jnp.concatenate(x), *section) for section in rows]

    def message_shapes(self) -> Any:
        """Returns the shapes and dtypes of a message's positions and values."""
        selectors = [section.selector for section in self.sections]
        blocks = [
            jax.ShapeDtypeStruct((s.num_blocks, s.selector.n), jnp.float32) for s in self.sections
        ]

        def message(blocks: list[Coefficients]) -> Message:
            return select(selectors, blocks, shared_positions(self.sections, jnp.int32(0)))

        return jax.eval_shape(message, blocks)


@functools.lru_cache(maxsize=64)
def make_plan(compression: Compression, shapes: tuple[Shape, ...]) -> Plan:
    """Makes the plan of tensors with these shapes."""
    momentum_format = compression.momentum_format
    geometries = tuple(map(momentum_format.geometry, shapes))
    filled: dict[tuple[Shape, Any], int] = {}  # blocks of each section, by sides and selector
    streams: dict[Shape, int] = {}
    parts: list[Part] = []
    for start, stop in _part_bounds([math.prod(shape) for shape in shapes]):
        members: dict[tuple[Shape, Any], list[int]] = {}
        for number, geometry in enumerate(geometries[start:stop]):
            if geometry.num_blocks:
                stream = streams.setdefault(geometry.block_shape, len(streams))
                selector = compression.selector(geometry, stream)
                members.setdefault((geometry.block_shape, selector), []).append(number)
        groups = []
        for kind, numbers in members.items():
            first = filled.get(kind, 0)
            filled[kind] = first + sum(geometries[start + i].num_blocks for i in numbers)
            sides, selector = kind
            section, rows = list(filled).index(kind), (first, filled[kind])
            groups.append(Group(sides, tuple(numbers), selector, section, rows))
        tensors = (start, stop), geometries[start:stop]
        parts.append(Part(momentum_format, *tensors, tuple(groups)))
    sections = [
        Section(blocks, selector, compression.value_coding)
        for (_, selector), blocks in filled.items()
    ]
    sides = tuple(sides for sides, _ in filled)
    stored = StoredMomenta(momentum_format, tuple(x.shape for x in geometries))
    return Plan(compression, geometries, tuple(parts), tuple(sections), sides, stored)


_SMALLEST_PART = 2**20  # elements; the programs of a smaller part cost more than they save


def _part_bounds(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the start and stop (exclusive) of the tensors of each part.

    The number of parts grows a little faster than the square root of that of the tensors, so that
    both the temporary memory and the program of a larger model grow slowly. A tensor belongs to the
    part in which its middle lies if all elements are divided evenly.
    """
    total = sum(sizes)
    parts = max(min(round(len(sizes) ** 0.6), total // _SMALLEST_PART), 1)
    middles = [end - size / 2 for end, size in zip(itertools.accumulate(sizes), sizes, strict=True)]
    part_of = [min(int(middle * parts / max(total, 1)), parts - 1) for middle in middles]
    members = [list(own) for _, own in itertools.groupby(range(len(sizes)), part_of.__getitem__)]
    return [(own[0], own[-1] + 1) for own in members] or [(0, 0)]


def shared_positions(sections: Sequence[Section], step: IntScalar) -> list[Positions | None]:
    """Returns each section's positions that all workers know, or None if each sends its own."""
    return [
        None if s.selector.sends_positions else s.selector.positions(s.num_blocks, step)
        for s in sections
    ]


def select(
    selectors: Sequence[Any],
    blocks: Sequence[Coefficients],
    shared: Sequence[Positions | None],
) -> Message:
    """Selects the coefficients to send from several arrays of blocks.

    The positions in ``shared`` are those that all workers know, or None where the selector chooses.
    """
    positions, values = [], []
    for selector, x, at in zip(selectors, blocks, shared, strict=True):
        positions.append(selector.select(x) if at is None else at)
        values.append(selector.take(x, positions[-1]))
    return Message(tuple(positions), tuple(values))


def _first_places(geometry: BlockGeometry, spec: Any) -> UInt32[Array, "*_grid"]:
    """Returns the places of the blocks of a shard, in the flattened coefficients of the tensor."""
    *grid, n = geometry.stored_shape
    names = [*map(axes.names, spec), *[()] * len(grid)][: len(grid)]
    whole = [size * axes.size(over or None) for size, over in zip(grid, names, strict=True)]
    strides = contiguous_strides((*whole, n))[:-1]
    places = positions(tuple(grid), strides)
    for size, over, stride in zip(grid, names, strides, strict=True):
        if over:
            places += axes.index(over).astype(jnp.uint32) * jnp.uint32(size * stride % 2**32)
    return places

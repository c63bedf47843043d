"""A compression scheme as one small value, and the steps of compressing and restoring a tree."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from demo_optax import checks
from demo_optax.compression import indices as index_codings
from demo_optax.compression import packet, selection, transforms
from demo_optax.compression.blocks import BLOCK_RULES, BlockGeometry, BlockRule
from demo_optax.compression.coordinates import Coordinates
from demo_optax.compression.indices import INDEX_CODINGS, IndexCoding
from demo_optax.compression.selection import SELECTIONS, Selection
from demo_optax.compression.transforms import TRANSFORMS, TransformName
from demo_optax.compression.values import ROUNDINGS, VALUE_CODINGS, Rounding, ValueCoding


@dataclasses.dataclass(frozen=True)
class Compression:
    """What is sent of a momentum, and how.

    Attributes:
      topk: coefficients sent of each block; all of them where a block has fewer.
      chunk_size: elements per side of a block (see `demo_optax.compression.blocks`).
      values: coding of the values on the wire, from 32 bits down to 1: ``"float32"``,
        ``"bfloat16"``, ``"float8"``, ``"int8"``, ``"int4"``, ``"int2"``, ``"sign"``.
      transform: ``"dct"``, ``"hadamard"``, ``"random"`` (orthogonal matrices redrawn on each
        step) or ``"identity"``.
      block_rule: ``"pad"`` or ``"divisor"``, for dimensions that ``chunk_size`` does not divide.
      selection: ``"topk"``, or one that all workers know from the step, so that no positions
        travel: ``"random"``, ``"striding"``, ``"slicing"``.
      indices: coding of the positions, ``"packed"``, ``"elias-fano"`` or ``"bitmap"``; with
        ``"auto"`` the smallest for each block size.
      rounding: of the values, to the ``"nearest"`` or ``"stochastic"``.
      seed: of everything that is drawn.

    Raises:
      ValueError: a setting is out of range.
      TypeError: an integer setting is an array, as under ``optax.inject_hyperparams``.

    Example:
      >>> Compression(topk=8, values="int4").chunk_size
      64
    """

    topk: int = 32
    chunk_size: int = 64
    values: ValueCoding = "float32"
    transform: TransformName = "dct"
    block_rule: BlockRule = "pad"
    selection: Selection = "topk"
    indices: IndexCoding | Literal["auto"] = "auto"
    rounding: Rounding = "nearest"
    seed: int = 0

    def __post_init__(self):
        checks.static_integer("topk", self.topk, at_least=1)
        checks.static_integer("chunk_size", self.chunk_size, at_least=1)
        checks.static_integer("seed", self.seed, at_least=0)
        checks.one_of("values", self.values, VALUE_CODINGS)
        checks.one_of("transform", self.transform, TRANSFORMS)
        checks.one_of("block_rule", self.block_rule, BLOCK_RULES)
        checks.one_of("selection", self.selection, SELECTIONS)
        checks.one_of("indices", self.indices, ("auto", *INDEX_CODINGS))
        checks.one_of("rounding", self.rounding, ROUNDINGS)

    @property
    def coordinates(self) -> Coordinates:
        """What decides how a momentum is stored."""
        seed = self.seed if transforms.is_redrawn(self.transform) else 0
        return Coordinates(self.transform, self.chunk_size, self.block_rule, seed)


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """How a list of tensors is compressed: the blocks of each, groups of equal ones, the packet.

    Attributes:
      geometries: one for each tensor.
      members: for each group of the layout, the tensors whose blocks it holds.
      layout: the packet's.
    """

    geometries: tuple[BlockGeometry, ...]
    members: tuple[tuple[int, ...], ...]
    layout: packet.PacketLayout


@functools.lru_cache(maxsize=64)
def arrange(compression: Compression, shapes: tuple[tuple[int, ...], ...]) -> Arrangement:
    """The arrangement of tensors of these shapes. Empty tensors belong to no group."""
    geometries = tuple(map(compression.coordinates.geometry, shapes))
    members: dict[int, list[int]] = {}
    for index, blocks in enumerate(geometries):
        if blocks.num_blocks:
            members.setdefault(blocks.block_size, []).append(index)

    def group(n: int, of: list[int]) -> packet.Group:
        k = min(compression.topk, n)
        indices: IndexCoding | None = None
        if k < n and compression.selection == "topk":
            forced = compression.indices
            indices = index_codings.cheapest(n, k) if forced == "auto" else forced
        blocks = sum(geometries[i].num_blocks for i in of)
        return packet.Group(blocks, n, k, indices, compression.values)

    layout = packet.PacketLayout(tuple(group(n, of) for n, of in members.items()))
    return Arrangement(geometries, tuple(tuple(of) for of in members.values()), layout)


def wide(x: jax.Array) -> jax.Array:
    """``x`` in the dtype to compute in: float32 at least."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def in_current_basis(
    compression: Compression, arrangement: Arrangement, momenta: Sequence[jax.Array], step
) -> Sequence[jax.Array]:
    """Momenta as the step before left them, as coefficients of this step's basis."""
    if not transforms.is_redrawn(compression.transform):
        return momenta
    last, now = compression.coordinates.basis(step - 1), compression.coordinates.basis(step)
    return [
        transforms.change_basis(wide(momentum), geometry, last, now)
        for momentum, geometry in zip(momenta, arrangement.geometries, strict=True)
    ]


def known_positions(
    compression: Compression, arrangement: Arrangement, step: jax.Array
) -> tuple[jax.Array | None, ...]:
    """For each group the positions that every worker knows, or None where they must travel."""

    def known(number: int, group: packet.Group) -> jax.Array | None:
        if group.indices is not None:
            return None
        if group.k == group.block_size:
            everything = jnp.arange(group.k, dtype=jnp.int32)
            return jnp.broadcast_to(everything, (group.blocks, group.k))
        key = jax.random.fold_in(_key(compression, step, 1), number)
        sizes = group.blocks, group.block_size, group.k
        return selection.shared(compression.selection, *sizes, step, key)

    return tuple(known(number, group) for number, group in enumerate(arrangement.layout.groups))


def rounding_key(compression: Compression, step: jax.Array, worker: jax.Array) -> jax.Array | None:
    """The key of a worker's stochastic rounding at a step; None for rounding to the nearest."""
    if compression.rounding == "nearest":
        return None
    return jax.random.fold_in(_key(compression, step, 2), worker)


def select(
    arrangement: Arrangement, momenta: Sequence[jax.Array], known: Sequence[jax.Array | None]
) -> packet.Message:
    """The coefficients to send, in the dtype of the momenta, which have the stored shapes."""
    all_indices, all_values = [], []
    for group, members, positions in zip(
        arrangement.layout.groups, arrangement.members, known, strict=True
    ):
        blocks = [_blocks(arrangement, momenta, i) for i in members]
        if positions is None:
            chosen = [
                selection.top_k(x, group.k, _real_blocks(arrangement.geometries[i]))
                for i, x in zip(members, blocks, strict=True)
            ]
            positions = jnp.concatenate(chosen)
        each = _split(positions, [len(x) for x in blocks])
        values = [jnp.take_along_axis(x, own, axis=-1) for x, own in zip(blocks, each, strict=True)]
        all_indices.append(positions)
        all_values.append(jnp.concatenate(values))
    return packet.Message(tuple(all_indices), tuple(all_values))


def replace(
    arrangement: Arrangement, momenta: Sequence[jax.Array], message: packet.Message
) -> list[jax.Array]:
    """The momenta with the message's values in the message's places."""
    momenta = list(momenta)
    for members, indices, values in zip(arrangement.members, *message, strict=True):
        sizes = [arrangement.geometries[i].num_blocks for i in members]
        for i, index, value in zip(
            members, _split(indices, sizes), _split(values, sizes), strict=True
        ):
            blocks = _blocks(arrangement, momenta, i)
            rows = jnp.arange(len(blocks))[:, None]
            blocks = blocks.at[rows, index].set(
                value.astype(blocks.dtype), unique_indices=True, mode="promise_in_bounds"
            )
            momenta[i] = blocks.reshape(arrangement.geometries[i].stored_shape)
    return momenta


def real_places(
    arrangement: Arrangement, indices: Sequence[jax.Array]
) -> tuple[jax.Array | None, ...]:
    """For each group which of the positions are not padding, ``(blocks, k)``; None where all."""

    def real(members, positions):
        geometries = [arrangement.geometries[i] for i in members]
        if not any(geometry.ragged for geometry in geometries):
            return None
        parts = _split(positions, [geometry.num_blocks for geometry in geometries])
        masks = [
            jnp.ones(part.shape, bool)
            if (blocks := _real_blocks(geometry)) is None
            else jnp.take_along_axis(blocks, part, axis=-1)
            for geometry, part in zip(geometries, parts, strict=True)
        ]
        return jnp.concatenate(masks)

    return tuple(map(real, arrangement.members, indices))


def ungroup(arrangement: Arrangement, dense: Sequence[jax.Array]) -> list[jax.Array]:
    """From ``(blocks, block_size)`` of each group to the stored shapes of each tensor."""
    tensors = [jnp.zeros(g.stored_shape, jnp.float32) for g in arrangement.geometries]
    for members, group in zip(arrangement.members, dense, strict=True):
        sizes = [arrangement.geometries[i].num_blocks for i in members]
        for i, blocks in zip(members, _split(group, sizes), strict=True):
            tensors[i] = blocks.reshape(arrangement.geometries[i].stored_shape)
    return tensors


def _key(compression: Compression, step: jax.Array, purpose: int) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(compression.seed), step)
    return jax.random.fold_in(key, purpose)


def _blocks(arrangement, momenta, i):
    """One tensor's coefficients as ``(blocks, block_size)``."""
    shape = arrangement.geometries[i].num_blocks, arrangement.geometries[i].block_size
    return momenta[i].reshape(shape)


def _real_blocks(geometry: BlockGeometry) -> jax.Array | None:
    """Which of ``(blocks, block_size)`` are not padding; None where nothing is."""
    if not geometry.ragged:
        return None
    return transforms.real_positions(geometry).reshape(geometry.num_blocks, geometry.block_size)


def _split(x, sizes):
    """Cuts the first dimension into parts of these sizes."""
    return jnp.split(x, list(itertools.accumulate(sizes[:-1])))

"""A compression scheme as one small value, and the steps of compressing and restoring a tree."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from demo_optax import checks
from demo_optax.compression import packet, selection, transforms
from demo_optax.compression.blocks import BLOCK_RULES, BlockGeometry, BlockRule, block_geometry
from demo_optax.compression.transforms import TRANSFORMS, TransformName
from demo_optax.compression.values import VALUE_CODINGS, ValueCoding


@dataclasses.dataclass(frozen=True)
class Compression:
    """What is sent of a momentum, and how.

    Attributes:
      topk: coefficients sent of each block; all of them where a block has fewer.
      chunk_size: elements per side of a block (see `demo_optax.compression.blocks`).
      values: coding of the values on the wire, ``"float32"`` or ``"bfloat16"``.
      transform: ``"dct"``, ``"hadamard"``, ``"random"`` (orthogonal matrices redrawn on each
        step) or ``"identity"``.
      block_rule: ``"pad"`` or ``"divisor"``, for dimensions that ``chunk_size`` does not divide.
      seed: of the random transform.

    Raises:
      ValueError: a setting is out of range.
      TypeError: an integer setting is an array, as under ``optax.inject_hyperparams``.

    Example:
      >>> Compression(topk=8, values="bfloat16").chunk_size
      64
    """

    topk: int = 32
    chunk_size: int = 64
    values: ValueCoding = "float32"
    transform: TransformName = "dct"
    block_rule: BlockRule = "pad"
    seed: int = 0

    def __post_init__(self):
        checks.static_integer("topk", self.topk, at_least=1)
        checks.static_integer("chunk_size", self.chunk_size, at_least=1)
        checks.static_integer("seed", self.seed, at_least=0)
        checks.one_of("values", self.values, VALUE_CODINGS)
        checks.one_of("transform", self.transform, TRANSFORMS)
        checks.one_of("block_rule", self.block_rule, BLOCK_RULES)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a list of tensors is compressed: geometry of each, groups of equal blocks, packet.

    Attributes:
      geometries: one for each tensor.
      members: for each group of the layout, the tensors whose blocks it holds.
      layout: the packet's.
    """

    geometries: tuple[BlockGeometry, ...]
    members: tuple[tuple[int, ...], ...]
    layout: packet.PacketLayout


def geometry(compression: Compression, shape: tuple[int, ...]) -> BlockGeometry:
    """The blocks of one tensor."""
    return block_geometry(shape, compression.chunk_size, compression.block_rule)


@functools.lru_cache(maxsize=64)
def plan(compression: Compression, shapes: tuple[tuple[int, ...], ...]) -> Plan:
    """The plan for tensors of these shapes. Empty tensors belong to no group."""
    geometries = tuple(geometry(compression, shape) for shape in shapes)
    members: dict[int, list[int]] = {}
    for index, blocks in enumerate(geometries):
        if blocks.num_blocks:
            members.setdefault(blocks.block_size, []).append(index)
    groups = tuple(
        packet.Group(sum(geometries[i].num_blocks for i in of), n, min(compression.topk, n))
        for n, of in members.items()
    )
    layout = packet.PacketLayout(groups, compression.values)
    return Plan(geometries, tuple(tuple(of) for of in members.values()), layout)


def select(plan: Plan, momenta: Sequence[jax.Array]) -> packet.Message:
    """The coefficients to send, in the dtype of the momenta, which have the stored shapes."""
    all_indices, all_values = [], []
    for group, members in zip(plan.layout.groups, plan.members, strict=True):
        indices, values = [], []
        for geometry, momentum in ((plan.geometries[i], momenta[i]) for i in members):
            blocks = momentum.reshape(geometry.num_blocks, geometry.block_size)
            if group.k == group.block_size:
                indices.append(jnp.broadcast_to(jnp.arange(group.k), blocks.shape))
            else:
                real = None
                if geometry.ragged:
                    real = transforms.real_positions(geometry).reshape(blocks.shape)
                indices.append(selection.top_k(blocks, group.k, real))
            values.append(jnp.take_along_axis(blocks, indices[-1], axis=-1))
        all_indices.append(jnp.concatenate(indices))
        all_values.append(jnp.concatenate(values))
    return packet.Message(tuple(all_indices), tuple(all_values))


def replace(plan: Plan, momenta: Sequence[jax.Array], message: packet.Message) -> list[jax.Array]:
    """The momenta with the message's values in the message's places."""
    momenta = list(momenta)
    for members, indices, values in zip(plan.members, *message, strict=True):
        sizes = [plan.geometries[i].num_blocks for i in members]
        for i, index, value in zip(
            members, _split(indices, sizes), _split(values, sizes), strict=True
        ):
            geometry = plan.geometries[i]
            blocks = momenta[i].reshape(geometry.num_blocks, geometry.block_size)
            rows = jnp.arange(geometry.num_blocks)[:, None]
            blocks = blocks.at[rows, index].set(
                value.astype(blocks.dtype), unique_indices=True, mode="promise_in_bounds"
            )
            momenta[i] = blocks.reshape(geometry.stored_shape)
    return momenta


def ungroup(plan: Plan, dense: Sequence[jax.Array]) -> list[jax.Array]:
    """From ``(blocks, block_size)`` of each group to the stored shapes of each tensor."""
    tensors = [jnp.zeros(g.stored_shape, jnp.float32) for g in plan.geometries]
    for members, group in zip(plan.members, dense, strict=True):
        sizes = [plan.geometries[i].num_blocks for i in members]
        for i, blocks in zip(members, _split(group, sizes), strict=True):
            tensors[i] = blocks.reshape(plan.geometries[i].stored_shape)
    return tensors


def _split(x, sizes):
    """Cuts the first dimension into parts of these sizes."""
    stops = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
    return jnp.split(x, stops)

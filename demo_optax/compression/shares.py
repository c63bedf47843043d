"""The blocks of a packet divided among owners: each owns an equal run of every section's blocks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped

from demo_optax.arrays import IntScalar
from demo_optax.compression.packet import Layout, Section, Travelled
from demo_optax.compression.runs import Run

Where = Int32[Array, "_blocks _k"] | Run | None
Divided = Shaped[Array, "owners _share _k"]


def layout_of(layout: Layout, owners: int) -> Layout:
    """Of one owner's share; where blocks do not divide evenly, the last shares are padded."""
    sections = [
        dataclasses.replace(section, blocks=-(-section.blocks // owners))
        for section in layout.sections
    ]
    return dataclasses.replace(layout, sections=tuple(sections))


def divided(message: Travelled, owners: int) -> Travelled:
    """A message's part for each owner; padding sends zeros."""
    positions = jax.tree.map(functools.partial(divided_rows, owners=owners), message.positions)
    values = [divided_rows(v, owners, "constant") for v in message.values]
    return Travelled(positions, tuple(values))


def joined(parts: Divided, section: Section) -> Shaped[Array, "_blocks _k"]:
    """What the owners' shares of a section hold, as all of its blocks."""
    return parts.reshape(-1, parts.shape[2])[: section.blocks]


def of_owner(where: Where, owners: int, owner: IntScalar) -> Where:
    """Known positions of one owner's blocks; a run is the same in all blocks."""
    if where is None or isinstance(where, Run):
        return where
    return divided_rows(where, owners)[owner]


def divided_rows(
    x: Shaped[Array, "blocks k"], owners: int, mode: str = "edge"
) -> Shaped[Array, "{owners} share k"]:
    """Rows for each owner; the last is repeated where they are too few, or zeros ("constant")."""
    share = -(-len(x) // owners)
    padded = jnp.pad(x, ((0, owners * share - len(x)), (0, 0)), mode)
    return padded.reshape(owners, share, x.shape[1])

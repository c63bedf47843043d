"""The blocks of a packet divided among owners: each owns an equal run of every section's blocks."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Shaped

from demo_optax.compression.packet import Layout, Message

Divided = Shaped[Array, "owners _share _k"]


def layout_of(layout: Layout, owners: int) -> Layout:
    """Of one owner's share; where blocks do not divide evenly, the last shares are padded."""
    sections = [
        dataclasses.replace(section, blocks=-(-section.blocks // owners))
        for section in layout.sections
    ]
    return dataclasses.replace(layout, sections=tuple(sections))


def divided(message: Message, owners: int) -> Message:
    """A message's part for each owner; padding sends zeros."""
    positions = [divided_rows(p, owners) for p in message.positions]
    values = [divided_rows(v, owners, "constant") for v in message.values]
    return Message(tuple(positions), tuple(values))


def joined(parts: Sequence[Divided], layout: Layout) -> tuple[Shaped[Array, "_blocks _k"], ...]:
    """What the owners' shares hold, as the sections of all blocks."""
    pairs = zip(parts, layout.sections, strict=True)
    return tuple(x.reshape(-1, x.shape[2])[: section.blocks] for x, section in pairs)


def divided_rows(
    x: Shaped[Array, "blocks k"], owners: int, mode: str = "edge"
) -> Shaped[Array, "{owners} share k"]:
    """Rows for each owner; the last is repeated where they are too few, or zeros ("constant")."""
    share = -(-len(x) // owners)
    padded = jnp.pad(x, ((0, owners * share - len(x)), (0, 0)), mode)
    return padded.reshape(owners, share, x.shape[1])

"""Compression: from the momenta of a step to what is sent of them."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

from demo_optax.arrays import Coefficients, IntScalar, Positions
from demo_optax.compression import packet, selection
from demo_optax.compression.packet import Message, Section
from demo_optax.compression.plan import Plan
from demo_optax.compression.settings import DRAW, ROUND, Compression


class Compressed(NamedTuple):
    """What a worker sends.

    Attributes:
      body: of its packet.
      selected: the coefficients that were chosen.
      decoded: the same places, with the values that the others decode.
    """

    body: UInt32[Array, "words"]
    selected: Message
    decoded: Message


def compress(
    plan: Plan, momenta: Sequence[Coefficients], step: IntScalar, worker: IntScalar
) -> Compressed:
    """Selects coefficients and codes them.

    Args:
      plan: of the tensors.
      momenta: of each group.
      step: updates so far; from it all workers draw shared positions alike.
      worker: its number, of which stochastic rounding depends.
    """
    settings, layout = plan.compression, plan.layout
    positions = tuple(
        _positions(settings, number, section, m, step)
        for number, (section, m) in enumerate(zip(layout.sections, momenta, strict=True))
    )
    values = tuple(selection.take(m, p) for m, p in zip(momenta, positions, strict=True))
    selected = Message(positions, values)
    key = None
    if settings.rounding == "stochastic":
        key = jax.random.fold_in(settings.key(step, ROUND), worker)
    body = packet.encode(layout, selected, key)
    decoded, _ = packet.decode(layout, body, positions)
    # The positions are those that were coded: whoever subtracts need not wait for their decoding.
    return Compressed(body, selected, decoded._replace(positions=positions))


def _positions(
    settings: Compression, number: int, section: Section, momenta: Coefficients, step: IntScalar
) -> Positions:
    if section.k == section.block_size:
        everything = jnp.arange(section.k, dtype=jnp.int32)
        return jnp.broadcast_to(everything, (section.blocks, section.k))
    if settings.selection == "topk":
        return selection.top_k(momenta, section.k)
    key = jax.random.fold_in(settings.key(step, DRAW), number)
    sizes = section.blocks, section.block_size, section.k
    return selection.shared(settings.selection, *sizes, step, key)

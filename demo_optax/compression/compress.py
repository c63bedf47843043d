"""Compression: from the momenta of a step to what is sent of them."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, PRNGKeyArray, UInt32

from demo_optax.arrays import Coefficients, IntScalar
from demo_optax.compression import packet, selection, shares
from demo_optax.compression.bins import Bins
from demo_optax.compression.packet import Layout, Message, Section, Travelled
from demo_optax.compression.plan import Plan
from demo_optax.compression.runs import Run
from demo_optax.compression.settings import DRAW, ROUND, Compression

Known = tuple[Int32[Array, "_blocks _k"] | Run | None, ...]
"""For each section the positions that every worker knows; None where they travel."""


class Compressed(NamedTuple):
    """What is sent.

    Attributes:
      bodies: of the packets, one for each owner of a share of the blocks.
      selected: the coefficients that were chosen.
      decoded: the same places, with the values that the others decode.
    """

    bodies: UInt32[Array, "owners words"]
    selected: Message
    decoded: Message


def known_positions(settings: Compression, layout: Layout, step: IntScalar) -> Known:
    """The positions that follow from the step alone, the same on all workers.

    Args:
      settings: of the compression.
      layout: of the packet.
      step: updates so far.
    """

    def of_section(number: int) -> Int32[Array, "_blocks _k"] | Run | None:
        section = layout.sections[number]
        if section.index_coding is not None:
            return None
        if section.k == section.block_size:
            return Run(jnp.zeros((), jnp.int32), section.k)
        key = jax.random.fold_in(settings.key(step, DRAW), number)
        sizes = section.blocks, section.block_size, section.k
        return selection.shared(settings.selection, *sizes, step, key)

    return tuple(map(of_section, range(len(layout.sections))))


def compress(
    plan: Plan, momenta: Sequence[Coefficients], step: IntScalar, worker: IntScalar, owners: int = 1
) -> Compressed:
    """Selects coefficients and codes them.

    Args:
      plan: of the tensors.
      momenta: of each group.
      step: updates so far; from it all workers draw shared positions alike.
      worker: its number, of which stochastic rounding depends.
      owners: among whom the blocks are divided.
    """
    known = known_positions(plan.compression, plan.layout, step)
    key = plan.compression.rounding_key(step, ROUND, worker)
    return compress_layout(plan.layout, momenta, known, key, owners)


def compress_layout(
    layout: Layout,
    momenta: Sequence[Coefficients],
    known: Known,
    key: PRNGKeyArray | None,
    owners: int = 1,
) -> Compressed:
    """Selects coefficients, but where they are known, and codes them.

    Args:
      layout: of all that is sent.
      momenta: of each section.
      known: positions that every worker knows.
      key: for stochastic rounding; None rounds to the nearest.
      owners: among whom the blocks are divided.
    """
    positions = tuple(
        _chosen(section, m) if at is None else at
        for section, m, at in zip(layout.sections, momenta, known, strict=True)
    )
    values = tuple(selection.take(m, p) for m, p in zip(momenta, positions, strict=True))
    travelling = tuple(
        None if at is not None or isinstance(p, Run) else p
        for p, at in zip(positions, known, strict=True)
    )
    share = shares.layout_of(layout, owners)
    parts = shares.divided(Travelled(travelling, values), owners)
    keys = None if key is None else jax.random.split(key, owners)
    bodies = jax.vmap(functools.partial(packet.encode, share), axis_size=owners)(parts, keys)
    decoded, _ = jax.vmap(functools.partial(packet.decode, share))(bodies)
    # The positions are those that were coded: whoever subtracts need not wait for their decoding.
    arrived = tuple(map(shares.joined, decoded.values, layout.sections))
    others = Message(positions, arrived)
    return Compressed(bodies, Message(positions, values), others)


def _chosen(section: Section, momentum: Coefficients) -> Int32[Array, "_blocks _k"] | Bins:
    choose = selection.largest_of_bins if section.index_coding == "bins" else selection.top_k
    return choose(momentum, section.k)

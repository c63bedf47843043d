"""A worker's message in its packets: sealed by the sender, opened by whoever gets them."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, UInt32

from demo_optax import axes
from demo_optax.arrays import BoolScalar, IntScalar, Positions, Values
from demo_optax.averaging import decode
from demo_optax.axes import AxisName
from demo_optax.compression import Compressed, Known, Plan, known_positions, packet, shares, sparse
from demo_optax.compression.bins import Bins
from demo_optax.compression.packet import Layout, Message, Opened, Origin
from demo_optax.compression.runs import Run
from demo_optax.metrics import Report

Packets = UInt32[Array, "owners words"]
"""One for each owner of a share of the blocks; a single one where nobody owns any."""


class Outgoing(NamedTuple):
    """What a worker sends of a step.

    Attributes:
      packets: sealed.
      message: what the others decode of them.
    """

    packets: Packets
    message: Message


def owners_of(plan: Plan, axis_name: AxisName) -> int:
    """Among how many workers the blocks are divided."""
    return axes.size(axis_name) if plan.compression.exchange == "two-phase" else 1


def before_the_first(plan: Plan, axis_name: AxisName) -> Packets | tuple[()]:
    """Packets that wait and count nowhere; none where the exchange is not delayed."""
    if not plan.compression.delay:
        return ()
    owners = owners_of(plan, axis_name)
    none = jnp.zeros((owners, shares.layout_of(plan.layout, owners).words), jnp.uint32)
    return axes.as_varying(none, axis_name)


def outgoing(
    plan: Plan,
    compressed: Compressed,
    report: Report,
    takes_part: BoolScalar,
    step: IntScalar,
    axis_name: AxisName,
) -> Outgoing:
    """Seals a worker's message in packets.

    Args:
      plan: of the tensors.
      compressed: what it sends.
      report: what each packet tells of the step, beside its own energy.
      takes_part: whether they shall count.
      step: updates so far.
      axis_name: the workers' axis or axes; None for a single worker.
    """
    owners = len(compressed.bodies)
    share = shares.layout_of(plan.layout, owners)
    energies = jnp.zeros(owners, jnp.float32)
    for values in compressed.decoded.values:
        parts = shares.divided_rows(values, owners, "constant")
        energies += jnp.sum(jnp.square(parts), axis=(1, 2))
    numbers = jnp.broadcast_to(jnp.stack(report), (owners, len(report)))
    # Sums over many sound blocks may still end beyond float32.
    energies = jnp.minimum(energies, jnp.finfo(jnp.float32).max)
    numbers = jnp.concatenate([numbers, energies[:, None]], axis=1)

    def seal_part(numbers, body, number):
        return packet.seal(share, numbers, body, takes_part, Origin(step, number))

    packets = jax.vmap(seal_part)(numbers, compressed.bodies, own_numbers(owners, axis_name))
    return Outgoing(packets, compressed.decoded)


def own_numbers(owners: int, axis_name: AxisName) -> Int32[Array, "{owners}"]:
    """The numbers of a worker's packets among those of all."""
    return axes.index(axis_name) * owners + jnp.arange(owners, dtype=jnp.int32)


def opened(
    layout: Layout,
    packets: UInt32[Array, "packets words"],
    step: IntScalar,
    numbers: Int32[Array, "packets"],
) -> Opened:
    """Packets that are to be of this step, and have these numbers among those of all."""
    return jax.vmap(lambda words, number: packet.unseal(layout, words, Origin(step, number)))(
        packets, numbers
    )


def joined(
    layout: Layout,
    bodies: UInt32[Array, "owners words"],
    intact: Bool[Array, "owners"],
    known: Known,
) -> tuple[Message, Bool[Array, "owners"]]:
    """The message whose shares these are, zeros where one does not count, and which do.

    Args:
      layout: of the whole message.
      bodies: of the packets.
      intact: whether they are.
      known: positions that every worker knows.
    """
    share = shares.layout_of(layout, len(bodies))
    messages, counted, _ = decode(share, bodies, intact)
    positions: list[Positions | Run | Bins] = []
    values: list[Values] = []
    for section, at, where, value in zip(layout.sections, known, *messages, strict=True):
        sent = sparse.weighted(where, value, counted.astype(jnp.float32))
        if at is None:
            assert sent.positions is not None
            at = jax.tree.map(functools.partial(shares.joined, section=section), sent.positions)
        positions.append(at)
        values.append(shares.joined(sent.values, section))
    return Message(tuple(positions), tuple(values)), counted


def reread(plan: Plan, packets: Packets, step: IntScalar, axis_name: AxisName) -> Outgoing:
    """What a worker has sealed in a step; zeros where that was not to count, or is damaged."""
    share = shares.layout_of(plan.layout, len(packets))
    found = opened(share, packets, step, own_numbers(len(packets), axis_name))
    known = known_positions(plan.compression, plan.layout, step)
    return Outgoing(packets, joined(plan.layout, found.body, found.intact, known)[0])

"""The exchange in two phases, whose traffic does not grow with the workers.

Each worker owns an equal share of the blocks. It averages what all workers send of these, adds what
it could not send before, and sends everybody the largest coefficients of the sum. What those leave
out stays in its residual: error feedback on both sides, as in 1-bit Adam (Tang et al., arXiv
2102.02888) and DoubleSqueeze (Tang et al., arXiv 1905.05957).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from demo_optax import axes, messages, metrics, wire
from demo_optax.arrays import Coefficients, IntScalar
from demo_optax.averaging import Aggregate, average, largest_norm, norm_of, shortened
from demo_optax.axes import AxisName
from demo_optax.compression import (
    Compression,
    Known,
    Plan,
    compress_layout,
    known_positions,
    packet,
    shares,
)
from demo_optax.compression.packet import Layout, Origin
from demo_optax.compression.plan import section_of
from demo_optax.compression.settings import ROUND_BACK
from demo_optax.compression.sparse import Mean, add_at
from demo_optax.messages import Packets
from demo_optax.metrics import ExchangeMetrics, Report
from demo_optax.numerics import restart_blocks

_BITS = 24  # of an integer that a float32 holds exactly
_REPORT = len(Report._fields)


def before_the_first(plan: Plan, axis_name: AxisName) -> tuple[Coefficients, ...]:
    """What an owner has yet to send before the first step; nothing where nobody owns blocks."""
    if plan.compression.exchange != "two-phase":
        return ()
    share = shares.layout_of(plan.layout, axes.size(axis_name))
    zeros = tuple(jnp.zeros((s.blocks, s.block_size), jnp.float32) for s in share.sections)
    return axes.as_varying(zeros, axis_name)


class Words(NamedTuple):
    """32-bit words that each worker hands to the two collectives.

    Attributes:
      dealt: all of its packets for the owners.
      gathered: the packet that it sends everybody as an owner.
    """

    dealt: int
    gathered: int


def words(plan: Plan, workers: int) -> Words:
    """What the exchange sends of this plan."""
    share = shares.layout_of(plan.layout, workers)
    back = _layout(plan.compression.way_back, plan.layout, workers)
    return Words(workers * share.words, shares.layout_of(back, workers).words)


def two_phase(
    plan: Plan,
    sent: Packets,
    residual: tuple[Coefficients, ...],
    last: ExchangeMetrics,
    step: IntScalar,
    axis_name: AxisName,
    mean: Mean,
) -> Aggregate:
    """Exchanges as `demo_optax._exchange.exchange` says.

    Whether a packet counts is decided once, by the owner that it is for, which tells everybody.
    Where an owner's packet is damaged, its residual stays as it was, and what was sent to it stays
    with the senders. On a step on which no worker takes part nothing changes.
    """
    workers, own = len(sent), axes.index(axis_name)
    every = jnp.arange(workers, dtype=jnp.int32)
    settings, back = plan.compression, plan.compression.way_back
    share = shares.layout_of(plan.layout, workers)
    known = known_positions(settings, plan.layout, step)

    # To the owners
    parts = wire.deal(sent, axis_name)
    arrived = messages.opened(share, parts, step, every * workers + own)
    largest = largest_norm(arrived, settings.norm_limit)
    of_share = _of_owner(known, workers, own)
    averaged = average(share, arrived.body, arrived.intact, of_share, largest, mean)

    # The largest of what they have
    owed, _ = restart_blocks(plan.rebased(residual, step))
    totals = [old + new for old, new in zip(owed, averaged.coefficients, strict=True)]
    layout = _layout(back, plan.layout, workers)
    back_share = shares.layout_of(layout, workers)
    known = known_positions(back, layout, step)
    key = back.rounding_key(step, ROUND_BACK, own)
    of_share = _of_owner(known, workers, own)
    compressed = compress_layout(back_share, totals, of_share, key)

    # To everybody
    owns = messages.opened(share, sent, step, messages.own_numbers(workers, axis_name)).numbers
    report = jnp.where(jnp.isfinite(owns[0]), owns[0], 0)[:_REPORT]
    heard = _as_numbers(averaged.weights > 0)
    numbers = jnp.concatenate([report, largest[None], heard])
    sealed = packet.seal(
        back_share, numbers, compressed.bodies[0], jnp.array(True), Origin(step, own)
    )
    packets = wire.gather(sealed, axis_name)
    found = messages.opened(back_share, packets, step, every)
    message, intact = messages.joined(layout, found.body, found.intact, known)

    reports, limits, heard = jnp.split(found.numbers, [_REPORT, _REPORT + 1], axis=1)
    heard = _as_bits(heard, workers) & intact[:, None]
    counted = heard.any(axis=0) & intact
    anyone = counted.any()  # else the step is none, and what the owners owe waits
    of_owners = shortened(norm_of(owns[:, -1]), limits[:, 0])
    delivered = jnp.where(heard[:, own] & anyone, of_owners, 0.0)
    values = [jnp.where(anyone, v, 0.0) for v in message.values]
    sections = list(zip(plan.layout.sections, share.sections, strict=True))
    zeros = [
        axes.varying_like(jnp.zeros((s.blocks, s.block_size), jnp.float32), packets)
        for s, _ in sections
    ]
    sends = intact[own] & anyone
    kept = zip(totals, *compressed.decoded, owed, strict=True)
    return Aggregate(
        list(map(add_at, zeros, message.positions, values)),
        [jnp.repeat(delivered, part.blocks)[: s.blocks, None] for s, part in sections],
        tuple(jnp.where(sends, add_at(total, p, -v), old) for total, p, v, old in kept),
        metrics.summarise(
            Report(*reports.T),
            counted,
            jnp.where(intact, packets[:, 0], 0),
            last,
        ),
    )


def _layout(back: Compression, layout: Layout, workers: int) -> Layout:
    """Of all that the owners send."""
    sections = [section_of(back, s.blocks, s.block_size) for s in layout.sections]
    return Layout(tuple(sections), _REPORT + 1 + -(-workers // _BITS))


def _of_owner(known: Known, owners: int, owner: IntScalar) -> Known:
    """The known positions of one owner's blocks."""
    return tuple(shares.of_owner(where, owners, owner) for where in known)


def _as_numbers(bits: Bool[Array, "bits"]) -> Float32[Array, "numbers"]:
    """Bits as numbers that travel as float32."""
    padded = jnp.pad(bits, (0, -len(bits) % _BITS)).reshape(-1, _BITS)
    return jnp.sum(padded * 2.0 ** jnp.arange(_BITS, dtype=jnp.float32)[None], axis=1)


def _as_bits(
    numbers: Float32[Array, "packets numbers"], size: int
) -> Bool[Array, "packets {size}"]:
    """The bits of such numbers; those that no bits have given are taken for some."""
    whole = jnp.clip(numbers, 0, 2.0**_BITS - 1).astype(jnp.uint32)
    bits = whole[..., None] >> jnp.arange(_BITS, dtype=jnp.uint32)[None, None] & 1
    return bits.reshape(len(numbers), -1)[:, :size] > 0

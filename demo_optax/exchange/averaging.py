r"""How several workers' packets become their mean. No packet is trusted.

Of coefficient :math:`j` that is the mean over the workers :math:`S_j` that sent it, or over all,

.. math::
    \bar q_j = \sum_{i \in S_j} w_i\, a_i\, \hat q_{ij} \Big/ \sum_{i \in S_j} w_i

with the weight :math:`w_i` in a worker's header, 1 unless its update was given another, and the
part :math:`a_i \le 1` of its decoded message :math:`\hat q_i` that is accepted: less than 1 where
its norm is beyond the cap.

Every worker that averages the same packets does it in the same order with the same program, so that
the mean is equal to the last bit everywhere.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from demo_optax import axes
from demo_optax.arrays import FloatScalar, Positions, clamp_to_float32
from demo_optax.compression import Plan
from demo_optax.compression.packet import (
    Header,
    Message,
    Origin,
    PacketLayout,
    Packets,
    Section,
    decode,
    parse_headers,
)
from demo_optax.compression.selection import AllCoefficients
from demo_optax.exchange.protocol import Mean, SparseSum
from demo_optax.metrics import ExchangeMetrics, summarise

Shared = Sequence[Positions | None]
"""For each section the positions that all workers know; None where each worker sends its own."""


class Decoded(NamedTuple):
    """What packets hold, with an axis of packets in front of each array.

    Attributes:
      message: positions that `add` may be given, and values; zeros where a packet is rejected.
      accepted: whether a packet is intact, well formed and finite.
      norms: of the messages.
    """

    message: Message
    accepted: Bool[Array, "packets"]
    norms: Float32[Array, "packets"]


def decode_accepted(
    layout: PacketLayout, packets: Packets, intact: Bool[Array, "packets"]
) -> Decoded:
    """Decodes packets, and rejects those that are not intact, well formed and finite.

    The energy is checked per block: one bad block would not show in the norm of all blocks.
    """
    found, valid = decode(layout, packets)
    accepted, total = intact & valid, jnp.zeros(len(intact), jnp.float32)
    for values in found.values:
        energies = jnp.sum(jnp.square(values), axis=2)
        accepted &= jnp.isfinite(energies).all(axis=1)
        total += jnp.sum(energies, axis=1)
    here = accepted[:, None, None]
    positions = [
        at if at is None else jnp.where(here, at, section.selector.placeholder()[None, None])
        for section, at in zip(layout.sections, found.positions, strict=True)
    ]
    values = [jnp.where(here, v, 0.0) for v in found.values]
    return Decoded(
        Message(tuple(positions), tuple(values)), accepted, jnp.sqrt(clamp_to_float32(total))
    )


class Average(NamedTuple):
    """What all workers make of the same packets.

    Attributes:
      mean: of each section.
      factors: of the workers' messages, at most 1; 0 where one was rejected.
      metrics: of the step.
    """

    mean: list[SparseSum]
    factors: Float32[Array, "workers"]
    metrics: ExchangeMetrics


def average_all(
    plan: Plan,
    layout: PacketLayout,
    packets: Packets,
    origin: Origin,
    norm_limit: float | None,
    previous_metrics: ExchangeMetrics,
    mean: Mean,
) -> Average:
    """Averages whole messages, one packet of each worker.

    Args:
      plan: of the tensors.
      layout: of each packet.
      packets: one of each worker.
      origin: of the packets.
      norm_limit: as in `demo_optax.AllGather`: the cap as a multiple of the median norm.
      previous_metrics: metrics of the exchange before.
      mean: as in `average`.
    """
    headers, _, intact = parse_headers(layout, packets, origin)
    cap = norm_cap(headers, intact, norm_limit)
    shared = plan.shared_positions(origin.step)
    weights = capped_weights(headers, intact, norm_limit)
    means, factors = average(layout, packets, intact, shared, cap, weights, mean)
    accepted = factors > 0
    checksums = jnp.where(accepted, packets[:, 0], 0)
    return Average(means, factors, summarise(headers, accepted, checksums, previous_metrics))


def average(
    layout: PacketLayout,
    packets: Packets,
    intact: Bool[Array, "workers"],
    shared: Shared,
    cap: FloatScalar,
    weights: Float32[Array, "workers"],
    mean: Mean,
) -> tuple[list[SparseSum], Float32[Array, "workers"]]:
    """Averages packets.

    Args:
      layout: of each of them.
      packets: one of each worker.
      intact: which packets are intact.
      shared: positions that every worker knows.
      cap: norm to which a larger message is scaled down.
      weights: of the workers in the mean; a packet with the weight 0 is rejected.
      mean: over the ``"senders"`` of each coefficient, or over all accepted ``"workers"``.

    Returns:
      The mean of each section, and the factors by which the workers' messages were scaled down;
      0 where one was rejected.
    """

    def weigh(packets, intact, weights):
        found = decode_accepted(layout, packets, intact & (weights > 0))
        factors = jnp.where(found.accepted, clip_factor(found.norms, cap), 0.0)
        weights = jnp.where(found.accepted & (factors > 0), weights, 0.0)
        scale = (factors * weights)[:, None, None]
        values = tuple(v * scale for v in found.message.values)
        return found.message._replace(values=values), weights, factors

    workers, at_once = len(packets), _workers_at_once(layout)
    if workers <= at_once:
        message, weights, factors = weigh(packets, intact, weights)
        sections = zip(layout.sections, shared, *message, strict=True)
        return [_mean_of_few(*section, weights, mean) for section in sections], factors

    def add(sums, some):
        message, weights, factors = weigh(*some)
        added = zip(layout.sections, sums, *message, strict=True)
        return [_add(*section, weights) for section in added], (weights, factors)

    missing = -workers % at_once
    rounds = jax.tree.map(
        lambda x: jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)), (packets, intact, weights)
    )
    rounds = jax.tree.map(lambda x: x.reshape(-1, at_once, *x.shape[1:]), rounds)
    zeros = axes.as_varying(list(map(_zeros, layout.sections)), tuple(axes.varying(packets)))
    sums, (weights, factors) = jax.lax.scan(add, zeros, rounds)
    total_weight = jnp.sum(weights)
    means = [
        _mean_of_sums(section, at, *total, total_weight, mean)
        for section, at, total in zip(layout.sections, shared, sums, strict=True)
    ]
    return means, factors.reshape(-1)[:workers]


def _mean_of_few(section: Section, shared, positions, values, weights, mean: Mean) -> SparseSum:
    """The mean of messages that are all at hand."""
    selector, total_weight = section.selector, jnp.sum(weights)
    if not selector.sends_positions:
        return _of_values(selector, shared, jnp.sum(values, axis=0), total_weight)
    divisor = total_weight
    if mean == "senders" and len(values) > 1:
        divisor = selector.sender_weight_sums(positions, weights[:, None, None])
    return SparseSum(positions, values / _safe_divisor(divisor), selector)


def _safe_divisor(divisor: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """The divisor; 1 where nobody sent anything."""
    return jnp.where(divisor > 0, divisor, 1.0)


def _zeros(section: Section) -> tuple[Array, Array]:
    """Sums of values, and how many workers sent each; of ``k`` values for shared positions."""
    columns = section.selector.n if section.selector.sends_positions else section.selector.k
    zeros = jnp.zeros((section.num_blocks, columns), jnp.float32)
    return zeros, zeros


def _add(section: Section, sums, positions, values, weights) -> tuple[Array, Array]:
    """Adds some workers' messages to the sums of those before."""
    total, senders = sums
    if not section.selector.sends_positions:
        return total + jnp.sum(values, axis=0), senders
    of_each = jnp.broadcast_to(weights[:, None, None], values.shape)
    add_all = section.selector.add_all
    return add_all(total, positions, values), add_all(senders, positions, of_each)


def _mean_of_sums(section: Section, shared, total, senders, total_weight, mean: Mean) -> SparseSum:
    if not section.selector.sends_positions:
        return _of_values(section.selector, shared, total, total_weight)
    divisor = senders if mean == "senders" else total_weight
    nowhere = jnp.zeros((1, section.num_blocks, 0), jnp.int32)
    dense = (total / _safe_divisor(divisor))[None]
    return SparseSum(nowhere, dense, AllCoefficients(section.selector.n))


def _of_values(selector, shared: Positions, total, divisor) -> SparseSum:
    return SparseSum(shared[None], (total / _safe_divisor(divisor))[None], selector)


def _workers_at_once(layout: PacketLayout) -> int:
    """Packets to decode together: few where they hold positions.

    Otherwise so many that their values together are not more than all coefficients.
    """
    selectors = [section.selector for section in layout.sections]
    limits = [selector.workers_at_once for selector in selectors if selector.sends_positions]
    if limits:
        return min(limits)
    dense = sum(s.num_blocks * s.selector.n for s in layout.sections)
    return max(dense // max(sum(s.num_blocks * s.selector.k for s in layout.sections), 1), 1)


def clip_factor(
    norms: Float32[Array, "*shape"], cap: Float32[Array, "..."]
) -> Float32[Array, "*shape"]:
    """The factor that scales a message's norm down to the cap: 0 to 1, even if a packet lies."""
    cap = jnp.maximum(cap, 0.0)
    return jnp.where(norms > cap, cap / norms, 1.0)


def norm_cap(headers: Header, intact: Bool[Array, "packets"], limit: float | None) -> FloatScalar:
    """The cap on the norm of a message: a multiple of the median of the norms in the headers."""
    return _multiple_of_median(jnp.sqrt(headers.message_energy), intact, limit)


def capped_weights(
    headers: Header, intact: Bool[Array, "packets"], limit: float | None
) -> Float32[Array, "packets"]:
    """The weights in the headers, capped like the norms, as parts of the largest."""
    weights = jnp.where(intact, headers.weight, 0.0)
    weights = jnp.minimum(weights, _multiple_of_median(weights, intact, limit))
    return weights / _safe_divisor(jnp.max(weights))


def _multiple_of_median(
    numbers: Float32[Array, "packets"], intact: Bool[Array, "packets"], limit: float | None
) -> FloatScalar:
    """A multiple of the median of positive numbers.

    For an even number of packets the lower of the two in the middle is taken. Whoever lies moves
    the median by one place at most.
    """
    largest = jnp.finfo(jnp.float32).max
    if limit is None:
        return jnp.array(largest, jnp.float32)
    numbers = jnp.sort(jnp.where(intact & (numbers > 0), numbers, jnp.inf))
    middle = jnp.maximum(jnp.sum(jnp.isfinite(numbers)) - 1, 0) // 2
    return jnp.minimum(limit * numbers[middle], largest)

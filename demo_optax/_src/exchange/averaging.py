r"""Averaging of the packets of several workers, none of which is trusted.

The mean of coefficient :math:`j` is taken over the workers :math:`S_j` that sent it, or over all
workers whose packets are accepted:

.. math::
    \bar q_j = \sum_{i \in S_j} w_i\, a_i\, \hat q_{ij} \Big/ \sum_{i \in S_j} w_i

:math:`w_i` is the weight in the header of worker :math:`i`, which is 1 unless its update was given
a ``message_weight``. :math:`a_i \le 1` is the accepted fraction of its decoded message
:math:`\hat q_i`, which is below 1 if the norm of the message exceeds the cap.

Every worker averages the same packets in the same order with the same program, so that the mean is
equal to the last bit on all of them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from demo_optax._src import axes
from demo_optax._src.arrays import Positions, clamp_to_float32
from demo_optax._src.compression.packet import (
    Header,
    Message,
    PacketLayout,
    Packets,
    Section,
    decode,
)
from demo_optax._src.compression.sparse import AllCoefficients, SparseSum
from demo_optax._src.exchange.protocol import Mean

Shared = Sequence[Positions | None]
"""The positions of each section that all workers know, or None if each worker sends its own."""


class Decoded(NamedTuple):
    """Decoded packets, whose arrays have an axis of packets in front.

    The positions are always valid, and the values of a packet that is not accepted are zeros.
    """

    message: Message
    accepted: Bool[Array, "packets"]
    norms: Float32[Array, "packets"]


def decode_accepted(
    layout: PacketLayout, packets: Packets, intact: Bool[Array, "packets"]
) -> Decoded:
    """Decodes packets and rejects those that are not intact, well formed and finite.

    The energy is checked per block, since one bad block would not show in the norm of all blocks.
    """
    message, valid = decode(layout, packets)
    accepted, total = intact & valid, jnp.zeros(len(intact), jnp.float32)
    for values in message.values:
        energies = jnp.sum(jnp.square(values), axis=2)
        accepted &= jnp.isfinite(energies).all(axis=1)
        total += jnp.sum(energies, axis=1)
    keep = accepted[:, None, None]
    values = tuple(jnp.where(keep, v, 0.0) for v in message.values)
    return Decoded(message._replace(values=values), accepted, jnp.sqrt(clamp_to_float32(total)))


def average(
    layout: PacketLayout,
    packets: Packets,
    intact: Bool[Array, "workers"],
    shared: Shared,
    caps: Float32[Array, "workers"],
    weights: Float32[Array, "workers"],
    mean: Mean,
) -> tuple[list[SparseSum], Float32[Array, "workers"]]:
    """Averages one packet per worker, and rejects packets with the weight 0.

    Each coefficient is averaged over its ``"senders"``, or over all ``"workers"`` whose packets are
    accepted. A message whose norm exceeds its cap is scaled down to it. The factors of all
    messages, 0 for a rejected one, are returned with the mean of each section.
    """

    def weigh(packets, intact, caps, weights):
        decoded = decode_accepted(layout, packets, intact & (weights > 0))
        factors = jnp.where(decoded.accepted, clip_factor(decoded.norms, caps), 0.0)
        weights = jnp.where(decoded.accepted & (factors > 0), weights, 0.0)
        scale = (factors * weights)[:, None, None]
        values = tuple(v * scale for v in decoded.message.values)
        return decoded.message._replace(values=values), weights, factors

    # Few packets are decoded together if they hold positions, else as many as together have no more
    # values than there are coefficients.
    workers, sections = len(packets), layout.sections
    limits = [x.selector.workers_at_once for x in sections if x.selector.sends_positions]
    dense = sum(x.num_blocks * x.selector.n for x in sections)
    sent = sum(x.num_blocks * x.selector.k for x in sections)
    at_once = min(limits, default=max(dense // max(sent, 1), 1))
    if workers <= at_once:
        message, weights, factors = weigh(packets, intact, caps, weights)
        each = zip(sections, shared, *message, strict=True)
        return [_mean_of_few(*section, weights, mean) for section in each], factors

    def add(sums, group):
        def add_packets(sums):
            message, weights, factors = weigh(*group)
            each = zip(sections, sums, *message, strict=True)
            return [_add(*section, weights) for section in each], (weights, factors)

        def add_nothing(sums):
            none = jnp.zeros_like(group[3])
            return sums, (none, none)

        # Most slots of a swarm may be empty.
        return jax.lax.cond(
            group[1].any(), *axes.branches_of_one_type(add_packets, add_nothing, sums), sums
        )

    missing = -workers % at_once
    groups = jax.tree.map(
        lambda x: jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)),
        (packets, intact, caps, weights),
    )
    groups = jax.tree.map(lambda x: x.reshape(-1, at_once, *x.shape[1:]), groups)
    zeros = axes.as_varying(list(map(_zeros, layout.sections)), tuple(axes.varying(packets)))
    sums, (weights, factors) = jax.lax.scan(add, zeros, groups)
    total_weight = jnp.sum(weights)
    means = [
        _mean_of_sums(section, at, *total, total_weight, mean)
        for section, at, total in zip(layout.sections, shared, sums, strict=True)
    ]
    return means, factors.reshape(-1)[:workers]


def _mean_of_few(section: Section, shared, positions, values, weights, mean: Mean) -> SparseSum:
    selector, total_weight = section.selector, jnp.sum(weights)
    if not selector.sends_positions:
        total = jnp.sum(values, axis=0)
        return SparseSum(shared[None], _ratio(total, total_weight)[None], selector)
    divisor = total_weight
    if mean == "senders" and len(values) > 1:
        divisor = selector.sender_weight_sums(positions, weights[:, None, None])
    return SparseSum(positions, _ratio(values, divisor), selector)


def _ratio(total: Float32[Array, "..."], weight: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """Divides by a weight, or by 1 if it is 0 because no worker sent anything."""
    return total / jnp.where(weight > 0, weight, 1.0)


def _zeros(section: Section) -> tuple[Array, Array]:
    """Returns initial sums of the values and of their senders' weights for each coefficient."""
    columns = section.selector.n if section.selector.sends_positions else section.selector.k
    zeros = jnp.zeros((section.num_blocks, columns), jnp.float32)
    return zeros, zeros


def _add(section: Section, sums, positions, values, weights) -> tuple[Array, Array]:
    total, sender_weights = sums
    if not section.selector.sends_positions:
        return total + jnp.sum(values, axis=0), sender_weights
    weights = jnp.broadcast_to(weights[:, None, None], values.shape)
    add_all = section.selector.add_all
    return add_all(total, positions, values), add_all(sender_weights, positions, weights)


def _mean_of_sums(
    section: Section, shared, total, sender_weights, total_weight, mean: Mean
) -> SparseSum:
    if not section.selector.sends_positions:
        return SparseSum(shared[None], _ratio(total, total_weight)[None], section.selector)
    divisor = sender_weights if mean == "senders" else total_weight
    no_positions = jnp.zeros((1, section.num_blocks, 0), jnp.int32)
    dense = _ratio(total, divisor)[None]
    return SparseSum(no_positions, dense, AllCoefficients(section.selector.n))


def clip_factor(
    norms: Float32[Array, "*shape"], cap: Float32[Array, "..."]
) -> Float32[Array, "*shape"]:
    """Returns the factor in [0, 1] that scales the norm of any message down to the cap."""
    cap = jnp.maximum(cap, 0.0)
    return jnp.where(norms > cap, cap / norms, 1.0)


def medians_and_weights(
    headers: Header, intact: Bool[Array, "packets"], limit: float | None
) -> tuple[Float32[Array, "2"], Float32[Array, "packets"]]:
    """Returns the medians of weights and weighted norms, and each message's weight in the mean.

    They follow from the headers. Weights are capped at ``limit`` times their median and divided by
    the largest; the norms are those of the messages times these capped weights. The median of an
    even number of packets is the lower one in the middle, and a wrong number in one packet moves it
    by at most one place.
    """
    medians, weights = [], jnp.where(intact, headers.weight, 0.0)
    for factor in 1.0, jnp.sqrt(headers.message_energy):
        numbers = weights * factor
        numbers = jnp.sort(jnp.where(intact & (numbers > 0), numbers, jnp.inf))
        middle = jnp.maximum(jnp.sum(jnp.isfinite(numbers)) - 1, 0) // 2
        medians.append(numbers[middle])
        if limit is not None:
            weights = jnp.minimum(weights, limit * medians[0])
    return jnp.stack(medians), _ratio(weights, jnp.max(weights))


def norm_caps(
    medians: Float32[Array, "*owners 2"], weights: Float32[Array, "..."], limit: float | None
) -> Float32[Array, "..."]:
    """Returns the largest norms of messages of these weights.

    No message counts for more than ``limit`` times the median: a weight is at most so many median
    weights, and a weight times the norm of its message so many medians of these products. A weight
    below the median sets the limit of the median, since it cancels in a mean over senders.
    """
    largest = jnp.finfo(jnp.float32).max
    if limit is None:
        return jnp.full_like(weights, largest)
    weights = jnp.clip(weights, medians[..., 0], limit * medians[..., 0])
    weights = jnp.where(jnp.isfinite(weights), weights, 1.0)  # there is no median of no packets
    return jnp.minimum(limit * medians[..., 1] / weights, largest)

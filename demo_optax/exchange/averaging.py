"""How several workers' packets become their mean. No packet is trusted.

Every worker that averages the same packets does it in the same order with the same program, so that
the mean is equal to the last bit everywhere.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from demo_optax import axes
from demo_optax.arrays import FloatScalar, Positions, in_float32
from demo_optax.compression import Plan
from demo_optax.compression.packet import (
    Header,
    Layout,
    Message,
    Origin,
    Packets,
    Section,
    decode,
    open_heads,
)
from demo_optax.compression.selection import Everything
from demo_optax.exchange.protocol import Mean, SparseSum
from demo_optax.metrics import ExchangeMetrics, summarise

Shared = Sequence[Positions | None]
"""For each section the positions that all workers know; None where they travel."""


class Read(NamedTuple):
    """What packets hold, with an axis of packets in front of each array.

    Attributes:
      message: positions that `add` may be given, and values; zeros where a packet is rejected.
      accepted: whether a packet is intact, well formed and finite.
      norms: of the messages.
    """

    message: Message
    accepted: Bool[Array, "packets"]
    norms: Float32[Array, "packets"]


def read(layout: Layout, packets: Packets, intact: Bool[Array, "packets"]) -> Read:
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
    return Read(Message(tuple(positions), tuple(values)), accepted, jnp.sqrt(in_float32(total)))


class Average(NamedTuple):
    """What all workers make of the same packets.

    Attributes:
      mean: of each section.
      weights: of the workers' messages; 0 where one was rejected.
      metrics: of the step.
    """

    mean: list[SparseSum]
    weights: Float32[Array, "workers"]
    metrics: ExchangeMetrics


def average_all(
    plan: Plan,
    layout: Layout,
    packets: Packets,
    origin: Origin,
    norm_limit: float | None,
    last: ExchangeMetrics,
    mean: Mean,
) -> Average:
    """Averages whole messages, one packet of each worker.

    Args:
      plan: of the tensors.
      layout: of each packet.
      packets: one of each worker.
      origin: of the packets.
      norm_limit: as in `demo_optax.AllGather`.
      last: metrics of the exchange before.
      mean: as in `average`.
    """
    headers, _, intact = open_heads(layout, packets, origin)
    largest = largest_norm(headers, intact, norm_limit)
    shared = plan.shared_positions(origin.step)
    means, weights = average(layout, packets, intact, shared, largest, mean)
    accepted = weights > 0
    checksums = jnp.where(accepted, packets[:, 0], 0)
    return Average(means, weights, summarise(headers, accepted, checksums, last))


def average(
    layout: Layout,
    packets: Packets,
    intact: Bool[Array, "workers"],
    shared: Shared,
    largest: FloatScalar,
    mean: Mean,
) -> tuple[list[SparseSum], Float32[Array, "workers"]]:
    """Averages packets.

    Args:
      layout: of each of them.
      packets: one of each worker.
      intact: which packets are intact.
      shared: positions that every worker knows.
      largest: norm to which a larger message is scaled down.
      mean: over the ``"senders"`` of each coefficient, or over all accepted ``"workers"``.

    Returns:
      The mean of each section, and the weights of the workers' messages; 0 where one was
      rejected.
    """

    def weigh(packets, intact):
        found = read(layout, packets, intact)
        weights = jnp.where(found.accepted, clip_factor(found.norms, largest), 0.0)
        values = tuple(v * weights[:, None, None] for v in found.message.values)
        return found.message._replace(values=values), weights

    workers, at_once = len(packets), _workers_at_once(layout)
    if workers <= at_once:
        message, weights = weigh(packets, intact)
        sections = zip(layout.sections, shared, *message, strict=True)
        return [_mean_of_few(*section, weights > 0, mean) for section in sections], weights

    def add(sums, some):
        message, weights = weigh(*some)
        added = zip(layout.sections, sums, *message, strict=True)
        return [_add(*section, weights > 0) for section in added], weights

    missing = -workers % at_once
    rounds = jnp.pad(packets, ((0, missing), (0, 0))), jnp.pad(intact, (0, missing))
    rounds = jax.tree.map(lambda x: x.reshape(-1, at_once, *x.shape[1:]), rounds)
    zeros = axes.as_varying(list(map(_zeros, layout.sections)), tuple(axes.varying(packets)))
    sums, weights = jax.lax.scan(add, zeros, rounds)
    weights = weights.reshape(-1)[:workers]
    participants = jnp.sum(weights > 0, dtype=jnp.float32)
    means = [
        _mean_of_sums(section, at, *total, participants, mean)
        for section, at, total in zip(layout.sections, shared, sums, strict=True)
    ]
    return means, weights


def _mean_of_few(section: Section, shared, positions, values, accepted, mean: Mean) -> SparseSum:
    """The mean of messages that are all at hand."""
    selector, participants = section.selector, jnp.sum(accepted, dtype=jnp.float32)
    if not selector.travels:
        return _of_values(selector, shared, jnp.sum(values, axis=0), participants)
    number = participants
    if mean == "senders" and len(values) > 1:
        number = selector.senders(positions, accepted[:, None, None])
    return SparseSum(positions, values / jnp.maximum(number, 1.0), selector)


def _zeros(section: Section) -> tuple[Array, Array]:
    """Sums of values, and how many workers sent each; of ``k`` values for shared positions."""
    columns = section.selector.n if section.selector.travels else section.selector.k
    zeros = jnp.zeros((section.blocks, columns), jnp.float32)
    return zeros, zeros


def _add(section: Section, sums, positions, values, accepted) -> tuple[Array, Array]:
    """Adds some workers' messages to the sums of those before."""
    total, senders = sums
    if not section.selector.travels:
        return total + jnp.sum(values, axis=0), senders
    ones = jnp.broadcast_to(accepted[:, None, None].astype(jnp.float32), values.shape)
    add_all = section.selector.add_all
    return add_all(total, positions, values), add_all(senders, positions, ones)


def _mean_of_sums(section: Section, shared, total, senders, participants, mean: Mean) -> SparseSum:
    if not section.selector.travels:
        return _of_values(section.selector, shared, total, participants)
    number = senders if mean == "senders" else participants
    nowhere = jnp.zeros((1, section.blocks, 0), jnp.int32)
    dense = (total / jnp.maximum(number, 1.0))[None]
    return SparseSum(nowhere, dense, Everything(section.selector.n))


def _of_values(selector, shared: Positions, total, participants) -> SparseSum:
    return SparseSum(shared[None], (total / jnp.maximum(participants, 1.0))[None], selector)


def _workers_at_once(layout: Layout) -> int:
    """Packets to decode together: few where their positions travel.

    Otherwise so many that their values together are not more than all coefficients.
    """
    selectors = [section.selector for section in layout.sections]
    travelling = [selector.workers_at_once for selector in selectors if selector.travels]
    if travelling:
        return min(travelling)
    dense = sum(s.blocks * s.selector.n for s in layout.sections)
    return max(dense // max(sum(s.blocks * s.selector.k for s in layout.sections), 1), 1)


def clip_factor(
    norms: Float32[Array, "*shape"], largest: Float32[Array, "..."]
) -> Float32[Array, "*shape"]:
    """The factor that scales a message down to the largest norm: 0 to 1, even if a packet lies."""
    limit = jnp.maximum(largest, 0.0)
    return jnp.where(norms > limit, limit / norms, 1.0)


def largest_norm(
    headers: Header, intact: Bool[Array, "packets"], limit: float | None
) -> FloatScalar:
    """The largest norm of a message: a multiple of the median of the norms in the headers.

    For an even number of packets the lower of the two middle norms is taken, and messages of zeros
    are ignored. Whoever lies about its norm moves the median by one place at most.
    """
    largest = jnp.finfo(jnp.float32).max
    if limit is None:
        return jnp.array(largest, jnp.float32)
    norms = jnp.sqrt(headers.message)
    norms = jnp.sort(jnp.where(intact & (norms > 0), norms, jnp.inf))
    middle = jnp.maximum(jnp.sum(jnp.isfinite(norms)) - 1, 0) // 2
    return jnp.minimum(limit * norms[middle], largest)

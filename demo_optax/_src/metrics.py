"""Makes the headers of packets, and computes and checks the metrics of a step."""

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from demo_optax._src.arrays import (
    FloatScalar,
    IntScalar,
    WordScalar,
    clamp_to_float32,
    energy,
    in_dtype_of,
    unboxed,
)
from demo_optax._src.compression.bits import checksum, hashed, to_words
from demo_optax._src.compression.packet import Header, Message


class ExchangeMetrics(NamedTuple):
    """Holds the metrics that the packets of a step report, the same on every worker.

    Attributes:
      participants: int32, number of workers whose packet was accepted.
      agreed: bool, whether all of them had received the same packets up to the previous step. If
        not, the replicas differ (see `demo_optax.check_replicas`, `demo_optax.repair_replicas`).
      received: uint32, a digest of all packets that were accepted, which the next packet carries.
      identical: bool, whether all workers had exactly the same gradient, which means that
        it is not local.
      sent_share: float32 in [0, 1], fraction of the momenta's energy that was sent.
      restarted: int32, number of blocks of all workers whose momentum was not finite, or too large
        for float32, and was reset to zero, plus the number of preconditioners whose state was not
        finite.
      residual_norm: float32, norm of the part that stays in a worker's momentum, as the root mean
        square over the workers. If several devices of a worker hold copies of a tensor, each
        copy counts.

    Example:
      >>> import jax, demo_optax
      >>> tx = demo_optax.demo(1e-3, demo_optax.Compression(topk=4, block_side=4))
      >>> gradient = jnp.eye(4)
      >>> _, state = jax.jit(tx.update)(gradient, tx.init(gradient), gradient)
      >>> metrics = demo_optax.exchange_metrics(state)
      >>> int(metrics.participants), round(float(metrics.sent_share), 3)
      (1, 1.0)
    """

    participants: Int32[Array, "..."]
    agreed: Bool[Array, "..."]
    received: UInt32[Array, "..."]
    identical: Bool[Array, "..."]
    sent_share: Float32[Array, "..."]
    restarted: Int32[Array, "..."]
    residual_norm: Float32[Array, "..."]


def init_metrics() -> ExchangeMetrics:
    return ExchangeMetrics(
        participants=jnp.int32(0),
        agreed=jnp.array(True),
        received=jnp.uint32(0),
        identical=jnp.array(False),
        sent_share=jnp.float32(0),
        restarted=jnp.int32(0),
        residual_norm=jnp.float32(0),
    )


def header_of(
    gradient,
    energies: Sequence[FloatScalar],
    restarted: Sequence[IntScalar],
    selected: Message,
    message: Message,
    factor: FloatScalar,
    message_weight: ArrayLike,
    previous_metrics: ExchangeMetrics,
) -> Header:
    """Makes the header of a worker's packets, still without the energy of their message.

    The fingerprint is that of the gradient before preconditioning, because preconditioned gradients
    of a first step are hardly more than signs and could be equal by chance. ``energies`` are those
    of each part of the momentum before anything is subtracted. ``selected`` and ``message`` hold
    the same coefficients, as they were selected and as the others decode them.
    """
    pairs = list(zip(selected.values, message.values, strict=True))
    unsent, left = (
        energy([chosen - in_dtype_of(share * decoded, chosen) for chosen, decoded in pairs])
        for share in (1.0, factor)
    )
    momentum = clamp_to_float32(jnp.sum(jnp.stack(energies)))
    chosen = clamp_to_float32(energy(selected.values))
    return Header(
        fingerprint=_fingerprint(gradient),
        received=previous_metrics.received,
        restarted=jnp.sum(jnp.stack(restarted)).astype(jnp.uint32),
        momentum_energy=momentum,
        sent_energy=chosen - unsent,
        residual_energy=jnp.maximum(momentum - chosen, 0.0) + left,
        message_energy=jnp.zeros((), jnp.float32),
        weight=jnp.asarray(message_weight, jnp.float32),
    )


def _fingerprint(gradient) -> WordScalar:
    """Returns a hash of the energy and a projection of every leaf, or 0 if all leaves are zeros."""
    leaves, projections = jax.tree.leaves(gradient), []
    shapes = [x.shape for x in leaves]
    axes = 1 + jnp.arange(max(map(len, shapes), default=0), dtype=jnp.uint32)
    places = jnp.arange(max(itertools.chain(*shapes), default=0), dtype=jnp.uint32)
    of_axes = list(hashed(axes[:, None], places[None]).astype(jnp.float32) * 2.0**-32)
    for x in leaves:  # an energy does not depend on positions, but this does
        weights = jnp.ones((), jnp.float32)
        for of_axis, size in zip(of_axes, x.shape, strict=False):
            weights = jnp.multiply.outer(weights, of_axis[:size])
        projections.append(jnp.sum(x.astype(jnp.float32) * weights))
    words = to_words(jnp.stack([energy(leaves), *projections]))
    return jnp.where(jnp.any(words << 1 != 0), checksum(words), jnp.uint32(0))


def summarise(
    headers: Header,
    accepted: Bool[Array, "workers"],
    checksums: UInt32[Array, "workers"],
    previous_metrics: ExchangeMetrics,
) -> ExchangeMetrics:
    """Computes the metrics of a step; ``checksums`` are 0 for packets that were rejected."""
    received = previous_metrics.received  # a single worker sends it to nobody
    if len(checksums) > 1:
        received = checksum(jnp.append(checksums, received))
    participants = jnp.sum(accepted, dtype=jnp.int32)
    divisor = jnp.maximum(participants, 1).astype(jnp.float32)
    energies = headers.momentum_energy, headers.sent_energy, headers.residual_energy
    momentum, sent, residual = (jnp.sum(jnp.where(accepted, x, 0.0)) for x in energies)
    digests = jnp.stack([headers.fingerprint, headers.received])
    smallest = jnp.min(jnp.where(accepted, digests, jnp.uint32(0xFFFFFFFF)), axis=1)
    largest = jnp.max(jnp.where(accepted, digests, jnp.uint32(0)), axis=1)
    same, agreed = smallest >= largest
    return ExchangeMetrics(
        participants=participants,
        agreed=agreed,
        received=received,
        identical=same & (largest[0] != 0) & (participants > 1),
        sent_share=jnp.clip(sent / jnp.where(momentum > 0, momentum, 1.0), 0.0, 1.0),
        restarted=jnp.sum(jnp.where(accepted, headers.restarted, 0)).astype(jnp.int32),
        residual_norm=jnp.sqrt(residual / divisor),
    )


def exchange_metrics(opt_state) -> ExchangeMetrics | None:
    """Returns the metrics of the last exchange from any optimizer state, or None if it holds none.

    If several decoupled momenta exchange in one step (``optax.partition``), the metrics combine
    them: they hold the smallest number of participants, the mean of the shares sent, the number of
    all blocks that were reset, and the norm of all residuals. ``identical`` is True if it is True
    for any of them.

    Example:
      >>> import jax.numpy as jnp, demo_optax
      >>> exchange_metrics(demo_optax.demo(1e-3).init(jnp.ones(3))).participants
      Array(0, dtype=int32)
    """
    fields = set(ExchangeMetrics._fields)

    def is_metrics(x) -> bool:
        """Recognizes metrics, which are a mapping of their fields in an ``nnx.State``."""
        return isinstance(x, ExchangeMetrics) or (isinstance(x, Mapping) and set(x) == fields)

    leaves = filter(is_metrics, jax.tree.leaves(opt_state, is_leaf=is_metrics))
    found = [x if isinstance(x, ExchangeMetrics) else ExchangeMetrics(**x) for x in leaves]
    if len(found) < 2:
        return unboxed(found[0]) if found else None
    each = jax.tree.map(lambda *x: jnp.stack(x), *map(unboxed, found))
    merge = jax.vmap(partial(merge_shards, sharded="momenta"), axis_name="momenta", out_axes=None)
    return merge(each)._replace(identical=jnp.any(each.identical, axis=0))


def merge_shards(metrics: ExchangeMetrics, sharded: str | tuple[str, ...]) -> ExchangeMetrics:
    least, total = (partial(reduce, axis_name=sharded) for reduce in (jax.lax.pmin, jax.lax.psum))
    return ExchangeMetrics(
        participants=least(metrics.participants),
        agreed=least(metrics.agreed.astype(jnp.int32)) > 0,
        received=total(metrics.received.view(jnp.int32)).view(jnp.uint32),
        identical=least(metrics.identical.astype(jnp.int32)) > 0,
        sent_share=jax.lax.pmean(metrics.sent_share, sharded),
        restarted=total(metrics.restarted),
        residual_norm=jnp.sqrt(total(jnp.square(metrics.residual_norm))),
    )


def check_metrics(metrics: ExchangeMetrics | None) -> None:
    """Raises if a step's metrics show that workers share a gradient, or that replicas differ.

    Where JAX's types cannot show that a gradient is not local, the fingerprints in the packets can.
    Call this after the first exchange and occasionally afterwards; it costs nothing on the device.
    The first exchange ends with the second step if there is a delay, and with the first round if
    there are local steps. Over a million steps, fingerprints may be equal by chance.

    Args:
      metrics: metrics of a step; under ``pmap`` and ``vmap`` with an axis of workers. None, as the
        state of an optimizer without decoupled momentum has, is not checked.

    Raises:
      ValueError: all workers had the same gradient; workers did not get the same packets, or
        disagree on how many took part.

    Example:
      >>> import jax.numpy as jnp, demo_optax
      >>> state = demo_optax.demo(1e-3).init(jnp.ones(3))
      >>> check_metrics(exchange_metrics(state))
    """
    if metrics is None:
        return
    if not isinstance(metrics, ExchangeMetrics):
        raise TypeError(
            f"check_metrics takes the metrics of an exchange, not {metrics!r}: pass "
            "metrics.exchange of a train step, or demo_optax.exchange_metrics(opt_state)."
        )
    if np.any(metrics.identical):
        raise ValueError(
            f"all {int(np.max(metrics.participants))} workers have the very same gradient: their "
            "gradients are not local (summed or averaged over the workers already), or all saw "
            "the same data. Take gradients with demo_optax.local_value_and_grad, leave out any "
            "pmean or psum of gradient or loss, and give each worker its own part of the batch."
        )
    if not np.all(metrics.agreed):
        raise ValueError(
            "workers did not receive the same packets (agreed is False), and the replicas differ: "
            "a packet was damaged on its way into a single worker. Make the replicas equal with "
            "demo_optax.repair_replicas, or restore a checkpoint."
        )
    if len(counts := np.unique(metrics.participants)) > 1:
        raise ValueError(
            f"workers disagree on how many took part in a step, {counts.tolist()}: one of them "
            "skipped a step that the others took, and the replicas differ. Leave out "
            "optax.apply_if_finite and whatever else lets a worker decide alone: one whose "
            "gradient is not finite is left out by itself."
        )

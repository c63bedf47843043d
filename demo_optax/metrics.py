"""What a step tells: the header of every packet, the metrics made of headers, and their check."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from demo_optax.arrays import (
    FloatScalar,
    IntScalar,
    Tensor,
    WordScalar,
    energy,
    in_float32,
    unboxed,
)
from demo_optax.compression.bits import checksum, to_words
from demo_optax.compression.packet import Header, Message


class ExchangeMetrics(NamedTuple):
    """What a step's packets told, the same on every worker.

    Attributes:
      participants: int32, workers whose packet counted.
      agreed: bool, whether they all had received the same packets up to the previous step. Where
        not, one was damaged on the way into one worker, and the replicas differ: compare and mend
        them with `demo_optax.check_replicas` and `demo_optax.repair_replicas`.
      received: uint32, a digest of all packets that counted, which the next packet carries.
      identical: bool, True where all of several workers had the very same gradient, which
        means that it is not local (see `demo_optax.check_metrics`).
      sent_share: float32 in [0, 1], share of the momenta's energy that was sent.
      restarted: int32, blocks of all workers whose momentum was not finite, or too large for
        float32, and started again from zero.
      residual_norm: float32, root mean square over the workers of the norm of what stays
        in the momentum. Where a worker's parameters are sharded, what all of its shards hold
        counts once for each.

    Example:
      >>> import demo_optax
      >>> tx = demo_optax.demo(1e-3, demo_optax.Compression(topk=4, block_side=4))
      >>> gradient = jnp.eye(4)
      >>> _, state = tx.update(gradient, tx.init(gradient), gradient)
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
    """Metrics of a state that has exchanged nothing yet."""
    zero = jnp.zeros((), jnp.float32)
    none = jnp.zeros((), jnp.int32)
    return ExchangeMetrics(
        participants=none,
        agreed=jnp.ones((), bool),
        received=jnp.zeros((), jnp.uint32),
        identical=jnp.zeros((), bool),
        sent_share=zero,
        restarted=none,
        residual_norm=zero,
    )


def header_of(
    gradient,
    health: Sequence[tuple[FloatScalar, IntScalar]],
    selected: Message,
    sent: Message,
    factor: ArrayLike,
    last: ExchangeMetrics,
) -> Header:
    """What a worker's packets say of its step, but for the energy of their message.

    Args:
      gradient: as it came; a first row of each leaf is read.
      health: of some parts of the momentum, the energy before anything is taken out and the number
        of blocks that started again from zero.
      selected: the coefficients that were chosen.
      sent: the same, with the values that the others decode.
      factor: part of what is sent that leaves the momentum.
      last: metrics of its last step.
    """

    def rest(factor):
        pairs = zip(selected.values, sent.values, strict=True)
        return energy([chosen - factor * decoded for chosen, decoded in pairs])

    momentum, restarted = (jnp.sum(jnp.stack(x)) for x in zip(*health, strict=True))
    momentum, chosen = in_float32(momentum), in_float32(energy(selected.values))
    return Header(
        fingerprint=_fingerprint([jnp.atleast_1d(x)[:1] for x in jax.tree.leaves(gradient)]),
        received=last.received,
        restarted=restarted.astype(jnp.uint32),
        momentum=momentum,
        sent=chosen - rest(1.0),
        residual=jnp.maximum(momentum - chosen, 0.0) + rest(factor),
        message=jnp.zeros((), jnp.float32),
    )


def summarise(
    headers: Header,
    counted: Bool[Array, "workers"],
    checksums: UInt32[Array, "workers"],
    last: ExchangeMetrics,
) -> ExchangeMetrics:
    """The metrics of a step.

    Args:
      headers: of all workers' packets.
      counted: whether they took part.
      checksums: the first word of each packet that was received; 0 where one did not count.
      last: metrics of the step before.
    """

    def total(energies):
        return jnp.sum(jnp.where(counted, energies, 0.0))

    def equal(digests):
        """Whether all participants report one value, and that value."""
        smallest = jnp.min(jnp.where(counted, digests, jnp.uint32(0xFFFFFFFF)))
        largest = jnp.max(jnp.where(counted, digests, jnp.uint32(0)))
        return smallest >= largest, largest

    received = last.received  # a single worker has nobody to tell
    if len(checksums) > 1:
        received = checksum(jnp.append(checksums, received))
    participants = jnp.sum(counted, dtype=jnp.int32)
    heard = jnp.maximum(participants, 1).astype(jnp.float32)
    momentum, sent = total(headers.momentum), total(headers.sent)
    same, fingerprint = equal(headers.fingerprint)
    return ExchangeMetrics(
        participants=participants,
        agreed=equal(headers.received)[0],
        received=received,
        identical=same & (fingerprint != 0) & (participants > 1),
        sent_share=jnp.clip(sent / jnp.where(momentum > 0, momentum, 1.0), 0.0, 1.0),
        restarted=jnp.sum(jnp.where(counted, headers.restarted, 0)).astype(jnp.int32),
        residual_norm=jnp.sqrt(total(headers.residual) / heard),
    )


def _fingerprint(arrays: Sequence[Tensor]) -> WordScalar:
    """A hash of the bits; 0 where all are zeros.

    Of gradients as they came: clipped ones have equal norms, and preconditioned ones are hardly
    more than signs on a first step.
    """
    if not arrays:
        return jnp.zeros((), jnp.uint32)
    words = jnp.concatenate([to_words(x.astype(jnp.float32)).reshape(-1) for x in arrays])
    return jnp.where(jnp.any(words << 1 != 0), checksum(words), jnp.uint32(0))


def exchange_metrics(opt_state) -> ExchangeMetrics | None:
    """The metrics of the last exchange, from any optimizer state that holds them, else None.

    Where several decoupled momenta exchange in one step (``optax.partition``): the fewest
    participants, whether any saw identical gradients, the mean share sent, all blocks that started
    again, the norm of all residuals.

    Example:
      >>> import jax.numpy as jnp, demo_optax
      >>> exchange_metrics(demo_optax.demo(1e-3).init(jnp.ones(3))).participants
      Array(0, dtype=int32)
    """
    found = all_metrics(opt_state)
    if len(found) < 2:
        return found[0] if found else None
    each = ExchangeMetrics(*map(jnp.stack, zip(*found, strict=True)))
    return ExchangeMetrics(
        participants=jnp.min(each.participants, axis=0),
        agreed=jnp.all(each.agreed, axis=0),
        received=jnp.sum(each.received, axis=0),
        identical=jnp.any(each.identical, axis=0),
        sent_share=jnp.mean(each.sent_share, axis=0),
        restarted=jnp.sum(each.restarted, axis=0),
        residual_norm=jnp.linalg.norm(each.residual_norm, axis=0),
    )


def all_metrics(opt_state) -> list[ExchangeMetrics]:
    """The metrics of each decoupled momentum in a state."""
    leaves = jax.tree.leaves(opt_state, is_leaf=_is_metrics)
    return [_unwrapped(leaf) for leaf in leaves if _is_metrics(leaf)]


def of_worker(x: ExchangeMetrics, sharded: tuple[str, ...]) -> ExchangeMetrics:
    """The metrics of a worker's shards, along these axes, made one.

    What several shards hold in common counts once for each in the norm of the residual.
    """
    return ExchangeMetrics(
        participants=jax.lax.pmin(x.participants, sharded),
        agreed=jax.lax.pmin(x.agreed.astype(jnp.int32), sharded) > 0,
        received=jax.lax.psum(x.received.view(jnp.int32), sharded).view(jnp.uint32),
        identical=jax.lax.pmin(x.identical.astype(jnp.int32), sharded) > 0,
        sent_share=jax.lax.pmean(x.sent_share, sharded),
        restarted=jax.lax.psum(x.restarted, sharded),
        residual_norm=jnp.sqrt(jax.lax.psum(jnp.square(x.residual_norm), sharded)),
    )


def _is_metrics(x) -> bool:
    """Whether it holds metrics; in an ``nnx.State`` these are a mapping of their fields."""
    fields = set(ExchangeMetrics._fields)
    return isinstance(x, ExchangeMetrics) or (isinstance(x, Mapping) and set(x) == fields)


def _unwrapped(x) -> ExchangeMetrics:
    """Metrics of arrays, whatever Flax wraps around them."""
    fields = x._asdict() if isinstance(x, ExchangeMetrics) else dict(x)
    return ExchangeMetrics(**unboxed(fields))


def check_metrics(metrics: ExchangeMetrics | None) -> None:
    """Raises where a step's metrics show that workers share a gradient, or that replicas differ.

    Under ``check_vma=False``, ``pmap`` and ``vmap`` JAX's types cannot show it, but the packets
    can: they carry a fingerprint of each worker's gradient, and workers with different data never
    have the very same. And a worker that skips a step which the others take, as
    ``optax.apply_if_finite`` lets it, hears nobody from then on. The check costs nothing on the
    device. Call it after the first exchange, which is on the second step with a delay and at
    the end of the first round with local steps, and now and then: in a million steps, fingerprints
    may be equal by chance.

    Args:
      metrics: of a step; under ``pmap`` and ``vmap`` with their axis of workers.

    Raises:
      ValueError: all workers had the same gradient; workers did not get the same packets, or
        disagree on how many took part.

    Example:
      >>> import jax.numpy as jnp, demo_optax
      >>> state = demo_optax.demo(1e-3).init(jnp.ones(3))
      >>> check_metrics(exchange_metrics(state))
    """
    if not isinstance(metrics, ExchangeMetrics):
        raise TypeError(
            f"check_metrics takes the metrics of an exchange, not {metrics!r}: pass "
            "metrics.exchange of a train step, or demo_optax.exchange_metrics(opt_state). That is "
            "None where the state holds no decoupled momentum."
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
            "workers have not got the same packets (agreed is False), and the replicas differ: one "
            "was damaged on its way into a single worker. Make them alike with "
            "demo_optax.repair_replicas, or restore a checkpoint."
        )
    if len(heard := np.unique(metrics.participants)) > 1:
        raise ValueError(
            f"workers disagree on how many took part in a step, {heard.tolist()}: one of them "
            "skipped a step that the others took, and the replicas differ. Leave out "
            "optax.apply_if_finite and whatever else lets a worker decide alone: one whose "
            "gradient is not finite is left out by itself."
        )

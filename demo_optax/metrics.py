"""What a step tells: the numbers in every packet, the metrics made of them, and their check."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from demo_optax.arrays import FloatScalar, IntScalar, Tensor
from demo_optax.compression import Compressed
from demo_optax.compression.bits import checksum
from demo_optax.numerics import energy


class ExchangeMetrics(NamedTuple):
    """What a step's packets told, the same on every worker.

    Attributes:
      participants: int32, workers whose packet counted.
      agreed: bool, whether they all had got the same packets until the step before. Where not, one
        was damaged behind the exchange, on the way into one worker, and the replicas differ:
        compare and mend them with `demo_optax.check_replicas` and `demo_optax.repair_replicas`.
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


class Report(NamedTuple):
    """What a worker's packet tells of its step: scalars, or with an axis of all workers.

    A packet in which one is not finite does not count.

    Attributes:
      fingerprint: differs where gradients do.
      momentum: energy (sum of squares) of the momentum before anything was taken out.
      sent: the part of it that the others get: what was selected, less rounding errors.
      residual: energy of the momentum afterwards.
      restarted: number of its blocks that started again from zero.
      received: 24 bits of the digest of the packets that it got until the step before.
    """

    fingerprint: Float32[Array, "..."]
    momentum: Float32[Array, "..."]
    sent: Float32[Array, "..."]
    residual: Float32[Array, "..."]
    restarted: Float32[Array, "..."]
    received: Float32[Array, "..."]


def before_the_first() -> ExchangeMetrics:
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


def report(
    gradient: Sequence[Tensor],
    momentum: FloatScalar,
    restarted: IntScalar,
    compressed: Compressed,
    subtraction_factor: ArrayLike,
    last: ExchangeMetrics,
) -> Report:
    """Reports a worker's step.

    Args:
      gradient: its leaves, as they came; a first row of each is read.
      momentum: its energy before anything is taken out.
      restarted: blocks that started again from zero.
      compressed: what the worker sends.
      subtraction_factor: part of it that leaves the momentum.
      last: metrics of its last step.
    """

    def rest(factor):
        pairs = zip(compressed.selected.values, compressed.decoded.values, strict=True)
        return energy([chosen - factor * decoded for chosen, decoded in pairs])

    # Sums over many sound blocks may still end beyond float32.
    largest = jnp.finfo(jnp.float32).max
    momentum = jnp.minimum(momentum, largest)
    selected = jnp.minimum(energy(compressed.selected.values), largest)
    return Report(
        fingerprint=_fingerprint([jnp.atleast_1d(x)[:1] for x in gradient]),
        momentum=momentum,
        sent=selected - rest(1.0),
        residual=jnp.maximum(momentum - selected, 0.0) + rest(subtraction_factor),
        restarted=restarted.astype(jnp.float32),
        received=(last.received >> 8).astype(jnp.float32),
    )


def summarise(
    reports: Report,
    counted: Bool[Array, "workers"],
    checksums: UInt32[Array, "workers"],
    last: ExchangeMetrics,
) -> ExchangeMetrics:
    """The metrics of a step.

    Args:
      reports: of all workers.
      counted: whether they took part.
      checksums: as the packets that were got state them; 0 where one did not count.
      last: metrics of the step before.
    """

    def total(energies):
        return jnp.sum(jnp.where(counted, energies, 0.0))

    def equal(x):
        """Whether all that counted are, and the number that they are."""
        smallest = jnp.min(jnp.where(counted, x, jnp.inf))
        largest = jnp.max(jnp.where(counted, x, -jnp.inf))
        return smallest >= largest, largest

    received = last.received  # a single worker has nobody to tell
    if len(checksums) > 1:
        received = checksum(jnp.append(checksums, received))
    participants = jnp.sum(counted, dtype=jnp.int32)
    heard = jnp.maximum(participants, 1).astype(jnp.float32)
    momentum, sent = total(reports.momentum), total(reports.sent)
    same, fingerprint = equal(reports.fingerprint)
    return ExchangeMetrics(
        participants=participants,
        agreed=equal(reports.received)[0],
        received=received,
        identical=same & (fingerprint != 0) & (participants > 1),
        sent_share=jnp.clip(sent / jnp.where(momentum > 0, momentum, 1.0), 0.0, 1.0),
        restarted=total(reports.restarted).astype(jnp.int32),
        residual_norm=jnp.sqrt(total(reports.residual) / heard),
    )


def _fingerprint(arrays: Iterable[Tensor]) -> FloatScalar:
    """A weighted sum. Norms would not do, since clipping makes them equal.

    Nor would preconditioned gradients: on a first step those are hardly more than signs.
    """
    total = jnp.zeros((), jnp.float32)
    for x in arrays:
        scrambled = jax.lax.iota(jnp.uint32, x.size) * jnp.uint32(0x9E3779B9) >> 20
        weights = 1.0 + scrambled.astype(jnp.float32) / 4096
        total += jnp.sum(weights * x.reshape(-1).astype(jnp.float32))
    return jnp.where(jnp.isfinite(total), total, 0.0)  # a precondition may mend what is not


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
    return [leaf for leaf in leaves if _is_metrics(leaf)]


def if_anyone_took_part(updates, opt_state):
    """The updates; zeros on a step on which no worker took part in any exchange."""
    exchanges = all_metrics(opt_state)
    if not exchanges:
        return updates
    any_did = jnp.any(jnp.array([m.participants > 0 for m in exchanges]))
    return jax.tree.map(lambda u: jnp.where(any_did, u, jnp.zeros_like(u)), updates)


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
    return isinstance(x, ExchangeMetrics)


def check_metrics(metrics: ExchangeMetrics) -> None:
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

"""The one collective of a step, and how the workers' packets become one aggregate.

Every worker decodes the same bytes in the same order with the same program, so that the
aggregate is equal to the last bit everywhere: packets are added one after the other, and within
one packet each position of a block occurs at most once, so that no addition races another.
"""

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from demo_optax import axes
from demo_optax.axes import AxisName
from demo_optax.compression import packet as packets

Mean = Literal["senders", "workers"]
MEANS = get_args(Mean)


class ExchangeMetrics(NamedTuple):
    """What a step's packets told, the same on every worker.

    Attributes:
      heard: int32 scalar, workers whose packet counted.
      identical: bool scalar, True where all of several workers had the very same gradient, which
        means that it is not local (see `demo_optax.check_metrics`).
      sent_share: float32 scalar in [0, 1], share of the momenta's energy that was sent.
      residual_norm: float32 scalar, root mean square over the workers of the norm of what stays
        in the momentum. Where a worker's parameters are sharded, what all of its shards hold
        counts once for each.

    Example:
      >>> import demo_optax
      >>> tx = demo_optax.demo(1e-3, topk=4, chunk_size=4)
      >>> gradient = jnp.eye(4)
      >>> _, state = tx.update(gradient, tx.init(gradient), gradient)
      >>> metrics = demo_optax.exchange_metrics(state)
      >>> int(metrics.heard), round(float(metrics.sent_share), 3)
      (1, 1.0)
    """

    heard: jax.Array
    identical: jax.Array
    sent_share: jax.Array
    residual_norm: jax.Array


def nothing_heard() -> ExchangeMetrics:
    """The metrics before the first exchange."""
    zero = jnp.zeros((), jnp.float32)
    return ExchangeMetrics(jnp.zeros((), jnp.int32), jnp.zeros((), bool), zero, zero)


def exchange(
    packet: jax.Array,
    layout: packets.PacketLayout,
    known: tuple[jax.Array | None, ...],
    axis_name: AxisName,
    mean: Mean,
) -> tuple[list[jax.Array], jax.Array, ExchangeMetrics]:
    """Gives every worker the mean of all workers' messages.

    No packet is trusted: one with a wrong checksum, with positions that do not ascend within
    their block, or with a value that is not finite counts as absent, on all workers alike.

    Args:
      packet: uint32 ``(layout.words,)``, this worker's.
      layout: of every worker's packet.
      known: for each group the positions that every worker knows, or None where they travel.
      axis_name: the workers' axis or axes; None for a single worker.
      mean: over the ``"senders"`` of each coefficient, or over all ``"workers"`` heard.

    Returns:
      For each group of the layout float32 ``(blocks, block_size)``, zero where nobody sent
      anything; a bool scalar, whether this worker's own packet counted; and the metrics.
    """
    gathered = gather(packet, axis_name)
    sizes = [(group.blocks, group.block_size) for group in layout.groups]
    start = (
        [axes.like(jnp.zeros(size, jnp.float32), gathered) for size in sizes],
        [axes.like(jnp.zeros(size, jnp.int16), gathered) for size in sizes],
    )

    def add(carry, words):
        header, body, intact = packets.unseal(words)
        message, sound = packets.decode(layout, body, known)
        counts = intact & sound
        sums, senders = [], []
        for total, number, indices, values in zip(*carry, *message, strict=True):
            first = jnp.arange(indices.shape[1], dtype=indices.dtype)[None]
            at = jnp.arange(len(indices))[:, None], jnp.where(counts, indices, first)
            options = dict(unique_indices=True, mode="promise_in_bounds")
            sums.append(total.at[at].add(jnp.where(counts, values, 0.0), **options))
            senders.append(number.at[at].add(counts.astype(number.dtype), **options))
        return (sums, senders), (header, counts)

    (sums, senders), (headers, counted) = jax.lax.scan(add, start, gathered)
    heard = jnp.sum(counted, dtype=jnp.int32)
    number = senders if mean == "senders" else [heard] * len(sums)
    aggregate = [total / jnp.maximum(n, 1) for total, n in zip(sums, number, strict=True)]
    return aggregate, counted[axes.index(axis_name)], _metrics(headers, counted, heard)


def gather(packet: jax.Array, axis_name: AxisName) -> jax.Array:
    """All workers' packets ``(workers, words)``, typed as the same everywhere where types are.

    Where several devices of a worker hold the same packet, each sends its part of it, so that it
    crosses the links between workers once; the parts are joined inside the worker.
    """
    if axis_name is None:
        return packet[None]
    if not axes.manual_names(axis_name):
        return jax.lax.all_gather(packet, axis_name)  # vmap knows only the plain form
    copies = axes.copies_of(packet, axis_name)
    if not copies:
        return jax.lax.all_gather(packet, axis_name, to="invarying")
    parts = jnp.pad(packet, (0, -packet.size % axes.size(copies)))
    parts = parts.reshape(axes.size(copies), -1)[jax.lax.axis_index(copies)]
    gathered = jax.lax.all_gather(parts, axis_name, to="invarying")
    joined = jax.lax.all_gather(gathered, copies, axis=1, tiled=True, to="invarying")
    return joined[:, : packet.size]


def require_local(updates, axis_name: AxisName) -> None:
    """Refuses gradients that are the same on all workers, where the types can tell."""
    if axis_name is None or not axes.types_are_tracked(axis_name):
        return
    for path, leaf in jax.tree.leaves_with_path(updates):
        missing = [name for name in axes.names(axis_name) if name not in axes.varying(leaf)]
        if missing:
            raise ValueError(
                f"the gradient{jax.tree_util.keystr(path)} is not local: its type "
                f"{jax.typeof(leaf)} says that it is the same on all workers of axis "
                f"{missing[0]!r}, so it was summed over them already. jax.grad does so by "
                "itself inside jax.shard_map for parameters that are replicated. Take gradients "
                "with demo_optax.local_value_and_grad(loss_fn, {missing[0]!r}), or call "
                f"jax.lax.pcast(params, {missing[0]!r}, to='varying') before jax.grad."
            )


def _metrics(headers, counted, heard) -> ExchangeMetrics:
    def total(energies):
        return jnp.sum(jnp.where(counted, energies, 0.0))

    momentum, sent = total(headers.momentum), total(headers.sent)
    smallest = jnp.min(jnp.where(counted, headers.fingerprint, jnp.inf))
    largest = jnp.max(jnp.where(counted, headers.fingerprint, -jnp.inf))
    return ExchangeMetrics(
        heard=heard,
        identical=(smallest == largest) & (largest != 0) & (heard > 1),
        sent_share=jnp.clip(sent / jnp.where(momentum > 0, momentum, 1.0), 0.0, 1.0),
        residual_norm=jnp.sqrt(total(headers.residual) / jnp.maximum(heard, 1)),
    )


def mean_over_workers(axis_name: AxisName) -> optax.GradientTransformationExtraArgs:
    """The mean of the workers' gradients by a dense all-reduce: ordinary data parallelism.

    In front of any optax optimizer it gives the baseline that DeMo is compared with, on the same
    train step.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> tx = optax.chain(mean_over_workers("data"), optax.sgd(1.0))
      >>> jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data")(jnp.array([1.0, 3.0]))
      Array([-2., -2.], dtype=float32)
    """

    def update(updates, params=None):
        del params
        axes.size(axis_name)
        require_local(updates, axis_name)
        return updates if axis_name is None else jax.lax.pmean(updates, axis_name)

    return optax.with_extra_args_support(optax.stateless(update))

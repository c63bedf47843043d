"""Optimizers in two halves, `send` and `apply`, for transports other than a collective."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from demo_optax._momentum import EMPTY, DecoupledMomentumState
from demo_optax.exchange import AllGather, Exchange, Outbox


class SplitTransformation(optax.GradientTransformationExtraArgs):
    """An optax transformation whose ``update`` can be called in two halves.

    Every optimizer of this library is one. Between the halves any transport may carry the packets:
    files, sockets, MPI, an object store. Neither half contains a collective over the workers::

        tx = demo_optax.demo_muon(3e-3)  # no axis of workers
        outbox, state = tx.send(gradient, state, params, worker=i)
        packets = my_transport(outbox.packet)  # uint32 (workers, words)
        updates, state = tx.apply(packets, outbox, state, params, worker=i)

    After ``send`` the message is out of the momentum. ``apply`` puts back what did not count, with
    one rounding, and returns the same updates for all workers that get the same packets. Where all
    packets arrive they equal those of ``update``. Extra arguments of ``update`` go to both halves.
    The state between them can be saved, together with the outbox.

    Attributes:
      send: ``send(gradient, state, params=None, *, worker=None, **extra_args)`` returns an
        `demo_optax.Outbox` and the new state. ``worker`` is this worker's row in ``packets``,
        an int or an int32 scalar. It is -1 for a worker whose packet is not among them, and None
        for its number on the optimizer's axis.
      apply: ``apply(packets, outbox, state, params, *, worker=None, **extra_args)`` returns the
        updates and the new state. ``packets`` are uint32 ``(workers, words)``, where a row of zeros
        stands for a packet that did not come. The worker is -1 if its own packet came too late.
      empty_outbox: ``empty_outbox(params)`` returns the outbox of a worker that sends nothing, and
        only applies what the others sent.

    Raises:
      ValueError: ``send`` is called twice in a step; ``apply`` gets an outbox of another step, or
        packets of another shape or dtype. Inside ``jax.jit``, where steps are not known, such a
        second outbox is marked, and ``apply`` changes nothing for one that is marked or old.
      TypeError: the exchange has no halves, as `demo_optax.TwoPhase`.

    Example:
      >>> import jax.numpy as jnp, demo_optax
      >>> tx, params = demo_optax.demo(0.1), jnp.ones((8, 8))
      >>> outbox, state = tx.send(jnp.eye(8), tx.init(params), params, worker=1)
      >>> packets = jnp.stack([jnp.zeros_like(outbox.packet), outbox.packet])
      >>> updates, state = tx.apply(packets, outbox, state, params, worker=1)
      >>> int(demo_optax.exchange_metrics(state).participants)
      1
    """

    send: Callable
    apply: Callable
    empty_outbox: Callable

    @classmethod
    def make(
        cls, init: Callable, update: Callable, send: Callable, apply: Callable
    ) -> "SplitTransformation":
        """The transformation with these functions."""

        def empty_outbox(params) -> Outbox:
            shapes, _ = jax.eval_shape(lambda x: send(x, init(x), x, worker=-1), params)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            return zeros._replace(step=jnp.int32(EMPTY))

        made = cls(init, update)
        made.send, made.apply, made.empty_outbox = send, apply, empty_outbox
        return made


def require_halves(exchange: Exchange) -> None:
    """Refuses exchanges that cannot be cut in two."""
    if not isinstance(exchange, AllGather):
        raise TypeError(
            f"{exchange} has no halves: send() and apply() carry one packet a worker, to all. "
            "Leave exchange out. In two phases an owner's packet needs those of the others; for a "
            "delay take the next gradient before you call apply()."
        )


def require_unsent(state: DecoupledMomentumState) -> None:
    """Refuses a second ``send`` in one step, where the step is known."""
    sent, count = _known(state.sent), _known(state.count)
    if sent is not None and sent == count:
        raise ValueError(
            f"send() was called in step {count} before, and its message has left the momentum: "
            "call apply() with the outbox that it returned, then send() again."
        )


def require_current(outbox: Outbox, state: DecoupledMomentumState) -> None:
    """Refuses an outbox of another step, where both are known."""
    step, count = _known(outbox.step), _known(state.count)
    if step is not None and count is not None and step not in (count, EMPTY):
        raise ValueError(
            f"the outbox is of step {step}, but the state is at step {count}: give apply() the "
            "outbox that send() returned in this step, once."
        )


def require_packets(packets: Any, words: int) -> None:
    """Refuses packets of another shape or dtype."""
    if np.ndim(packets) != 2 or packets.shape[1] != words or packets.dtype != jnp.uint32:
        raise ValueError(
            f"packets must be uint32 (workers, {words}), a row for each worker, but "
            f"{packets.dtype} {packets.shape} was given: stack each worker's outbox.packet, with "
            "zeros for a packet that did not come."
        )


def _known(step: Any) -> int | None:
    return None if isinstance(step, Tracer) else int(step)

"""Optimizers in two halves, `send` and `apply`, for transports other than a collective."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from demo_optax._src.axes import TRACING_ARGUMENTS
from demo_optax._src.compression import Compression, Plan
from demo_optax._src.exchange import AllGather, Exchange, Outbox
from demo_optax._src.momentum import EMPTY, IN_ROUND, REFUSED, DecoupledMomentumState


class SplitTransformation(optax.GradientTransformationExtraArgs):
    """An optax transformation whose ``update`` can be called in two halves.

    Every optimizer of this library is one. Between the halves any transport may carry the packets:
    files, sockets, MPI, an object store. Neither half contains a collective over the workers::

        tx = demo_optax.demo_muon(3e-3)  # no axis of workers
        outbox, state = tx.send(gradient, state, params, worker=i)
        packets = my_transport(outbox.packet)  # uint32 (workers, words)
        updates, state = tx.apply(packets, outbox, state, params, worker=i)

    After ``send`` the message is out of the momentum. ``apply`` puts back what did not count, with
    one rounding, and returns the same updates for all workers that get the same packets. Extra
    arguments of ``update`` go to both halves. The state between them can be saved, together with
    the outbox.

    Attributes:
      send: ``send(gradient, state, params=None, *, worker=None, **extra_args)`` returns an
        `demo_optax.Outbox` and the new state. ``worker`` is this worker's row in ``packets``,
        an int or an int32 scalar. It is -1 for a worker whose packet is not among them, and None
        for its number on the optimizer's axis.
      apply: ``apply(packets, outbox, state, params, *, worker=None, **extra_args)`` returns the
        updates, in the dtypes of ``params``, and the new state. ``packets`` are uint32
        ``(workers, words)``, where a row of zeros stands for a packet that did not come. This
        worker's message counts if its packet is in its row.
      empty_outbox: ``empty_outbox(params, **extra_args)`` returns the outbox of a worker that does
        not call ``send`` in a step, and only applies what the others sent.
      compression: the `demo_optax.Compression` of the packets.
      exchange: the exchange of ``update``.

    Raises:
      ValueError: ``send`` is called twice in a step; ``apply`` gets another outbox than that of the
        last ``send``, or packets of another shape or dtype; ``worker`` is no row of the packets.
        Inside ``jax.jit``, where steps are not known, ``apply`` changes nothing for an outbox of
        another step or of a second ``send``, and its updates are zero.
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
    compression: Compression
    exchange: Exchange

    @classmethod
    def make(
        cls,
        init: Callable,
        update: Callable,
        send: Callable,
        apply: Callable,
        compression: Compression,
        exchange: Exchange,
    ) -> "SplitTransformation":
        """The transformation with these functions."""

        def empty_outbox(params, **extra_args) -> Outbox:
            known = TRACING_ARGUMENTS | extra_args
            shapes, _ = jax.eval_shape(lambda x: send(x, init(x), x, worker=-1, **known), params)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            return zeros._replace(step=jnp.int32(EMPTY))

        @functools.wraps(apply)
        def apply_to_arrays(packets, outbox, state, params, **options):
            outbox, state = jax.tree.map(jnp.asarray, (outbox, state))  # they may come from files
            return apply(packets, outbox, state, params, **options)

        made = cls(init, update)
        made.send, made.apply, made.empty_outbox = send, apply_to_arrays, empty_outbox
        made.compression, made.exchange = compression, exchange
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
    """Refuses a second ``send``, or an ``update``, in one step, where the step is known."""
    sent, count = _known(state.sent), _known(state.count)
    if sent is not None and sent == count:
        raise ValueError(
            f"send() was called in step {count} before, and its message has left the momentum: "
            "call apply() with the outbox that it returned, and go on from there."
        )


def require_outbox(outbox: Outbox, state: DecoupledMomentumState, plan: Plan) -> None:
    """Refuses an outbox of another optimizer; and of another step, where the steps are known."""
    has = [x.shape for x in outbox.message.values]
    needs = [(section.num_blocks, section.selector.k) for section in plan.sections]
    if has != needs:
        raise ValueError(
            f"the outbox holds values of the shapes {has}, but this optimizer sends {needs}: give "
            "apply() the outbox that send() of the same optimizer returned."
        )
    step, sent, count = map(_known, (outbox.step, state.sent, state.count))
    if step is None or sent is None or count is None or step == IN_ROUND:
        return
    if step == REFUSED or step != (count if sent == count else EMPTY):
        given = {REFUSED: "of a second send()", EMPTY: "empty"}.get(step, f"of step {step}")
        needed = (
            "send() was called in it, and its message has left the momentum: give apply() the "
            "outbox that it returned, with a row of zeros if no packet came"
            if sent == count
            else "send() was not called in it: give apply() each outbox once, together with the "
            "state that send() returned, or tx.empty_outbox(params)"
        )
        raise ValueError(f"the outbox is {given}, but the state is at step {count}, and {needed}.")


def require_packets(packets: Any, words: int) -> None:
    """Refuses packets of another shape or dtype."""
    shape, dtype = np.shape(packets), getattr(packets, "dtype", type(packets).__name__)
    if len(shape) != 2 or shape[0] < 1 or shape[1] != words or dtype != jnp.uint32:
        raise ValueError(
            f"packets must be uint32 (workers, {words}), a row for each worker, but {dtype} "
            f"{shape} was given: stack each worker's outbox.packet, with zeros for a packet that "
            "did not come."
        )


def require_worker(worker: Any, rows: int | None = None) -> None:
    """Refuses a worker that is no row of the packets, where that is known."""
    is_number = np.shape(worker) == () and jnp.issubdtype(jnp.result_type(worker), jnp.integer)
    number = _known(worker) if is_number else None
    if not is_number or (number is not None and not -1 <= number < (rows or number + 1)):
        expected = "an integer of at least -1" if rows is None else f"an integer in [-1, {rows})"
        raise ValueError(
            f"worker must be {expected}, this worker's row in the packets, not {worker!r}: -1 "
            "stands for a worker whose packet is not among them."
        )


def _known(number: Any) -> int | None:
    return None if isinstance(number, Tracer) else int(number)

"""Splits optimizers into `send` and `apply`, for transports other than a collective."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from demo_optax._src import axes
from demo_optax._src.compression import Compression, Plan
from demo_optax._src.exchange import AllGather, Delayed, Exchange, Outbox
from demo_optax._src.exchange.protocol import EMPTY, IN_ROUND, MESSAGE


class SplitTransformation(optax.GradientTransformationExtraArgs):
    """Splits the ``update`` of an optax transformation into two halves.

    Every optimizer of this library is of this type. Between the halves any transport may carry the
    packets: files, sockets, MPI or an object store. Neither half contains a collective over the
    workers, unless ``apply`` gets None for the packets::

        tx = demo_optax.demo_muon(3e-3)  # no axis of workers
        outbox, state = tx.send(gradient, state, params, worker=i)
        packets = my_transport(outbox.packet)  # uint32 (workers, words)
        updates, state = tx.apply(packets, outbox, state, params, worker=i)

    ``send`` takes the message out of the momentum. ``apply`` puts back the part that was not
    accepted, with one rounding, and returns the same updates to all workers that receive the same
    packets. Both halves take the extra arguments of ``update``. Between them the state can be saved
    together with the outbox, by `demo_optax.checkpoint.Checkpointer` with ``axis_name=None``.

    Attributes:
      send: ``send(gradient, state, params=None, *, worker=None, **extra_args)`` returns an
        `demo_optax.Outbox` and the new state. ``worker``, an int or an int32 scalar, is this
        worker's row in ``packets``. It is -1 for a worker whose packet is not among them, and None
        stands for its number on the optimizer's axis.
      apply: ``apply(packets, outbox, state, params, *, worker=None, **extra_args)`` returns the
        updates, in the dtypes of ``params``, and the new state. ``packets`` are uint32
        ``(workers, words)``, where a row of zeros stands for a missing packet. This worker's
        message counts if its packet is in its row. With None the optimizer's own exchange carries
        the packets, over its axis of workers.
      empty_outbox: ``empty_outbox(params, **extra_args)`` returns the outbox of a worker that does
        not call ``send`` in a step and only applies the packets of the others.
      compression: the `demo_optax.Compression` of the packets.
      exchange: the exchange of ``update``.
      steps_per_round: the number of steps of `demo_optax.local_steps` in a round; None for an
        optimizer that exchanges on every step.

    Raises:
      ValueError: ``send`` is called twice in a step; ``apply`` gets an outbox other than that of
        the last ``send``, or packets of a wrong shape or dtype; ``worker`` is not a row of the
        packets. Inside ``jax.jit``, where steps are not known, a second ``send`` sends nothing, and
        ``apply`` returns zero updates for an outbox of a different step.
      TypeError: the exchange, such as `demo_optax.TwoPhase`, cannot be carried by another
        transport.

    Example:
      >>> import jax, jax.numpy as jnp, demo_optax
      >>> tx, params = demo_optax.demo(0.1), jnp.ones((8, 8))
      >>> send, apply = jax.jit(tx.send), jax.jit(tx.apply)
      >>> outbox, state = send(jnp.eye(8), tx.init(params), params, worker=1)
      >>> packets = jnp.stack([jnp.zeros_like(outbox.packet), outbox.packet])
      >>> updates, state = apply(packets, outbox, state, params, worker=1)
      >>> int(demo_optax.exchange_metrics(state).participants)
      1
    """

    @property
    def algorithm(self) -> Any:
        """The value whose methods `init` and `update` are; the other halves are methods of it."""
        return self.update.__self__  # type: ignore[attr-defined]

    @property
    def send(self) -> Callable:
        return self.algorithm.send

    @property
    def apply(self) -> Callable:
        return self.algorithm.apply

    @property
    def empty_outbox(self) -> Callable:
        return self.algorithm.empty_outbox

    @property
    def compression(self) -> Compression:
        return self.algorithm.compression

    @property
    def exchange(self) -> Exchange:
        return self.algorithm.exchange

    @property
    def steps_per_round(self) -> int | None:
        return self.algorithm.steps_per_round

    def _replace(self, **fields):  # type: ignore[override]
        if "update" in fields:
            raise TypeError(
                "_replace(update=...) would leave send() and apply() behind, which are the halves "
                "of this optimizer's own update: make optax.GradientTransformationExtraArgs(init, "
                "update) instead, which has none, or wrap the optimizer with optax.chain."
            )
        return type(self)(**self._asdict() | fields)


def require_carried(exchange: Exchange, over_axis: bool = False) -> None:
    """Refuses an exchange that no transport can carry, or not one of the user's own."""
    if isinstance(exchange, Delayed) or not (over_axis or isinstance(exchange, AllGather)):
        raise TypeError(
            f"{exchange} has no halves: send() and apply() carry one packet a worker, to all. "
            "Leave exchange out. In two phases an owner's packet needs those of the others; for a "
            "delay take the next gradient before you call apply()."
        )


def require_outbox(outbox: Outbox, state: Any, plan: Plan) -> None:
    """Refuses an outbox of a different optimizer, or of a different step if steps are known."""
    has = [x.shape for x in outbox.message.values]
    needs = [(section.num_blocks, section.selector.k) for section in plan.sections]
    if has != needs:
        raise ValueError(
            f"the outbox holds values of the shapes {has}, but this optimizer sends {needs}: give "
            "apply() the outbox that send() of the same optimizer returned."
        )
    status, step, sent, count = map(_known, (outbox.status, outbox.step, state.sent, state.count))
    if None in (status, step, sent, count) or (status == IN_ROUND and not sent):
        return
    if status != (MESSAGE if sent else EMPTY) or (sent and step != count):
        kinds = {EMPTY: "empty", IN_ROUND: "of a second send()", MESSAGE: f"of step {step}"}
        needed = (
            "send() was called in it, and its message has left the momentum: give apply() the "
            "outbox that it returned, with a row of zeros if no packet came"
            if sent
            else "send() was not called in it: give apply() each outbox once, together with the "
            "state that send() returned, or tx.empty_outbox(params)"
        )
        raise ValueError(
            f"the outbox is {kinds[int(outbox.status)]}, but the state is at step {count}, and "
            f"{needed}."
        )


def require_packets(packets: Any, words: int) -> int:
    """Returns the number of packets, and refuses what is no array of packets."""
    shape, dtype = np.shape(packets), getattr(packets, "dtype", type(packets).__name__)
    if len(shape) != 2 or shape[0] < 1 or shape[1] != words or dtype != jnp.uint32:
        raise ValueError(
            f"packets must be uint32 (workers, {words}), a row for each worker, but {dtype} "
            f"{shape} was given: stack each worker's outbox.packet, with zeros for a packet that "
            "did not come."
        )
    return shape[0]


def row_of(worker: Any, axis_name: axes.AxisName, rows: int | None = None) -> jax.Array:
    """Returns this worker's row in the packets; refuses an invalid number if it is known."""
    if worker is None and axis_name is None and (rows or 0) > 1:
        raise ValueError(
            f"there are packets of {rows} workers, but worker is None: give send() and apply() the "
            "number of this worker's row."
        )
    worker = axes.index(axis_name) if worker is None else worker
    is_number = np.shape(worker) == () and jnp.issubdtype(jnp.result_type(worker), jnp.integer)
    number = _known(worker) if is_number else None
    if not is_number or (number is not None and not -1 <= number < (rows or number + 1)):
        expected = "an integer of at least -1" if rows is None else f"an integer in [-1, {rows})"
        raise ValueError(
            f"worker must be {expected}, this worker's row in the packets, not {worker!r}: -1 "
            "stands for a worker whose packet is not among them."
        )
    return jnp.asarray(worker, jnp.int32)


def _known(number: Any) -> int | None:
    return None if isinstance(number, Tracer) else int(number)

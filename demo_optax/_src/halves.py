"""Splits optimizers into `send` and `apply`, for transports other than a collective."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from demo_optax._src import axes, checks, metrics, momentum
from demo_optax._src.arrays import unboxed
from demo_optax._src.compression import Compression, Plan, make_plan
from demo_optax._src.compression.settings import STATIC_NODES, TensorShapes
from demo_optax._src.exchange import AllGather, Delayed, Exchange, Outbox
from demo_optax._src.exchange.all_gather import resolve_exchange
from demo_optax._src.exchange.protocol import MEANS
from demo_optax._src.momentum import (
    EMPTY,
    IN_ROUND,
    NEVER,
    REFUSED,
    Applied,
    DecoupledMomentumState,
    Sent,
    Settings,
)


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
      with_compression: ``with_compression(compression)`` returns the same optimizer with another
        compression.
      base: the optimizer that takes the aggregate as its gradient, or None.
      update_and_tell: ``update`` with a third result, which tells whether this worker's gradient
        has entered its momentum.
      steps_per_round: the number of steps of `demo_optax.local_steps` in a round; None for an
        optimizer that exchanges on every step.

    Raises:
      ValueError: ``send`` is called twice in a step; ``apply`` gets an outbox other than that of
        the last ``send``, or packets of a wrong shape or dtype; ``worker`` is not a row of the
        packets. Inside ``jax.jit``, where steps are not known, ``apply`` changes nothing for an
        outbox of a different step or of a second ``send``, and returns zero updates.
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

    send: Callable
    apply: Callable
    empty_outbox: Callable
    compression: Compression
    exchange: Exchange
    with_compression: Callable[[Compression], "SplitTransformation"]
    base: optax.GradientTransformation | None = None
    update_and_tell: Callable
    steps_per_round: int | None

    def __new__(cls, init, update):
        """Gives a pair the halves that belong to its update, also where JAX copies it as a tree."""
        made = super().__new__(cls, init, update)
        vars(made).update(getattr(update, "halves", {}))
        return made

    def _replace(self, **fields):  # type: ignore[override]
        if "update" in fields:
            raise TypeError(
                "_replace(update=...) would leave send() and apply() behind, which are the halves "
                "of this optimizer's own update: make optax.GradientTransformationExtraArgs(init, "
                "update) instead, which has none, or wrap the optimizer with optax.chain."
            )
        return type(self)(**self._asdict() | fields)

    @classmethod
    def make(
        cls,
        init,
        update_and_tell,
        send,
        apply,
        compression,
        exchange,
        with_compression,
        steps_per_round=None,
    ) -> "SplitTransformation":
        def empty_outbox(params, **extra_args) -> Outbox:
            extra = axes.TRACING_ARGUMENTS | extra_args
            shapes, _ = jax.eval_shape(lambda x: send(x, init(x), x, worker=-1, **extra), params)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            return zeros._replace(step=jnp.int32(EMPTY))

        @functools.wraps(apply)
        def apply_to_arrays(packets, outbox, state, params, **options):
            outbox, state = jax.tree.map(jnp.asarray, (outbox, state))  # they may come from files
            return apply(packets, outbox, state, params, **options)

        @functools.wraps(update_and_tell)
        def update(*args, **extra_args):
            return update_and_tell(*args, **extra_args)[:2]

        made = cls(init, update)
        made.update_and_tell = update_and_tell
        made.send, made.apply, made.empty_outbox = send, apply_to_arrays, empty_outbox
        made.compression, made.exchange = compression, exchange
        made.with_compression = with_compression
        made.steps_per_round = steps_per_round
        vars(update)["halves"] = vars(made)
        return made


class SplitMomentum(NamedTuple):
    """Holds the functions of a decoupled momentum, as the wrappers around it call them."""

    init: Callable[[Any], DecoupledMomentumState]
    update: Callable[..., Applied]
    send: Callable[..., Sent]
    apply: Callable[..., Applied]
    exchange: Exchange


def split_momentum(
    compression: Compression,
    axis_name: axes.AxisName,
    exchange: Exchange | None,
    precondition: optax.GradientTransformation | None,
    **options,
) -> SplitMomentum:
    """Checks the arguments of `demo_optax.decoupled_momentum`, and returns its functions."""
    if not isinstance(compression, Compression):
        raise TypeError(
            "compression must be a demo_optax.Compression, as in Compression(topk=32), not "
            f"{compression!r}."
        )
    exchange = resolve_exchange(axis_name, exchange)
    axis_name = exchange.axis_name
    checks.require_unwrapped(precondition)
    precondition = optax.with_extra_args_support(precondition or optax.identity())
    settings = Settings(
        compression=compression, precondition=precondition, exchange=exchange, **options
    )
    checks.in_interval("decay", settings.decay, "[0, 1]")
    checks.in_interval("subtraction_factor", settings.subtraction_factor, "(0, 1]")
    is_kept = not isinstance(settings.decay, Tracer) and settings.decay == 1
    if settings.gradient_weight is None and is_kept:
        raise ValueError(
            "decay=1 leaves gradients the weight 1 - decay = 0, so that nothing is trained: give a "
            "gradient_weight, such as 1.0."
        )
    if settings.gradient_weight is not None:
        checks.require_rate("gradient_weight", settings.gradient_weight)
    checks.one_of("mean", settings.mean, MEANS)
    checks.static_dtype("momentum_dtype", settings.momentum_dtype)
    momentum_format = compression.momentum_format

    def plan_of(tree) -> Plan:
        shapes = tuple(x.shape for x in jax.tree.leaves(tree))
        return make_plan(compression, shapes, axes.platform())

    def init(params) -> Any:  # optax's type for states has no static nodes
        checks.floating_leaves(params)

        zeros = jax.tree.map(
            lambda x: axes.varying_like(
                jnp.zeros(momentum_format.geometry(x.shape).stored_shape, settings.momentum_dtype),
                x,
            ),
            unboxed(params),
        )
        return DecoupledMomentumState(
            count=jnp.zeros((), jnp.int32),
            momentum=axes.as_varying(zeros, axis_name),
            precondition=axes.as_varying(precondition.init(params), axis_name),
            metrics=metrics.init_metrics(),
            exchange=exchange.init(plan_of(params)),
            sent=jnp.int32(NEVER),
            momentum_format=momentum_format,
            shapes=TensorShapes(x.shape for x in jax.tree.leaves(params)),
        )

    def plan_for(tree, state) -> Plan:
        """Returns the plan of these tensors, for which the state must have been made."""
        plan = plan_of(tree)
        leaves = [jax.ShapeDtypeStruct(x.stored_shape, jnp.float32) for x in plan.geometries]
        structure: Any = jax.tree.structure(unboxed(tree))
        kept = jax.eval_shape(lambda: exchange.init(plan))
        shapes = TensorShapes(x.shape for x in plan.geometries)
        needed = {"momentum": structure.unflatten(leaves), "exchange": kept}
        held = {name: getattr(state, name) for name in needed}
        settings_held = {"format": state.momentum_format, "shapes": state.shapes}
        checks.state_fits(
            "the state of the decoupled momentum",
            held | settings_held,
            needed | {"format": momentum_format, "shapes": shapes},
            "Make the state anew from the parameters that are trained now, or restore the run with "
            "demo_optax.checkpoint, which puts pending messages back into the momentum. An axis of "
            "workers in front belongs to demo_optax.make_train_step and stack_workers, which "
            "remove it.",
            STATIC_NODES,
        )
        return plan

    def update(gradient, state, params, extra_args) -> Applied:
        checks.require_local_gradient(gradient, axis_name)
        plan = plan_for(gradient, state)
        require_unsent(state)
        return momentum.update(settings, plan, gradient, state, params, extra_args)

    def send(gradient, state, params, worker, extra_args) -> Sent:
        require_halves(exchange, over_axis=axis_name is not None and worker is None)
        checks.require_local_gradient(gradient, axis_name)
        plan = plan_for(gradient, state)
        require_unsent(state)
        row = _row(worker, axis_name)
        return momentum.send(settings, plan, gradient, state, params, row, extra_args)

    def apply(packets, outbox, state, params, worker) -> Applied:
        if params is None:
            raise ValueError(
                "apply() needs the parameters, whose dtypes its updates have, but params is None: "
                "call apply(packets, outbox, state, params)."
            )
        plan = plan_for(params, state)
        _require_outbox(outbox, state, plan)
        over_axis = axis_name is not None and packets is None
        require_halves(exchange, over_axis)
        if over_axis:
            row = axes.index(axis_name)
        else:
            rows = _require_packets(packets, exchange.layout(plan).words)
            row, packets = _row(worker, axis_name, rows), jnp.asarray(packets)
        return momentum.apply(settings, plan, packets, outbox, state, params, row)

    return SplitMomentum(init, update, send, apply, exchange)


def require_halves(exchange: Exchange, over_axis: bool = False) -> None:
    """Refuses an exchange that no transport can carry, or not one of the user's own."""
    if isinstance(exchange, Delayed) or not (over_axis or isinstance(exchange, AllGather)):
        raise TypeError(
            f"{exchange} has no halves: send() and apply() carry one packet a worker, to all. "
            "Leave exchange out. In two phases an owner's packet needs those of the others; for a "
            "delay take the next gradient before you call apply()."
        )


def require_unsent(state: DecoupledMomentumState) -> None:
    """Refuses a second ``send`` or an ``update`` in one step, if the step is known."""
    sent, count = _known(state.sent), _known(state.count)
    if sent is not None and sent == count:
        raise ValueError(
            f"send() was called in step {count} before, and its message has left the momentum: "
            "call apply() with the outbox that it returned, and go on from there."
        )


def _require_outbox(outbox: Outbox, state: DecoupledMomentumState, plan: Plan) -> None:
    """Refuses an outbox of a different optimizer, or of a different step if steps are known."""
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


def _require_packets(packets: Any, words: int) -> int:
    """Returns the number of packets, and refuses what is no array of packets."""
    shape, dtype = np.shape(packets), getattr(packets, "dtype", type(packets).__name__)
    if len(shape) != 2 or shape[0] < 1 or shape[1] != words or dtype != jnp.uint32:
        raise ValueError(
            f"packets must be uint32 (workers, {words}), a row for each worker, but {dtype} "
            f"{shape} was given: stack each worker's outbox.packet, with zeros for a packet that "
            "did not come."
        )
    return shape[0]


def _row(worker: Any, axis_name: axes.AxisName, rows: int | None = None) -> jax.Array:
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

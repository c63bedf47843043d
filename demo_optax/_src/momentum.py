"""Decoupled momentum on one page, made of `send`, an exchange and `apply`.

    gradient ─► precondition ─► transform ─► accumulate ─► select ─► encode        `send`
                                                                        │ packet
                                                                    EXCHANGE
                                                                        │ all packets
    update ◄─ inverse ◄─ subtract what was delivered ◄─ mean ◄─ decode             `apply`

`send` knows of no axis of workers, nor does `apply` if it is given the packets. `update` runs both
in one program with the exchange between them, and subtracts only once.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PRNGKeyArray

from demo_optax._src import axes, checks, metrics, participation
from demo_optax._src.arrays import (
    BoolScalar,
    IntScalar,
    in_dtype_of,
    round_stochastically,
    widest,
)
from demo_optax._src.compression import Compression, MomentumFormat, Plan, packet
from demo_optax._src.compression.packet import Origin, Packets
from demo_optax._src.compression.plan import Part, shared_positions
from demo_optax._src.compression.settings import TensorShapes
from demo_optax._src.compression.transforms import ROUNDING_STREAM, key_of
from demo_optax._src.exchange import Aggregate, Exchange, Outbox
from demo_optax._src.exchange.protocol import Mean, Subtraction, split_messages
from demo_optax._src.metrics import ExchangeMetrics

MESSAGE_WEIGHT = "message_weight"
NEVER = EMPTY = -1
"""A state without a message under way has this as ``sent``, and an empty outbox as ``step``."""
REFUSED, IN_ROUND = -2, -3
"""These steps mark outboxes that `apply` ignores: of a second `send`, and from inside a round."""


class DecoupledMomentumState(NamedTuple):
    """State of `demo_optax.decoupled_momentum`, as one worker sees it.

    Attributes:
      count: int32 scalar, the number of updates so far; the same on all workers.
      momentum: a tree like the parameters, without Flax's boxes, of the coefficients
        ``(*grid, n)`` of each parameter's blocks in the momentum's dtype; each worker has its own.
      precondition: state of the local preconditioner; each worker has its own.
      metrics: metrics of the last exchange; the same on all workers.
      exchange: state of the exchange; ``()`` for `demo_optax.AllGather`.
      sent: int32 scalar, the step whose message has left the momentum in ``send`` and waits for
        ``apply``, or -1 if there is none. It differs between workers only where ``send`` is called.
      momentum_format: static, the transform and the blocks in which the momentum is stored.
      shapes: static, the shape of each parameter.

    Example:
      >>> import demo_optax
      >>> state = demo_optax.decoupled_momentum(0.95).init({"w": jnp.ones((128, 192))})
      >>> state.momentum["w"].shape
      (2, 3, 4096)
    """

    count: IntScalar  # type: ignore[assignment]  # as in optax; hides tuple.count
    momentum: optax.Updates
    precondition: optax.OptState
    metrics: ExchangeMetrics
    exchange: Any
    sent: IntScalar
    momentum_format: MomentumFormat
    shapes: TensorShapes

    handles_nonfinite = True
    local_fields = ("momentum", "precondition", "exchange", "sent")


class Settings(NamedTuple):
    """The arguments of `demo_optax.decoupled_momentum`."""

    compression: Compression
    decay: ArrayLike
    gradient_weight: optax.ScalarOrSchedule | None
    mean: Mean
    subtraction_factor: ArrayLike
    momentum_dtype: DTypeLike
    precondition: optax.GradientTransformationExtraArgs
    exchange: Exchange

    def weight_at(self, step: IntScalar) -> Any:
        weight = 1 - self.decay if self.gradient_weight is None else self.gradient_weight
        return checks.evaluate_schedule("gradient_weight", weight, step)


class Applied(NamedTuple):
    """Results of an update, or of `apply`.

    Attributes:
      updates: T^-1 of the mean message, a tree like the gradient.
      took_part: whether the worker's gradient of this step is in its momentum. It is True as well
        if the worker only follows the others, without a gradient.
      own: function that returns T^-1 of the momentum and of the message under way, as such a tree.
    """

    updates: Any
    state: DecoupledMomentumState
    took_part: BoolScalar
    own: Callable[[], Any]


class Sent(NamedTuple):
    """Results of `send`, where the message has left the momentum of the new state.

    The fields ``took_part`` and ``own`` are those of `Applied`.
    """

    outbox: Outbox
    state: DecoupledMomentumState
    took_part: BoolScalar
    own: Callable[[], Any]


def send(
    settings: Settings, plan: Plan, gradient, state, params, worker: IntScalar, extra_args
) -> Sent:
    """Runs the first half of an update, which moves the message from the momentum to the outbox.

    A second call in the same step changes nothing, and `apply` refuses its outbox, since otherwise
    the message of the first call would be lost.
    """
    momenta, outbox, precondition = _accumulate_and_encode(
        settings, plan, gradient, state, params, worker, extra_args
    )
    message = Subtraction.uniform(plan, outbox.message, outbox.factor, under_way=True)
    key = _rounding_key(settings, state, worker)
    momentum = _subtract(settings, plan, momenta, [message], state, key)
    own = functools.partial(_own, plan, momentum, [message], state.count, gradient)
    again = state.sent == state.count
    none = jax.tree.map(jnp.zeros_like, outbox)._replace(step=jnp.int32(REFUSED))
    old, new = (state.momentum, state.precondition), (momentum, precondition)
    momentum, precondition = participation.choose(again, old, new)
    sent = jnp.where(again, state.sent, state.count)
    new = state._replace(momentum=momentum, precondition=precondition, sent=sent)
    return Sent(participation.choose(again, none, outbox), new, outbox.factor > 0, own)


def apply(
    settings: Settings,
    plan: Plan,
    packets: Packets | None,
    outbox: Outbox,
    state,
    like,
    worker: IntScalar,
) -> Applied:
    """Runs the second half of an update, which averages all packets.

    Without ``packets`` the exchange carries those of the outbox over the workers' axis. Whatever
    part of the worker's message did not count returns to the momentum. Nothing changes unless the
    outbox comes from the last `send`, which was called in this step, or is an `EMPTY` one in a step
    without `send`.
    """
    step, has_sent = state.count, state.sent == state.count
    is_current = jnp.where(has_sent, outbox.step == step, outbox.step == EMPTY)
    exchange: Any = settings.exchange
    delivered, known = outbox._replace(step=step), (state.metrics, settings.mean)
    if packets is None:
        aggregate = exchange.exchange(plan, delivered, state.exchange, *known)
    else:
        is_there = (worker >= 0) & jnp.all(packets[worker] == outbox.packet)
        delivered = delivered._replace(factor=jnp.where(is_there, outbox.factor, 0.0))
        aggregate = exchange.average(plan, packets, delivered, worker, *known)
        aggregate = aggregate._replace(state=state.exchange)
    (accepted,) = aggregate.subtractions
    rest = aggregate._replace(subtractions=[accepted.less(outbox.factor)])

    def in_basis_of_step(part: Part, stored):
        # Where `send` was called, it has already changed the basis
        pairs = part.unpack(stored), part.unpack(stored, step)
        return jax.tree.map(lambda m, advanced: jnp.where(has_sent, m, advanced), *pairs)

    momenta = list(map(in_basis_of_step, plan.parts, plan.per_part(state.momentum)))
    # The key differs from that of `send`, which has decided how the stored momentum was rounded.
    key = jax.random.fold_in(_rounding_key(settings, state, worker), 2**31)
    skipped = (outbox.step != EMPTY) & (outbox.factor == 0)
    new = _finish(settings, plan, momenta, rest, state, like, key, ~skipped)
    applied = new.state._replace(sent=jnp.full_like(state.sent, NEVER))
    return new._replace(
        updates=participation.zero_unless(is_current, new.updates),
        state=participation.choose(is_current, applied, state),
    )


def update(settings: Settings, plan: Plan, gradient, state, params, extra_args) -> Applied:
    """Runs both halves in one program, with the exchange between them."""
    exchange, worker = settings.exchange, axes.index(settings.exchange.axis_name)
    momenta, outbox, precondition = _accumulate_and_encode(
        settings, plan, gradient, state, params, worker, extra_args
    )
    aggregate = exchange.exchange(plan, outbox, state.exchange, state.metrics, settings.mean)
    state = state._replace(precondition=precondition)
    key = _rounding_key(settings, state, worker)
    return _finish(settings, plan, momenta, aggregate, state, gradient, key, outbox.factor > 0)


def _accumulate_and_encode(
    settings: Settings, plan: Plan, gradient, state, params, worker: IntScalar, extra_args
) -> tuple[list[Any], Outbox, Any]:
    """Returns the momenta before any subtraction, the outbox and the preconditioner's state."""
    exchange, step, given = settings.exchange, state.count, gradient
    weight, sharded = settings.weight_at(step), axes.sharded_axes_in(extra_args)
    participates = participation.decide(gradient, exchange.axis_name, extra_args, sharded)
    participates &= jnp.isfinite(jnp.square(jnp.asarray(weight, jnp.float32)))
    participates &= jnp.isfinite(settings.decay)

    # Precondition: each worker may have a second moment of its own
    precondition = settings.precondition
    initial_state = precondition.init(gradient if params is None else params)
    intact = participation.is_intact(state.precondition, initial_state, exchange.axis_name, sharded)
    old_state = participation.choose_state(intact, state.precondition, initial_state)
    gradient, new_state = precondition.update(gradient, old_state, params, **extra_args)
    usable = participation.decide(gradient, exchange.axis_name, sharded=sharded)
    old_state = participation.choose_state(usable | ~participates, old_state, initial_state)
    participates &= usable

    def accumulate_and_select(part: Part, tensors, stored, shared):
        # Transform: c = T(g)
        coefficients = part.split(part.forward(tensors, step))

        # Accumulate: m <- beta m + w c. A worker that skips the step keeps the old m. In the shape
        # of c, XLA fuses this with the transform
        def accumulate(m, c):
            dtype = widest(m.dtype, c.dtype)
            old = m.reshape(c.shape).astype(dtype)
            new = settings.decay * old + weight * c.astype(dtype)
            return jnp.where(participates, new.astype(dtype), old).reshape(m.shape)

        momenta = jax.tree.map(accumulate, part.unpack(stored, step), coefficients)
        momenta, energy, restarted = participation.reset_nonfinite_blocks(momenta)

        # Select: q = top_k(m)
        momenta, selected = part.select(momenta, shared)
        return momenta, energy, restarted, selected

    results = plan.map_parts(
        accumulate_and_select,
        plan.per_part(gradient),
        plan.per_part(state.momentum),
        plan.split_rows(shared_positions(plan.sections, step)),
    )
    momenta, energies, restarted, selected = map(list, zip(*results, strict=True))

    # Encode: q_hat = decode(encode(q)), the `message`, and the packets that hold it
    selected = plan.join(selected)
    coded, message = packet.encode(plan.sections, selected)
    factor = jnp.where(participates, jnp.asarray(settings.subtraction_factor, jnp.float32), 0)
    header = metrics.header_of(
        given,
        energies,
        [*restarted, (~intact).astype(jnp.int32)],
        selected,
        message,
        factor,
        extra_args.get(MESSAGE_WEIGHT, 1.0),
        state.metrics,
    )
    layout, owners = exchange.layout(plan), exchange.packets_per_worker()
    origin = Origin(step, worker * owners + jnp.arange(owners, dtype=jnp.int32))
    packets = packet.build(layout, header, coded, message, participates, origin)
    outbox = Outbox(packets, message, factor, step)
    return momenta, outbox, participation.choose(participates, new_state, old_state)


def _finish(
    settings: Settings,
    plan: Plan,
    momenta: Sequence[Any],
    aggregate: Aggregate,
    state: DecoupledMomentumState,
    like,
    key: PRNGKeyArray,
    took_part: BoolScalar,
) -> Applied:
    """Subtracts the delivered messages from the momenta and inverts the mean."""
    step = state.count
    momentum = _subtract(settings, plan, momenta, aggregate.subtractions, state, key)

    def invert(part: Part, means):
        # Inverse: u = T^-1(q_bar)
        return part.inverse([mean.dense() for mean in means], step - aggregate.delay)

    means = plan.split_rows(aggregate.mean, axis=1)
    updates = _as_tree(like, plan.map_parts(invert, means))
    updates = jax.tree.map(in_dtype_of, updates, like)
    new = state._replace(
        count=jnp.asarray(optax.safe_increment(step)),
        momentum=momentum,
        metrics=aggregate.metrics,
        exchange=aggregate.state,
    )
    under_way = [s for s in aggregate.subtractions if s.under_way]
    own = functools.partial(_own, plan, momentum, under_way, step, like)
    return Applied(updates, new, took_part, own)


def _own(plan: Plan, momentum, under_way: Sequence[Subtraction], step: IntScalar, like):
    """Returns T^-1 of a stored momentum and of messages under way, as a tree like ``like``."""

    def invert(part: Part, rows, stored):
        momenta = part.unpack(stored)
        for message in rows:
            momenta = part.subtract(momenta, message, step, delay=0)
        return part.inverse(list(map(jnp.concatenate, momenta)), step)

    rows = split_messages(plan, [message.undone() for message in under_way])
    tensors = _as_tree(like, plan.map_parts(invert, rows, plan.per_part(momentum)))
    return jax.tree.map(in_dtype_of, tensors, like)


def _subtract(
    settings: Settings,
    plan: Plan,
    momenta: Sequence[Any],
    subtractions: Sequence[Subtraction],
    state: DecoupledMomentumState,
    key: PRNGKeyArray,
):
    """Returns the momentum to store, as a tree like the state's, after ``m <- m - alpha q_hat``."""

    def subtract(part: Part, rows, momenta):
        for subtraction, own in zip(subtractions, rows, strict=True):
            momenta = part.subtract(momenta, own, state.count, subtraction.delay)
        return part.pack(momenta)

    stored = plan.map_parts(subtract, split_messages(plan, subtractions), momenta)
    rounded = [
        round_stochastically(m, settings.momentum_dtype, jax.random.fold_in(key, number))
        for number, m in enumerate(itertools.chain.from_iterable(stored))
    ]
    return _as_tree(state.momentum, [rounded])


def _rounding_key(settings: Settings, state, worker: IntScalar) -> PRNGKeyArray:
    key = key_of(settings.compression.seed, state.count, ROUNDING_STREAM)
    return jax.random.fold_in(key, worker)


def _as_tree(like, leaves_of_parts: Sequence[Sequence[Any]]):
    leaves = itertools.chain.from_iterable(leaves_of_parts)
    return jax.tree.unflatten(jax.tree.structure(like), leaves)

"""Decoupled momentum on one page: `send`, an exchange and `apply`.

    gradient ─► precondition ─► transform ─► accumulate ─► select ─► encode        `send`
                                                                        │ packet
                                                                    EXCHANGE
                                                                        │ all packets
    update ◄─ inverse ◄─ put back what did not count ◄─ mean ◄─ decode             `apply`

After `send` the message is out of the momentum. `update` is `apply` of `send`; with a delay it is
`apply` of the outbox that the state has kept since the step before. Neither half knows of an axis
of workers, unless `apply` is not given the packets and lets the exchange carry them.
"""

import dataclasses
import functools
import itertools
import zlib
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, UInt32

from demo_optax._src import axes, checks, metrics, participation, transport
from demo_optax._src.arrays import BoolScalar, IntScalar, in_dtype_of, unboxed, widest, zero_unless
from demo_optax._src.compression import Compression, Plan, make_plan, packet
from demo_optax._src.compression.bits import round_stochastically
from demo_optax._src.compression.packet import Message, Origin, Packets
from demo_optax._src.compression.plan import Part, select, shared_positions
from demo_optax._src.compression.settings import require_words, word_of
from demo_optax._src.compression.transforms import is_redrawn
from demo_optax._src.exchange import Delayed, Exchange
from demo_optax._src.exchange.protocol import EMPTY, IN_ROUND, MEANS, MESSAGE, Mean, Outbox, Pending
from demo_optax._src.metrics import ExchangeMetrics

MESSAGE_WEIGHT = "message_weight"


class DecoupledMomentumState(NamedTuple):
    """State of `demo_optax.decoupled_momentum`, as one worker sees it.

    Attributes:
      count: int32 scalar, the number of updates so far; the same on all workers.
      momentum: a tree like the parameters, without Flax's boxes, of the coefficients
        ``(*grid, n)`` of each parameter's blocks in the momentum's dtype; each worker has its own.
      precondition: state of the local preconditioner; each worker has its own.
      metrics: metrics of the last exchange; the same on all workers.
      exchange: state of the exchange; ``()`` for `demo_optax.AllGather`.
      pending: with `demo_optax.Delayed`, the outbox of the last step; otherwise ``()``.
      sent: bool scalar, whether a message has left the momentum in ``send`` and waits for
        ``apply``. It differs between workers only where ``send`` is called.
      format: uint32 scalar, a checksum of the transform, its seed, the blocks and the parameters'
        shapes, without which the momentum means nothing; the same on all workers.

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
    pending: Any
    sent: BoolScalar
    format: UInt32[Array, ""]  # type: ignore[assignment]

    exchanges = True
    handles_nonfinite = True
    local_fields = ("momentum", "precondition", "exchange")
    own_fields = ("pending", "sent")  # of a worker that does not step together with the others


@dataclasses.dataclass(frozen=True, eq=False)
class Momentum:
    """The arguments of `demo_optax.decoupled_momentum`, and its functions."""

    compression: Compression
    exchange: Exchange
    decay: ArrayLike
    gradient_weight: optax.ScalarOrSchedule | None
    mean: Mean
    subtraction_factor: ArrayLike
    momentum_dtype: DTypeLike
    precondition: Any  # a transformation or None

    steps_per_round: ClassVar[None] = None

    def __post_init__(self):
        if not isinstance(self.compression, Compression):
            raise TypeError(
                "compression must be a demo_optax.Compression, as in Compression(topk=32), not "
                f"{self.compression!r}."
            )
        checks.in_interval("decay", self.decay, "[0, 1]")
        checks.in_interval("subtraction_factor", self.subtraction_factor, "(0, 1]")
        if self.gradient_weight is not None:
            checks.require_rate("gradient_weight", self.gradient_weight)
        elif not isinstance(self.decay, Tracer) and self.decay == 1:
            raise ValueError(
                "decay=1 leaves gradients the weight 1 - decay = 0, so that nothing is trained: "
                "give a gradient_weight, such as 1.0."
            )
        checks.one_of("mean", self.mean, MEANS)
        checks.momentum_dtype("momentum_dtype", self.momentum_dtype)
        precondition = self.precondition or optax.identity()
        checks.require_unwrapped(precondition)
        precondition = optax.with_extra_args_support(precondition)
        object.__setattr__(self, "precondition", precondition)

    def with_compression(self, compression: Compression) -> "Momentum":
        return dataclasses.replace(self, compression=compression)

    # --- the functions of the transformation, which check what they are given

    def init(self, params) -> DecoupledMomentumState:
        checks.floating_leaves(params)
        plan, axis_name = self._plan_of(params), self.exchange.axis_name
        structure: Any = jax.tree.structure(unboxed(params))
        zeros = [
            axes.varying_like(jnp.zeros(own.stored_shape, self.momentum_dtype), x)
            for own, x in zip(plan.geometries, jax.tree.leaves(unboxed(params)), strict=True)
        ]
        return DecoupledMomentumState(
            count=jnp.zeros((), jnp.int32),
            momentum=axes.as_varying(structure.unflatten(zeros), axis_name),
            precondition=axes.as_varying(self.precondition.init(params), axis_name),
            metrics=metrics.init_metrics(),
            exchange=self.exchange.init(plan),
            pending=self._empty_pending(plan) if isinstance(self.exchange, Delayed) else (),
            sent=jnp.array(False),
            format=jnp.asarray(word_of(plan.stored)),
        )

    def update(self, updates, state, params=None, **extra_args) -> Any:
        return self.step(updates, state, params, **extra_args)[:2]

    def step(self, gradient, state, params=None, **extra_args) -> tuple[Any, Any, Outbox]:
        """Updates, and also returns the outbox that was sent."""
        worker = axes.index(self.exchange.axis_name)
        plan, old = self._plan_for(gradient, state, to_send=True), state
        outbox, state = self._send(plan, gradient, state, params, worker, extra_args)
        arriving = outbox
        if isinstance(self.exchange, Delayed):
            arriving = state.pending.restored(plan, self.compression)._replace(step=state.count - 1)
            pending = Pending.of(outbox, self.compression, self.exchange.axis_name)
            state = state._replace(pending=pending)
        updates, state = self._apply(plan, None, arriving, state, gradient, worker, extra_args)
        # A message that `send` has taken out before still waits for its own `apply`.
        count = jnp.where(old.sent, old.count, state.count)
        return updates, state._replace(count=count, sent=old.sent), outbox

    def send(self, gradient, state, params=None, *, worker=None, **extra_args) -> Any:
        over_axis = self.exchange.axis_name is not None and worker is None
        transport.require_carried(self.exchange, over_axis)
        plan = self._plan_for(gradient, state, to_send=True)
        row = transport.row_of(worker, self.exchange.axis_name)
        return self._send(plan, gradient, state, params, row, extra_args)

    def apply(self, packets, outbox, state, params, *, worker=None, **extra_args) -> Any:
        if params is None:
            raise ValueError(
                "apply() needs the parameters, whose dtypes its updates have, but params is None: "
                "call apply(packets, outbox, state, params)."
            )
        outbox, state = jax.tree.map(jnp.asarray, (outbox, state))  # they may come from files
        plan, axis_name = self._plan_for(params, state), self.exchange.axis_name
        transport.require_outbox(outbox, state, plan)
        over_axis = axis_name is not None and packets is None
        transport.require_carried(self.exchange, over_axis)
        if over_axis:
            row = axes.index(axis_name)
        else:
            rows = transport.require_packets(packets, self.exchange.layout(plan).words)
            row, packets = transport.row_of(worker, axis_name, rows), jnp.asarray(packets)
        is_own = (outbox.status == MESSAGE) & (outbox.step == state.count)
        is_current = jnp.where(state.sent, is_own, outbox.status == EMPTY)
        is_current &= state.format == word_of(plan.stored)
        packets, to_carry = zero_unless(is_current, (packets, outbox.packets))
        factor = jnp.where(is_current, outbox.factor, 0)
        outbox = outbox._replace(packets=to_carry, factor=factor, step=state.count)
        follows = is_current & ~state.sent
        updates, new = self._apply(plan, packets, outbox, state, params, row, extra_args, follows)
        told = new.count, new.metrics
        count, known = participation.choose(is_current, told, (state.count, state.metrics))
        return updates, new._replace(count=count, metrics=known, sent=state.sent & ~is_current)

    def empty_outbox(self, params, **extra_args) -> Outbox:
        del extra_args
        return Outbox.empty(self._plan_of(params), self.exchange)

    # --- the algorithm

    def _send(
        self, plan: Plan, gradient, state, params, worker: IntScalar, extra_args
    ) -> tuple[Outbox, DecoupledMomentumState]:
        exchange, step, given = self.exchange, state.count, gradient
        weight = 1 - self.decay if self.gradient_weight is None else self.gradient_weight
        weight: Any = checks.evaluate_schedule("gradient_weight", weight, step)
        allowed = jnp.isfinite(jnp.square(jnp.asarray(weight, jnp.float32)))
        allowed &= jnp.isfinite(self.decay) & ~state.sent & (state.format == word_of(plan.stored))
        participates = participation.decide(gradient, exchange.axis_name, extra_args, allowed)

        # Precondition: each worker may have a second moment of its own
        initial = self.precondition.init(gradient if params is None else params)
        intact = participation.is_intact(
            state.precondition, initial, exchange.axis_name, extra_args
        )
        old = participation.choose_state(intact, state.precondition, initial)
        gradient, new = self.precondition.update(gradient, old, params, **extra_args)
        factor = jnp.where(participates, jnp.asarray(self.subtraction_factor, jnp.float32), 0)

        wide = widest(*[x.dtype for x in jax.tree.leaves(gradient) if x.size])
        rounded = functools.partial(round_stochastically, dtype=self.momentum_dtype)

        def send_part(part: Part, tensors, stored, shared):
            # Transform: c = T(g)
            coefficients = part.forward(tensors, step, wide)

            old = part.unpack(stored, step)
            if is_redrawn(self.compression.transform):  # a `send` before has changed the basis
                old = participation.choose(state.sent, part.unpack(stored), old)

            # Accumulate: m <- beta m + w c. A worker that skips the step keeps the old m. In the
            # shape of c, XLA fuses this with the transform
            momenta = []
            for m, c in zip(old, coefficients, strict=True):
                dtype = widest(m.dtype, c.dtype)
                kept = m.reshape(c.shape).astype(dtype)
                total = self.decay * kept + weight * c.astype(dtype)
                total = jnp.where(participates, total.astype(dtype), kept)
                momenta.append(total.reshape(m.shape))
            momenta, energy, restarted = participation.reset_nonfinite_blocks(momenta)

            # Select: q = top_k(m). Without a barrier XLA would compute m twice
            sections = [plan.sections[group.section] for group in part.groups]
            momenta = jax.lax.optimization_barrier(momenta)
            selected = select([section.selector for section in sections], momenta, shared)

            # Encode: q_hat = decode(encode(q)), which leaves the momentum: m <- m - alpha q_hat
            coded, message = packet.encode(sections, selected)
            momenta = part.add(momenta, _rows(message, [-factor] * len(sections)))
            rows = list(zip(*selected, message.values, coded, strict=True))
            bits = part.random_bits(_seeds(plan, step, worker, 0), specs)
            # If the next part waited for one of these only, XLA would round the others later.
            new = part.pack(jax.tree.map(rounded, momenta, bits), stored)
            return (energy, restarted, rows, new), new

        specs = axes.specs_of_leaves(gradient, extra_args)
        energies, restarted, rows, momentum = zip(
            *plan.map_parts(
                send_part,
                plan.per_part(gradient),
                plan.per_part(state.momentum),
                plan.split_rows(shared_positions(plan.sections, step)),
            ),
            strict=True,
        )
        # XLA writes the new state over the old one, which the gradients of all parts need, once it
        # knows that no block was reset.
        finite = jnp.sum(jnp.stack(restarted)) == 0
        finite = axes.on_all_devices(finite, exchange.axis_name, extra_args)
        new = participation.choose(participates, new, old)
        precondition = participation.choose_state(finite, new, initial)
        positions, chosen, decoded, coded = list(zip(*plan.join(rows), strict=True)) or [()] * 4
        message = Message(positions, decoded)
        header = metrics.header_of(
            given,
            energies,
            [*restarted, (~intact).astype(jnp.int32)],
            Message(positions, chosen),
            message,
            factor,
            extra_args.get(MESSAGE_WEIGHT, 1.0),
            state.metrics,
        )
        layout, owners = exchange.layout(plan), exchange.packets_per_worker()
        origin = Origin(step, worker * owners + jnp.arange(owners, dtype=jnp.int32))
        packets = packet.build(layout, header, list(coded), message, participates, origin)
        # A second message in a step must not be applied.
        status = jnp.where(state.sent, IN_ROUND, MESSAGE).astype(jnp.int32)
        return Outbox(packets, message, factor, step, status), state._replace(
            momentum=_as_tree(state.momentum, momentum),
            precondition=precondition,
            sent=jnp.full_like(state.sent, True),
        )

    def _apply(
        self,
        plan: Plan,
        packets: Packets | None,
        outbox: Outbox,
        state: DecoupledMomentumState,
        like,
        worker: IntScalar,
        extra_args,
        follows: BoolScalar | None = None,
    ) -> tuple[Any, DecoupledMomentumState]:
        """Averages all packets; a worker that ``follows`` has sent nothing in this step."""
        exchange: Any = self.exchange
        known = state.metrics, self.mean
        if packets is None:
            aggregate = exchange.exchange(plan, outbox, state.exchange, *known)
            accepted = aggregate.accepted
        else:
            aggregate = exchange.average(plan, packets, outbox, worker, *known)
            aggregate = aggregate._replace(state=state.exchange)
            is_there = (worker >= 0) & jnp.all(packets[worker] == outbox.packet)
            accepted = [jnp.where(is_there, fraction, 0.0) for fraction in aggregate.accepted]

        # Put back: m <- m + alpha (1 - a) q_hat, in a loop of at most one pass, since XLA would
        # copy what a conditional returns. The random bits depend on the pass, or XLA would compute
        # all of them in advance.
        specs = axes.specs_of_leaves(like, extra_args)
        returned = [outbox.factor * (1 - fraction) for fraction in accepted]
        returns = jnp.array([jnp.any(x != 0) for x in returned], bool).any()
        redrawn = is_redrawn(self.compression.transform)
        new_basis = state.count if redrawn and isinstance(exchange, Delayed) else None

        rounded = functools.partial(round_stochastically, dtype=self.momentum_dtype)

        def put_back(number: Any, momentum):
            def put_back_part(part: Part, rows, stored):
                bits = part.random_bits(_seeds(plan, state.count, worker, 1 + number), specs)
                new = part.add_to_stored(stored, rows, bits, new_basis)
                return new, axes.largest(new)

            rows = plan.split_rows(_rows(outbox.message, returned))
            parts = plan.map_parts(put_back_part, rows, plan.per_part(momentum))
            return _as_tree(momentum, parts)

        def advance(number: Any, momentum):
            def advance_part(part: Part, stored):
                bits = part.random_bits(_seeds(plan, state.count, worker, number), specs)
                momenta = part.unpack(stored, state.count)
                new = part.pack(jax.tree.map(rounded, momenta, bits), stored)
                return new, axes.largest(new)

            return _as_tree(momentum, plan.map_parts(advance_part, plan.per_part(momentum)))

        momentum = axes.varying_like(state.momentum, outbox.packets)
        if redrawn and follows is not None:  # its momentum is still in the old basis
            momentum = jax.lax.fori_loop(0, follows.astype(jnp.int32), advance, momentum)
        momentum = jax.lax.fori_loop(0, returns.astype(jnp.int32), put_back, momentum)

        def invert(part: Part, means):
            # Inverse: u = T^-1(q_bar)
            tensors = part.inverse([mean.dense() for mean in means], outbox.step)
            return tensors, axes.largest(tensors)

        means = plan.split_rows(aggregate.mean, axis=1)
        updates = jax.tree.map(in_dtype_of, _as_tree(like, plan.map_parts(invert, means)), like)
        return updates, state._replace(
            count=jnp.asarray(optax.safe_increment(state.count)),
            momentum=momentum,
            metrics=aggregate.metrics,
            exchange=aggregate.state,
            sent=jnp.full_like(state.sent, False),
        )

    def undelivered(self, state: DecoupledMomentumState, outbox: Outbox | None, like, after) -> Any:
        """Returns T^-1 of the momentum and of a message under way, as a tree like ``like``.

        It is computed after the arrays ``after``, so that XLA does not merge the products of both.
        """
        plan, step = self._plan_of(like), state.count - 1 + state.sent.astype(jnp.int32)

        def invert(part: Part, stored, rows):
            momenta = part.unpack(stored)
            momenta = part.add(momenta, rows) if outbox else momenta
            tensors = part.inverse(momenta, step)
            return tensors, axes.largest(tensors)

        factors = [outbox.factor] * len(plan.sections) if outbox else []
        rows = plan.split_rows(_rows(outbox.message, factors)) if outbox else [()] * len(plan.parts)
        stored = plan.per_part(state.momentum)
        parts = plan.map_parts(invert, stored, rows, after=jax.tree.leaves(after))
        tensors = _as_tree(like, parts)
        return jax.tree.map(in_dtype_of, tensors, like)

    # --- the plan of the tensors, and the outbox that a delay keeps

    def _empty_pending(self, plan: Plan) -> Pending:
        outbox = Outbox.empty(plan, self.exchange)
        return Pending.of(outbox, self.compression, self.exchange.axis_name)

    def _plan_of(self, tree) -> Plan:
        shapes = tuple(x.shape for x in jax.tree.leaves(tree))
        return make_plan(self.compression, shapes)

    def _plan_for(self, tree, state, to_send: bool = False) -> Plan:
        """Returns the plan of these tensors, for which the state must have been made.

        What is to be sent must be local, and no message may be under way.
        """
        if to_send:
            checks.require_local_gradient(tree, self.exchange.axis_name)
        plan = self._plan_of(tree)
        is_delayed = isinstance(self.exchange, Delayed)
        leaves = [jax.ShapeDtypeStruct(x.stored_shape, jnp.float32) for x in plan.geometries]
        structure: Any = jax.tree.structure(unboxed(tree))
        needed = {
            "momentum": structure.unflatten(leaves),
            "exchange": jax.eval_shape(lambda: self.exchange.init(plan)),
            "pending": jax.eval_shape(lambda: self._empty_pending(plan)) if is_delayed else (),
        }
        remedy = (
            "Make the state anew from the parameters that are trained now, or restore the run with "
            "demo_optax.checkpoint, which puts pending messages back into the momentum. An axis of "
            "workers in front belongs to demo_optax.make_train_step and stack_workers, which "
            "remove it."
        )
        what = "the state of the decoupled momentum"
        require_words(what, {"format": state.format}, {"format": plan.stored}, remedy)
        checks.state_fits(what, {name: getattr(state, name) for name in needed}, needed, remedy)
        if to_send:
            checks.require_unsent(state)
        return plan


def _rows(message: Message, factors: Sequence[Any]) -> list[Any]:
    """Returns positions, values and factors, with a row for each block."""
    pairs = zip(factors, message.values, strict=True)
    factors = [jnp.broadcast_to(factor, (len(values), 1)) for factor, values in pairs]
    return list(zip(*message, factors, strict=True))


def _seeds(plan: Plan, step: IntScalar, worker: IntScalar, purpose: Any) -> Any:
    """Returns what the random bits of a rounding follow from, besides the place in a tensor."""
    shapes = zlib.crc32(repr([geometry.shape for geometry in plan.geometries]).encode())
    return jnp.stack([jnp.asarray(x, jnp.uint32) for x in (step, worker, shapes, purpose)])


def _as_tree(like, leaves_of_parts: Sequence[Sequence[Any]]):
    leaves = itertools.chain.from_iterable(leaves_of_parts)
    return jax.tree.unflatten(jax.tree.structure(like), leaves)

"""Runs rounds of local steps with one exchange at their end."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from demo_optax._src import axes, checks, participation, round_checks, transport
from demo_optax._src.arrays import BoolScalar, in_dtype_of, unboxed, upcast, zero_unless
from demo_optax._src.axes import AxisName
from demo_optax._src.compression import Compression
from demo_optax._src.decoupled import LookAheadState
from demo_optax._src.exchange import Exchange, Outbox
from demo_optax._src.exchange.protocol import EMPTY
from demo_optax._src.fragments import Fragments
from demo_optax._src.local_state import LocalStepsState, local_parameters, nodes
from demo_optax._src.momentum import MESSAGE_WEIGHT, DecoupledMomentumState
from demo_optax._src.participation import PARTICIPATES, all_finite, choose
from demo_optax._src.transport import SplitTransformation

ENDS_ROUND = "ends_round"


def local_steps(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    every: int,
    *,
    fragments: int | None = None,
    merge: float | None = None,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Lets each worker take steps by itself, with one exchange at the end of each round.

    Worker :math:`i` has its own parameters :math:`y_i`, which start at the shared parameters
    :math:`x`. After :math:`H` inner steps the outer optimizer uses their differences as gradients:

    .. math::
        y_i &\leftarrow y_i + \mathrm{inner}(\nabla f_i(y_i)) \quad (H \text{ times}) \\
        \Delta_i &= x - y_i \\
        x &\leftarrow x + u, \quad u = \mathrm{outer}(\Delta_1, \dots, \Delta_N)

    These are DiLoCo and SparseLoCo on the axis ``"data"``::

        nesterov = optax.sgd(0.7, momentum=0.9, nesterov=True)
        diloco = optax.chain(mean_over_workers("data"), nesterov)
        local_steps(optax.adamw(4e-4), diloco, every=500, axis_name="data")

        compression = Compression(topk=64, value_coding="int2", transform="identity")
        options = dict(decay=0.95, gradient_weight=1.0, mean="workers", axis_name="data")
        sparseloco = decoupled(optax.sgd(1.0), compression, **options)
        local_steps(optax.adamw(4e-4), sparseloco, every=30, axis_name="data")

    `make_train_step` uses gradients at each worker's own parameters; a custom loop computes them
    at `local_parameters`. Inside a round updates are zero and nothing is sent.

    **Overlap.** With ``send`` and ``apply`` a worker can go on with inner steps while its message
    travels, as `demo_optax.swarm.SwarmWorker` does. Until the result comes, its own parameters are
    :math:`y_i = x + s_i + d_i`, where :math:`s_i` is what it has sent and :math:`d_i` its progress
    since then. When :math:`u` comes, :math:`s_i` has been delivered, and is dropped:

    .. math::
        y_i \leftarrow x + u + d_i

    With ``merge`` :math:`= w` the worker instead moves a part of the way from its own parameters to
    the shared ones, as in Streaming DiLoCo. The progress of the next round is measured from the
    shared parameters, so some of it is sent again:

    .. math::
        y_i \leftarrow x + u + w\,(s_i + d_i - u)

    This pays where results come late. In our runs of DiLoCo with rounds of 30 steps, results that
    came one step late cost nothing in loss without ``merge``, and 0.018 with ``merge=0.5`` (three
    seeds). Results that came 10 steps late cost 0.014 and 0.028, and a whole round late 0.115 and
    0.057 (one seed). With the sparse messages of SparseLoCo 10 steps cost 0.034 and 0.011.

    **Fragments.** With ``fragments`` :math:`= P` a worker sends its progress in :math:`P` parts,
    one after each :math:`H / P` steps, as in Streaming DiLoCo: every :math:`P`-th block of the
    tensors is a fragment. A fragment is exchanged and applied when the next one is due, and the
    worker goes on with inner steps in the meantime. The equations above then hold for the elements
    of each fragment by itself. With :math:`P = H` each step exchanges what the step before has
    sent, which does not depend on this step's gradient, so that XLA can overlap the two. The outer
    optimizer may exchange by `demo_optax.AllGather`, or by `demo_optax.TwoPhase` among many
    workers. This one sends all elements::

        every_element = Compression(topk=4096, value_coding="int8", transform="identity")
        options = dict(decay=1.0, gradient_weight=1.0, mean="workers", axis_name="data")
        outer = decoupled(nesterov, every_element, **options)
        local_steps(optax.adamw(4e-4), outer, every=32, fragments=32, axis_name="data")

    It sees stacks of blocks instead of the model's tensors, so it cannot use masks by name or
    norms of layers. Its schedules still count rounds.

    **Residuals.** A worker whose outer optimizer sends few coefficients has a large residual, which
    nobody else knows of. With ``look_ahead=1.0`` in `decoupled`, around a base that is linear such
    as ``optax.sgd(1.0)``, each round begins at :math:`x` plus what the worker has not delivered,
    and its progress is measured from there. At the end of a run the mean of the workers' own
    parameters, `local_parameters`, delivers all residuals at once. A worker that has skipped the
    last round stands at :math:`x` instead, in case its residual was the reason.

    **Weights and schedules.** A round's message has the weight of its gradients, which is the sum
    of the extra argument ``message_weight`` over its steps, such as the tokens trained on. Workers
    may thus take unequal numbers of steps, which matters in a swarm. A round ends with its last
    step, or whenever the extra argument ``ends_round``, a bool, says so. Schedules of ``inner``
    follow the shared progress, which is ``every`` for each round that was applied, and the steps of
    this one up to ``every``. Those of ``outer`` count rounds.

    A worker skips an inner step whose gradient is not finite. If it skipped all steps of a round,
    or its own parameters are not finite at the end, it sends nothing, and in the latter case
    continues from the shared parameters: ``outer`` gets zeros and ``participates=False``, which its
    links must pass on. An inner state that is not finite at the end of a round is reset, except for
    its schedules and injected hyperparameters. When a run is restored on a different number of
    workers, the workers' parameters and inner states keep their mean, as momenta do.

    Args:
      inner: any optax optimizer that does not exchange. If parameters are sharded, norms inside it
        (``optax.lamb``) are those of a shard, so clip with ``make_train_step(clip_norm=...)``.
      outer: any optax optimizer that exchanges over ``axis_name``.
      every: number of inner steps in a round, :math:`H`.
      fragments: number of fragments, :math:`P`, a divisor of ``every``; None sends everything at
        the end of a round. Parameters must not be sharded inside a worker.
      merge: :math:`w` in [0, 1), or None.
      axis_name: the workers' axis, a tuple of axes, or None for a single worker.

    Returns:
      An ``optax.GradientTransformationExtraArgs``, whose ``update`` needs the shared parameters. It
      is a `demo_optax.SplitTransformation` if ``outer`` is one, unless there are fragments. Extra
      arguments go to both optimizers.

    Raises:
      ValueError, TypeError: ``every`` is not an integer of at least 1; ``inner`` exchanges,
        or holds a decoupled momentum; ``outer`` exchanges over another axis; the gradient is not
        local; there are no parameters; or ``outer`` cannot be divided into fragments.

    References:
      Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_ and `Streaming DiLoCo
      <https://arxiv.org/abs/2501.18512>`_; Sarfi et al., `SparseLoCo
      <https://arxiv.org/abs/2508.15706>`_.

    Example:
      >>> tx = local_steps(optax.sgd(0.5), optax.sgd(1.0), every=2)
      >>> params, state = jnp.float32(8.0), tx.init(jnp.float32(8.0))
      >>> for _ in range(2):
      ...     gradient = local_parameters(params, state)  # of a parabola
      ...     updates, state = tx.update(gradient, state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     print(params, local_parameters(params, state))
      8.0 4.0
      2.0 2.0
    """
    checks.static_integer("every", every, at_least=1)
    if merge is not None:
        checks.in_interval("merge", merge, "[0, 1)")
    checks.require_unwrapped(inner)
    checks.require_unwrapped(outer)
    inner, outer = map(optax.with_extra_args_support, (inner, outer))
    round_checks.require_axis(getattr(outer, "exchange", None), axis_name)
    if fragments is not None:
        parts = Fragments.of(outer, fragments, every, axis_name)
        rounds = LocalSteps(inner, outer, every // fragments, merge, axis_name, parts)
        return optax.GradientTransformationExtraArgs(rounds.init, rounds.update_fragment)
    rounds = LocalSteps(inner, outer, every, merge, axis_name)
    if isinstance(outer, SplitTransformation):
        return SplitTransformation(rounds.init, rounds.update)
    return optax.GradientTransformationExtraArgs(rounds.init, rounds.update)


@dataclasses.dataclass(frozen=True, eq=False)
class LocalSteps:
    """The arguments of `local_steps`, of which ``every`` is that between fragments."""

    inner: optax.GradientTransformationExtraArgs
    outer: Any
    every: int
    merge: float | None
    axis_name: AxisName
    fragments: Fragments | None = None

    @property
    def compression(self) -> Compression:
        return self.outer.compression

    @property
    def exchange(self) -> Exchange:
        return self.outer.exchange

    @property
    def steps_per_round(self) -> int:
        return self.every

    def init(self, params) -> LocalStepsState:
        parts = self.fragments
        checks.floating_leaves(params)
        inner_state = self.inner.init(params)
        outer_state, pending = parts.init(params) if parts else (self.outer.init(params), ())
        if nodes(inner_state, DecoupledMomentumState):
            raise ValueError(
                "the state of inner holds a DecoupledMomentumState ('decoupled_momentum'), but "
                "each worker takes its inner steps by itself: put it into outer, which exchanges, "
                "and leave another optimizer in inner."
            )
        if nodes(outer_state, LookAheadState) and (parts or self.merge is not None):
            setting = f"fragments={parts.count}" if parts else f"merge={self.merge}"
            raise ValueError(
                "the state of outer holds a LookAheadState ('look_ahead'), by which a round begins "
                f"at what its worker has not delivered, but with {setting} it begins elsewhere: "
                "leave out one of the two."
            )
        if nodes(outer_state, LookAheadState):
            algorithm = getattr(self.outer, "algorithm", None)
            round_checks.require_linear(getattr(algorithm, "base", None), params)
        none, axis_name = jnp.zeros((), jnp.int32), self.axis_name
        weight = jnp.zeros(parts.count if parts else (), jnp.float32)
        return LocalStepsState(
            round=none,
            first_step=none,
            last_step=jnp.full((), self.every - 1, jnp.int32),
            mini_step=none,
            weight=axes.as_varying(weight, axis_name),
            displacement=axes.as_varying(zeros_to_sum(unboxed(params)), axis_name),
            inner=axes.as_varying(inner_state, axis_name),
            outer=outer_state,
            pending=pending,
        )

    def update(self, updates, state, params=None, **extra_args) -> Any:
        ends_round, state = self._take_step(updates, state, params, extra_args)

        def exchange(state):
            change, extra, state = self._end_round(updates, state, params, extra_args)
            if isinstance(self.outer, SplitTransformation):
                step = self.outer.algorithm.step
                results, new, outbox = step(change, state.outer, params, **extra)
                was_taken = outbox.factor > 0
            else:
                results, new = self.outer.update(change, state.outer, params, **extra)
                was_taken = extra[PARTICIPATES]
            round_checks.require_no_other_axis(change, results, self.axis_name)
            return results, self._merged(results, change, was_taken, state._replace(outer=new))

        return step_or_skip(ends_round, exchange, lambda state: state, state)

    def update_fragment(self, updates, state, params: Any = None, **extra_args) -> Any:
        parts: Any = self.fragments
        is_due, state = self._take_step(updates, state, params, extra_args)

        def exchange(state):
            results, state = parts.deliver(state, updates, params, extra_args, self._moved)
            shared = optax.apply_updates(params, results)
            number, weights = parts.next_number(state), state.weight
            state = state._replace(weight=weights[number])
            first = state.first_step + state.mini_step
            change, extra, state = self._end_round(updates, state, shared, extra_args)
            weights = jnp.where(extra[PARTICIPATES], weights.at[number].set(0), 0)
            last = first + self.every - 1
            state = state._replace(first_step=first, last_step=last, weight=weights)
            return results, parts.send(change, state, shared, extra)

        # Without a conditional, the exchange overlaps with the gradient.
        is_due = True if self.every == 1 else is_due
        return step_or_skip(is_due, exchange, lambda state: state, state)

    def send(self, gradient, state, params=None, *, worker=None, **extra_args) -> Any:
        ends_round, new = self._take_step(gradient, state, params, extra_args)
        momenta = nodes(state.outer, DecoupledMomentumState)
        if isinstance(ends_round, Tracer):  # no round ends before the result of the last one
            ends_round &= ~jnp.array([one.sent for one in momenta]).any()
        elif ends_round:
            transport.require_unsent(*momenta)

        def send(new):
            change, extra, new = self._end_round(gradient, new, params, extra_args)
            outbox, outer = self.outer.send(change, new.outer, params, worker=worker, **extra)
            # A worker that the outer optimizer excludes keeps its progress.
            progress = zero_unless(outbox.factor > 0, change)
            new = new._replace(outer=outer)
            if nodes(outer, LookAheadState):  # which holds the progress from now on
                trees = new.displacement, unboxed(progress)
                displacement = jax.tree.map(lambda d, g: d + g.astype(d.dtype), *trees)
                new = new._replace(displacement=displacement)
                progress = jax.tree.map(jnp.zeros_like, progress)
            return outbox._replace(progress=progress), new

        return step_or_skip(ends_round, send, lambda new: new, new)

    def apply(self, packets, outbox, state, params, *, worker=None, **extra_args) -> Any:
        outbox, state = jax.tree.map(jnp.asarray, (outbox, state))  # they may come from files
        args = packets, outbox._replace(progress=()), state.outer, params
        updates, outer = self.outer.apply(*args, worker=worker, **extra_args)
        (before,), (after,) = (nodes(x, DecoupledMomentumState) for x in (state.outer, outer))
        new = self._merged(updates, outbox.progress, outbox.factor > 0, state._replace(outer=outer))
        # A worker that sent nothing begins the next round with the others.
        mini_step = jnp.where(outbox.status == EMPTY, 0, state.mini_step)
        new, old = new._replace(mini_step=mini_step, outer=()), state._replace(outer=())
        return updates, choose(before.count != after.count, new, old)._replace(outer=outer)

    def empty_outbox(self, params, **extra_args) -> Outbox:
        outbox = self.outer.empty_outbox(params, **extra_args)
        return outbox._replace(progress=jax.tree.map(jnp.zeros_like, params))

    def _at_round(self, state, round):
        """Returns the state at a round, or at the later one that the outer optimizer has reached.

        Each of the rounds between has ``every`` steps.
        """
        momenta = nodes(state.outer, DecoupledMomentumState)
        reached = [round, *[one.count + one.sent.astype(jnp.int32) for one in momenta]]
        reached = jnp.array(reached).max()
        ahead = reached - state.round
        last = state.last_step + ahead * self.every
        first = jnp.where(ahead > 0, last - (self.every - 1), state.first_step)
        return state._replace(round=reached, first_step=first, last_step=last)

    def _take_step(self, gradient, state, params, extra_args):
        """Takes an inner step; returns whether it ends the round, and the new state."""
        if params is None:
            raise ValueError(
                "local_steps needs the shared parameters, to which each worker's own are relative, "
                "but params is None: call update(gradient, state, params)."
            )
        axis_name = self.axis_name
        checks.require_local_gradient(gradient, axis_name)
        now = state if self.fragments else self._at_round(state, state.round)
        step = now.first_step + state.mini_step
        ends_round = extra_args.pop(ENDS_ROUND, step >= now.last_step)
        sharded = axes.sharded_axes_in(extra_args)
        participates = participation.decide(gradient, axis_name, extra_args, sharded)
        inner_state = participation.with_counts(state.inner, jnp.minimum(step, now.last_step))
        local_params = local_parameters(params, state)
        steps, inner_state = self.inner.update(gradient, inner_state, local_params, **extra_args)
        round_checks.require_no_exchange(steps, axis_name)
        displacement = jax.tree.map(
            lambda d, u: d + u.astype(d.dtype), state.displacement, unboxed(steps)
        )
        old = state.displacement, state.inner
        displacement, inner_state = choose(participates, (displacement, inner_state), old)
        weight = jnp.where(participates, extra_args.get(MESSAGE_WEIGHT, 1.0), 0.0)
        return ends_round, state._replace(
            mini_step=state.mini_step + 1,
            weight=state.weight + weight.astype(jnp.float32),
            displacement=displacement,
            inner=inner_state,
        )

    def _end_round(self, gradient, state, params, extra_args):
        """Returns the gradient of the outer optimizer, its extra arguments, and the new state."""
        sharded, structure = (
            axes.sharded_axes_in(extra_args),
            jax.tree.structure(gradient),
        )
        finite = all_finite(local_parameters(params, state))
        finite = axes.on_all_devices(finite, self.axis_name, sharded)
        sends = finite & (state.weight > 0)
        initial = self.inner.init(params)
        intact = participation.is_intact(state.inner, initial, self.axis_name, sharded)
        displacement = zero_unless(finite, state.displacement)
        change = jax.tree.map(
            lambda d, g: in_dtype_of(jnp.where(sends, -d, 0), g), displacement, unboxed(gradient)
        )
        extra = {**extra_args, PARTICIPATES: sends, MESSAGE_WEIGHT: state.weight}
        return (
            structure.unflatten(jax.tree.leaves(change)),
            extra,
            state._replace(
                mini_step=jnp.zeros((), jnp.int32),
                weight=jnp.zeros_like(state.weight),
                displacement=displacement,
                inner=participation.choose_state(intact, state.inner, initial),
            ),
        )

    def _moved(self, d, g, u):
        """Returns a displacement of which the gradient ``g`` was sent, after an update ``u``."""
        # The gradient is minus a displacement, rounded if it is narrower.
        merge = self.merge
        return d + g.astype(d.dtype) if merge is None else merge * (d - u.astype(d.dtype))

    def _merged(self, updates, progress, was_taken, state):
        """Returns the state after the shared parameters have moved by ``updates``.

        A worker whose progress the outer optimizer has not taken keeps all of it.
        """
        trees = state.displacement, *unboxed((progress, updates))
        displacement = choose(was_taken, jax.tree.map(self._moved, *trees), state.displacement)
        return self._at_round(state._replace(displacement=displacement), state.round + 1)


def step_or_skip(is_last: BoolScalar | bool, step, skip, *args):
    """Returns ``step(*args)`` on the last call of a round, else zeros and ``skip(*args)``."""
    if is_last is True:
        return step(*args)
    step = jax.jit(step, inline=True)  # so that it is traced once
    shapes, _ = jax.eval_shape(step, *args)

    def zeros_and_skip(*args):
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), skip(*args)

    if is_last is False:
        return zeros_and_skip(*args)
    return jax.lax.cond(is_last, *axes.branches_of_one_type(step, zeros_and_skip, *args), *args)


def zeros_to_sum(params):
    """Returns zeros, in float32 or wider, to which updates of the parameters are added."""
    checks.real_leaves("parameter", params)
    return jax.tree.map(lambda x: upcast(jnp.zeros_like(x)), params)

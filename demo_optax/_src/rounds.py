"""Runs rounds of local steps with one exchange at their end."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from demo_optax._src import axes, checks, participation, round_checks
from demo_optax._src.arrays import BoolScalar, in_dtype_of, unboxed, upcast
from demo_optax._src.axes import AxisName
from demo_optax._src.decoupled import LookAheadState
from demo_optax._src.fragments import Fragments
from demo_optax._src.halves import SplitTransformation, require_unsent
from demo_optax._src.local_state import LocalStepsState, local_parameters, nodes
from demo_optax._src.momentum import (
    EMPTY,
    IN_ROUND,
    MESSAGE_WEIGHT,
    REFUSED,
    DecoupledMomentumState,
)
from demo_optax._src.participation import PARTICIPATES, all_finite, choose

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
    parts: Any = None if fragments is None else Fragments.of(outer, fragments, every, axis_name)
    every //= fragments or 1

    def init_fn(params):
        checks.floating_leaves(params)
        inner_state = inner.init(params)
        outer_state, pending = parts.init(params) if parts else (outer.init(params), ())
        if nodes(inner_state, DecoupledMomentumState):
            raise ValueError(
                "the state of inner holds a DecoupledMomentumState ('decoupled_momentum'), but "
                "each worker takes its inner steps by itself: put it into outer, which exchanges, "
                "and leave another optimizer in inner."
            )
        if nodes(outer_state, LookAheadState) and (parts or merge is not None):
            raise ValueError(
                "the state of outer holds a LookAheadState ('look_ahead'), by which a round begins "
                "at what its worker has not delivered, but with "
                f"{f'fragments={fragments}' if parts else f'merge={merge}'} it begins elsewhere: "
                "leave out one of the two."
            )
        if nodes(outer_state, LookAheadState):
            round_checks.require_linear(getattr(outer, "base", None), params)
        return LocalStepsState(
            round=jnp.zeros((), jnp.int32),
            first_step=jnp.zeros((), jnp.int32),
            last_step=jnp.full((), every - 1, jnp.int32),
            mini_step=jnp.zeros((), jnp.int32),
            weight=axes.as_varying(jnp.zeros(parts.count if parts else (), jnp.float32), axis_name),
            displacement=axes.as_varying(zeros_to_sum(unboxed(params)), axis_name),
            inner=axes.as_varying(inner_state, axis_name),
            outer=outer_state,
            pending=pending,
        )

    def at_round(state, round):
        """Returns the state at a round, or at the later one that the outer optimizer has reached.

        Each of the rounds between has ``every`` steps.
        """
        momenta = nodes(state.outer, DecoupledMomentumState)
        reached = jnp.array(
            [round, *[one.count + (one.sent >= 0).astype(jnp.int32) for one in momenta]]
        ).max()
        ahead = reached - state.round
        last = state.last_step + ahead * every
        first = jnp.where(ahead > 0, last - (every - 1), state.first_step)
        return state._replace(round=reached, first_step=first, last_step=last)

    def take_step(updates, state, params, extra_args):
        """Takes an inner step; returns whether it ends the round, and the new state."""
        if params is None:
            raise ValueError(
                "local_steps needs the shared parameters, to which each worker's own are relative, "
                "but params is None: call update(gradient, state, params)."
            )
        checks.require_local_gradient(updates, axis_name)
        now = state if parts else at_round(state, state.round)
        step = now.first_step + state.mini_step
        ends_round = extra_args.pop(ENDS_ROUND, step >= now.last_step)
        sharded = axes.sharded_axes_in(extra_args)
        participates = participation.decide(updates, axis_name, extra_args, sharded)
        inner_state = participation.with_counts(state.inner, jnp.minimum(step, now.last_step))
        local_params = local_parameters(params, state)
        steps, inner_state = inner.update(updates, inner_state, local_params, **extra_args)
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

    def end_round(updates, state, params, extra_args):
        """Returns the gradient of the outer optimizer, its extra arguments, and the new state."""
        sharded, structure = axes.sharded_axes_in(extra_args), jax.tree.structure(updates)
        finite = all_finite(local_parameters(params, state))
        finite = axes.on_all_devices(finite, axis_name, sharded)
        sends = finite & (state.weight > 0)
        initial = inner.init(params)
        intact = participation.is_intact(state.inner, initial, axis_name, sharded)
        displacement = participation.zero_unless(finite, state.displacement)
        gradient = jax.tree.map(
            lambda d, g: in_dtype_of(jnp.where(sends, -d, 0), g), displacement, unboxed(updates)
        )
        extra = {**extra_args, PARTICIPATES: sends, MESSAGE_WEIGHT: state.weight}
        return (
            structure.unflatten(jax.tree.leaves(gradient)),
            extra,
            state._replace(
                mini_step=jnp.zeros((), jnp.int32),
                weight=jnp.zeros_like(state.weight),
                displacement=displacement,
                inner=participation.choose_state(intact, state.inner, initial),
            ),
        )

    def moved(d, g, u):
        """Returns a displacement of which the gradient ``g`` was sent, after an update ``u``."""
        # The gradient is minus a displacement, rounded if it is narrower.
        return d + g.astype(d.dtype) if merge is None else merge * (d - u.astype(d.dtype))

    def merged(updates, progress, was_taken, state):
        """Returns the state after the shared parameters have moved by ``updates``.

        A worker whose progress the outer optimizer has not taken keeps all of it.
        """
        trees = state.displacement, *unboxed((progress, updates))
        displacement = choose(was_taken, jax.tree.map(moved, *trees), state.displacement)
        return at_round(state._replace(displacement=displacement), state.round + 1)

    def outer_update(gradient, state, params, extra_args):
        """Returns updates, the new state, and whether the outer optimizer took the gradient."""
        if isinstance(outer, SplitTransformation):
            return outer.update_and_tell(gradient, state, params, **extra_args)
        return *outer.update(gradient, state, params, **extra_args), extra_args[PARTICIPATES]

    def update_and_tell(updates, state, params=None, **extra_args):
        ends_round, state = take_step(updates, state, params, extra_args)

        def exchange(state):
            gradient, extra, state = end_round(updates, state, params, extra_args)
            results, new, was_taken = outer_update(gradient, state.outer, params, extra)
            round_checks.require_no_other_axis(gradient, results, axis_name)
            state = merged(results, gradient, was_taken, state._replace(outer=new))
            return (results, was_taken), state

        results, state = step_or_skip(ends_round, exchange, lambda state: state, state)
        results, was_taken = results
        return results, state, was_taken

    def update_fn(updates, state, params=None, **extra_args):
        return update_and_tell(updates, state, params, **extra_args)[:2]

    def update_fragment(updates, state, params: Any = None, **extra_args):
        is_due, state = take_step(updates, state, params, extra_args)

        def exchange(state):
            results, state = parts.deliver(state, updates, params, extra_args, moved)
            shared = optax.apply_updates(params, results)
            number, weights = parts.next_number(state), state.weight
            state = state._replace(weight=weights[number])
            first = state.first_step + state.mini_step
            gradient, extra, state = end_round(updates, state, shared, extra_args)
            state = state._replace(first_step=first, last_step=first + every - 1)
            weights = jnp.where(extra[PARTICIPATES], weights.at[number].set(0), 0)
            return results, parts.send(gradient, state._replace(weight=weights), shared, extra)

        # Without a conditional, the exchange overlaps with the gradient.
        is_due = True if every == 1 else is_due
        return step_or_skip(is_due, exchange, lambda state: state, state)

    if parts:
        return optax.GradientTransformationExtraArgs(init_fn, update_fragment)
    if not isinstance(outer, SplitTransformation):
        return optax.GradientTransformationExtraArgs(init_fn, update_fn)
    split: SplitTransformation = outer

    def send_fn(updates, state, params=None, *, worker=None, **extra_args):
        ends_round, new = take_step(updates, state, params, extra_args)
        if not isinstance(ends_round, Tracer) and ends_round:
            require_unsent(*nodes(state.outer, DecoupledMomentumState))

        def send(new):
            gradient, extra, new = end_round(updates, new, params, extra_args)
            outbox, outer_state = split.send(gradient, new.outer, params, worker=worker, **extra)
            # A worker that the outer optimizer excludes keeps its progress.
            progress = participation.zero_unless(outbox.factor > 0, gradient)
            new = new._replace(outer=outer_state)
            if nodes(outer_state, LookAheadState):  # which holds the progress from now on
                trees = new.displacement, unboxed(progress)
                displacement = jax.tree.map(lambda d, g: d + g.astype(d.dtype), *trees)
                new = new._replace(displacement=displacement)
                progress = jax.tree.map(jnp.zeros_like, progress)
            return outbox._replace(progress=progress), new

        outbox, new = step_or_skip(ends_round, send, lambda new: new, new)
        outbox = outbox._replace(step=jnp.where(ends_round, outbox.step, IN_ROUND))
        return outbox, choose(outbox.step == REFUSED, state, new)

    def apply_fn(packets, outbox, state, params, *, worker=None, **extra_args):
        args = packets, outbox._replace(progress=()), state.outer, params
        updates, outer_state = split.apply(*args, worker=worker, **extra_args)
        (before,), (after,) = (
            nodes(outer, DecoupledMomentumState) for outer in (state.outer, outer_state)
        )
        new = state._replace(outer=outer_state)
        new = merged(updates, outbox.progress, outbox.factor > 0, new)
        # A worker that sent nothing begins the next round with the others.
        mini_step = jnp.where(outbox.step == EMPTY, 0, state.mini_step)
        new = new._replace(mini_step=mini_step)
        return updates, choose(before.count != after.count, new, state)

    def with_compression(compression):
        other = split.with_compression(compression)
        return local_steps(inner, other, every, merge=merge, axis_name=axis_name)

    settings = split.compression, split.exchange, with_compression, every
    return SplitTransformation.make(init_fn, update_and_tell, send_fn, apply_fn, *settings)


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

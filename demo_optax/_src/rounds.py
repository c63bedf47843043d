"""Rounds of several gradients with one exchange at their end: local steps, and their mean."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from demo_optax._src import axes, checks, participation
from demo_optax._src.arrays import (
    BoolScalar,
    FloatScalar,
    in_dtype_of,
    unboxed,
    upcast,
    zero_unless,
)
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
        x &\leftarrow x + \mathrm{outer}(\Delta_1, \dots, \Delta_N)

    `make_train_step` uses gradients at each worker's own parameters; a custom loop computes them
    at `local_parameters`. Inside a round updates are zero and nothing is sent. A round ends with
    its last step; the extra argument ``ends_round``, a bool, decides instead where it is given. Its
    message has the weight of its steps, the sum of the extra argument ``message_weight``, which a
    dense `demo_optax.mean_over_workers` ignores.

    A worker skips an inner step whose gradient is not finite. If it skipped all of a round, or its
    own parameters are not finite at the end, it sends nothing: ``outer`` gets zeros and
    ``participates=False``, which the transformations in it must pass on. In the latter case the
    worker continues from the shared parameters. An inner state that is not finite is then reset,
    except for its schedules. ``docs/how_to/local_steps.md`` makes DiLoCo and SparseLoCo of it, and
    says when fragments, ``merge`` and an overlap by ``send`` and ``apply`` pay.

    Args:
      inner: any optax optimizer that does not exchange. Its schedules count the steps of the run.
        If parameters are sharded, norms inside it (``optax.lamb``) are those of a shard.
      outer: any optax optimizer that exchanges over ``axis_name`` and does not look ahead. Its
        schedules count rounds.
      every: number of inner steps in a round, :math:`H`.
      fragments: number of parts, :math:`P`, in which a worker sends its progress: every
        :math:`P`-th block of the tensors after each :math:`H / P` steps. One part is exchanged and
        applied when the next one is due. ``outer`` must be an optimizer of this library that
        exchanges by `demo_optax.AllGather` or `demo_optax.TwoPhase`, and sees a stack of blocks for
        each shape of blocks. Parameters must not be sharded inside a worker.
      merge: :math:`w` in [0, 1) or None. When the shared parameters move by :math:`u`, a worker
        that has sent :math:`s_i` and gone on by :math:`d_i` continues from :math:`x + u + d_i`, or
        with a number from :math:`x + u + w\,(s_i + d_i - u)`.
      axis_name: the workers' axis, a tuple of axes, or None for a single worker.

    Returns:
      An ``optax.GradientTransformationExtraArgs``, whose ``update`` needs the shared parameters. It
      is a `demo_optax.SplitTransformation` if ``outer`` is one, unless there are fragments. Extra
      arguments go to both optimizers.

    Raises:
      ValueError, TypeError: ``every`` is not an integer of at least 1; ``inner`` exchanges,
        or holds a decoupled momentum; ``outer`` exchanges over another axis, looks ahead, or cannot
        take fragments; the gradient is not local; or there are no parameters.

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
    _require_axis("local_steps", outer, axis_name)
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
    """The arguments of `local_steps`; with fragments a round lasts from one to the next."""

    inner: optax.GradientTransformationExtraArgs
    outer: Any
    steps_per_round: int
    merge: float | None
    axis_name: AxisName
    fragments: Fragments | None = None

    @property
    def compression(self) -> Compression:
        return self.outer.compression

    @property
    def exchange(self) -> Exchange:
        return self.outer.exchange

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
        if nodes(outer_state, LookAheadState):
            raise ValueError(
                "the state of outer holds a LookAheadState ('look_ahead'), but a round begins at "
                "the shared parameters: give outer look_ahead=None."
            )
        none = jnp.zeros((), jnp.int32)
        weight = jnp.zeros(parts.cutter.count if parts else (), jnp.float32)
        return LocalStepsState(
            round=none,
            first_step=none,
            last_step=jnp.full((), self.steps_per_round - 1, jnp.int32),
            mini_step=none,
            weight=axes.as_varying(weight, self.axis_name),
            displacement=axes.as_varying(_zeros_to_sum(unboxed(params)), self.axis_name),
            inner=axes.as_varying(inner_state, self.axis_name),
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
            _require_no_other_axis("local_steps", change, results, self.axis_name)
            return results, self._merged(results, change, was_taken, state._replace(outer=new))

        return _exchange_if(ends_round, exchange, state)

    def update_fragment(self, updates, state, params: Any = None, **extra_args) -> Any:
        parts: Any = self.fragments
        is_due, state = self._take_step(updates, state, params, extra_args)

        def exchange(state):
            results, state = parts.deliver(state, updates, params, extra_args, self._moved)
            shared = optax.apply_updates(params, results)
            number, weights = state.round % parts.cutter.count, state.weight
            state = state._replace(weight=weights[number])
            first = state.first_step + state.mini_step
            change, extra, state = self._end_round(updates, state, shared, extra_args)
            weights = jnp.where(extra[PARTICIPATES], weights.at[number].set(0), 0)
            last = first + self.steps_per_round - 1
            state = state._replace(first_step=first, last_step=last, weight=weights)
            return results, parts.send(change, state, shared, extra)

        return _exchange_if(is_due, exchange, state)

    def send(self, gradient, state, params=None, *, worker=None, **extra_args) -> Any:
        ends_round, new = self._take_step(gradient, state, params, extra_args)
        momenta = nodes(state.outer, DecoupledMomentumState)
        if isinstance(ends_round, Tracer):  # no round ends before the result of the last one
            ends_round &= ~jnp.array([one.sent for one in momenta]).any()
        elif ends_round:
            checks.require_unsent(*momenta)

        def send(new):
            change, extra, new = self._end_round(gradient, new, params, extra_args)
            outbox, outer = self.outer.send(change, new.outer, params, worker=worker, **extra)
            # A worker that the outer optimizer excludes keeps its progress.
            progress = zero_unless(outbox.factor > 0, change)
            return outbox._replace(progress=progress), new._replace(outer=outer)

        return _exchange_if(ends_round, send, new)

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
        last = state.last_step + ahead * self.steps_per_round
        first = jnp.where(ahead > 0, last - (self.steps_per_round - 1), state.first_step)
        return state._replace(round=reached, first_step=first, last_step=last)

    def _take_step(self, gradient, state, params, extra_args):
        """Takes an inner step; returns whether it ends the round, and the new state."""
        if params is None:
            raise ValueError(
                "local_steps needs the shared parameters, to which each worker's own are relative, "
                "but params is None: call update(gradient, state, params)."
            )
        checks.require_local_gradient(gradient, self.axis_name)
        now = state if self.fragments else self._at_round(state, state.round)
        step = now.first_step + state.mini_step
        # Without a conditional, the exchange of a fragment overlaps with the gradient.
        is_last = True if self.fragments and self.steps_per_round == 1 else step >= now.last_step
        ends_round = extra_args.pop(ENDS_ROUND, is_last)
        participates = participation.decide(gradient, self.axis_name, extra_args)
        inner_state = participation.with_counts(state.inner, jnp.minimum(step, now.last_step))
        local_params = local_parameters(params, state)
        steps, inner_state = self.inner.update(gradient, inner_state, local_params, **extra_args)
        _require_no_exchange(steps, self.axis_name)
        displacement = jax.tree.map(
            lambda d, u: d + u.astype(d.dtype), state.displacement, unboxed(steps)
        )
        old = state.displacement, state.inner
        displacement, inner_state = choose(participates, (displacement, inner_state), old)
        return ends_round, state._replace(
            mini_step=state.mini_step + 1,
            weight=state.weight + _weight_of_step(participates, extra_args),
            displacement=displacement,
            inner=inner_state,
        )

    def _end_round(self, gradient, state, params, extra_args):
        """Returns the gradient of the outer optimizer, its extra arguments, and the new state."""
        finite = all_finite(local_parameters(params, state))
        finite = axes.on_all_devices(finite, self.axis_name, extra_args)
        sends = finite & (state.weight > 0)
        initial = self.inner.init(params)
        intact = participation.is_intact(state.inner, initial, self.axis_name, extra_args)
        displacement = zero_unless(finite, state.displacement)
        change = jax.tree.map(
            lambda d, g: in_dtype_of(jnp.where(sends, -d, 0), g), displacement, unboxed(gradient)
        )
        extra = {**extra_args, PARTICIPATES: sends, MESSAGE_WEIGHT: state.weight}
        return (
            jax.tree.unflatten(jax.tree.structure(gradient), jax.tree.leaves(change)),
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


def multi_steps(
    tx: optax.GradientTransformation, every: int, *, axis_name: AxisName = None
) -> optax.GradientTransformationExtraArgs:
    """Takes one step with the mean of several gradients, for optimizers that exchange.

    It is meant for loops that call the optimizer once for each microbatch. `make_train_step` with
    ``microbatches`` needs less memory. Only the last of ``every`` calls exchanges, and the shared
    parameters stay as they are until then. Each worker averages its own, weighted by the
    extra argument ``message_weight``; one that is not finite does not count. If none counts, ``tx``
    gets zeros and ``participates=False``.

    Args:
      tx: any optax transformation that exchanges over ``axis_name``.
      every: number of calls that make one step of ``tx``.
      axis_name: the workers' axis, a tuple of axes, or None for a single worker.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` with a `LocalStepsState`. Updates are zero on all
      calls but the last. Gradients are averaged in float32 or wider.

    Raises:
      ValueError, TypeError: ``every`` is not an integer of at least 1; ``tx`` exchanges over a
        different axis.

    Example:
      >>> tx = multi_steps(optax.sgd(1.0), every=2)
      >>> state = tx.init(jnp.zeros(()))
      >>> first, state = tx.update(jnp.float32(1.0), state)
      >>> second, state = tx.update(jnp.float32(3.0), state)
      >>> float(first), float(second)
      (0.0, -2.0)
    """
    checks.static_integer("every", every, at_least=1)
    checks.require_unwrapped(tx)
    _require_axis("multi_steps", tx, axis_name)
    tx = optax.with_extra_args_support(tx)

    def init_fn(params):
        none, weight = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)
        weight, total = axes.as_varying((weight, _zeros_to_sum(params)), axis_name)
        return LocalStepsState(none, none, none, none, weight, (), total, tx.init(params))

    def update_fn(updates, state, params=None, **extra_args):
        participates = participation.decide(updates, axis_name, extra_args)
        weight = _weight_of_step(participates, extra_args)

        def add(total, g):
            return total + jnp.where(
                weight > 0, weight.astype(total.dtype) * g.astype(total.dtype), 0
            )

        def exchange(state):
            weights = jnp.where(state.weight > 0, state.weight, 1)
            gradient = jax.tree.map(
                lambda x, g: in_dtype_of(x / weights.astype(x.dtype), g), state.inner, updates
            )
            extra = {**extra_args, PARTICIPATES: state.weight > 0, MESSAGE_WEIGHT: state.weight}
            results, outer = tx.update(gradient, state.outer, params, **extra)
            _require_no_other_axis("multi_steps", gradient, results, axis_name)
            begun = jax.tree.map(jnp.zeros_like, state._replace(outer=()))
            return results, begun._replace(round=state.round + 1, outer=outer)

        ends_round = state.mini_step >= every - 1
        total = jax.tree.map(add, state.inner, updates)
        weight += state.weight  # of a sum, so that both merge with those of another worker
        state = state._replace(mini_step=state.mini_step + 1, weight=weight, inner=total)
        return _exchange_if(ends_round, exchange, state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _exchange_if(ends_round: BoolScalar | bool, exchange: Callable, state) -> tuple[Any, Any]:
    """Returns ``exchange(state)`` on the last call of a round, else zeros and the state."""
    if ends_round is True:
        return exchange(state)
    exchange = jax.jit(exchange, inline=True)  # so that it is traced once
    shapes, _ = jax.eval_shape(exchange, state)

    def zeros(state):
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), state

    if ends_round is False:
        return zeros(state)
    return jax.lax.cond(ends_round, *axes.branches_of_one_type(exchange, zeros, state), state)


def _weight_of_step(participates: BoolScalar, extra_args) -> FloatScalar:
    weight = jnp.where(participates, extra_args.get(MESSAGE_WEIGHT, 1.0), 0.0)
    return weight.astype(jnp.float32)


def _zeros_to_sum(params):
    """Returns zeros, in float32 or wider, to which updates of the parameters are added."""
    checks.real_leaves("parameter", params)
    return jax.tree.map(lambda x: upcast(jnp.zeros_like(x)), params)


def _require_axis(wrapper: str, tx, axis_name: AxisName) -> None:
    """Refuses an optimizer of this library that exchanges over another axis than its wrapper."""
    exchange = getattr(tx, "exchange", None)
    if exchange is not None and axes.names(exchange.axis_name) != axes.names(axis_name):
        raise ValueError(
            f"the optimizer inside {wrapper} exchanges over axis_name={exchange.axis_name!r}, but "
            f"{wrapper} has axis_name={axis_name!r}: give both the axis of the workers, as in "
            f"{wrapper}(..., axis_name={exchange.axis_name or axis_name!r})."
        )


def _require_no_other_axis(wrapper: str, gradient, updates, axis_name: AxisName) -> None:
    """Refuses updates whose VMA types say that they are the same along a further axis."""
    pairs = zip(*map(jax.tree.leaves, (gradient, updates)), strict=True)
    exchanged = frozenset().union(*(axes.varying(g) - axes.varying(u) for g, u in pairs))
    if others := sorted(exchanged - set(axes.names(axis_name))):
        raise ValueError(
            f"the optimizer inside {wrapper} exchanges over the axes {others}, but {wrapper} has "
            f"axis_name={axis_name!r}, so that it cannot tell these workers apart: give {wrapper} "
            f"the axis_name={others[0]!r}."
        )


def _require_no_exchange(steps, axis_name: AxisName) -> None:
    """Refuses inner steps whose VMA types say that they are the same on all workers."""
    workers = set(axes.names(axis_name))
    if axes.types_are_tracked(axis_name) and not any(
        workers <= axes.varying(x) for x in jax.tree.leaves(steps)
    ):
        raise ValueError(
            f"the inner optimizer of local_steps exchanges over {axis_name!r} on every step, so "
            "that all workers have the same parameters: give inner an ordinary optimizer, such as "
            "optax.adamw, and let outer exchange."
        )

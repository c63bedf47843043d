"""Rounds of several gradients with one exchange: local steps, and accumulation."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from demo_optax import axes, checks, participation
from demo_optax._decoupled_momentum import DecoupledMomentumState
from demo_optax.arrays import BoolScalar, IntScalar, unboxed, upcast
from demo_optax.axes import AxisName
from demo_optax.participation import PARTICIPATES, all_finite, choose


class LocalStepsState(NamedTuple):
    """State of `local_steps`, as one worker sees it.

    Attributes:
      mini_step: int32 scalar, inner steps of this round so far, in ``[0, every)``; the same on all
        workers.
      displacement: a tree like the parameters, float32 or wider: the worker's own parameters minus
        the shared ones, the sum of its inner updates in this round; each worker its own.
      inner: state of the inner optimizer; each worker its own.
      outer: state of the outer optimizer.

    Example:
      >>> state = local_steps(optax.adam(0.1), optax.sgd(1.0), every=4).init(jnp.ones(3))
      >>> state.displacement
      Array([0., 0., 0.], dtype=float32)
    """

    mini_step: IntScalar
    displacement: optax.Updates
    inner: optax.OptState
    outer: optax.OptState

    handles_nonfinite = True


def local_steps(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    every: int,
    *,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Steps that each worker takes by itself, and one exchange at the end of each round of them.

    With :math:`x` the shared parameters, worker :math:`i` trains its own, :math:`x_i`, which begin
    each round at :math:`x`. After ``every`` steps, :math:`H`, what it came along is a gradient for
    the outer optimizer, which exchanges it:

    .. math::
        x_i &\leftarrow x_i + \mathrm{inner}(\nabla f_i(x_i)) \quad (H \text{ times}) \\
        \Delta_i &= x - x_i \\
        x &\leftarrow x + \mathrm{outer}(\Delta_1, \dots, \Delta_N)

    DiLoCo and SparseLoCo are two calls of it::

        local_steps(
            optax.adamw(4e-4),
            optax.chain(
                mean_over_workers("data"), optax.sgd(0.7, momentum=0.9, nesterov=True)
            ),
            every=500,
            axis_name="data",
        )
        sent = Compression(topk=64, value_coding="int2", transform="identity")
        local_steps(
            optax.adamw(4e-4),
            decoupled(
                optax.sgd(1.0), sent, decay=0.95, gradient_weight=1.0, mean="workers",
                axis_name="data",
            ),
            every=30,
            axis_name="data",
        )

    `make_train_step` takes the gradients at each worker's own parameters, which the state holds as
    their difference from the shared ones. In a loop of your own take them at `own_parameters`. The
    updates are zero inside a round, and nothing is sent; ``jax.lax.scan`` over the step makes one
    program of a round. Schedules of ``inner`` count inner steps, those of ``outer`` rounds.

    A worker whose gradient is not finite skips that inner step. One whose own parameters are not
    finite at the end of a round sends nothing, and starts again from the shared ones; one whose
    inner state is not finite then, with a fresh one. Restored on another number of workers, own
    parameters and inner states keep their mean, as momenta do.

    Args:
      inner: any optax optimizer that does not exchange. Where a worker's parameters are sharded,
        norms inside of it (``optax.clip_by_global_norm``, ``optax.lamb``) are those of a shard:
        clip with ``make_train_step(clip_norm=...)``.
      outer: any optax optimizer that exchanges over ``axis_name``.
      every: inner steps of a round, :math:`H`.
      axis_name: the workers' axis, a tuple of axes, or None for a single worker.

    Returns:
      An ``optax.GradientTransformationExtraArgs``, whose ``update`` needs the shared parameters.
      Extra arguments go to both optimizers.

    Raises:
      ValueError, TypeError: ``every`` is not an integer of at least 1; ``inner`` exchanges,
        or holds a decoupled momentum; the gradient is not local; there are no parameters.

    References:
      Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_; Sarfi et al.,
      `SparseLoCo <https://arxiv.org/abs/2508.15706>`_.

    Example:
      >>> tx = local_steps(optax.sgd(0.5), optax.sgd(1.0), every=2)
      >>> params, state = jnp.float32(8.0), tx.init(jnp.float32(8.0))
      >>> for _ in range(2):
      ...     gradient = own_parameters(params, state)  # of a parabola
      ...     updates, state = tx.update(gradient, state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     print(params, own_parameters(params, state))
      8.0 4.0
      2.0 2.0
    """
    checks.static_integer("every", every, at_least=1)
    inner, outer = map(optax.with_extra_args_support, (inner, outer))

    def init_fn(params):
        params = unboxed(params)
        inner_state = inner.init(params)
        if _nodes(inner_state, DecoupledMomentumState):
            raise ValueError(
                "the state of inner holds a DecoupledMomentumState ('decoupled_momentum'), but "
                "each worker takes its inner steps by itself: put it into outer, which exchanges, "
                "and leave another optimizer in inner."
            )
        return LocalStepsState(
            mini_step=jnp.zeros((), jnp.int32),
            displacement=axes.as_varying(
                jax.tree.map(lambda x: upcast(jnp.zeros_like(x)), params), axis_name
            ),
            inner=_typed_as_own(inner_state, axis_name),
            outer=outer.init(params),
        )

    def update_fn(updates, state, params=None, **extra_args):
        if params is None:
            raise ValueError(
                "local_steps needs the shared parameters, from which workers set out, but params "
                "is None: call update(gradient, state, params)."
            )
        checks.local_gradient(updates, axis_name)
        structure: Any = jax.tree.structure(updates)
        gradient, params = unboxed(updates), unboxed(params)

        own = own_parameters(params, state)
        steps, inner_state = inner.update(gradient, state.inner, own, **extra_args)
        _require_no_exchange(steps, axis_name)
        displacement = jax.tree.map(lambda d, u: d + u.astype(d.dtype), state.displacement, steps)
        moves = participation.decide(gradient, axis_name, extra_args)
        arrived = choose(moves, (displacement, inner_state), (state.displacement, state.inner))

        def exchange(displacement, inner_state, old):
            ended = own_parameters(params, state._replace(displacement=displacement))
            arrives = axes.on_all_devices(all_finite(ended), axis_name)
            difference = jax.tree.map(lambda d, g: (-d).astype(g.dtype), displacement, gradient)
            extra = {**extra_args, PARTICIPATES: arrives}
            updates, new = outer.update(difference, old, params, **extra)
            return updates, LocalStepsState(
                mini_step=jnp.zeros((), jnp.int32),
                displacement=jax.tree.map(jnp.zeros_like, displacement),
                inner=restart_nonfinite(inner.init(params), inner_state),
                outer=own_kept(arrives, new, old),
            )

        def go_on(displacement, inner_state, old):
            none = jax.tree.map(lambda g: jnp.zeros(g.shape, g.dtype), gradient)
            return none, LocalStepsState(state.mini_step + 1, displacement, inner_state, old)

        args = *arrived, state.outer
        branches = axes.branches_of_one_type(exchange, go_on, *args)
        updates, new = jax.lax.cond(state.mini_step >= every - 1, *branches, *args)
        return structure.unflatten(jax.tree.leaves(updates)), new

    def restart_nonfinite(fresh, inner_state):
        """A fresh inner state where a worker's own is not finite."""
        finite = axes.on_all_devices(all_finite(inner_state), axis_name)
        return choose(finite, inner_state, fresh)

    def own_kept(arrives, new, old):
        """A new outer state; what a worker has of its own stays where it sends nothing."""

        def leaf(new, old):
            if isinstance(new, DecoupledMomentumState):  # which protects itself
                return new
            own = axes.varying(new) & set(axes.names(axis_name))
            return choose(arrives, new, old) if own else new

        return jax.tree.map(leaf, new, old, is_leaf=lambda x: isinstance(x, DecoupledMomentumState))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def own_parameters(params, opt_state):
    """The parameters at which a worker's gradient is to be taken.

    Args:
      params: the shared parameters.
      opt_state: a state in which one of `local_steps` may be, wherever in the chain.

    Returns:
      A tree like ``params``, in their dtypes: with local steps the worker's own parameters, with an
      axis of workers in front where the state has one; otherwise ``params``.

    Raises:
      ValueError: the local steps are not those of all parameters.

    Example:
      >>> params = jnp.float32(8.0)
      >>> own_parameters(params, optax.sgd(1.0).init(params))
      Array(8., dtype=float32)
    """
    found = _nodes(opt_state, LocalStepsState)
    if not found:
        return params
    wanted, *held = map(_paths, (unboxed(params), *[state.displacement for state in found]))
    if held != [wanted]:
        raise ValueError(
            f"local_steps must be that of all parameters, {wanted}, but the state holds such of "
            f"{held}: leave it outermost, and partition and mask inside of inner and outer."
        )
    structure: Any = jax.tree.structure(params)

    def moved(x, d):
        in_front = tuple(range(d.ndim - jnp.ndim(x)))
        return (jnp.expand_dims(x, in_front) + d).astype(jnp.result_type(x))

    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(found[0].displacement), strict=True)
    return structure.unflatten([moved(x, d) for x, d in pairs])


def _typed_as_own(state, axis_name: AxisName):
    """Types a state as each worker's own, but for momenta, which type themselves."""

    def is_momentum(x) -> bool:
        return isinstance(x, DecoupledMomentumState)

    return jax.tree.map(
        lambda x: x if is_momentum(x) else axes.as_varying(x, axis_name), state, is_leaf=is_momentum
    )


def _paths(tree) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]


def has_exchanged(opt_state) -> BoolScalar:
    """Whether the update that gave this state was the last of its round, or all are."""
    rounds = _nodes(opt_state, LocalStepsState)
    outside = jax.tree.map(
        lambda x: x.outer if isinstance(x, LocalStepsState) else x,
        opt_state,
        is_leaf=lambda x: isinstance(x, LocalStepsState),
    )
    counting = rounds + _nodes(outside, optax.MultiStepsState)
    return jnp.all(jnp.array([x.mini_step == 0 for x in counting], bool))


def _nodes(tree, kind: type) -> list:
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
    return [node for node in nodes if isinstance(node, kind)]


def _require_no_exchange(steps, axis_name: AxisName) -> None:
    """Refuses inner steps that are the same on all workers, where the types can tell."""
    workers = set(axes.names(axis_name))
    if axes.types_are_tracked(axis_name) and not any(
        workers <= axes.varying(x) for x in jax.tree.leaves(steps)
    ):
        raise ValueError(
            f"the inner optimizer of local_steps exchanges over {axis_name!r} on every step, so "
            "that no worker goes a way of its own: give inner an ordinary optimizer, such as "
            "optax.adamw, and let outer exchange."
        )


def multi_steps(
    tx: optax.GradientTransformation, every: int
) -> optax.GradientTransformationExtraArgs:
    """``optax.MultiSteps`` for optimizers that exchange: local means, then one step of all workers.

    For loops that call the optimizer once for each microbatch. Each worker accumulates its own
    gradients, and nothing is sent until the last of ``every`` calls, on which all workers step
    together. `demo_optax.make_train_step` with ``microbatches`` needs less memory.

    Args:
      tx: any optax transformation that exchanges.
      every: calls for one step of ``tx``.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` with the state of ``optax.MultiSteps``. Updates
      are zero on all calls but the last. Gradients are averaged in float32 or wider.

    Example:
      >>> tx = multi_steps(optax.sgd(1.0), every=2)
      >>> state = tx.init(jnp.zeros(()))
      >>> first, state = tx.update(jnp.float32(1.0), state)
      >>> second, state = tx.update(jnp.float32(3.0), state)
      >>> float(first), float(second)
      (0.0, -2.0)
    """
    checks.static_integer("every", every, at_least=1)
    tx = optax.with_extra_args_support(tx)

    def init_fn(params):
        zeros = jax.tree.map(lambda x: upcast(jnp.zeros(x.shape, x.dtype)), params)
        zero = jnp.zeros((), jnp.int32)
        return optax.MultiStepsState(zero, zero, tx.init(params), zeros, skip_state=())

    def update_fn(updates, state, params=None, **extra_args):
        extra_args.pop(PARTICIPATES, None)  # which is of this call's gradient, not of the mean
        calls = (state.mini_step + 1).astype(jnp.float32)
        mean = jax.tree.map(
            lambda m, g: m + (g.astype(m.dtype) - m) / calls.astype(m.dtype),
            state.acc_grads,
            updates,
        )

        def step(mean, inner):
            gradient = jax.tree.map(lambda m, g: m.astype(g.dtype), mean, updates)
            return tx.update(gradient, inner, params, **extra_args)

        def wait(_, inner):
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), stepped[0]), inner

        stepped = jax.eval_shape(step, mean, state.inner_opt_state)
        last = state.mini_step == every - 1
        new, inner = jax.lax.cond(
            last,
            *axes.branches_of_one_type(step, wait, mean, state.inner_opt_state),
            mean,
            state.inner_opt_state,
        )
        return new, optax.MultiStepsState(
            mini_step=(state.mini_step + 1) % every,
            gradient_step=state.gradient_step + last.astype(jnp.int32),
            inner_opt_state=inner,
            acc_grads=jax.tree.map(lambda m: jnp.where(last, jnp.zeros_like(m), m), mean),
            skip_state=(),
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)

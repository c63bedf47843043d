"""Decoupled momentum (DeMo) as an optax gradient transformation: the algorithm on one page."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from demo_optax import axes, checks, messages, metrics, state_checks, two_phase
from demo_optax._exchange import exchange
from demo_optax.arrays import BoolScalar, Coefficients, IntScalar
from demo_optax.averaging import Aggregate
from demo_optax.axes import AxisName
from demo_optax.boxes import unboxed
from demo_optax.compression import Compression, Plan, compress, make_plan
from demo_optax.compression.packet import Message
from demo_optax.compression.settings import STORE, Coordinates
from demo_optax.compression.sparse import MEANS, Mean, add_at
from demo_optax.messages import Packets
from demo_optax.metrics import ExchangeMetrics
from demo_optax.numerics import (
    all_finite,
    choose,
    in_dtype_of,
    restart_blocks,
    round_stochastically,
    widest,
)


class DecoupledMomentumState(NamedTuple):
    """State of `decoupled_momentum`, as one worker sees it.

    Attributes:
      count: int32 scalar, updates so far; the same on all workers.
      momentum: a tree like the parameters, without boxes of Flax's. A parameter has the
        coefficients ``(*grid, n)`` of its blocks, in the momentum's dtype; each worker its own.
      precondition: state of the local preconditioner; each worker its own.
      metrics: what the last exchange told; the same on all workers.
      residual: for each shape of blocks, what this worker has yet to send of those that it owns,
        ``(blocks / workers, n)`` float32; empty unless the exchange has two phases.
      waiting: uint32, the packets of the last step, where the exchange is delayed; each worker its
        own. The momentum still holds what they carry.
      coordinates: static, what the numbers of the momentum are coefficients of.

    Example:
      >>> import jax.numpy as jnp
      >>> state = decoupled_momentum(0.95).init({"w": jnp.ones((128, 192))})
      >>> state.momentum["w"].shape
      (2, 3, 4096)
    """

    count: IntScalar  # type: ignore[assignment]  # as in optax; hides tuple.count
    momentum: optax.Updates
    precondition: optax.OptState
    metrics: ExchangeMetrics
    residual: tuple[Coefficients, ...]
    waiting: Packets | tuple[()]
    coordinates: Coordinates


def decoupled_momentum(
    decay: ArrayLike = 0.999,
    compression: Compression = Compression(),
    *,
    axis_name: AxisName = None,
    gradient_weight: optax.ScalarOrSchedule | None = None,
    mean: Mean = "senders",
    subtraction_factor: ArrayLike = 1.0,
    momentum_dtype: DTypeLike = "float32",
    precondition: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Momentum that stays with its worker; only its largest coefficients are exchanged.

    With :math:`T` a blockwise orthonormal transform, worker :math:`i` keeps the coefficients
    :math:`m_i` of its own momentum and on each step computes

    .. math::
        m_i &\leftarrow \beta m_i + w\, T(g_i) \\
        q_i &= \mathrm{top}_k(m_i) \\
        m_i &\leftarrow m_i - \alpha\, q_i \\
        u &= T^{-1}(\mathrm{mean}(q_1, \dots, q_N))

    All workers return the same :math:`u` to the last bit, in the parameters' shapes, for the
    next transformation of the chain. What is subtracted is what the others decode: rounding by
    the value coding stays in the momentum.

    A worker whose gradient or preconditioner is infinite or NaN sends nothing on that step and
    keeps momentum and preconditioner as they were. If no worker is left, the update is zero. A
    packet that arrives damaged counts on no worker, and its sender keeps all of it in the momentum.
    A block of the momentum, or a leaf of the preconditioner, that is damaged itself starts again.

    Args:
      decay: :math:`\beta` in [0, 1). 0.999 suits runs of many thousand steps, 0.95 short ones.
      compression: transform, blocks, number of coefficients and their coding.
      axis_name: the workers' axis, bound by ``jax.shard_map``, ``jax.pmap`` or ``jax.vmap``; a
        tuple of names for workers along several axes; None for a single worker.
      gradient_weight: :math:`w`, a number or a schedule of the step. ``1 - decay`` by default
        (the second version); the first version has the learning rate here.
      mean: for each coefficient over the ``"senders"`` that sent it (the published code), or
        over all ``"workers"``.
      subtraction_factor: :math:`\alpha` in (0, 1], the part of what was sent that leaves the
        momentum.
      momentum_dtype: of the stored momentum, whatever the parameters' dtype; float32 or wider is
        computed as it is, what is narrower in float32 and rounded stochastically, since what
        decays or waits changes by less than half a step of such a dtype.
      precondition: a transformation of the local gradient before it enters the momentum, such
        as ``optax.scale_by_rms``. Its state belongs to the worker and is never exchanged.

    Returns:
      An ``optax.GradientTransformationExtraArgs``. Its ``update`` takes the worker's *local*
      gradient and returns updates in the gradient's dtypes.

    Raises:
      ValueError, TypeError: a setting is out of range; a leaf is not of a floating dtype; the
        gradient or the compression does not match the state; the gradient is not local.
      NameError: ``axis_name`` is not bound where ``update`` is called.

    References:
      Peng et al., `DeMo: Decoupled Momentum Optimization <https://arxiv.org/abs/2411.19870>`_,
      versions of 2024 and 2026.

    Example:
      A chain for one worker; `demo_optax.make_train_step` runs it on many.

      >>> import jax.numpy as jnp, optax
      >>> tx = optax.chain(
      ...     optax.clip_by_global_norm(1.0),
      ...     decoupled_momentum(0.95, Compression(topk=2), gradient_weight=1.0),
      ...     optax.scale_by_sign(),
      ...     optax.scale_by_learning_rate(0.1),
      ... )
      >>> params = {"w": jnp.ones((4, 4))}
      >>> updates, state = tx.update({"w": jnp.full((4, 4), 2.0)}, tx.init(params), params)
      >>> updates["w"][0]
      Array([-0.1, -0.1, -0.1, -0.1], dtype=float32)
    """
    if not isinstance(compression, Compression):
        raise TypeError(
            "compression must be a demo_optax.Compression, as in Compression(topk=32), not "
            f"{compression!r}."
        )
    checks.in_interval("decay", decay, "[0, 1)")
    checks.in_interval("subtraction_factor", subtraction_factor, "(0, 1]")
    checks.one_of("mean", mean, MEANS)
    checks.static_dtype("momentum_dtype", momentum_dtype)
    coordinates = compression.coordinates
    precondition = optax.with_extra_args_support(precondition or optax.identity())

    def beside_the_momentum(plan):
        return {
            "residual": two_phase.before_the_first(plan, axis_name),
            "waiting": messages.before_the_first(plan, axis_name),
        }

    def init_fn(params) -> Any:  # optax's type for states knows no static nodes
        state_checks.floating_leaves(params)
        plan = make_plan(compression, tuple(x.shape for x in jax.tree.leaves(params)))

        def zeros(param):
            shape = coordinates.geometry(param.shape).stored_shape
            return axes.varying_like(jnp.zeros(shape, momentum_dtype), param)

        return DecoupledMomentumState(
            count=jnp.zeros((), jnp.int32),
            momentum=axes.as_varying(jax.tree.map(zeros, unboxed(params)), axis_name),
            precondition=axes.as_varying(precondition.init(params), axis_name),
            metrics=metrics.before_the_first(),
            **beside_the_momentum(plan),
            coordinates=coordinates,
        )

    def weight(step):
        if gradient_weight is None:
            return 1 - decay
        return gradient_weight(step) if callable(gradient_weight) else gradient_weight

    def rounded(momenta, step, worker):
        key = jax.random.fold_in(compression.key(step, STORE), worker)
        for number, m in enumerate(momenta):
            yield round_stochastically(m, momentum_dtype, jax.random.fold_in(key, number))

    def plan_of(updates, state) -> Plan:
        plan = make_plan(compression, tuple(x.shape for x in jax.tree.leaves(updates)))
        expected = jax.eval_shape(lambda: beside_the_momentum(plan))
        state_checks.usable(updates, state, expected, plan, axis_name)
        return plan

    def settle(plan, state, momenta, sent, step) -> tuple[list[Coefficients], Aggregate]:
        # Exchange: mean(q_1, ..., q_N)
        past = state.residual, state.metrics
        aggregate = exchange(plan, sent.packets, *past, step, axis_name, mean)

        # Subtract: m <- m - alpha q
        factors = [jnp.asarray(subtraction_factor) * part for part in aggregate.delivered]
        return _subtract(momenta, sent.message, factors), aggregate

    def update_fn(updates, state, params=None, **extra_args) -> Any:
        plan, gradient, unflatten = plan_of(updates, state), *_flattened(updates)
        step, worker, w = state.count, axes.index(axis_name), weight(state.count)
        like = updates if params is None else params
        past = _restart_leaves(state.precondition, precondition.init(like))
        local, preconditioned = precondition.update(updates, past, params, **extra_args)
        momenta, aggregate = plan.stacked(jax.tree.leaves(state.momentum)), None

        # A delayed exchange is that of the last step's packets, and comes first.
        if compression.delay:
            sent = messages.reread(plan, state.waiting, step - 1, axis_name)
            momenta, aggregate = settle(plan, state, momenta, sent, step - 1)

        # Accumulate: m <- beta m + w T(g)
        coefficients, arrived = plan.transform(plan.blocks(jax.tree.leaves(local)), step)
        sound = all_finite((arrived * jnp.square(w), decay, preconditioned))
        momenta = _accumulate(sound, decay, plan.rebased(momenta, step), w, coefficients)
        momenta, sums = restart_blocks(momenta)

        # Compress: q = top_k(m)
        compressed = compress(plan, momenta, step, worker, messages.owners_of(plan, axis_name))
        report = metrics.report(gradient, *sums, compressed, subtraction_factor, state.metrics)
        outgoing = messages.outgoing(plan, compressed, report, sound, step, axis_name)
        if aggregate is None:
            momenta, aggregate = settle(plan, state, momenta, outgoing, step)

        # Inverse: u = T^-1 mean(q_1, ..., q_N)
        means = plan.tensors(plan.inverse(aggregate.coefficients, step - compression.delay))
        return unflatten(map(in_dtype_of, means, gradient)), DecoupledMomentumState(
            count=jnp.asarray(optax.safe_increment(step)),
            momentum=_flattened(state.momentum)[1](rounded(plan.stored(momenta), step, worker)),
            precondition=choose(sound, preconditioned, past),
            metrics=aggregate.metrics,
            residual=aggregate.residual,
            waiting=outgoing.packets if compression.delay else (),
            coordinates=coordinates,
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _flattened(tree):
    """Its leaves, and what makes such a tree of others."""
    leaves, structure = jax.tree.flatten(tree)
    return leaves, functools.partial(jax.tree.unflatten, structure)


def _restart_leaves(state, fresh):
    """A state whose leaves start again where they hold anything infinite or NaN."""

    def leaf(x, anew):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return jnp.where(jnp.isfinite(x).all(), x, in_dtype_of(anew, x))

    return jax.tree.map(leaf, state, fresh)


def _accumulate(
    sound: BoolScalar,
    decay: ArrayLike,
    momenta: Sequence[Coefficients],
    weight: ArrayLike,
    coefficients: Sequence[Float[Array, "_blocks _columns _rows"]],
) -> list[Coefficients]:
    """Computes ``decay * m + weight * c``; where the step is not sound, ``m`` stays.

    In the shape of the coefficients, so that XLA fuses it with the product they come from.
    """

    def add(
        m: Float[Array, "blocks n"], c: Float[Array, "blocks columns rows"]
    ) -> Float[Array, "blocks n"]:
        dtype = widest(m.dtype, c.dtype)
        old = m.reshape(c.shape).astype(dtype)
        new = decay * old + weight * c.astype(dtype)
        return jnp.where(sound, new.astype(dtype), old).reshape(m.shape)

    return [add(m, c) for m, c in zip(momenta, coefficients, strict=True)]


def _subtract(
    momenta: Sequence[Coefficients],
    message: Message,
    factors: Sequence[Float[Array, "_blocks 1"]],
) -> list[Coefficients]:
    """Computes ``m - f q``, with a factor for each block."""
    groups = zip(momenta, *message, factors, strict=True)
    return [add_at(m, positions, -f * values) for m, positions, values, f in groups]

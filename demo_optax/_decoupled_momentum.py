"""Decoupled momentum (DeMo) as an optax gradient transformation: the algorithm on one page."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from demo_optax import axes, checks, metrics, participation
from demo_optax.arrays import (
    BoolScalar,
    IntScalar,
    in_dtype_of,
    round_stochastically,
    unboxed,
    widest,
)
from demo_optax.axes import AxisName
from demo_optax.compression import Compression, MomentumFormat, Plan, make_plan, packet
from demo_optax.compression.packet import Origin
from demo_optax.compression.plan import Part, sequentially
from demo_optax.compression.settings import TensorShapes
from demo_optax.compression.transforms import ROUNDING_STREAM
from demo_optax.exchange import Exchange, Outgoing, halves
from demo_optax.exchange.all_gather import resolve_exchange
from demo_optax.exchange.protocol import MEANS, Mean, packet_ids, rows_per_part
from demo_optax.metrics import ExchangeMetrics
from demo_optax.specs import sharded_axes_in

MESSAGE_WEIGHT = "message_weight"


class DecoupledMomentumState(NamedTuple):
    """State of `decoupled_momentum`, as one worker sees it.

    Attributes:
      count: int32 scalar, updates so far; the same on all workers.
      momentum: a tree like the parameters, without boxes of Flax's. A parameter has the
        coefficients ``(*grid, n)`` of its blocks, in the momentum's dtype; each worker its own.
      precondition: state of the local preconditioner; each worker its own.
      metrics: what the last exchange reported; the same on all workers.
      exchange: what the exchange keeps between steps; ``()`` for `demo_optax.AllGather`.
      momentum_format: static, the transform and the blocks in which the momentum is stored.
      shapes: static, the shape of each parameter.

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
    exchange: Any
    momentum_format: MomentumFormat
    shapes: TensorShapes

    handles_nonfinite = True


def decoupled_momentum(
    decay: ArrayLike = 0.999,
    compression: Compression = Compression(),
    *,
    axis_name: AxisName = None,
    exchange: Exchange | None = None,
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
        c_i &= T(g_i) \\
        m_i &\leftarrow \beta m_i + w\, c_i \\
        q_i &= \mathrm{top}_k(m_i) \\
        \hat q_i &= \mathrm{decode}(\mathrm{encode}(q_i)) \\
        \bar q &= \mathrm{mean}(\hat q_1, \dots, \hat q_N) \\
        m_i &\leftarrow m_i - \alpha\, \hat q_i \quad \text{if the others accepted its packet} \\
        u &= T^{-1}(\bar q)

    A worker selects :math:`q_i` and sends it encoded; all workers decode :math:`\hat q_i`, whose
    mean is :math:`\bar q`. What is subtracted is what the others decode: rounding by the value
    coding stays in the momentum. All workers return the same :math:`u` to the last bit, in the
    parameters' shapes, for the next transformation of the chain.

    A worker sends nothing on a step whose gradient is infinite or NaN, before or after the
    preconditioner. Its momentum does not change then, nor does its preconditioner if the gradient
    itself is not finite. If no worker sends, the update is zero. All workers reject a damaged
    packet, and its sender keeps all of it in the momentum. A block of the momentum that is not
    finite is reset to zero. A preconditioner starts again if its state is not finite, or if it
    makes a finite gradient infinite or NaN. Its schedules and injected hyperparameters stay.

    Args:
      decay: :math:`\beta` in [0, 1). 0.999 suits runs of many thousand steps, 0.95 short ones.
      compression: transform, blocks, number of coefficients and their coding.
      axis_name: the workers' axis, bound by ``jax.shard_map``, ``jax.pmap`` or ``jax.vmap``; a
        tuple of names for workers along several axes; None for a single worker. Short for
        ``exchange=AllGather(axis_name)``.
      exchange: how the messages travel: `demo_optax.AllGather`, `demo_optax.TwoPhase` or
        `demo_optax.Delayed`.
      gradient_weight: :math:`w`, a number or a schedule of the step. ``1 - decay`` by default
        (the second version); the first version has the learning rate here.
      mean: which workers each coefficient is averaged over: the ``"senders"`` that sent it (the
        published code), or all ``"workers"`` whose packets are accepted.
      subtraction_factor: :math:`\alpha` in (0, 1], the fraction of what was sent that leaves the
        momentum.
      momentum_dtype: dtype of the stored momentum, whatever the parameters' dtype. With a narrower
        dtype than float32 the momentum is computed in float32 and rounded stochastically.
        Otherwise small changes, such as the decay, would be rounded away.
      precondition: a transformation of the local gradient before it enters the momentum, such
        as ``optax.scale_by_rms``. Its state belongs to the worker and is never exchanged.

    Returns:
      An ``optax.GradientTransformationExtraArgs``. Its ``update`` takes the worker's *local*
      gradient and returns updates in the gradient's dtypes. An extra argument ``message_weight``,
      a positive number such as the tokens of the worker's batch, weighs its message in the mean.

    Warns:
      UserWarning: once, if parameters or gradients lie on several devices, but neither
        ``axis_name`` nor ``exchange`` was given. ``exchange=AllGather(None)`` says that one worker
        on all of them is meant.

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
    momentum = momentum_with_progress(
        decay,
        compression,
        axis_name=axis_name,
        exchange=exchange,
        gradient_weight=gradient_weight,
        mean=mean,
        subtraction_factor=subtraction_factor,
        momentum_dtype=momentum_dtype,
        precondition=precondition,
    )

    def update_fn(updates, state, params=None, **extra_args) -> Any:
        updates, state, _ = momentum.update(updates, state, params, **extra_args)
        return updates, state

    return optax.GradientTransformationExtraArgs(momentum.init, update_fn)


class Progress(NamedTuple):
    """What a worker knows after an update of the steps to come.

    Attributes:
      took_part: whether its gradient of this step entered its momentum.
      own: gives T^-1 of its momentum with the message that is under way, a tree like the gradient.
    """

    took_part: BoolScalar
    own: Callable[[], Any]


def momentum_with_progress(
    decay: ArrayLike,
    compression: Compression,
    *,
    axis_name: AxisName,
    exchange: Exchange | None,
    gradient_weight: optax.ScalarOrSchedule | None,
    mean: Mean,
    subtraction_factor: ArrayLike,
    momentum_dtype: DTypeLike,
    precondition: optax.GradientTransformation | None,
) -> Any:
    """`decoupled_momentum`, whose update returns its `Progress` as well."""
    if not isinstance(compression, Compression):
        raise TypeError(
            "compression must be a demo_optax.Compression, as in Compression(topk=32), not "
            f"{compression!r}."
        )
    check_worker = checks.warn_of_several_devices(axis_name is not None or exchange is not None)
    exchange = resolve_exchange(axis_name, exchange)
    axis_name = exchange.axis_name
    checks.in_interval("decay", decay, "[0, 1)")
    checks.in_interval("subtraction_factor", subtraction_factor, "(0, 1]")
    if gradient_weight is not None:
        checks.require_rate("gradient_weight", gradient_weight)
    checks.one_of("mean", mean, MEANS)
    checks.static_dtype("momentum_dtype", momentum_dtype)
    momentum_format = compression.momentum_format
    precondition = optax.with_extra_args_support(precondition or optax.identity())

    def init_fn(params) -> Any:  # optax's type for states knows no static nodes
        checks.floating_leaves(params)
        check_worker("the parameters", params)
        plan = make_plan(compression, _shapes(params), axes.platform())

        def zeros(param):
            shape = momentum_format.geometry(param.shape).stored_shape
            return axes.varying_like(jnp.zeros(shape, momentum_dtype), param)

        return DecoupledMomentumState(
            count=jnp.zeros((), jnp.int32),
            momentum=axes.as_varying(jax.tree.map(zeros, unboxed(params)), axis_name),
            precondition=axes.as_varying(precondition.init(params), axis_name),
            metrics=metrics.init_metrics(),
            exchange=exchange.init(plan),
            momentum_format=momentum_format,
            shapes=TensorShapes(_shapes(params)),
        )

    def gradient_weight_at(step):
        weight = 1 - decay if gradient_weight is None else gradient_weight
        return checks.evaluate_schedule("gradient_weight", weight, step)

    def checked_plan(updates, state) -> Plan:
        plan = make_plan(compression, _shapes(updates), axes.platform())
        checks.require_local_gradient(updates, axis_name)
        check_worker("the gradients", updates)
        exchange_state_shapes = jax.eval_shape(lambda: exchange.init(plan))
        checks.gradient_fits_state(
            updates, state, momentum_format, plan.geometries, exchange_state_shapes
        )
        return plan

    def update_fn(updates, state, params=None, **extra_args) -> Any:
        plan, step, previous_metrics = checked_plan(updates, state), state.count, state.metrics
        sharded = sharded_axes_in(extra_args)
        participates = participation.decide(updates, axis_name, extra_args, sharded)
        participates &= participation.settings_are_finite(gradient_weight_at(step), decay)

        # Precondition: each worker's own second moment, or nothing
        initial_state = precondition.init(updates if params is None else params)
        intact = participation.is_intact(state.precondition, initial_state, axis_name, sharded)
        old_state = participation.choose_state(intact, state.precondition, initial_state)
        gradient, precondition_state = precondition.update(updates, old_state, params, **extra_args)
        usable = participation.decide(gradient, axis_name, sharded=sharded)
        old_state = participation.choose_state(usable | ~participates, old_state, initial_state)
        participates &= usable

        # after_previous(x, y) returns x and y, and adds a dependency on the previous part, so that
        # parts run one after another
        def accumulate_and_select(part: Part, after_previous, tensors, stored, shared):
            # Transform: c = T(g)
            tensors, stored = after_previous(tensors, stored)
            coefficients = part.transform(part.blocks(tensors), step)

            # Accumulate: m <- beta m + w c
            momenta = part.advance_basis(part.unpack(stored), step)
            new = accumulate(
                momenta, part.split(coefficients), participates, gradient_weight_at(step)
            )
            momenta, energy, restarted = participation.reset_nonfinite_blocks(new)
            momenta = jax.lax.optimization_barrier(momenta)  # or XLA computes them twice

            # Select: q = top_k(m)
            selected = part.select(momenta, shared)
            return (momenta, selected, energy, restarted), selected.values

        shared = plan.rows_per_part(plan.shared_positions(step))
        tensors = plan.per_part(gradient), plan.per_part(state.momentum)
        momenta, selected, energies, restarted = sequentially(
            accumulate_and_select, plan.parts, *tensors, shared
        )

        # Encode: q_hat = decode(encode(q)), the `message`, and the packets that hold it
        selected = plan.join(selected)
        coded, message = packet.encode(plan.sections, selected)
        factor = jnp.where(participates, jnp.asarray(subtraction_factor, jnp.float32), 0)
        message_weight = extra_args.get(MESSAGE_WEIGHT, 1.0)
        header = metrics.header_of(
            updates,
            energies,
            [*restarted, (~intact).astype(jnp.int32)],
            selected,
            message,
            factor,
            message_weight,
            previous_metrics,
        )
        origin = Origin(step, packet_ids(exchange.packets_per_worker(), axis_name))
        layout = exchange.layout(plan)
        packets = packet.build(layout, header, coded, message, participates, origin)

        # Exchange: q_bar = mean(q_hat_1, ..., q_hat_N)
        outgoing = Outgoing(packets, message, factor, step)
        aggregate = exchange.exchange(plan, outgoing, state.exchange, previous_metrics, mean)

        def subtract(part: Part, after_previous, momenta, rows):
            # Subtract: m <- m - alpha q_hat, of what was accepted
            rows, momenta = after_previous(rows, momenta)
            for subtraction, own in zip(aggregate.subtractions, rows, strict=True):
                momenta = part.subtract(momenta, own, step, subtraction.delay)
            stored = part.pack(momenta)
            return (stored,), stored

        def invert(part: Part, after_previous, averages):
            # Inverse: u = T^-1(q_bar)
            coefficients = [x.dense() for x in after_previous(averages)[0]]
            tensors = part.to_tensors(part.inverse(coefficients, step - aggregate.delay))
            return (tensors,), tensors

        def own_progress(part: Part, after_previous, stored, rows):
            # Look ahead: T^-1 of m and of the message that is under way
            rows, stored = after_previous(rows, stored)
            momenta = part.unpack(stored)
            for message in rows:
                momenta = part.subtract(momenta, message, step, delay=0)
            coefficients = list(map(jnp.concatenate, momenta))
            tensors = part.to_tensors(part.inverse(coefficients, step))
            return (tensors,), tensors

        (stored,) = sequentially(
            subtract, plan.parts, momenta, rows_per_part(plan, aggregate.subtractions)
        )
        averages = plan.rows_per_part(aggregate.mean, axis=1)
        (tensors,) = sequentially(invert, plan.parts, averages)

        new_state = DecoupledMomentumState(
            count=jnp.asarray(optax.safe_increment(step)),
            momentum=_as_tree(state.momentum, rounded(_joined(stored), step)),
            precondition=participation.choose(participates, precondition_state, old_state),
            metrics=aggregate.metrics,
            exchange=aggregate.state,
            momentum_format=momentum_format,
            shapes=TensorShapes(_shapes(updates)),
        )

        def as_updates(tensors):
            return _as_tree(updates, map(in_dtype_of, _joined(tensors), jax.tree.leaves(updates)))

        def own():
            under_way = [s.undone() for s in aggregate.subtractions if s.under_way]
            new = plan.per_part(new_state.momentum)
            (tensors,) = sequentially(own_progress, plan.parts, new, rows_per_part(plan, under_way))
            return as_updates(tensors)

        took_part = halves.took_part(exchange, participates, state.exchange)
        return as_updates(tensors), new_state, Progress(took_part, own)

    def accumulate(momenta, coefficients, participates, weight):
        """``decay * m + weight * c``; the old momenta for a worker that skips the step.

        It is computed in the shape of ``c``, where XLA fuses it with the transform, and returned in
        that of ``m``.
        """

        def add(
            m: Float[Array, "blocks n"], c: Float[Array, "blocks columns rows"]
        ) -> Float[Array, "blocks n"]:
            dtype = widest(m.dtype, c.dtype)
            old = m.reshape(c.shape).astype(dtype)
            new = decay * old + weight * c.astype(dtype)
            return jnp.where(participates, new.astype(dtype), old).reshape(m.shape)

        return jax.tree.map(add, momenta, coefficients)

    def rounded(momenta, step):
        key = jax.random.fold_in(compression.key(step, ROUNDING_STREAM), axes.index(axis_name))
        for number, m in enumerate(momenta):
            yield round_stochastically(m, momentum_dtype, jax.random.fold_in(key, number))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _shapes(tree) -> tuple[tuple[int, ...], ...]:
    return tuple(x.shape for x in jax.tree.leaves(tree))


def _as_tree(like, leaves):
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _joined(per_part):
    return itertools.chain.from_iterable(per_part)

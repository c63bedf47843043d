"""Decoupled momentum (DeMo) as an optax gradient transformation."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from demo_optax._src import axes, checks, halves, metrics, momentum
from demo_optax._src.arrays import unboxed
from demo_optax._src.axes import AxisName
from demo_optax._src.compression import Compression, Plan, make_plan
from demo_optax._src.compression.settings import TensorShapes
from demo_optax._src.exchange import Exchange
from demo_optax._src.exchange.all_gather import resolve_exchange
from demo_optax._src.exchange.protocol import MEANS, Mean
from demo_optax._src.halves import SplitTransformation
from demo_optax._src.momentum import NEVER, Applied, DecoupledMomentumState, Sent, Settings


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
) -> SplitTransformation:
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
      A `demo_optax.SplitTransformation`. Its ``update`` takes the worker's *local* gradient and
      returns updates in the gradient's dtypes. An extra argument ``message_weight``, a positive
      number such as the tokens of the worker's batch, weighs its message in the mean.

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
    momentum = split_momentum(
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
        return momentum.update(updates, state, params, extra_args)[:2]

    def send_fn(updates, state, params=None, *, worker=None, **extra_args) -> Any:
        return momentum.send(updates, state, params, worker, extra_args)[:2]

    def apply_fn(packets, outbox, state, params, *, worker=None, **extra_args) -> Any:
        del extra_args
        return momentum.apply(packets, outbox, state, params, worker)[:2]

    exchange = resolve_exchange(axis_name, exchange)
    halves = send_fn, apply_fn
    return SplitTransformation.make(momentum.init, update_fn, *halves, compression, exchange)


class SplitMomentum(NamedTuple):
    """`decoupled_momentum` for `demo_optax.decoupled`, which needs all of `Applied`.

    Attributes:
      init: of the parameters.
      update: ``update(gradient, state, params, extra_args) -> Applied``.
      send: ``send(gradient, state, params, worker, extra_args) -> Sent``.
      apply: ``apply(packets, outbox, state, params, worker) -> Applied``.
    """

    init: Callable
    update: Callable[..., Applied]
    send: Callable[..., Sent]
    apply: Callable[..., Applied]


def split_momentum(
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
) -> SplitMomentum:
    """Decoupled momentum with these settings, which are checked here."""
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
    checks.require_unwrapped(precondition)
    settings = Settings(
        compression,
        decay,
        gradient_weight,
        mean,
        subtraction_factor,
        momentum_dtype,
        optax.with_extra_args_support(precondition or optax.identity()),
        exchange,
    )
    momentum_format = compression.momentum_format

    def plan_of(tree) -> Plan:
        shapes = tuple(x.shape for x in jax.tree.leaves(tree))
        return make_plan(compression, shapes, axes.platform())

    def init(params) -> Any:  # optax's type for states knows no static nodes
        checks.floating_leaves(params)
        check_worker("the parameters", params)
        plan = plan_of(params)

        def zeros(param):
            shape = momentum_format.geometry(param.shape).stored_shape
            return axes.varying_like(jnp.zeros(shape, momentum_dtype), param)

        return DecoupledMomentumState(
            count=jnp.zeros((), jnp.int32),
            momentum=axes.as_varying(jax.tree.map(zeros, unboxed(params)), axis_name),
            precondition=axes.as_varying(settings.precondition.init(params), axis_name),
            metrics=metrics.init_metrics(),
            exchange=exchange.init(plan),
            sent=jnp.int32(NEVER),
            momentum_format=momentum_format,
            shapes=TensorShapes(x.shape for x in jax.tree.leaves(params)),
        )

    def checked_plan(tree, state) -> Plan:
        plan = plan_of(tree)
        exchange_state_shapes = jax.eval_shape(lambda: exchange.init(plan))
        checks.gradient_fits_state(
            tree, state, momentum_format, plan.geometries, exchange_state_shapes
        )
        return plan

    def checked_gradient(gradient, state) -> Plan:
        checks.require_local_gradient(gradient, axis_name)
        check_worker("the gradients", gradient)
        return checked_plan(gradient, state)

    def update(gradient, state, params, extra_args) -> Applied:
        plan = checked_gradient(gradient, state)
        halves.require_unsent(state)
        return momentum.update(settings, plan, gradient, state, params, extra_args)

    def send(gradient, state, params, worker, extra_args) -> Sent:
        halves.require_halves(exchange)
        plan = checked_gradient(gradient, state)
        halves.require_unsent(state)
        worker = axes.index(axis_name) if worker is None else worker
        halves.require_worker(worker)
        row = jnp.asarray(worker, jnp.int32)
        return momentum.send(settings, plan, gradient, state, params, row, extra_args)

    def apply(packets, outbox, state, params, worker) -> Applied:
        halves.require_halves(exchange)
        if params is None:
            raise ValueError(
                "apply() needs the parameters, whose dtypes its updates have, but params is None: "
                "call apply(packets, outbox, state, params)."
            )
        plan = checked_plan(params, state)
        halves.require_packets(packets, exchange.layout(plan).words)
        halves.require_outbox(outbox, state, plan)
        if worker is None and axis_name is None and len(packets) > 1:
            raise ValueError(
                f"there are packets of {len(packets)} workers, but worker is None: give send() and "
                "apply() the number of this worker's row."
            )
        worker = axes.index(axis_name) if worker is None else worker
        halves.require_worker(worker, len(packets))
        packets, row = jnp.asarray(packets), jnp.asarray(worker, jnp.int32)
        return momentum.apply(settings, plan, packets, outbox, state, params, row)

    return SplitMomentum(init, update, send, apply)

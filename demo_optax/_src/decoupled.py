"""Provides decoupled momentum (DeMo) by itself, and in front of any optax optimizer."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from demo_optax._src import axes, checks, participation
from demo_optax._src.arrays import BoolScalar, in_dtype_of, unboxed, zero_unless
from demo_optax._src.axes import AxisName
from demo_optax._src.compression import Compression
from demo_optax._src.exchange import Exchange, Outbox
from demo_optax._src.exchange.all_gather import resolve_exchange
from demo_optax._src.exchange.protocol import EMPTY, Mean
from demo_optax._src.momentum import Momentum
from demo_optax._src.transport import SplitTransformation


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
    r"""Keeps a momentum on each worker, and exchanges only its largest coefficients.

    With :math:`T` a blockwise orthonormal transform, worker :math:`i` keeps the coefficients
    :math:`m_i` of its own momentum. On each step it computes

    .. math::
        c_i &= T(g_i) \\
        m_i &\leftarrow \beta m_i + w\, c_i \\
        q_i &= \mathrm{top}_k(m_i) \\
        \hat q_i &= \mathrm{decode}(\mathrm{encode}(q_i)) \\
        \bar q &= \mathrm{mean}(\hat q_1, \dots, \hat q_N) \\
        m_i &\leftarrow m_i - \alpha\, \hat q_i \quad \text{if the others accepted its packet} \\
        u &= T^{-1}(\bar q)

    A worker selects :math:`q_i` and sends it encoded; all workers decode :math:`\hat q_i`, whose
    mean is :math:`\bar q`. Because a worker subtracts the decoded values, the rounding error of the
    value coding stays in its momentum. All workers return the same :math:`u` to the last bit, in
    the parameters' shapes, for the next transformation of the chain.

    A worker sends nothing on a step whose gradient is infinite or NaN, and neither its momentum nor
    its preconditioner changes then. If no worker sends, the update is zero. All workers reject a
    damaged packet, whose content stays in its sender's momentum. A block of the momentum that is
    not finite, such as one that a preconditioner has made so, is reset to zero, and so is the
    preconditioner, except for its schedules and injected hyperparameters. A preconditioner whose
    state is not finite is reset before it is used.

    Args:
      decay: :math:`\beta` in [0, 1]. 0.999 suits runs of many thousand steps, 0.95 short ones. With
        1 nothing is forgotten, which needs a ``gradient_weight``.
      compression: transform, blocks, number of coefficients and their coding.
      axis_name: the workers' axis, bound by ``jax.shard_map``, ``jax.pmap`` or ``jax.vmap``; a
        tuple of names for workers along several axes; None for a single worker. It is short for
        ``exchange=AllGather(axis_name)``.
      exchange: how the messages travel: `demo_optax.AllGather`, `demo_optax.TwoPhase` or
        `demo_optax.Delayed`.
      gradient_weight: :math:`w`, a number or a schedule of the step. ``1 - decay`` by default, as
        in the second version of the paper; the first version uses the learning rate.
      mean: which workers each coefficient is averaged over: the ``"senders"`` that sent it (the
        published code), or all ``"workers"`` whose packets are accepted.
      subtraction_factor: :math:`\alpha` in (0, 1], the fraction of the sent message that leaves the
        momentum.
      momentum_dtype: dtype of the stored momentum, whatever the parameters' dtype. As
        ``"bfloat16"`` it is computed in float32 and rounded stochastically, since rounding to
        nearest would lose small changes such as the decay.
      precondition: a transformation of the local gradient before it enters the momentum, such
        as ``optax.scale_by_rms``. Its state belongs to the worker and is never exchanged.

    Returns:
      A `demo_optax.SplitTransformation`. Its ``update`` takes the worker's *local* gradient and
      returns updates in the gradient's dtypes. The extra argument ``message_weight``, a positive
      number such as the number of tokens in the worker's batch, weights its message in the mean.

    Raises:
      ValueError, TypeError: a setting is out of range; a leaf is not of a floating dtype; the
        gradient or the compression does not match the state; the gradient is not local.
      NameError: ``axis_name`` is not bound where ``update`` is called.

    References:
      Peng et al., `DeMo: Decoupled Momentum Optimization <https://arxiv.org/abs/2411.19870>`_,
      versions of 2024 and 2026.

    Example:
      This chain is for one worker; `demo_optax.make_train_step` runs it on many.

      >>> import jax, jax.numpy as jnp, optax
      >>> tx = optax.chain(
      ...     optax.clip_by_global_norm(1.0),
      ...     decoupled_momentum(0.95, Compression(topk=2), gradient_weight=1.0),
      ...     optax.scale_by_sign(),
      ...     optax.scale_by_learning_rate(0.1),
      ... )
      >>> params = {"w": jnp.ones((4, 4))}
      >>> gradient, update = {"w": jnp.full((4, 4), 2.0)}, jax.jit(tx.update)
      >>> updates, state = update(gradient, tx.init(params), params)
      >>> updates["w"][0]
      Array([-0.1, -0.1, -0.1, -0.1], dtype=float32)
    """
    momentum = Momentum(
        compression,
        resolve_exchange(axis_name, exchange),
        decay,
        gradient_weight,
        mean,
        subtraction_factor,
        momentum_dtype,
        precondition,
    )
    return SplitTransformation(momentum.init, momentum.update)


class LookAheadState(NamedTuple):
    """Holds the point at which a worker computes its gradient if its optimizer looks ahead.

    Attributes:
      displacement: a tree like the parameters, in their dtypes or in that of the momentum if it is
        narrower: this point minus the shared parameters, or zero after a step that the worker
        skipped.

    Example:
      >>> import demo_optax
      >>> tx = demo_optax.demo_scaled(0.1, look_ahead=1.0)
      >>> tx.init(jnp.ones(3))[2].displacement
      Array([0, 0, 0], dtype=bfloat16)
    """

    displacement: optax.Updates

    handles_nonfinite = True
    local_fields = ("displacement",)


def decoupled(
    base: optax.GradientTransformation,
    compression: Compression = Compression(),
    *,
    decay: chex.Numeric = 0.999,
    gradient_weight: optax.ScalarOrSchedule | None = None,
    mean: Mean = "senders",
    subtraction_factor: chex.Numeric = 1.0,
    momentum_dtype: DTypeLike = "float32",
    precondition: optax.GradientTransformation | None = None,
    look_ahead: chex.Numeric | None = None,
    axis_name: AxisName = None,
    exchange: Exchange | None = None,
) -> SplitTransformation:
    r"""Chains `decoupled_momentum` and ``base``, which may be any optax optimizer.

    The base optimizer uses the aggregate as its gradient. ``update`` takes the worker's local
    gradient; the state is the pair ``(DecoupledMomentumState, state of base)``. The base should
    have no momentum of its own (``optax.adamw(..., b1=0.0)``), since a second one made training
    much worse in our runs. On a step without participants the updates are zero, and only the
    schedule counts in the base's state change: states whose only field is an integer ``count``.

    With ``look_ahead`` each worker computes its gradient where its own momentum would lead:

    .. math::
        \tilde x_i &= x + \lambda\, \mathrm{base}(T^{-1}(m_i + \alpha q_i)) \\
        g_i &= \nabla f_i(\tilde x_i)

    With `demo_optax.Delayed`, :math:`q_i` is the message that was sent but is not applied yet;
    otherwise it is zero. `demo_optax.make_train_step` uses the gradients at these points; a custom
    loop computes them at `demo_optax.local_parameters`. ``base`` must hold the whole step, because
    transformations that follow it in a chain do not move this point. A third entry of the state, a
    `LookAheadState`, holds the displacement. It costs one more inverse transform, one more step of
    the base, and as much memory as the parameters for each worker; ``send`` and ``apply`` each do
    it once. Send few coefficients with it: if all are sent, the momentum contains only rounding
    errors, which a sign-based optimizer turns into full-size steps. DisTrO also looks ahead along
    the worker's own momentum, but this equation is our own. It is unrelated to ``optax.lookahead``.

    Args:
      base: any optax optimizer.
      compression: selection and coding of the part of the momentum that is sent.
      decay: momentum decay; this and the other arguments are those of `decoupled_momentum`.
      look_ahead: :math:`\lambda`, in [0, inf); None uses gradients at the shared parameters.

    Example:
      >>> tx = decoupled(optax.adafactor(1e-3), Compression(topk=8), decay=0.95)
      >>> tx.init(jax.numpy.ones((64, 64)))[0].momentum.shape
      (1, 1, 4096)
    """
    momentum = Momentum(
        compression,
        resolve_exchange(axis_name, exchange),
        decay,
        gradient_weight,
        mean,
        subtraction_factor,
        momentum_dtype,
        precondition,
    )
    checks.require_unwrapped(base)
    if look_ahead is not None:
        checks.in_interval("look_ahead", look_ahead, "[0, inf)")
    algorithm = Decoupled(momentum, optax.with_extra_args_support(base), look_ahead)
    return SplitTransformation(algorithm.init, algorithm.update)


@dataclasses.dataclass(frozen=True, eq=False)
class Decoupled:
    """A decoupled momentum and the optimizer that takes its aggregate as a gradient."""

    momentum: Momentum
    base: optax.GradientTransformationExtraArgs
    look_ahead: chex.Numeric | None

    steps_per_round: ClassVar[None] = None

    @property
    def compression(self) -> Compression:
        return self.momentum.compression

    @property
    def exchange(self) -> Exchange:
        return self.momentum.exchange

    def with_compression(self, compression: Compression) -> "Decoupled":
        return dataclasses.replace(self, momentum=self.momentum.with_compression(compression))

    def init(self, params) -> tuple:
        state = self.momentum.init(params), self.base.init(params)
        if self.look_ahead is None:
            return state

        def zeros(x):
            dtypes = x.dtype, jnp.dtype(self.momentum.momentum_dtype)
            return jnp.zeros_like(x, min(dtypes, key=lambda dtype: jnp.finfo(dtype).bits))

        displacement = jax.tree.map(zeros, unboxed(params))
        return *state, LookAheadState(axes.as_varying(displacement, self.exchange.axis_name))

    def update(self, updates, state, params=None, **extra_args) -> Any:
        return self.step(updates, state, params, **extra_args)[:2]

    def step(self, gradient, state, params=None, **extra_args) -> tuple[Any, Any, Outbox]:
        """Updates, and also returns the outbox that was sent."""
        results = self.momentum.step(gradient, state[0], params, **extra_args)
        aggregate, momentum, outbox = results
        steps, new = self._base_step(aggregate, momentum, state, params, extra_args)
        under_way = outbox if momentum.pending else None
        moved = params if params is None else optax.apply_updates(params, steps)
        ahead = self._ahead(steps, new, under_way, outbox.factor > 0, moved, extra_args)
        return steps, (*new[:2], *ahead), outbox

    def send(self, gradient, state, params=None, *, worker=None, **extra_args) -> Any:
        outbox, momentum = self.momentum.send(
            gradient, state[0], params, worker=worker, **extra_args
        )
        new = momentum, *state[1:]
        ahead = self._ahead(gradient, new, outbox, outbox.factor > 0, params, extra_args)
        return outbox, (momentum, state[1], *ahead)

    def apply(self, packets, outbox, state, params, *, worker=None, **extra_args) -> Any:
        outbox = jax.tree.map(jnp.asarray, outbox)  # it may come from files
        aggregate, momentum = self.momentum.apply(
            packets, outbox, state[0], params, worker=worker, **extra_args
        )
        steps, new = self._base_step(aggregate, momentum, state, params, extra_args)
        took_part = (outbox.status == EMPTY) | (outbox.factor > 0)
        is_applied = momentum.count != state[0].count
        steps = zero_unless(is_applied, steps)
        moved = optax.apply_updates(params, steps)
        ahead = self._ahead(steps, new, None, took_part, moved, extra_args)
        return steps, (momentum, *participation.choose(is_applied, (new[1], *ahead), state[1:]))

    def empty_outbox(self, params, **extra_args) -> Outbox:
        return self.momentum.empty_outbox(params, **extra_args)

    def _base_step(self, aggregate, momentum, state, params, extra_args) -> tuple[Any, Any]:
        steps, new = self.base.update(aggregate, state[1], params, **extra_args)
        # Without participants only the counts of schedules change, like that of the momentum.
        participants = momentum.metrics.participants
        steps = zero_unless(participants > 0, steps)
        new = participation.choose_state(participants > 0, new, state[1])
        return steps, (momentum, new, *state[2:])

    def _ahead(self, after, state, outbox, took_part: BoolScalar, params, extra_args) -> tuple:
        """Returns the displacement of a worker to where its own momentum would lead, if any."""
        if self.look_ahead is None:
            return ()
        old, structure = jax.tree.flatten(state[2].displacement)
        like = jax.tree.unflatten(jax.tree.structure(after), old)
        # After the caller's addition of the steps, XLA needs no memory for them any more.
        after = after if params is None else params
        own = self.momentum.undelivered(state[0], outbox, like, after)

        def displacement(u, old):
            # A worker that skipped the step takes its next gradient at the shared parameters.
            return in_dtype_of(jnp.where(took_part, self.look_ahead * u, 0), old)

        with jax.numpy_dtype_promotion("standard"):  # between the displacement and the parameters
            ahead, _ = self.base.update(own, state[1], params, **extra_args)
            moved = list(map(displacement, jax.tree.leaves(ahead), old))
        return (LookAheadState(structure.unflatten(moved)),)

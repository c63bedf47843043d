"""Decoupled momentum before any optax optimizer, and gradients where it would lead."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from demo_optax._src import axes, checks, participation
from demo_optax._src.arrays import in_dtype_of, unboxed
from demo_optax._src.axes import AxisName
from demo_optax._src.compression import Compression
from demo_optax._src.decoupled_momentum import split_momentum
from demo_optax._src.exchange import Exchange
from demo_optax._src.exchange.all_gather import resolve_exchange
from demo_optax._src.exchange.protocol import Mean
from demo_optax._src.halves import SplitTransformation
from demo_optax._src.momentum import REFUSED, Applied, Sent


class LookAheadState(NamedTuple):
    """Where a worker takes its gradient, in the state of an optimizer with ``look_ahead``.

    Attributes:
      displacement: a tree like the parameters, in their dtypes: that place minus the shared
        parameters; zero after a step that the worker skipped.

    Example:
      >>> import demo_optax
      >>> tx = demo_optax.demo_scaled(0.1, look_ahead=1.0)
      >>> tx.init(jnp.ones(3))[2].displacement
      Array([0., 0., 0.], dtype=float32)
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
    r"""``optax.chain(decoupled_momentum(...), base)``, for any optax optimizer ``base``.

    The base optimizer uses the aggregate as its gradient. ``update`` takes the worker's local
    gradient; the state is the pair ``(DecoupledMomentumState, state of base)``. Give the base no
    momentum of its own (``optax.adamw(..., b1=0.0)``): a second one made training much worse in our
    runs. On a step without participants the updates are zero, and of the base's state only the
    counts of its schedules change.

    With ``look_ahead`` each worker takes its gradient where its own momentum would lead:

    .. math::
        \tilde x_i &= x + \lambda\, \mathrm{base}(T^{-1}(m_i + \alpha q_i)) \\
        g_i &= \nabla f_i(\tilde x_i)

    :math:`q_i` is the message that was sent and is not applied yet, with `demo_optax.Delayed`;
    otherwise zero. `demo_optax.make_train_step` takes the gradients there; in a loop of your own
    take them at `demo_optax.local_parameters`. The whole step must be in ``base``: what follows in
    a chain does not act on the place of the gradient. A third entry of the state, a
    `LookAheadState`, holds the displacement. It costs one more inverse transform, one more step of
    the base, and as much memory as the parameters for each worker; ``send`` and ``apply`` each do
    it once. Send few coefficients with it: if all are sent, the momentum contains only rounding
    errors, which a sign-based optimizer turns into full-size steps. DisTrO looks ahead by the own
    momentum as well; the equation is ours. It has nothing to do with ``optax.lookahead``.

    Args:
      base: any optax optimizer.
      compression: what is sent of the momentum, and how.
      decay: this and the other arguments are those of `decoupled_momentum`.
      look_ahead: :math:`\lambda`, in [0, inf); None takes the gradients at the shared parameters.

    Example:
      >>> tx = decoupled(optax.adafactor(1e-3), Compression(topk=8), decay=0.95)
      >>> tx.init(jax.numpy.ones((64, 64)))[0].momentum.shape
      (1, 1, 4096)
    """
    momentum = split_momentum(
        decay,
        compression,
        gradient_weight=gradient_weight,
        mean=mean,
        subtraction_factor=subtraction_factor,
        momentum_dtype=momentum_dtype,
        precondition=precondition,
        axis_name=axis_name,
        exchange=exchange,
    )
    checks.require_unwrapped(base)
    base = optax.with_extra_args_support(base)
    if look_ahead is not None:
        checks.in_interval("look_ahead", look_ahead, "[0, inf)")
    exchange = resolve_exchange(axis_name, exchange)
    axis_name = exchange.axis_name

    def init_fn(params) -> Any:  # optax's type for states knows no static nodes
        state = momentum.init(params), base.init(params)
        if look_ahead is None:
            return state
        zeros = jax.tree.map(jnp.zeros_like, unboxed(params))
        return *state, LookAheadState(axes.as_varying(zeros, axis_name))

    def update_fn(updates, state, params=None, **extra_args) -> Any:
        applied = momentum.update(updates, state[0], params, extra_args)
        return update_base(applied, state, params, extra_args)

    def send_fn(updates, state, params=None, *, worker=None, **extra_args) -> Any:
        sent = momentum.send(updates, state[0], params, worker, extra_args)
        if look_ahead is None:
            return sent.outbox, (sent.state, state[1])
        ahead = displaced(sent, state[1], state[2], params, extra_args)
        ahead = participation.choose(sent.outbox.step == REFUSED, state[2], ahead)
        return sent.outbox, (sent.state, state[1], ahead)

    def apply_fn(packets, outbox, state, params, *, worker=None, **extra_args) -> Any:
        applied = momentum.apply(packets, outbox, state[0], params, worker)
        updates, new = update_base(applied, state, params, extra_args)
        is_applied = new[0].count != state[0].count
        updates = jax.tree.map(lambda u: jnp.where(is_applied, u, jnp.zeros_like(u)), updates)
        return updates, participation.choose(is_applied, new, state)

    def update_base(applied: Applied, state, params, extra_args) -> Any:
        steps, new = base.update(applied.updates, state[1], params, **extra_args)
        # Without participants nothing moves but the counts of schedules, as that of the momentum.
        participants = applied.state.metrics.participants
        steps = participation.zero_updates_if_no_participants(steps, participants)
        new = participation.choose_state(participants > 0, new, state[1])
        if look_ahead is None:
            return steps, (applied.state, new)
        ahead = displaced(applied, new, state[2], params, extra_args)
        return steps, (applied.state, new, ahead)

    def displaced(half: Applied | Sent, base_state, old, params, extra_args) -> LookAheadState:
        ahead, _ = base.update(half.own(), base_state, params, **extra_args)

        def displacement(u, old):
            # A worker that skipped the step takes its next gradient at the shared parameters.
            return in_dtype_of(jnp.where(half.took_part, look_ahead * u, 0), old)

        return LookAheadState(jax.tree.map(displacement, unboxed(ahead), old.displacement))

    return SplitTransformation.make(init_fn, update_fn, send_fn, apply_fn, compression, exchange)

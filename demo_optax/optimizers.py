"""Decoupled momentum before any optax optimizer, ready-made optimizers, and their baseline.

The aggregate is a momentum already, so the ready-made optimizers keep no second one. Arguments that
all of them share are described at `demo`.
"""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from demo_optax import checks, participation
from demo_optax._decoupled_momentum import decoupled_momentum
from demo_optax.arrays import in_dtype_of, upcast
from demo_optax.axes import AxisName
from demo_optax.compression import Compression
from demo_optax.exchange import Exchange
from demo_optax.exchange.protocol import Mean

Mask = Any | Callable[[optax.Params], Any] | None


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
    axis_name: AxisName = None,
    exchange: Exchange | None = None,
) -> optax.GradientTransformationExtraArgs:
    """``optax.chain(decoupled_momentum(...), base)``, for any optax optimizer ``base``.

    The base optimizer uses the aggregate as its gradient. ``update`` takes the worker's local
    gradient; the state is the pair ``(DecoupledMomentumState, state of base)``. Give the base no
    momentum of its own (``optax.adamw(..., b1=0.0)``): a second one made training much worse in our
    runs. On a step without participants the updates are zero, and of the base's state only the
    counts of its schedules change.

    Args:
      base: any optax optimizer.
      compression: what is sent of the momentum, and how.
      decay: this and the other arguments are those of `decoupled_momentum`.

    Example:
      >>> tx = decoupled(optax.adafactor(1e-3), Compression(topk=8), decay=0.95)
      >>> tx.init(jax.numpy.ones((64, 64)))[0].momentum.shape
      (1, 1, 4096)
    """
    momentum: Any = decoupled_momentum(
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
    base = optax.with_extra_args_support(base)

    def init_fn(params):
        return momentum.init(params), base.init(params)

    def update_fn(updates, state, params=None, **extra_args):
        aggregate, momentum_state = momentum.update(updates, state[0], params, **extra_args)
        new = base.update(aggregate, state[1], params, **extra_args)
        updates, new = participation.keep_base_if_no_participants(
            momentum_state.metrics.participants, *new, state[1]
        )
        return updates, (momentum_state, new)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def demo(
    learning_rate: optax.ScalarOrSchedule,
    compression: Compression = Compression(),
    *,
    decay: chex.Numeric = 0.999,
    weight_decay: chex.Numeric = 0.0,
    mask: Mask = None,
    precondition: optax.GradientTransformation | None = None,
    axis_name: AxisName = None,
    exchange: Exchange | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""DeMo as first published: the step is the sign of the aggregate.

    .. math::
        m_i &\leftarrow \beta m_i + \eta_t\, T(g_i) \\
        q_i &= \mathrm{top}_k(m_i), \quad \hat q_i = \mathrm{decode}(\mathrm{encode}(q_i)) \\
        \bar q &= \mathrm{mean}(\hat q_1, \dots, \hat q_N) \\
        m_i &\leftarrow m_i - \hat q_i \quad \text{if the others accepted its packet} \\
        x &\leftarrow x - \eta_t (\mathrm{sign}(T^{-1} \bar q) + \lambda x)

    The learning rate :math:`\eta_t` is a factor inside the momentum too, as in the published code
    (`arXiv 2411.19870v1 <https://arxiv.org/abs/2411.19870v1>`_). For the blocks of that code give
    ``Compression(block_rule="divisor")``; both rules agree where 64 divides every dimension.

    Args:
      learning_rate: :math:`\eta`, a number or a schedule; both uses evaluate the schedule at the
        same step.
      compression: what is sent of the momentum, and how.
      decay: momentum decay :math:`\beta` in [0, 1).
      weight_decay, mask: decoupled weight decay :math:`\lambda`; the parameters that it applies to.
      precondition: a transformation of the local gradient before the momentum; its state stays
        with its worker.
      axis_name: the workers' axis, a tuple of axes, or None for a single worker.
      exchange: how the messages travel; ``AllGather(axis_name)`` by default.

    Example:
      >>> tx, params = demo(0.1, Compression(topk=4)), jax.numpy.ones(3)
      >>> tx.update(jax.numpy.array([1.0, 2.0, -3.0]), tx.init(params), params)[0]
      Array([-0.1, -0.1,  0.1], dtype=float32)
    """
    base = _base(optax.scale_by_sign(), learning_rate, weight_decay, mask)
    options = _options(decay, precondition, axis_name, exchange)
    return decoupled(base, compression, gradient_weight=learning_rate, **options)


def demo_scaled(
    learning_rate: optax.ScalarOrSchedule,
    compression: Compression = Compression(32, value_coding="sign", selection="bins"),
    *,
    b2: chex.Numeric = 0.95,
    eps: chex.Numeric = 1e-8,
    decay: chex.Numeric = 0.98,
    weight_decay: chex.Numeric = 0.0,
    mask: Mask = None,
    axis_name: AxisName = None,
    exchange: Exchange | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""DeMo with gradients that each worker divides by the root of its second moment. Start here.

    .. math::
        v_i &\leftarrow \beta_2 v_i + (1 - \beta_2) g_i^2 \\
        m_i &\leftarrow \beta m_i + \eta_t\, T(g_i / (\sqrt{\hat v_i} + \epsilon)) \\
        q_i &= \mathrm{select}(m_i), \quad \hat q_i = \mathrm{decode}(\mathrm{encode}(q_i)) \\
        u &= T^{-1}(\tfrac{1}{N} \textstyle\sum_i \hat q_i) \\
        m_i &\leftarrow m_i - \hat q_i \quad \text{if the others accepted its packet} \\
        x &\leftarrow x - \eta_t \big(\mathrm{sign}(u) \sqrt{|u|\, \Sigma |u| / \Sigma u^2}
        + \lambda x\big)

    Without the scaling a few rows with large gradients take most of the packet. The second moment
    :math:`v_i`, bias-corrected to :math:`\hat v_i`, is never sent. Each coefficient is averaged
    over all workers; `demo` averages over its senders only. `demo` takes the sign; here the signed
    root makes small elements move less (`scale_by_signed_root`). It does not depend on the scale of
    :math:`u`, so that the sum and the mean over all workers give the same step.
    ``docs/explanation/quality.md`` shows the effect of each change. Begin with the learning rate of
    an AdamW that was tuned for the same model.

    Args:
      learning_rate: this and the arguments not named here are those of `demo`.
      b2, eps: decay of the second moment in [0, 1); number that is added to its root.

    Example:
      >>> tx, params = demo_scaled(0.1, Compression(topk=4)), jax.numpy.ones(3)
      >>> tx.update(jax.numpy.array([1.0, 20.0, -0.3]), tx.init(params), params)[0].round(3)
      Array([-0.1, -0.1,  0.1], dtype=float32)
    """
    base = _base(scale_by_signed_root(), learning_rate, weight_decay, mask)
    options = _options(decay, _scale_by_rms(b2, eps), axis_name, exchange)
    return decoupled(base, compression, gradient_weight=learning_rate, mean="workers", **options)


def demo_sgd(
    learning_rate: optax.ScalarOrSchedule,
    compression: Compression = Compression(),
    *,
    decay: chex.Numeric = 0.995,
    weight_decay: chex.Numeric = 0.0,
    mask: Mask = None,
    precondition: optax.GradientTransformation | None = None,
    axis_name: AxisName = None,
    exchange: Exchange | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Decoupled momentum instead of SGD's momentum: the step is the aggregate itself.

    Section 3 of `arXiv 2411.19870v2 <https://arxiv.org/abs/2411.19870v2>`_, :math:`\varphi` the
    identity. The learning rate is about ``1 / (1 - decay)`` times that of SGD without momentum.
    All arguments are those of `demo`.

    Example:
      >>> tx, params = demo_sgd(10.0, Compression(topk=4), decay=0.9), jax.numpy.ones(3)
      >>> tx.update(jax.numpy.array([1.0, 2.0, -3.0]), tx.init(params), params)[0].round()
      Array([-1., -2.,  3.], dtype=float32)
    """
    base = _base(optax.identity(), learning_rate, weight_decay, mask)
    return decoupled(base, compression, **_options(decay, precondition, axis_name, exchange))


def demo_adamw(
    learning_rate: optax.ScalarOrSchedule,
    compression: Compression = Compression(),
    *,
    b2: chex.Numeric = 0.95,
    eps: chex.Numeric = 1e-8,
    decay: chex.Numeric = 0.995,
    weight_decay: chex.Numeric = 1e-4,
    mask: Mask = None,
    precondition: optax.GradientTransformation | None = None,
    axis_name: AxisName = None,
    exchange: Exchange | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Decoupled momentum instead of AdamW's first moment.

    The second moment, with decay ``b2``, is that of the aggregate (From et al., `arXiv 2502.06728
    <https://arxiv.org/abs/2502.06728>`_); ``eps`` is added to its root. `demo_scaled` scales
    the local gradients instead. The other arguments are those of `demo`.

    Example:
      >>> tx = demo_adamw(1e-3, Compression(topk=8), decay=0.99, axis_name="data")
    """
    base = _base(_scale_by_rms(b2, eps), learning_rate, weight_decay, mask)
    return decoupled(base, compression, **_options(decay, precondition, axis_name, exchange))


def demo_signum(
    learning_rate: optax.ScalarOrSchedule,
    compression: Compression = Compression(),
    *,
    decay: chex.Numeric = 0.995,
    weight_decay: chex.Numeric = 0.0,
    mask: Mask = None,
    precondition: optax.GradientTransformation | None = None,
    axis_name: AxisName = None,
    exchange: Exchange | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The step is the sign of the aggregate, as in Signum (version 2 of the paper, section 3).

    `demo` without the learning rate inside the momentum, so that a schedule acts only once. All
    arguments are those of `demo`.

    Example:
      >>> tx = demo_signum(1e-3, Compression(topk=8), decay=0.99, axis_name="data")
    """
    base = _base(optax.scale_by_sign(), learning_rate, weight_decay, mask)
    return decoupled(base, compression, **_options(decay, precondition, axis_name, exchange))


def demo_muon(
    learning_rate: optax.ScalarOrSchedule,
    compression: Compression = Compression(),
    *,
    b2: chex.Numeric = 0.95,
    decay: chex.Numeric = 0.995,
    weight_decay: chex.Numeric = 0.0,
    mask: Mask = None,
    precondition: optax.GradientTransformation | None = None,
    axis_name: AxisName = None,
    exchange: Exchange | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Decoupled momentum before Muon's orthogonalised step.

    The step of a matrix is the aggregate with its singular values set to about 1, as in
    ``optax.contrib.muon``. That of other parameters is the aggregate divided by the root of its
    second moment, which decays by ``b2``. The other arguments are those of `demo`. Do not shard
    matrices inside a worker: each shard would be orthogonalised by itself. In our runs its loss was
    higher than that of `demo_scaled`.

    Example:
      >>> tx, params = demo_muon(1.0, Compression(topk=16)), jax.numpy.ones((4, 4))
      >>> updates, state = tx.update(jax.numpy.eye(4), tx.init(params), params)
      >>> bool(abs(updates + jax.numpy.eye(4)).max() < 0.5)
      True
    """
    muon = optax.contrib.muon(-1.0, beta=0.0, nesterov=False)  # -1: _base negates
    orthogonal = optax.stateless(lambda u, _: muon.update(u, muon.init(u), u)[0])
    parts: Any = {True: orthogonal, False: _scale_by_rms(b2, 1e-8)}
    direction = optax.partition(parts, lambda params: jax.tree.map(lambda x: x.ndim == 2, params))
    base = _base(direction, learning_rate, weight_decay, mask)
    return decoupled(base, compression, **_options(decay, precondition, axis_name, exchange))


def _options(decay, precondition, axis_name, exchange) -> dict[str, Any]:
    return dict(decay=decay, precondition=precondition, axis_name=axis_name, exchange=exchange)


def _base(direction, learning_rate, weight_decay, mask) -> optax.GradientTransformation:
    checks.require_rate("learning_rate", learning_rate)
    checks.require_rate("weight_decay", weight_decay)
    none = isinstance(weight_decay, (int, float)) and weight_decay == 0  # which needs no parameters
    decayed = optax.identity() if none else optax.add_decayed_weights(weight_decay, mask)
    return optax.chain(direction, decayed, optax.scale_by_learning_rate(learning_rate))


def _scale_by_rms(b2, eps) -> optax.GradientTransformation:
    """``optax.scale_by_rms`` with a second moment in float32 or wider.

    In bfloat16 a moment with a decay of 0.999 never decreases.
    """
    checks.in_interval("b2", b2, "[0, 1)")
    checks.in_interval("eps", eps, "[0, inf)")
    rms = optax.scale_by_rms(b2, eps, eps_in_sqrt=False, bias_correction=True)

    def update_fn(updates, state, params=None):
        del params
        scaled, state = rms.update(jax.tree.map(upcast, updates), state)
        return jax.tree.map(in_dtype_of, scaled, updates), state

    return optax.GradientTransformation(
        lambda params: rms.init(jax.tree.map(lambda x: upcast(jnp.asarray(x)), params)), update_fn
    )


def scale_by_signed_root() -> optax.GradientTransformation:
    r"""Each element's signed root, relative to the tensor's mean magnitude.

    .. math:: u \mapsto \mathrm{sign}(u) \sqrt{|u|\, \Sigma |u| / \Sigma u^2}

    The step of `demo_scaled`, to put after `decoupled_momentum` in a chain of your own. The mean
    :math:`\Sigma u^2 / \Sigma |u|` weights each magnitude by itself. So the root mean square of the
    steps is at most 1, however many elements are zero. The sums are over a device's shard where
    parameters are sharded.

    Example:
      >>> tx, params = scale_by_signed_root(), jax.numpy.ones(3)
      >>> steps, _ = tx.update(jax.numpy.array([4.0, -1.0, 0.0]), tx.init(params))
      >>> [round(float(x), 3) for x in steps]
      [1.085, -0.542, 0.0]
    """

    def step(update, _):
        u = upcast(update)
        magnitude = jnp.abs(u)
        total, squares = jnp.sum(magnitude), jnp.sum(jnp.square(u))
        mean = squares / jnp.where(total > 0, total, 1.0)
        relative = magnitude / jnp.where(mean > 0, mean, 1.0)
        return in_dtype_of(jnp.sign(u) * jnp.sqrt(relative), update)

    return optax.stateless_with_tree_map(step)


def mean_over_workers(axis_name: AxisName) -> optax.GradientTransformationExtraArgs:
    """The mean of the workers' gradients by a dense all-reduce: ordinary data parallelism.

    Before any optax optimizer it makes the baseline for DeMo, on the same train step. The mean is
    over the workers whose gradient is finite; counting them takes four more bytes. It is zero if
    there are none.

    Example:
      >>> import jax.numpy as jnp
      >>> tx = optax.chain(mean_over_workers("data"), optax.sgd(1.0))
      >>> jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data")(jnp.array([1.0, 3.0]))
      Array([-2., -2.], dtype=float32)
    """

    def update_fn(updates, state, params=None, **extra_args):
        del params
        checks.require_local_gradient(updates, axis_name)
        if axis_name is None:
            return updates, state
        participates = participation.decide(updates, axis_name, extra_args)
        number = jnp.maximum(jax.lax.psum(participates.astype(jnp.float32), axis_name), 1.0)

        def mean(g):
            total = jax.lax.psum(jnp.where(participates, g, jnp.zeros_like(g)), axis_name)
            return (upcast(total) / number).astype(g.dtype)

        return jax.tree.map(mean, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update_fn)

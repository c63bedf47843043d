"""Provides ready-made optimizers, with decoupled momentum in front of bases from optax.

They keep no second momentum, since the aggregate is one already. `demo` describes the arguments
that all of them share. Each signature is spelled out, as in optax, because
``optax.inject_hyperparams`` reads names and defaults from it and cannot pass on ``**options``.
"""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from demo_optax._src import axes, checks
from demo_optax._src.arrays import in_dtype_of, upcast
from demo_optax._src.axes import AxisName
from demo_optax._src.compression import Compression
from demo_optax._src.decoupled import decoupled
from demo_optax._src.exchange import Exchange
from demo_optax._src.exchange.all_gather import resolve_exchange
from demo_optax._src.exchange.collectives import sum_over_shards
from demo_optax._src.matrices import dimension_numbers, orthogonalize, scale_by_output_rms
from demo_optax._src.transport import SplitTransformation

Mask = Any | Callable[[optax.Params], Any] | None


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
) -> SplitTransformation:
    r"""Implements DeMo as first published, whose step is the sign of the aggregate.

    .. math::
        m_i &\leftarrow \beta m_i + \eta_t\, T(g_i) \\
        q_i &= \mathrm{top}_k(m_i), \quad \hat q_i = \mathrm{decode}(\mathrm{encode}(q_i)) \\
        \bar q &= \mathrm{mean}(\hat q_1, \dots, \hat q_N) \\
        m_i &\leftarrow m_i - \hat q_i \quad \text{if the others accepted its packet} \\
        x &\leftarrow x - \eta_t (\mathrm{sign}(T^{-1} \bar q) + \lambda x)

    The learning rate :math:`\eta_t` is a factor inside the momentum too, as in the published code
    (`arXiv 2411.19870v1 <https://arxiv.org/abs/2411.19870v1>`_). Use
    ``Compression(block_rule="divisor")`` for the blocks of that code; both rules agree if 64
    divides every dimension.

    Args:
      learning_rate: :math:`\eta`, a number or a schedule; both uses evaluate the schedule at the
        same step.
      compression: selection and coding of the part of the momentum that is sent.
      decay: momentum decay :math:`\beta` in [0, 1].
      weight_decay, mask: decoupled weight decay :math:`\lambda`; the parameters that it applies to.
      precondition: a transformation of the local gradient before the momentum; its state stays
        with its worker.
      axis_name: the workers' axis, a tuple of axes, or None for a single worker.
      exchange: how the messages travel; ``AllGather(axis_name)`` by default.

    Example:
      >>> tx, params = demo(0.1, Compression(topk=4)), jax.numpy.ones(3)
      >>> jax.jit(tx.update)(jax.numpy.array([1.0, 2.0, -3.0]), tx.init(params), params)[0]
      Array([-0.1, -0.1,  0.1], dtype=float32)
    """
    return decoupled(
        _base(optax.scale_by_sign(), learning_rate, weight_decay, mask),
        compression,
        decay=decay,
        gradient_weight=learning_rate,
        precondition=precondition,
        axis_name=axis_name,
        exchange=exchange,
    )


def demo_scaled(
    learning_rate: optax.ScalarOrSchedule,
    compression: Compression = Compression(32, value_coding="sign", selection="bins"),
    *,
    b2: chex.Numeric = 0.99,
    eps: chex.Numeric = 1e-8,
    decay: chex.Numeric = 0.98,
    weight_decay: chex.Numeric = 0.0,
    mask: Mask = None,
    momentum_dtype: DTypeLike = "bfloat16",
    look_ahead: chex.Numeric | None = None,
    axis_name: AxisName = None,
    exchange: Exchange | None = None,
) -> SplitTransformation:
    r"""Divides each worker's gradients by the root of their second moment, before the momentum.

    Take it in place of `demo_muon` if the batch of a worker is small (``5 * width / tokens`` above
    0.2, with the tokens of one worker's batch).

    .. math::
        v_i &\leftarrow \beta_2 v_i + (1 - \beta_2) g_i^2 \\
        m_i &\leftarrow \beta m_i + \eta_t\, T(g_i / (\sqrt{\hat v_i} + \epsilon)) \\
        q_i &= \mathrm{select}(m_i), \quad \hat q_i = \mathrm{decode}(\mathrm{encode}(q_i)) \\
        u &= T^{-1}(\tfrac{1}{N} \textstyle\sum_i \hat q_i) \\
        m_i &\leftarrow m_i - \hat q_i \quad \text{if the others accepted its packet} \\
        x &\leftarrow x - \eta_t \big(\mathrm{sign}(u) \sqrt{|u|\, \Sigma |u| / \Sigma u^2}
        + \lambda x\big)

    Without the scaling, a few rows with large gradients would fill most of the packet. The second
    moment :math:`v_i`, bias-corrected to :math:`\hat v_i`, is never sent. Each coefficient is
    averaged over all workers, whereas `demo` averages over its senders only. The signed root
    (`scale_by_signed_root`), which replaces the sign of `demo`, makes small elements move less. It
    does not depend on the scale of :math:`u`, so that the sum and the mean over all workers give
    the same step. ``docs/explanation/quality.md`` shows the effect of each change. Begin with the
    learning rate of an AdamW run that was tuned for the same model.

    Args:
      learning_rate: this and the arguments not named here are those of `demo`.
      b2, eps: decay of the second moment in [0, 1); positive number that is added to its root.
      momentum_dtype: dtype in which :math:`m_i` and the displacement of ``look_ahead`` are stored.
      look_ahead: as in `decoupled`. With `demo_optax.Delayed` use 1.0 and half the learning rate.

    Example:
      >>> tx, params = demo_scaled(0.1, Compression(topk=4)), jax.numpy.ones(3)
      >>> gradient, state = jax.numpy.array([1.0, 20.0, -0.3]), tx.init(params)
      >>> jax.jit(tx.update)(gradient, state, params)[0].round(3)
      Array([-0.1, -0.1,  0.1], dtype=float32)
    """
    return decoupled(
        _base(scale_by_signed_root(), learning_rate, weight_decay, mask),
        compression,
        decay=decay,
        gradient_weight=learning_rate,
        mean="workers",
        momentum_dtype=momentum_dtype,
        precondition=_scale_by_rms(b2, eps),
        look_ahead=look_ahead,
        axis_name=axis_name,
        exchange=exchange,
    )


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
) -> SplitTransformation:
    r"""Replaces SGD's momentum by decoupled momentum, so that the step is the aggregate itself.

    This is section 3 of `arXiv 2411.19870v2 <https://arxiv.org/abs/2411.19870v2>`_ with the
    identity as :math:`\varphi`. The learning rate is about ``1 / (1 - decay)`` times that of SGD
    without momentum. All arguments are those of `demo`.

    Example:
      >>> tx, params = demo_sgd(10.0, Compression(topk=4), decay=0.9), jax.numpy.ones(3)
      >>> jax.jit(tx.update)(jax.numpy.array([1.0, 2.0, -3.0]), tx.init(params), params)[0].round()
      Array([-1., -2.,  3.], dtype=float32)
    """
    return decoupled(
        _base(optax.identity(), learning_rate, weight_decay, mask),
        compression,
        decay=decay,
        precondition=precondition,
        axis_name=axis_name,
        exchange=exchange,
    )


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
) -> SplitTransformation:
    """Replaces AdamW's first moment by decoupled momentum.

    The second moment, with decay ``b2``, is that of the aggregate (From et al., `arXiv 2502.06728
    <https://arxiv.org/abs/2502.06728>`_); ``eps`` is added to its root. `demo_scaled` scales
    the local gradients instead. The other arguments are those of `demo`.

    Example:
      >>> tx = demo_adamw(1e-3, Compression(topk=8), decay=0.99, axis_name="data")
    """
    return decoupled(
        _base(_scale_by_rms(b2, eps), learning_rate, weight_decay, mask),
        compression,
        decay=decay,
        precondition=precondition,
        axis_name=axis_name,
        exchange=exchange,
    )


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
) -> SplitTransformation:
    """Uses the aggregate's sign as its step, as in Signum (version 2 of the paper, section 3).

    It is `demo` without the learning rate inside the momentum, so that a schedule acts only once.
    All arguments are those of `demo`.

    Example:
      >>> tx = demo_signum(1e-3, Compression(topk=8), decay=0.99, axis_name="data")
    """
    return decoupled(
        _base(optax.scale_by_sign(), learning_rate, weight_decay, mask),
        compression,
        decay=decay,
        precondition=precondition,
        axis_name=axis_name,
        exchange=exchange,
    )


def demo_muon(
    learning_rate: optax.ScalarOrSchedule,
    compression: Compression = Compression(32, value_coding="sign", selection="bins"),
    *,
    b1: chex.Numeric = 0.9,
    b2: chex.Numeric = 0.99,
    eps: chex.Numeric = 1e-8,
    decay: chex.Numeric = 0.95,
    weight_decay: chex.Numeric = 0.0,
    mask: Mask = None,
    weight_dimension_numbers: Any = None,
    momentum_dtype: DTypeLike = "bfloat16",
    look_ahead: chex.Numeric | None = 1.0,
    axis_name: AxisName = None,
    exchange: Exchange | None = None,
) -> SplitTransformation:
    r"""Makes a momentum of each worker's own gradients orthogonal before the exchange of DeMo.

    This is the optimizer to begin with, at the learning rate of an AdamW that was tuned for the
    same model. If the batch of a worker is small, begin with `demo_scaled`.

    .. math::
        h_i &\leftarrow \beta_1 h_i + (1 - \beta_1) g_i \\
        o_i &= \mathrm{orthogonal}(\beta_1 h_i + (1 - \beta_1) g_i) \\
        v_i &\leftarrow \beta_2 v_i + (1 - \beta_2)\, \mathrm{mean}(o_i^2) \\
        m_i &\leftarrow \beta m_i + \eta_t\, T(o_i / (\sqrt{\hat v_i} + \epsilon))

    The rest is as in `demo_scaled`. The first two lines apply to matrices only, whose singular
    values Muon's five Newton-Schulz steps set to about 1. They are scaled after that by one number
    :math:`v_i` for each of their outputs, the mean over the inputs, as in NorMuon (Li et al.,
    `arXiv 2510.05491 <https://arxiv.org/abs/2510.05491>`_). Other parameters have one for each
    element. The state takes 6 bytes for each element of a matrix, and 8 elsewhere. Orthogonal steps
    of the sparse aggregate, as in version 2 of the paper, gave a higher loss in our runs.

    If ``param_specs`` of the train step say that matrices are sharded inside a worker, each
    device makes some whole matrices orthogonal, which takes two all-to-alls for each shape.

    Args:
      learning_rate: this and the arguments not named here are those of `demo_scaled`.
      b1: decay of the momentum :math:`h_i` of matrices, in [0, 1); it stays with its worker.
      weight_dimension_numbers: which parameters are matrices, as in ``optax.contrib.muon``: a tree
        of ``optax.contrib.MuonDimensionNumbers`` and None, or a function of the parameters that
        returns one and may see ``optax.MaskedNode`` in place of those that another transformation
        updates. By default all parameters of two dimensions are matrices, except those with "embed"
        in their path, because embeddings do better as None. Name this argument in the
        ``static_args`` of ``optax.inject_hyperparams``.
      momentum_dtype: dtype in which :math:`h_i`, :math:`m_i` and the displacement of
        ``look_ahead`` are stored. A ``b1`` above 0.99 needs ``"float32"``, because :math:`h_i` is
        rounded to nearest, which loses smaller changes.
      look_ahead: as in `decoupled`; part of the gain over `demo_scaled` depends on it. Use 1.5
        with `demo_optax.Delayed`, and None as the outer optimizer of `demo_optax.local_steps`.

    Raises:
      UserWarning: from ``init``, if a parameter has more than two dimensions and
        ``weight_dimension_numbers`` is None. It is then not treated as a matrix.

    Example:
      >>> tx, params = demo_muon(1.0, Compression(topk=16)), jax.numpy.ones((4, 4))
      >>> updates, state = jax.jit(tx.update)(jax.numpy.eye(4), tx.init(params), params)
      >>> bool(abs(updates + jax.numpy.eye(4)).max() < 0.5)
      True
    """
    for name, value, interval in (("b1", b1, "[0, 1)"), ("b2", b2, "[0, 1)"), ("eps", eps, _EPS)):
        checks.in_interval(name, value, interval)
    workers = resolve_exchange(axis_name, exchange).axis_name

    def is_matrix(params):
        numbers = dimension_numbers(weight_dimension_numbers, params)
        structure: Any = jax.tree.structure(params)
        return structure.unflatten([x is not None for x in numbers])

    # A sum may overflow where the gradients do not, but a mean does not.
    momentum = optax.chain(optax.scale(1 - b1), optax.trace(b1, nesterov=True))
    precondition = optax.chain(
        optax.masked(_in_float32(momentum, momentum_dtype), is_matrix),
        orthogonalize(weight_dimension_numbers, workers),
        scale_by_output_rms(weight_dimension_numbers, b2, eps),
    )
    return decoupled(
        _base(scale_by_signed_root(), learning_rate, weight_decay, mask),
        compression,
        decay=decay,
        gradient_weight=learning_rate,
        mean="workers",
        momentum_dtype=momentum_dtype,
        precondition=precondition,
        look_ahead=look_ahead,
        axis_name=axis_name,
        exchange=exchange,
    )


def scale_by_signed_root() -> optax.GradientTransformationExtraArgs:
    r"""Takes each element's signed root, relative to the tensor's mean magnitude.

    .. math:: u \mapsto \mathrm{sign}(u) \sqrt{|u|\, \Sigma |u| / \Sigma u^2}

    This is the step of `demo_scaled`, for use after `decoupled_momentum` in a custom chain. The
    mean :math:`\Sigma u^2 / \Sigma |u|` weights each magnitude by itself, so the root mean square
    of the steps is at most 1, however many elements are zero. If the extra argument ``param_specs``
    says that parameters are sharded inside a worker, the sums are over all shards.
    `demo_optax.make_train_step` and `demo_optax.stack_workers` pass it; without it the sums are
    over a device's shard.

    Example:
      >>> tx, params = scale_by_signed_root(), jax.numpy.ones(3)
      >>> steps, _ = tx.update(jax.numpy.array([4.0, -1.0, 0.0]), tx.init(params))
      >>> [round(float(x), 3) for x in steps]
      [1.085, -0.542, 0.0]
    """

    def update_fn(updates, state, params=None, **extra_args):
        del params
        checks.real_leaves("gradient", updates)
        leaves, structure = jax.tree.flatten(updates)
        wide, steps = list(map(upcast, leaves)), []
        sums = [jnp.sum(f(u)) for f in (jnp.abs, jnp.square) for u in wide]
        over = list(map(axes.axes_of, axes.specs_of_leaves(updates, extra_args)))
        sums = sum_over_shards(sums, 2 * over)
        for u, total, squares in zip(wide, sums[: len(wide)], sums[len(wide) :], strict=True):
            mean = squares / jnp.maximum(total, jnp.finfo(total.dtype).tiny)
            relative = jnp.abs(u) / jnp.where(mean > 0, mean, 1.0)
            steps.append(jnp.sign(u) * jnp.sqrt(relative))
        return structure.unflatten(map(in_dtype_of, steps, leaves)), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update_fn)


def _base(direction, learning_rate, weight_decay, mask) -> optax.GradientTransformation:
    checks.require_rate("learning_rate", learning_rate)
    checks.require_rate("weight_decay", weight_decay)
    # A chain without weight decay works without parameters.
    none = isinstance(weight_decay, (int, float)) and weight_decay == 0
    decayed = optax.identity() if none else optax.add_decayed_weights(weight_decay, mask)
    return optax.chain(direction, decayed, optax.scale_by_learning_rate(learning_rate))


_EPS = "[1.2e-38, inf)"  # smaller numbers may be 0 in float32


def _scale_by_rms(b2, eps) -> optax.GradientTransformation:
    checks.in_interval("b2", b2, "[0, 1)")
    checks.in_interval("eps", eps, _EPS)
    return _in_float32(optax.scale_by_rms(b2, eps, eps_in_sqrt=False, bias_correction=True))


def _in_float32(
    tx: optax.GradientTransformation, stored: DTypeLike | None = None
) -> optax.GradientTransformation:
    """Computes a transformation in float32 or wider, and keeps its state so.

    In bfloat16 a second moment with a decay of 0.999 would never decrease. State and results are of
    the dtype ``stored``, if it is given.
    """

    def update_fn(updates, state, params=None):
        del params
        wide = jax.tree.map(upcast, state) if stored else state
        with jax.numpy_dtype_promotion("standard"):  # which optax's correction of a bias needs
            new, wide = tx.update(jax.tree.map(upcast, updates), wide)
        new = jax.tree.map(lambda x, u: x.astype(stored or u.dtype), new, updates)
        return new, jax.tree.map(in_dtype_of, wide, state)

    return optax.GradientTransformation(
        lambda params: jax.tree.map(
            lambda x: x.astype(stored or x.dtype),
            tx.init(jax.tree.map(lambda x: upcast(jnp.asarray(x)), params)),
        ),
        update_fn,
    )

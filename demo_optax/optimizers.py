"""Ready-made optimizers: decoupled momentum in front of the steps that optax has.

All of them compress with the same settings and exchange once. The step behind the exchange
works on the aggregate, which is a momentum already; so each base runs without a first moment
of its own unless it is asked for one.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike
from optax import contrib

from demo_optax import axes, state_checks
from demo_optax._decoupled_momentum import decoupled_momentum
from demo_optax.axes import AxisName
from demo_optax.compression import Compression
from demo_optax.compression.blocks import BlockRule
from demo_optax.compression.sparse import Mean
from demo_optax.compression.transforms import TransformName
from demo_optax.compression.values import ValueCoding

Mask = Any | Callable[[optax.Params], Any] | None


def demo(
    learning_rate: optax.ScalarOrSchedule,
    *,
    decay: ArrayLike = 0.999,
    topk: int = 32,
    chunk_size: int = 64,
    values: ValueCoding = "float32",
    transform: TransformName = "dct",
    block_rule: BlockRule = "pad",
    mean: Mean = "senders",
    subtraction_factor: ArrayLike = 1.0,
    weight_decay: ArrayLike = 0.0,
    mask: Mask = None,
    momentum_dtype: DTypeLike = "float32",
    precondition: optax.GradientTransformation | None = None,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    r"""DeMo as first published: the sign of the aggregate is the step.

    On each step, with :math:`g_i` the local gradient of worker :math:`i` and :math:`T` the
    blockwise DCT,

    .. math::
        m_i &\leftarrow \beta m_i + \eta_t\, T(g_i) \\
        q_i &= \mathrm{top}_k(m_i), \quad m_i \leftarrow m_i - q_i \\
        x &\leftarrow x - \eta_t (\mathrm{sign}(T^{-1} \mathrm{mean}\, q_i) + \lambda x)

    The learning rate :math:`\eta_t` stands inside the momentum as well, as in the published code.

    Args:
      learning_rate: :math:`\eta`, a number or a schedule; both places see the same count.
      decay: momentum decay :math:`\beta` in [0, 1).
      topk: coefficients sent of each block.
      chunk_size: elements per side of a block at most (see `demo_optax.compression.blocks`).
      values: coding of the values on the wire, from ``"float32"`` down to ``"sign"`` (see
        `demo_optax.Compression`).
      transform: ``"dct"``, ``"hadamard"``, ``"random"`` or ``"identity"``.
      block_rule: for dimensions that ``chunk_size`` does not divide, ``"pad"`` or ``"divisor"``.
      mean: over the ``"senders"`` of a coefficient or over all ``"workers"``.
      subtraction_factor: part of what was sent that leaves the momentum, in (0, 1].
      weight_decay: decoupled weight decay :math:`\lambda`.
      mask: the parameters that decay, a tree of booleans or a function that makes it.
      momentum_dtype: dtype of the stored momentum.
      precondition: a transformation of the local gradient, before the momentum. Scaling it by its
        own second moment, ``optax.scale_by_rms(0.95, eps_in_sqrt=False, bias_correction=True)``,
        closed most of the gap to AdamW in our runs; the state stays with its worker.
      axis_name: the workers' axis, a tuple of axes, or None for a single worker.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` that takes local gradients.

    References:
      Peng et al., `DeMo: Decoupled Momentum Optimization <https://arxiv.org/abs/2411.19870v1>`_.

    Example:
      >>> import jax.numpy as jnp
      >>> tx = demo(0.1, topk=4)
      >>> params = jnp.ones(3)
      >>> updates, state = tx.update(jnp.array([1.0, 2.0, -3.0]), tx.init(params), params)
      >>> updates
      Array([-0.1, -0.1,  0.1], dtype=float32)
    """
    momentum = decoupled_momentum(
        decay,
        Compression(topk, chunk_size, values, transform, block_rule),
        axis_name=axis_name,
        gradient_weight=learning_rate,
        mean=mean,
        subtraction_factor=subtraction_factor,
        momentum_dtype=momentum_dtype,
        precondition=precondition,
    )
    return _drive(
        momentum,
        optax.scale_by_sign(),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def demo_sgd(
    learning_rate: optax.ScalarOrSchedule,
    *,
    decay: ArrayLike = 0.995,
    topk: int = 32,
    chunk_size: int = 64,
    values: ValueCoding = "float32",
    transform: TransformName = "dct",
    block_rule: BlockRule = "pad",
    mean: Mean = "senders",
    subtraction_factor: ArrayLike = 1.0,
    weight_decay: ArrayLike = 0.0,
    mask: Mask = None,
    momentum_dtype: DTypeLike = "float32",
    precondition: optax.GradientTransformation | None = None,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Decoupled momentum before plain SGD: the aggregate itself is the step.

    :math:`m_i \leftarrow \beta m_i + (1 - \beta) T(g_i)`, and
    :math:`x \leftarrow x - \eta (T^{-1} \mathrm{mean}\, q_i + \lambda x)`: section 3 of the second
    version with :math:`\varphi` the identity. The decoupled momentum is SGD's momentum; there is no
    other. Every part of a gradient arrives once with weight :math:`1 - \beta`, so that the learning
    rate is about :math:`1 / (1 - \beta)` times that of SGD without momentum.

    Args:
      learning_rate: :math:`\eta`, a number or a schedule.
      decay: this and all other arguments are those of `demo`.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` that takes local gradients.

    References:
      Peng et al., `DeMo: Decoupled Momentum Optimization <https://arxiv.org/abs/2411.19870v2>`_.

    Example:
      >>> import jax.numpy as jnp
      >>> tx = demo_sgd(10.0, decay=0.9, topk=4)
      >>> params = jnp.ones(3)
      >>> updates, state = tx.update(jnp.array([1.0, 2.0, -3.0]), tx.init(params), params)
      >>> updates.round()
      Array([-1., -2.,  3.], dtype=float32)
    """
    momentum = decoupled_momentum(
        decay,
        Compression(topk, chunk_size, values, transform, block_rule),
        axis_name=axis_name,
        mean=mean,
        subtraction_factor=subtraction_factor,
        momentum_dtype=momentum_dtype,
        precondition=precondition,
    )
    return _drive(
        momentum,
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def demo_adamw(
    learning_rate: optax.ScalarOrSchedule,
    b2: ArrayLike = 0.95,
    eps: ArrayLike = 1e-8,
    *,
    decay: ArrayLike = 0.995,
    topk: int = 32,
    chunk_size: int = 64,
    values: ValueCoding = "float32",
    transform: TransformName = "dct",
    block_rule: BlockRule = "pad",
    mean: Mean = "senders",
    subtraction_factor: ArrayLike = 1.0,
    weight_decay: ArrayLike = 1e-4,
    mask: Mask = None,
    momentum_dtype: DTypeLike = "float32",
    precondition: optax.GradientTransformation | None = None,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Decoupled momentum in the place of AdamW's first moment.

    The aggregate is divided by the root of its own second moment, which is the same on all
    workers. Adam's first moment is left out, since the decoupled momentum is one already: a
    second one behind the exchange made training much worse in our runs. The second moment sees
    a sparse aggregate; to scale each worker's gradient before it is compressed, which works
    better, use `demo` with ``precondition``.

    Args:
      learning_rate: :math:`\eta`, a number or a schedule.
      b2: decay of the second moment.
      eps: added to its root.
      decay: this and all other arguments are those of `demo`.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` that takes local gradients.

    References:
      Section 3 of Peng et al., version 2, names the second moment an open question; From et al.,
      `DeToNATION <https://arxiv.org/abs/2502.06728>`_, feed the aggregate to AdamW.

    Example:
      >>> import jax.numpy as jnp
      >>> tx = demo_adamw(0.1, topk=4, weight_decay=0.0)
      >>> params = jnp.ones(3)
      >>> updates, state = tx.update(jnp.array([1.0, 2.0, -3.0]), tx.init(params), params)
      >>> updates.round(3)
      Array([-0.1, -0.1,  0.1], dtype=float32)
    """
    momentum = decoupled_momentum(
        decay,
        Compression(topk, chunk_size, values, transform, block_rule),
        axis_name=axis_name,
        mean=mean,
        subtraction_factor=subtraction_factor,
        momentum_dtype=momentum_dtype,
        precondition=precondition,
    )
    return _drive(
        momentum,
        optax.scale_by_rms(b2, eps, eps_in_sqrt=False, bias_correction=True),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def demo_lion(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.0,
    b2: ArrayLike = 0.99,
    *,
    decay: ArrayLike = 0.995,
    topk: int = 32,
    chunk_size: int = 64,
    values: ValueCoding = "float32",
    transform: TransformName = "dct",
    block_rule: BlockRule = "pad",
    mean: Mean = "senders",
    subtraction_factor: ArrayLike = 1.0,
    weight_decay: ArrayLike = 1e-3,
    mask: Mask = None,
    momentum_dtype: DTypeLike = "float32",
    precondition: optax.GradientTransformation | None = None,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Decoupled momentum before Lion's step.

    Lion steps by the sign of :math:`b_1 \mu + (1 - b_1) u` and keeps
    :math:`\mu \leftarrow b_2 \mu + (1 - b_2) u`. With ``b1=0``, the default, :math:`\mu` plays no
    part, though it is stored: the decoupled momentum is Lion's momentum, and the step is the sign
    of the aggregate.
    A larger ``b1`` adds a second momentum behind the exchange.

    Args:
      learning_rate: :math:`\eta`, a number or a schedule.
      b1: weight of Lion's own momentum in the step.
      b2: decay of Lion's own momentum.
      decay: this and all other arguments are those of `demo`.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` that takes local gradients.

    References:
      Chen et al., `Symbolic Discovery of Optimization Algorithms
      <https://arxiv.org/abs/2302.06675>`_; "Signum" in Peng et al., version 2.

    Example:
      >>> import jax.numpy as jnp
      >>> tx = demo_lion(0.1, topk=4, weight_decay=0.0)
      >>> params = jnp.ones(3)
      >>> updates, state = tx.update(jnp.array([1.0, 2.0, -3.0]), tx.init(params), params)
      >>> updates
      Array([-0.1, -0.1,  0.1], dtype=float32)
    """
    momentum = decoupled_momentum(
        decay,
        Compression(topk, chunk_size, values, transform, block_rule),
        axis_name=axis_name,
        mean=mean,
        subtraction_factor=subtraction_factor,
        momentum_dtype=momentum_dtype,
        precondition=precondition,
    )
    return _drive(
        momentum,
        optax.scale_by_lion(b1, b2),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def demo_muon(
    learning_rate: optax.ScalarOrSchedule,
    b2: ArrayLike = 0.95,
    *,
    decay: ArrayLike = 0.995,
    topk: int = 32,
    chunk_size: int = 64,
    values: ValueCoding = "float32",
    transform: TransformName = "dct",
    block_rule: BlockRule = "pad",
    mean: Mean = "senders",
    subtraction_factor: ArrayLike = 1.0,
    weight_decay: ArrayLike = 0.0,
    mask: Mask = None,
    momentum_dtype: DTypeLike = "float32",
    precondition: optax.GradientTransformation | None = None,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Decoupled momentum before Muon's orthogonalised step.

    Matrices step by the aggregate with its singular values set to about 1, by the Newton-Schulz
    iteration of ``optax.contrib.muon``, which runs here without its momentum and without
    Nesterov. All other parameters are handed to Adam without its first moment. In both cases the
    decoupled momentum is the only one, though optax still stores an unused one for the base. All
    workers orthogonalise the same aggregate.

    Args:
      learning_rate: :math:`\eta`, a number or a schedule.
      b2: decay of Adam's second moment, for parameters that are not matrices.
      decay: this and all other arguments are those of `demo`.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` that takes local gradients.

    References:
      Jordan et al., `Muon <https://kellerjordan.github.io/posts/muon/>`_; section 3 of Peng et
      al., version 2.

    Example:
      >>> import jax.numpy as jnp
      >>> tx = demo_muon(1.0, topk=16)
      >>> params = jnp.ones((4, 4))
      >>> updates, state = tx.update(jnp.eye(4), tx.init(params), params)
      >>> bool(abs(updates + jnp.eye(4)).max() < 0.5)
      True
    """
    momentum = decoupled_momentum(
        decay,
        Compression(topk, chunk_size, values, transform, block_rule),
        axis_name=axis_name,
        mean=mean,
        subtraction_factor=subtraction_factor,
        momentum_dtype=momentum_dtype,
        precondition=precondition,
    )
    return _drive(
        momentum,
        contrib.muon(1.0, beta=0.0, nesterov=False, adam_b1=0.0, adam_b2=b2),
        optax.scale(-1.0),  # which took the place of a learning rate
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def mean_over_workers(axis_name: AxisName) -> optax.GradientTransformationExtraArgs:
    """The mean of the workers' gradients by a dense all-reduce: ordinary data parallelism.

    In front of any optax optimizer it gives the baseline that DeMo is compared with, on the same
    train step.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> tx = optax.chain(mean_over_workers("data"), optax.sgd(1.0))
      >>> jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data")(jnp.array([1.0, 3.0]))
      Array([-2., -2.], dtype=float32)
    """

    def update(updates, params=None):
        del params
        axes.size(axis_name)
        state_checks.require_local(updates, axis_name)
        return updates if axis_name is None else jax.lax.pmean(updates, axis_name)

    return optax.with_extra_args_support(optax.stateless(update))


def _drive(momentum: optax.GradientTransformation, *base: optax.GradientTransformation):
    """``optax.chain(momentum, *base)``, whose updates are zero where no worker took part.

    The base alone would still let weights decay on a step on which every gradient was infinite
    or NaN.
    """
    chain = optax.chain(momentum, *base)

    def update_fn(updates, state, params=None, **extra_args):
        updates, state = chain.update(updates, state, params, **extra_args)
        took_part = state[0].metrics.participants > 0
        updates = jax.tree.map(lambda u: jnp.where(took_part, u, jnp.zeros_like(u)), updates)
        return updates, state

    return optax.GradientTransformationExtraArgs(chain.init, update_fn)

"""Decoupled momentum (DeMo) as an optax gradient transformation: the algorithm on one page."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from demo_optax import axes, checks
from demo_optax.axes import AxisName
from demo_optax.compression import packet, scheme, transforms
from demo_optax.compression.coordinates import Coordinates
from demo_optax.compression.scheme import Compression
from demo_optax.exchange import MEANS, ExchangeMetrics, Mean, exchange, nothing_heard, require_local


class DecoupledMomentumState(NamedTuple):
    """State of `decoupled_momentum`, as one worker sees it.

    Attributes:
      count: int32 scalar, updates so far; the same on all workers.
      momentum: a tree like the parameters. A parameter ``shape`` has the coefficients
        ``(*grid, columns, rows)`` of its blocks, in the momentum's dtype; each worker its own.
      precondition: state of the local preconditioner; each worker its own.
      metrics: what the last exchange told; the same on all workers.
      coordinates: static, what the numbers of the momentum are coefficients of.

    Example:
      >>> import jax.numpy as jnp
      >>> state = decoupled_momentum(0.95).init({"w": jnp.ones((128, 192))})
      >>> state.momentum["w"].shape
      (2, 3, 64, 64)
    """

    count: jax.Array  # type: ignore[assignment]  # as in optax; hides tuple.count
    momentum: optax.Updates
    precondition: optax.OptState
    metrics: ExchangeMetrics
    coordinates: Coordinates


def decoupled_momentum(
    decay: jax.typing.ArrayLike = 0.999,
    compression: Compression = Compression(),
    *,
    axis_name: AxisName = None,
    gradient_weight: optax.ScalarOrSchedule | None = None,
    mean: Mean = "senders",
    subtraction_factor: jax.typing.ArrayLike = 1.0,
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

    A worker whose gradient, momentum or preconditioner would become infinite or NaN sends nothing
    on that step and keeps both as they were. If no worker is left, the update is zero. A packet
    that arrives damaged counts on no worker, and its sender keeps all of it in the momentum.

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
        computed as it is, what is narrower in float32.
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
    checks.in_interval("decay", decay, "[0, 1)")
    checks.in_interval("subtraction_factor", subtraction_factor, "(0, 1]")
    checks.one_of("mean", mean, MEANS)
    checks.static_dtype("momentum_dtype", momentum_dtype)
    coordinates = compression.coordinates
    precondition = optax.with_extra_args_support(precondition or optax.identity())

    def init_fn(params):
        checks.floating_leaves(params)

        def zeros(param):
            shape = coordinates.geometry(param.shape).stored_shape
            return jnp.zeros(shape, momentum_dtype)

        return DecoupledMomentumState(
            count=jnp.zeros((), jnp.int32),
            momentum=jax.tree.map(zeros, params),
            precondition=precondition.init(params),
            metrics=nothing_heard(),
            coordinates=coordinates,
        )

    def update_fn(updates, state, params=None, **extra_args):
        axes.size(axis_name)
        checks.same_structure(updates, state.momentum)
        require_local(updates, axis_name)
        structure = jax.tree.structure(updates)
        leaves = jax.tree.leaves(updates)
        arrangement = scheme.arrange(compression, tuple(x.shape for x in leaves))
        geometries = arrangement.geometries
        checks.same_blocks(updates, state.momentum, geometries)
        checks.same_coordinates(state.coordinates, coordinates)

        local, precondition_state = precondition.update(
            updates, state.precondition, params, **extra_args
        )
        weight = 1 - decay if gradient_weight is None else gradient_weight
        weight = weight(state.count) if callable(weight) else weight
        basis = coordinates.basis(state.count)
        stored = jax.tree.leaves(state.momentum)
        old = scheme.in_current_basis(compression, arrangement, stored, state.count)
        momenta = [
            _accumulate(decay, m, weight, transforms.forward(scheme.wide(g), geometry, basis))
            for m, g, geometry in zip(old, jax.tree.leaves(local), geometries, strict=True)
        ]

        known = scheme.known_positions(compression, arrangement, state.count)
        message = scheme.select(arrangement, momenta, known)
        key = scheme.rounding_key(compression, state.count, axes.index(axis_name))
        real = scheme.real_places(arrangement, message.indices)
        body = packet.encode(arrangement.layout, message, real, key)
        sent, _ = packet.decode(arrangement.layout, body, known)
        decoded = [
            values if mask is None else jnp.where(mask, values, 0)
            for values, mask in zip(sent.values, real, strict=True)
        ]
        left = _subtract(message.values, subtraction_factor, decoded)
        energy, selected = _energy(momenta), _energy(message.values)
        header = packet.Header(
            fingerprint=_fingerprint(leaves),
            momentum=energy,
            sent=selected - _energy(_subtract(message.values, 1.0, decoded)),
            residual=jnp.maximum(energy - selected, 0.0) + _energy(left),
        )
        finite = (
            jnp.isfinite(header.fingerprint)
            & jnp.isfinite(_energy(m.astype(momentum_dtype) for m in momenta))
            & _all_finite(precondition_state)
        )
        aggregate, delivered, metrics = exchange(
            packet.seal(header, body, count=finite), arrangement.layout, known, axis_name, mean
        )

        left = tuple(
            jnp.where(delivered, rest, value)
            for rest, value in zip(left, message.values, strict=True)
        )
        residuals = scheme.replace(arrangement, momenta, message._replace(values=left))
        aggregated = [
            transforms.inverse(coefficients, geometry, basis).astype(leaf.dtype)
            for coefficients, geometry, leaf in zip(
                scheme.ungroup(arrangement, aggregate), geometries, leaves, strict=True
            )
        ]

        def unless_infinite(new, old, stored):
            return jnp.where(finite, new.astype(stored.dtype), old.astype(stored.dtype))

        return jax.tree.unflatten(structure, aggregated), DecoupledMomentumState(
            count=optax.safe_increment(state.count),
            momentum=jax.tree.unflatten(structure, map(unless_infinite, residuals, old, stored)),
            precondition=jax.tree.map(
                unless_infinite, precondition_state, state.precondition, state.precondition
            ),
            metrics=metrics,
            coordinates=coordinates,
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _accumulate(decay, momentum, weight, coefficients) -> jax.Array:
    dtype = jnp.promote_types(momentum.dtype, coefficients.dtype)
    return (decay * momentum.astype(dtype) + weight * coefficients.astype(dtype)).astype(dtype)


def _subtract(values, factor, decoded) -> tuple[jax.Array, ...]:
    return tuple((v - factor * d).astype(v.dtype) for v, d in zip(values, decoded, strict=True))


def _energy(tensors) -> jax.Array:
    """Sum of squares over all tensors, a float32 scalar."""
    squares = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in tensors]
    return sum(squares, jnp.zeros((), jnp.float32))


def _fingerprint(tensors) -> jax.Array:
    """A float32 scalar that differs between different tensors, and is not finite where one is not.

    A weighted sum; norms would not do, since clipping makes them equal.
    """
    total = jnp.zeros((), jnp.float32)
    for x in tensors:
        scrambled = jax.lax.iota(jnp.uint32, x.size) * jnp.uint32(0x9E3779B9) >> 20
        weights = 1.0 + scrambled.astype(jnp.float32) / 4096
        total += jnp.sum(weights * x.reshape(-1).astype(jnp.float32))
    return total


def _all_finite(tree) -> jax.Array:
    return jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)], bool).all()

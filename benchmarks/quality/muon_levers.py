"""Levers with Muon: where the orthogonal step stands, before the exchange, after it, or both."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

import demo_optax
from lm.recipes import Settings

from .bases import powers, scale_by_rms, with_base


def muon_stepping_by(settings: Settings, power: float) -> optax.GradientTransformation:
    """`demo_optax.demo_muon` whose step is another power of the aggregate than a half."""
    return with_base(
        powers(power),
        settings,
        mean="workers",
        look_ahead=settings.look_ahead,
        precondition=orthogonal_and_scaled(settings),
    )


def muon_before_and_after(settings: Settings, shared: float) -> optax.GradientTransformation:
    """`demo_optax.demo_muon`, and a momentum of the aggregates is made orthogonal as well."""
    return with_base(
        _by_shape(orthogonal(shared), demo_optax.scale_by_signed_root()),
        settings,
        mean="workers",
        look_ahead=settings.look_ahead,
        precondition=orthogonal_and_scaled(settings),
    )


def orthogonal_and_scaled(settings: Settings) -> optax.GradientTransformation:
    """What each worker of `demo_optax.demo_muon` does to its own gradient."""
    return optax.chain(_by_shape(orthogonal(0.9), optax.identity()), scale_by_rms(settings.b2))


def muon_before(settings: Settings, local: float) -> optax.GradientTransformation:
    """Each worker sends its own orthogonal momentum, whose decay is ``local``."""
    precondition = _by_shape(orthogonal(local), scale_by_rms(settings.b2))
    step = demo_optax.scale_by_signed_root()
    return with_base(step, settings, mean="workers", precondition=precondition)


def muon_after(
    settings: Settings, shared: float, scaled: bool = True
) -> optax.GradientTransformation:
    """A momentum of the aggregates, the same on all workers, is made orthogonal."""
    precondition = scale_by_rms(settings.b2) if scaled else None
    base = _by_shape(orthogonal(shared), demo_optax.scale_by_signed_root())
    return with_base(base, settings, mean="workers", precondition=precondition)


def orthogonal(beta: float) -> optax.GradientTransformation:
    """A momentum made orthogonal, with a root mean square of 1."""

    def dimensions(updates):
        return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), updates)

    muon = optax.contrib.scale_by_muon(beta=beta, weight_dimension_numbers=dimensions)
    return optax.chain(muon, root_mean_square_of_one())


def root_mean_square_of_one() -> optax.GradientTransformation:
    def scaled(u):
        return u / (jnp.sqrt(jnp.mean(jnp.square(u))) + 1e-30)

    return optax.stateless(lambda updates, _: jax.tree.map(scaled, updates))


def _by_shape(matrices, others) -> optax.GradientTransformation:
    """Embeddings, norms and biases are not made orthogonal."""

    def label(path, x):
        return x.ndim == 2 and "embed" not in jax.tree_util.keystr(path)

    parts = {True: matrices, False: others}
    return optax.partition(parts, lambda params: jax.tree.map_with_path(label, params))


class Covariance(NamedTuple):
    """State of `whitened`: the mean of each matrix's own covariance over its shorter side."""

    count: jax.Array
    covariance: optax.Updates


def whitened(b2: float, eps: float = 1e-6) -> optax.GradientTransformation:
    """Each matrix times the inverse root of the mean of its covariances, over the shorter side."""

    def covariance(g):
        return g @ g.T if g.shape[0] <= g.shape[1] else g.T @ g

    def root(c):
        values, vectors = jnp.linalg.eigh(c)
        values = jnp.maximum(values, 0) + eps * jnp.maximum(values.max(), 1e-30)
        return (vectors * jax.lax.rsqrt(values)[None]) @ vectors.T

    def init(params):
        zeros = jax.tree.map(lambda p: jnp.zeros((min(p.shape), min(p.shape))), params)
        return Covariance(jnp.zeros((), jnp.int32), zeros)

    def update(updates, state, params=None):
        del params
        count = state.count + 1
        new = jax.tree.map(
            lambda c, g: b2 * c + (1 - b2) * covariance(g), state.covariance, updates
        )
        correction = 1 - b2**count

        def scale(g, c):
            r = root(c / correction)
            return r @ g if g.shape[0] <= g.shape[1] else g @ r

        return jax.tree.map(scale, updates, new), Covariance(count, new)

    return optax.GradientTransformation(init, update)


def whitened_before(settings: Settings, b2: float) -> optax.GradientTransformation:
    """Each worker whitens its own gradients by its own covariances: RMS scaling, of matrices."""
    precondition = _by_shape(whitened(b2), scale_by_rms(settings.b2))
    step = demo_optax.scale_by_signed_root()
    return with_base(step, settings, mean="workers", precondition=precondition)


def published_muon(settings: Settings, scaled: bool = True) -> optax.GradientTransformation:
    """Muon's step of the aggregate, as in version 2 of the paper."""
    muon = optax.contrib.muon(-1.0, beta=0.0, nesterov=False)
    orthogonal = optax.stateless(lambda u, _: muon.update(u, muon.init(u), u)[0])
    parts = {True: orthogonal, False: scale_by_rms(settings.b2)}
    base = optax.partition(parts, lambda params: jax.tree.map(lambda x: x.ndim == 2, params))
    return demo_optax.decoupled(
        optax.chain(base, optax.scale_by_learning_rate(settings.learning_rate)),
        settings.compression,
        decay=settings.decay,
        precondition=scale_by_rms(settings.b2) if scaled else None,
        exchange=settings.exchange,
    )

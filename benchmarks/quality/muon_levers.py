"""Levers with Muon: where the orthogonal step stands, before the exchange, after it, or both."""

import functools

import jax
import jax.numpy as jnp
import optax

import demo_optax
from lm.recipes import Settings

scale_by_rms = functools.partial(optax.scale_by_rms, eps_in_sqrt=False, bias_correction=True)


def muon_before(
    settings: Settings,
    local: float = 0.9,
    nesterov: bool = True,
    after: str = "root",
    **options,
) -> optax.GradientTransformation:
    """Each worker sends its own orthogonal momentum, whose decay is ``local``."""
    matrices = orthogonal(local, nesterov)
    return _decoupled(settings, _by_shape(matrices), AFTER[after](), **options)


def muon_after(
    settings: Settings,
    shared: float = 0.9,
    nesterov: bool = True,
    scaled: bool = True,
    **options,
) -> optax.GradientTransformation:
    """A momentum of the aggregates, the same on all workers, is made orthogonal."""
    base = _by_shape(orthogonal(shared, nesterov), demo_optax.scale_by_signed_root())
    return _decoupled(settings, scale_by_rms(0.95) if scaled else None, base, **options)


def orthogonal(beta: float, nesterov: bool) -> optax.GradientTransformation:
    """A momentum made orthogonal, with a root mean square of 1."""

    def dimensions(updates):
        return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), updates)

    muon = optax.contrib.scale_by_muon(
        beta=beta, nesterov=nesterov, weight_dimension_numbers=dimensions
    )
    return optax.chain(muon, root_mean_square_of_one())


def root_mean_square_of_one() -> optax.GradientTransformation:
    def scaled(u):
        return u / (jnp.sqrt(jnp.mean(jnp.square(u))) + 1e-30)

    return optax.stateless(lambda updates, _: jax.tree.map(scaled, updates))


AFTER = {
    "root": demo_optax.scale_by_signed_root,
    "rms": root_mean_square_of_one,
    "sign": optax.scale_by_sign,
}


def _by_shape(matrices, others=None) -> optax.GradientTransformation:
    """Embeddings, norms and biases are not made orthogonal."""

    def label(path, x):
        return x.ndim == 2 and "embed" not in jax.tree_util.keystr(path)

    parts = {True: matrices, False: others or scale_by_rms(0.95)}
    return optax.partition(parts, lambda params: jax.tree.map_with_path(label, params))


def _decoupled(settings: Settings, precondition, base, inside: bool = True, **options):
    """With the learning rate in the momentum as well, if ``inside``."""
    weight = settings.learning_rate if inside else 1.0
    given = {"mean": "workers", "gradient_weight": weight, "precondition": precondition} | options
    return demo_optax.decoupled(
        optax.chain(
            base,
            optax.add_decayed_weights(settings.weight_decay),
            optax.scale_by_learning_rate(settings.learning_rate),
        ),
        settings.compression,
        decay=settings.decay,
        exchange=settings.exchange,
        **given,
    )

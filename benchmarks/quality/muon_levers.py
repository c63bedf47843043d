"""Levers with Muon: where the orthogonal step stands, before the exchange, after it, or both."""

import jax
import jax.numpy as jnp
import optax

import demo_optax
from lm.recipes import Settings

from .bases import scale_by_rms, with_base


def muon_before(settings: Settings, local: float) -> optax.GradientTransformation:
    """Each worker sends its own orthogonal momentum, whose decay is ``local``."""
    precondition = _by_shape(orthogonal(local), scale_by_rms(0.95))
    step = demo_optax.scale_by_signed_root()
    return with_base(step, settings, mean="workers", precondition=precondition)


def muon_after(
    settings: Settings, shared: float, scaled: bool = True
) -> optax.GradientTransformation:
    """A momentum of the aggregates, the same on all workers, is made orthogonal."""
    precondition = scale_by_rms(0.95) if scaled else None
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

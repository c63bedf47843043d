"""What levers have in common: scaled gradients, and steps after the exchange."""

import functools

import jax
import jax.numpy as jnp
import optax

import demo_optax
from lm.recipes import Settings

scale_by_rms = functools.partial(optax.scale_by_rms, eps_in_sqrt=False, bias_correction=True)


def with_base(base, settings: Settings, **options) -> optax.GradientTransformation:
    """Another step after the exchange; the learning rate is inside the momentum as well."""
    common = {"gradient_weight": settings.learning_rate, "precondition": scale_by_rms(settings.b2)}
    return demo_optax.decoupled(
        optax.chain(
            base,
            optax.add_decayed_weights(settings.weight_decay),
            optax.scale_by_learning_rate(settings.learning_rate),
        ),
        settings.compression,
        decay=settings.decay,
        exchange=settings.exchange,
        **common | options,
    )


def powers(power: float) -> optax.GradientTransformation:
    """Each element to a power, with a root mean square of 1 of each tensor."""

    def step(u):
        u = jnp.sign(u) * jnp.abs(u) ** power
        return u / (jnp.sqrt(jnp.mean(jnp.square(u))) + 1e-30)

    return optax.stateless(lambda updates, _: jax.tree.map(step, updates))

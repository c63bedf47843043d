"""What levers have in common: scaled gradients, and steps after the exchange."""

import functools

import optax

import demo_optax
from lm.recipes import Settings

scale_by_rms = functools.partial(optax.scale_by_rms, eps_in_sqrt=False, bias_correction=True)


def with_base(base, settings: Settings, **options) -> optax.GradientTransformation:
    """Another step after the exchange; the learning rate is inside the momentum as well."""
    common = {"gradient_weight": settings.learning_rate, "precondition": scale_by_rms(0.95)}
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

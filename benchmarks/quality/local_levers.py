"""Levers of local steps: the inner optimizer, the outer one, and what is sent of a round."""

from typing import Any

import optax

import demo_optax
from demo_optax import Compression
from lm.recipes import Settings

AXIS = "data"


def local(
    settings: Settings,
    every: int,
    inner: str = "adamw",
    rate: float = 0.7,
    momentum: float = 0.9,
    decay: float | None = None,
    fragments: int | None = None,
    merge: float | None = None,
    look_ahead: float | None = None,
    **sparse,
) -> optax.GradientTransformation:
    """Local steps with this inner optimizer; outside SGD with momentum, dense or sparse."""
    outer = optax.sgd(rate, momentum=momentum or None, nesterov=bool(momentum))
    if decay is None:
        outer = optax.chain(demo_optax.mean_over_workers(AXIS), outer)
    else:
        outer = demo_optax.decoupled(
            outer,
            Compression(**sparse),
            decay=decay,
            gradient_weight=1.0,
            mean="workers",
            look_ahead=look_ahead,
            axis_name=AXIS,
        )
    if inner == "muon":
        own = optax.contrib.muon(settings.learning_rate, weight_decay=settings.weight_decay)
    else:
        own = optax.adamw(
            settings.learning_rate, settings.decay, settings.b2, weight_decay=settings.weight_decay
        )
    options: Any = dict(fragments=fragments, merge=merge, axis_name=AXIS)
    return demo_optax.local_steps(own, outer, every, **options)

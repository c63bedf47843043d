"""Changes of an optimizer that the trainer has no setting for, by their names in studies.yaml.

The tag studies-2026-11 has the levers of all studies.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import optax

import demo_optax
from demo_optax import Compression
from lm import recipes

AXIS = "data"


def maker(name: str, **options: Any) -> Callable[..., optax.GradientTransformation]:
    """What the trainer's `prepare` takes for its optimizer."""
    return lambda _name, settings, _local_steps: LEVERS[name](settings, **options)


def muon(settings: recipes.Settings) -> optax.GradientTransformation:
    """Muon after a dense all-reduce, as optax has it."""
    own = optax.contrib.muon(settings.learning_rate, weight_decay=settings.weight_decay)
    return optax.chain(demo_optax.mean_over_workers(AXIS), own)


def owners(settings: recipes.Settings, residual_decay: float) -> optax.GradientTransformation:
    """`demo_scaled` with another ``residual_decay`` of the owners of two phases."""
    exchange = dataclasses.replace(settings.exchange, residual_decay=residual_decay)
    return recipes.make("demo-scaled", settings._replace(exchange=exchange), None)


def local(
    settings: recipes.Settings,
    every: int,
    rate: float = 0.7,
    momentum: float = 0.9,
    decay: float | None = None,
    fragments: int | None = None,
    merge: float | None = None,
    **sparse,
) -> optax.GradientTransformation:
    """Local steps of AdamW; outside SGD with momentum, dense or sparse."""
    outer = optax.sgd(rate, momentum=momentum or None, nesterov=bool(momentum))
    if decay is None:
        outer = optax.chain(demo_optax.mean_over_workers(AXIS), outer)
    else:
        options: Any = dict(decay=decay, gradient_weight=1.0, mean="workers")
        outer = demo_optax.decoupled(outer, Compression(**sparse), **options, axis_name=AXIS)
    rate, decay, weight_decay = settings[:3]
    inner = optax.adamw(rate, decay, settings.b2, weight_decay=weight_decay)
    options = dict(fragments=fragments, merge=merge, axis_name=AXIS)
    return demo_optax.local_steps(inner, outer, every, **options)


LEVERS: dict[str, Callable] = {"local": local, "muon": muon, "owners": owners}

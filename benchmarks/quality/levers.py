"""Changes of an optimizer that the trainer has no setting for.

A lever is a function of the trainer's settings and its own options that gives an optimizer; the
names are those in studies.yaml. The tag studies-2026-11 has the levers of all studies.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import optax

import demo_optax
from lm import recipes
from lm.recipes import Settings

from .local_levers import AXIS, local


def maker(name: str, **options: Any) -> Callable[..., optax.GradientTransformation]:
    """What the trainer's `prepare` takes for its optimizer."""
    return lambda _name, settings, _local_steps: LEVERS[name](settings, **options)


def muon(settings: Settings) -> optax.GradientTransformation:
    """Muon after a dense all-reduce, as optax has it."""
    own = optax.contrib.muon(settings.learning_rate, weight_decay=settings.weight_decay)
    return optax.chain(demo_optax.mean_over_workers(AXIS), own)


def owners(settings: Settings, residual_decay: float) -> optax.GradientTransformation:
    """`demo_scaled` with another ``residual_decay`` of the owners of two phases."""
    exchange = dataclasses.replace(settings.exchange, residual_decay=residual_decay)
    return recipes.make("demo-scaled", settings._replace(exchange=exchange), None)


LEVERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "local": local,
    "muon": muon,
    "owners": owners,
}

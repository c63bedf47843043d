"""The optimizers by name, with defaults found in runs of the `tiny` model.

``docs/explanation/quality.md`` has these runs.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import optax

import demo_optax

OptimizerName = Literal[
    "demo-scaled",
    "demo",
    "demo-sgd",
    "demo-adamw",
    "demo-signum",
    "demo-muon",
    "diloco",
    "sparseloco",
    "adamw",
]

LOCAL_STEPS = 20
LOOK_AHEAD = {0: 1.0, 1: 1.5}  # by the delay
MERGE = 0.5  # where results come up to a round late
PUBLISHED = demo_optax.Compression(32)
FOUR_BITS = demo_optax.Compression(32, value_coding="int4")
ONE_BIT = demo_optax.Compression(32, value_coding="sign", selection="bins")
AS_THEY_ARE = dataclasses.replace(FOUR_BITS, transform="identity")
WHOLE = demo_optax.Compression(64 * 64, value_coding="int8", transform="identity")


class Settings(NamedTuple):
    """What an optimizer is made from; its momentum decay is AdamW's b1.

    ``b2`` is the decay of the second moment, 0 where there is none. ``matrices`` are the
    dimension numbers of what Muon makes orthogonal.
    """

    learning_rate: optax.Schedule
    decay: float
    weight_decay: float
    compression: demo_optax.Compression
    exchange: demo_optax.Exchange
    b2: float
    look_ahead: float | None = None
    merge: float | None = None
    matrices: Any = None
    fragments: int | None = None

    @property
    def decoupled(self) -> dict[str, Any]:
        """What every optimizer with decoupled momentum takes."""
        common = ("learning_rate", "decay", "weight_decay", "compression", "exchange")
        return {name: getattr(self, name) for name in common}


class Recipe(NamedTuple):
    """Default learning rate, decays of the momentum and the weights, and what makes the optimizer.

    The learning rate is that of width 128: the trainer multiplies it by 128 / width.
    With an ``outer`` optimizer it is that of each worker's local steps. Those that ``reduce``
    all-reduce whole gradients, or differences of parameters, except in a swarm and in fragments,
    whose packets have the default ``compression``. ``b2`` is the default decay of the second
    moment, where there is one.
    """

    learning_rate: float
    decay: float
    weight_decay: float
    make: Callable[[Settings], optax.GradientTransformation]
    compression: demo_optax.Compression | None = FOUR_BITS
    outer: Callable[[Settings], optax.GradientTransformation] | None = None
    looks_ahead: bool = False
    b2: float | None = None
    reduces: bool = False


def _decoupled(optimizer, settings: Settings) -> optax.GradientTransformation:
    return optimizer(**settings.decoupled)


def _scaled(settings: Settings) -> optax.GradientTransformation:
    return demo_optax.demo_scaled(
        **settings.decoupled, b2=settings.b2, look_ahead=settings.look_ahead
    )


def muon_with(settings: Settings, **options) -> optax.GradientTransformation:
    """`demo_optax.demo_muon`, with options that the trainer has no setting for."""
    return demo_optax.demo_muon(
        **settings.decoupled,
        b2=settings.b2,
        look_ahead=settings.look_ahead,
        weight_dimension_numbers=settings.matrices,
        **options,
    )


def _adamw(settings: Settings) -> optax.GradientTransformation:
    rate, decay, weight_decay = settings[:3]
    return optax.adamw(rate, b1=decay, b2=settings.b2, weight_decay=weight_decay)


def _demo_adamw(settings: Settings) -> optax.GradientTransformation:
    return demo_optax.demo_adamw(**settings.decoupled, b2=settings.b2)


def _data_parallel_adamw(settings: Settings) -> optax.GradientTransformation:
    return optax.chain(demo_optax.mean_over_workers("data"), _adamw(settings))


def _diloco(settings: Settings) -> optax.GradientTransformation:
    nesterov = optax.sgd(0.7, momentum=0.9, nesterov=True)
    if settings.fragments or settings.exchange.axis_name is None:  # which send packets
        return _of_differences(nesterov, settings, decay=1.0)
    return optax.chain(demo_optax.mean_over_workers("data"), nesterov)


def _sparseloco(settings: Settings) -> optax.GradientTransformation:
    return _of_differences(optax.sgd(1.0), settings, decay=0.95)


def _of_differences(base, settings: Settings, decay: float) -> optax.GradientTransformation:
    return demo_optax.decoupled(
        base,
        settings.compression,
        decay=decay,
        gradient_weight=1.0,
        mean="workers",
        exchange=settings.exchange,
    )


RECIPES: dict[OptimizerName, Recipe] = {
    "demo-scaled": Recipe(3e-3, 0.98, 0.0, _scaled, ONE_BIT, b2=0.99),
    "demo": Recipe(1e-3, 0.999, 0.0, functools.partial(_decoupled, demo_optax.demo), PUBLISHED),
    "demo-sgd": Recipe(12.0, 0.95, 0.0, functools.partial(_decoupled, demo_optax.demo_sgd)),
    "demo-adamw": Recipe(2e-3, 0.95, 0.1, _demo_adamw, b2=0.95),
    "demo-signum": Recipe(2e-3, 0.95, 0.0, functools.partial(_decoupled, demo_optax.demo_signum)),
    "demo-muon": Recipe(3e-3, 0.95, 0.0, muon_with, ONE_BIT, looks_ahead=True, b2=0.99),
    "diloco": Recipe(7.5e-4, 0.9, 0.1, _adamw, WHOLE, outer=_diloco, b2=0.95, reduces=True),
    "sparseloco": Recipe(3e-3, 0.9, 0.1, _adamw, AS_THEY_ARE, outer=_sparseloco, b2=0.95),
    "adamw": Recipe(3e-3, 0.9, 0.1, _data_parallel_adamw, None, b2=0.95, reduces=True),
}


def make(
    optimizer: OptimizerName, settings: Settings, local_steps: int | None
) -> optax.GradientTransformation:
    """The optimizer of a name: for local steps, the steps and the exchange after them."""
    recipe = RECIPES[optimizer]
    tx = recipe.make(settings)
    if recipe.outer is None:
        return tx
    every, axis_name = steps_of_a_round(optimizer, local_steps), settings.exchange.axis_name
    options: Any = dict(fragments=settings.fragments, merge=settings.merge, axis_name=axis_name)
    return demo_optax.local_steps(tx, recipe.outer(settings), every, **options)


def steps_of_a_round(optimizer: OptimizerName, local_steps: int | None) -> int:
    """Steps for one exchange."""
    return local_steps or (LOCAL_STEPS if RECIPES[optimizer].outer else 1)

"""Workers that send well-formed packets of huge values and tell a small energy, for many steps.

A try is lost where parameters or states are not finite, or a step is beyond what the optimizer
bounds (`BOUNDS`), for `demo_sgd` by way of `norm_limit` alone.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import demo_optax
from demo_optax._src.compression import packet

from .outcomes import Try, in_turn
from .workers import AXIS, DECAY, PARAMS, WORKERS, aggregate_bound, finite, gradients, norms, start

STEPS = 6
RATE, B2 = 0.01, 0.95
OPTIMIZERS = {
    "demo": demo_optax.demo,
    "demo_sgd": demo_optax.demo_sgd,
    "demo_adamw": functools.partial(demo_optax.demo_adamw, b2=B2, weight_decay=0.0),
}


class Setting(NamedTuple):
    """An optimizer and its liars."""

    optimizer: str
    norm_limit: float | None
    liars: int
    size: float


DRAWN_FROM = (OPTIMIZERS, (None, 10.0), (1, 2), (1e17, 1e30, 3e38))
SETTINGS = [Setting(*each) for each in itertools.product(*DRAWN_FROM)]
ROWS = ("liars among the workers",)
EACH = len(SETTINGS)


def run(count: int, seed: int) -> Iterator[Try]:
    for number, setting in enumerate(in_turn(SETTINGS, count, seed)):
        reason = outcome(setting, np.random.default_rng([seed, number]))
        yield Try(ROWS[0], reason and f"{setting}: {reason}")


def outcome(setting: Setting, rng: np.random.Generator) -> str:
    state = start(optimizer(setting.optimizer, setting.norm_limit))
    params = PARAMS
    step = step_of(setting.optimizer, setting.norm_limit)
    weight = RATE if setting.optimizer == "demo" else 1 - DECAY
    for number, gradient in enumerate(gradients(rng, STEPS), 1):
        largest = np.inf
        if setting.norm_limit is not None:
            largest = aggregate_bound(setting.norm_limit, state[0].momentum, gradient, weight)
        updates, state = step(gradient, state, setting.liars, setting.size)
        updates, state = jax.tree.map(np.asarray, (updates, state))
        params = jax.tree.map(lambda p, u: p + u[0], params, updates)
        if not finite((params, updates, state)):
            return f"not finite behind step {number}"
        if any((u != u[:1]).any() for u in updates.values()):
            return f"workers differ behind step {number}"
        if reason := BOUNDS[setting.optimizer](updates, largest):
            return f"{reason} on step {number}"
    return ""


def beyond(what: str, found: float, bound: float) -> str:
    return f"{what} of the update is {found:.3g}, beyond {bound:.3g}" if found > bound else ""


def element(updates) -> float:
    return max(float(np.abs(u).max()) for u in updates.values())


# A sign is at most 1. Adam divides by a root to which the aggregate itself adds (1 - b2) of its
# square. The aggregate of demo_sgd is the step, and nothing but a limit of its norm bounds it.
BOUNDS: dict[str, Callable[[dict, float], str]] = {
    "demo": lambda u, _: beyond("an element", element(u), RATE * (1 + 1e-6)),
    "demo_adamw": lambda u, _: beyond("an element", element(u), RATE / np.sqrt(1 - B2) * 1.001),
    "demo_sgd": lambda u, largest: beyond("the norm", norms(u).max(), RATE * largest),
}


def optimizer(name: str, norm_limit: float | None):
    exchange = demo_optax.AllGather(AXIS, norm_limit)
    compression = demo_optax.Compression(8, 16)
    return OPTIMIZERS[name](RATE, compression, decay=DECAY, exchange=exchange)


@functools.cache
def step_of(name: str, norm_limit: float | None) -> Callable:
    """Every worker's update and state; how many lie, and how much, are arguments."""
    tx, plain = optimizer(name, norm_limit), packet.build

    def step(gradient, state, liars, size):
        def build(layout, header, coded, message, *rest):
            """Says the energy of what is sent, and seals other values."""
            lies = jax.lax.axis_index(AXIS) >= WORKERS - liars
            values = tuple(jnp.where(lies, size, v) for v in message.values)
            coded, _ = packet.encode(layout.sections, message._replace(values=values))
            return plain(layout, header, coded, message, *rest)

        with mock.patch.object(packet, "build", build):
            update = functools.partial(tx.update, params=PARAMS)
            return jax.vmap(update, axis_name=AXIS)(gradient, state)

    return jax.jit(step)

"""Levers in two phases: what owners do with what they have not sent back."""

import dataclasses

import demo_optax
from lm import recipes
from lm.recipes import Settings


def owners(settings: Settings, optimizer: str = "demo-scaled", **options):
    """Other settings of `demo_optax.TwoPhase`: ``residual_decay``, ``topk_back``."""
    delayed = isinstance(settings.exchange, demo_optax.Delayed)
    two_phase = settings.exchange.inner if delayed else settings.exchange
    exchange = dataclasses.replace(two_phase, **options)
    exchange = demo_optax.Delayed(exchange) if delayed else exchange
    return recipes.make(optimizer, settings._replace(exchange=exchange), None)

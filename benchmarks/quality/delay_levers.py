"""Levers with a delay: gradients are taken where the update that is under way would lead."""

import jax
import jax.numpy as jnp
import optax

from demo_optax._rounds import LocalStepsState
from lm import recipes
from lm.recipes import Settings


def ahead_by_last(settings: Settings, fraction: float) -> optax.GradientTransformation:
    """The update under way is taken to be a part of the last one."""
    tx = recipes.make("demo-scaled", settings, None)

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return LocalStepsState(jnp.zeros((), jnp.int32), zeros, optax.EmptyState(), tx.init(params))

    def update(updates, state, params=None, **extra_args):
        updates, inside = tx.update(updates, state.outer, params, **extra_args)
        ahead = jax.tree.map(lambda u: fraction * u, updates)
        return updates, state._replace(displacement=ahead, outer=inside)

    return optax.GradientTransformationExtraArgs(init, update)

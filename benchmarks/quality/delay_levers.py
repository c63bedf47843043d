"""Levers with a delay: what is done about the update that is under way."""

import jax
import jax.numpy as jnp
import optax

import demo_optax
from demo_optax import axes
from demo_optax._decoupled import LookAheadState
from demo_optax._momentum import DecoupledMomentumState
from demo_optax.compression import make_plan
from demo_optax.compression.packet import Origin
from demo_optax.exchange.protocol import packet_ids
from demo_optax.exchange.wrapper import decode_pending
from lm import recipes
from lm.recipes import Settings

from .bases import with_base


def ahead_by(settings: Settings, own: float = 0.0, last: float = 0.0):
    """The update under way is taken to be parts of the own message's step and of the last one."""
    tx = recipes.make("demo-scaled", settings, None)
    step = demo_optax.scale_by_signed_root()

    def displacement(updates, state, params):
        rate = own * settings.learning_rate(state[0].count)
        alone, _ = step.update(own_message(settings, state[0], params), None)
        return jax.tree.map(lambda u, a: last * u - rate * a, updates, alone)

    def init(params):
        return *tx.init(params), LookAheadState(jax.tree.map(jnp.zeros_like, params))

    def update(updates, state, params=None, **extra_args):
        updates, new = tx.update(updates, state[:2], params, **extra_args)
        return updates, (*new, LookAheadState(displacement(updates, new, params)))

    return optax.GradientTransformationExtraArgs(init, update)


def own_message(settings: Settings, state: DecoupledMomentumState, params):
    """What a worker has sent and nobody has applied yet, as a tree like the parameters."""
    leaves, structure = jax.tree.flatten(params)
    plan, exchange = (
        make_plan(settings.compression, tuple(x.shape for x in leaves)),
        settings.exchange,
    )
    step, packets = state.count - 1, state.exchange.pending
    origin = Origin(step, packet_ids(len(packets), axes.index(exchange.axis_name)))
    sent = decode_pending(plan, exchange.layout(plan), packets, origin)
    tensors = []
    for part, rows in zip(plan.parts, plan.rows_per_part(zip(*sent, strict=True)), strict=True):
        dense = [
            group.selector.add(jnp.zeros((group.num_blocks, group.selector.n)), *row)
            for group, row in zip(part.groups, rows, strict=True)
        ]
        tensors += part.to_tensors(part.inverse(dense, step))
    return structure.unflatten(tensors)


def stale_adamw(settings: Settings) -> optax.GradientTransformation:
    """AdamW after a dense all-reduce, by the gradient of the step before."""
    adamw = optax.adamw(settings.learning_rate, settings.decay, settings.b2, weight_decay=0.1)
    return optax.chain(demo_optax.mean_over_workers("data"), one_step_late(), adamw)


def one_step_late() -> optax.GradientTransformation:
    """Gives the updates of the call before, at first zeros."""

    def init(params):
        return jax.tree.map(jnp.zeros_like, params)

    return optax.GradientTransformation(init, lambda updates, state, params=None: (state, updates))


def with_lead(settings: Settings, lead: float) -> optax.GradientTransformation:
    """Steps by the aggregate plus a part of its change."""

    def init(params):
        return jax.tree.map(jnp.zeros_like, params)

    def update(updates, state, params=None):
        del params
        return jax.tree.map(lambda u, old: u + lead * (u - old), updates, state), updates

    led = optax.GradientTransformation(init, update)
    return with_base(optax.chain(led, demo_optax.scale_by_signed_root()), settings, mean="workers")


def trace_after(settings: Settings, beta: float) -> optax.GradientTransformation:
    """A momentum of the aggregates, the same on all workers, before the signed root."""
    base = optax.chain(optax.trace(beta), demo_optax.scale_by_signed_root())
    return with_base(base, settings, mean="workers")

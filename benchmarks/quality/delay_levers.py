"""Levers with a delay: what is done about the update that is under way."""

import jax
import jax.numpy as jnp
import optax

import demo_optax
from demo_optax import LookAheadState
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


def own_message(settings: Settings, state, params):
    """What a worker has sent and nobody has applied yet, as one decodes it who only follows."""
    workers, worker = jax.lax.axis_size("data"), jax.lax.axis_index("data")
    (packet,) = state.exchange.packets
    packets = jnp.zeros((workers, packet.size), jnp.uint32).at[worker].set(packet)
    follower = demo_optax.decoupled_momentum(0.0, settings.compression)
    start = follower.init(params)._replace(count=state.count - 1)
    nothing = follower.empty_outbox(params)
    return follower.apply(packets, nothing, start, params, worker=-1)[0]


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

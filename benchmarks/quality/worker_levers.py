"""Levers of the workers: some sit out, and their batches have unequal sizes."""

import jax
import jax.numpy as jnp
import optax

import demo_optax
from lm import recipes
from lm.recipes import OptimizerName, Settings
from lm.setup import Run

from .bases import scale_by_rms, with_base


def sits_out(
    settings: Settings, share: float, optimizer: OptimizerName
) -> optax.GradientTransformation:
    """On each step a worker has no gradient with this probability, and so takes no part."""
    tx = recipes.make(optimizer, settings, None)

    def init(params):
        return jnp.zeros((), jnp.int32), tx.init(params)

    def update(updates, state, params=None, **extra_args):
        step, own = state
        key = jax.random.fold_in(jax.random.key(0), step)
        key = jax.random.fold_in(key, jax.lax.axis_index("data"))
        missing = jax.random.bernoulli(key, share)
        updates = jax.tree.map(lambda g: jnp.where(missing, jnp.nan, g), updates)
        updates, own = tx.update(updates, own, params, **extra_args)
        return updates, (step + 1, own)

    return optax.GradientTransformationExtraArgs(init, update)


def unequal(
    settings: Settings, sequences: list[int], weighted: bool
) -> optax.GradientTransformation:
    """`demo_optax.demo_scaled`, where each worker's weight may be its share of the sequences."""

    def weigh(updates, _):
        shares = jnp.asarray(sequences) * (len(sequences) / sum(sequences))
        share = shares[jax.lax.axis_index("data")]
        return jax.tree.map(lambda g: share * g, updates)

    weight = optax.stateless(weigh) if weighted else optax.identity()
    precondition = optax.chain(scale_by_rms(settings.b2), weight)
    step = demo_optax.scale_by_signed_root()
    return with_base(step, settings, mean="workers", precondition=precondition)


def of_unequal_batches(run: Run, sequences: list[int]) -> Run:
    """Each worker's loss is that of its first few sequences."""

    def loss_fn(params, tokens_BxT):
        number = jnp.asarray(sequences)[jax.lax.axis_index("data")]
        losses = jax.vmap(lambda row: run.loss_fn(params, row[None]))(tokens_BxT)
        return jnp.where(jnp.arange(len(losses)) < number, losses, 0.0).sum() / number

    step = demo_optax.make_train_step(loss_fn, run.tx, run.mesh, clip_norm=1.0)
    return run._replace(train_step=step)

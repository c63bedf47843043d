"""The step of `demo_optax.demo_scaled`: signed roots of the aggregate."""

import jax
import jax.numpy as jnp
import optax

from demo_optax._src import checks
from demo_optax._src.arrays import in_dtype_of, upcast
from demo_optax._src.exchange.collectives import gather_along
from demo_optax._src.specs import axes_of, of_leaves


def scale_by_signed_root() -> optax.GradientTransformationExtraArgs:
    r"""Each element's signed root, relative to the tensor's mean magnitude.

    .. math:: u \mapsto \mathrm{sign}(u) \sqrt{|u|\, \Sigma |u| / \Sigma u^2}

    The step of `demo_scaled`, to put after `decoupled_momentum` in a chain of your own. The mean
    :math:`\Sigma u^2 / \Sigma |u|` weights each magnitude by itself. So the root mean square of the
    steps is at most 1, however many elements are zero. Where parameters are sharded inside a
    worker, the sums are over all shards. `demo_optax.make_train_step` and
    `demo_optax.stack_workers` tell it by the extra argument ``param_specs``; without it the sums
    are over a device's shard.

    Example:
      >>> tx, params = scale_by_signed_root(), jax.numpy.ones(3)
      >>> steps, _ = tx.update(jax.numpy.array([4.0, -1.0, 0.0]), tx.init(params))
      >>> [round(float(x), 3) for x in steps]
      [1.085, -0.542, 0.0]
    """

    def update_fn(updates, state, params=None, **extra_args):
        del params
        checks.real_leaves("gradient", updates)
        leaves, structure = jax.tree.flatten(updates)
        sums = [_sums(upcast(x)) for x in leaves]
        over = list(map(axes_of, of_leaves(updates, extra_args)))
        for names in dict.fromkeys(filter(None, over)):
            numbers = [i for i, along in enumerate(over) if along == names]
            # The shards' sums in one fixed order: an all-reduce may add in another one elsewhere.
            own = jnp.stack([sums[i] for i in numbers]).astype(jnp.float32)
            words = gather_along(jax.lax.bitcast_convert_type(own, jnp.uint32).ravel(), names)
            each = jax.lax.bitcast_convert_type(words, jnp.float32)
            totals = each.reshape(len(each), -1, 2).sum(axis=0)
            for i, total in zip(numbers, totals, strict=True):
                sums[i] = total
        return structure.unflatten(map(step, leaves, sums)), state

    def step(update, sums):
        total, squares = sums
        mean = squares / jnp.where(total > 0, total, 1.0)
        u = upcast(update)
        relative = jnp.abs(u) / jnp.where(mean > 0, mean, 1.0)
        return in_dtype_of(jnp.sign(u) * jnp.sqrt(relative), update)

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update_fn)


def _sums(u):
    """The sums of magnitudes and of squares."""
    return jnp.stack([jnp.sum(jnp.abs(u)), jnp.sum(jnp.square(u))])

"""What decoupled momentum is compared with: ordinary data parallelism."""

import jax
import jax.numpy as jnp
import optax

from demo_optax import axes, state_checks
from demo_optax.axes import AxisName
from demo_optax.numerics import all_finite, upcast


def mean_over_workers(axis_name: AxisName) -> optax.GradientTransformationExtraArgs:
    """The mean of the workers' gradients by a dense all-reduce: ordinary data parallelism.

    In front of any optax optimizer it gives the baseline that DeMo is compared with, on the same
    train step. The mean is over the workers whose gradient is finite, whose number takes four more
    bytes; where there are none, it is zero.

    Example:
      >>> import jax.numpy as jnp
      >>> tx = optax.chain(mean_over_workers("data"), optax.sgd(1.0))
      >>> jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data")(jnp.array([1.0, 3.0]))
      Array([-2., -2.], dtype=float32)
    """

    def update(updates, params=None):
        del params
        axes.size(axis_name)
        state_checks.require_local(updates, axis_name)
        if axis_name is None:
            return updates
        finite = axes.on_all_devices(all_finite(updates), axis_name)
        heard = jnp.maximum(jax.lax.psum(finite.astype(jnp.float32), axis_name), 1.0)

        def mean(g):
            total = jax.lax.psum(jnp.where(finite, g, jnp.zeros_like(g)), axis_name)
            return (upcast(total) / heard).astype(g.dtype)

        return jax.tree.map(mean, updates)

    return optax.with_extra_args_support(optax.stateless(update))

"""What decoupled momentum is compared with: ordinary data parallelism."""

import jax
import optax

from demo_optax import axes, state_checks
from demo_optax.axes import AxisName


def mean_over_workers(axis_name: AxisName) -> optax.GradientTransformationExtraArgs:
    """The mean of the workers' gradients by a dense all-reduce: ordinary data parallelism.

    In front of any optax optimizer it gives the baseline that DeMo is compared with, on the same
    train step.

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
        return updates if axis_name is None else jax.lax.pmean(updates, axis_name)

    return optax.with_extra_args_support(optax.stateless(update))

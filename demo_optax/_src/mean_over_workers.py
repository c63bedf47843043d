"""Averages gradients densely, as the baseline that DeMo is compared with."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from demo_optax._src import axes, checks, participation
from demo_optax._src.arrays import IntScalar, upcast
from demo_optax._src.axes import AxisName


class MeanOverWorkersState(NamedTuple):
    """Holds the state of `mean_over_workers`.

    Attributes:
      participants: int32 scalar, number of workers whose gradient entered the last mean.
    """

    participants: IntScalar

    exchanges = True


def mean_over_workers(axis_name: AxisName) -> optax.GradientTransformationExtraArgs:
    """Averages the workers' gradients by a dense all-reduce, as in ordinary data parallelism.

    In front of any optax optimizer it gives the baseline for DeMo, on the same train step. The mean
    is over the workers whose gradient is finite, or zero if there are none, and each of them counts
    the same, whatever ``message_weight`` it gives. Counting them takes four more bytes; the state
    holds their number.

    Example:
      >>> import jax.numpy as jnp
      >>> tx = optax.chain(mean_over_workers("data"), optax.sgd(1.0))
      >>> jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data")(jnp.array([1.0, 3.0]))
      Array([-2., -2.], dtype=float32)
    """

    def init_fn(params):
        checks.floating_leaves(params)
        return MeanOverWorkersState(jnp.zeros((), jnp.int32))

    def update_fn(updates, state, params=None, **extra_args):
        del params
        checks.require_local_gradient(updates, axis_name)
        workers = axes.names(axis_name)
        participates = participation.decide(updates, axis_name, extra_args)
        # In float32 XLA sums it together with the gradients.
        participants = jax.lax.psum(participates.astype(jnp.float32), workers)

        def mean(g):
            total = jax.lax.psum(jnp.where(participates, g, jnp.zeros_like(g)), workers)
            total = upcast(total)
            return (total / jnp.maximum(participants, 1.0).astype(total.dtype)).astype(g.dtype)

        state = MeanOverWorkersState(participants.astype(jnp.int32))
        return jax.tree.map(mean, updates), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)

"""Accumulates gradients over several calls of an optimizer, with one exchange at the end."""

import jax
import jax.numpy as jnp
import optax

from demo_optax._src import checks
from demo_optax._src.arrays import in_dtype_of
from demo_optax._src.participation import PARTICIPATES, all_finite
from demo_optax._src.rounds import step_or_skip, zeros_to_sum


class MultiStepsState(optax.MultiStepsState):
    """Holds the state of `multi_steps`, in which each worker has its own mean of gradients."""

    local_fields = ("acc_grads",)


def multi_steps(
    tx: optax.GradientTransformation, every: int
) -> optax.GradientTransformationExtraArgs:
    """Adapts ``optax.MultiSteps`` to optimizers that exchange.

    It is meant for loops that call the optimizer once for each microbatch. Each worker averages its
    own gradients, and only the last of ``every`` calls exchanges. `demo_optax.make_train_step` with
    ``microbatches`` needs less memory.

    Args:
      tx: any optax transformation that exchanges.
      every: number of calls that make one step of ``tx``.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` with the state of ``optax.MultiSteps``. Updates
      are zero on all calls but the last. Gradients are averaged in float32 or wider.

    Example:
      >>> tx = multi_steps(optax.sgd(1.0), every=2)
      >>> state = tx.init(jnp.zeros(()))
      >>> first, state = tx.update(jnp.float32(1.0), state)
      >>> second, state = tx.update(jnp.float32(3.0), state)
      >>> float(first), float(second)
      (0.0, -2.0)
    """
    checks.static_integer("every", every, at_least=1)
    checks.require_unwrapped(tx)
    tx = optax.with_extra_args_support(tx)

    def init_fn(params):
        zero = jnp.zeros((), jnp.int32)
        return MultiStepsState(zero, zero, tx.init(params), zeros_to_sum(params), ())

    def update_fn(updates, state, params=None, **extra_args):
        checks.real_leaves("gradient", updates)
        participates = extra_args.pop(PARTICIPATES, True)
        calls = (state.mini_step + 1).astype(jnp.float32)

        def add(m, g):
            # NaN marks a worker that sends nothing at the end of this round.
            change = jnp.where(participates, g.astype(m.dtype) - m, jnp.nan)
            return m + change / calls.astype(m.dtype)

        def step(mean, inner):
            def finite_or_zero(m, g):  # not all leaves vary over the same axes
                return in_dtype_of(jnp.where(all_finite(m), m, 0), g)

            gradient = jax.tree.map(finite_or_zero, mean, updates)
            extra = {**extra_args, PARTICIPATES: all_finite(mean)}
            return tx.update(gradient, inner, params, **extra)

        mean = jax.tree.map(add, state.acc_grads, updates)
        is_last = state.mini_step >= every - 1
        new, inner = step_or_skip(
            is_last, step, lambda _, inner: inner, mean, state.inner_opt_state
        )
        return new, MultiStepsState(
            mini_step=jnp.where(is_last, 0, state.mini_step + 1),
            gradient_step=state.gradient_step + is_last.astype(jnp.int32),
            inner_opt_state=inner,
            acc_grads=jax.tree.map(lambda m: jnp.where(is_last, jnp.zeros_like(m), m), mean),
            skip_state=(),
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)

"""Gradients accumulated over several calls, with one exchange."""

import jax
import jax.numpy as jnp
import optax

from demo_optax import axes, checks
from demo_optax.numerics import upcast


def multi_steps(
    tx: optax.GradientTransformation, every: int
) -> optax.GradientTransformationExtraArgs:
    """``optax.MultiSteps`` for optimizers that exchange: local means, then one step of all workers.

    For loops that call the optimizer once for each microbatch. Each worker accumulates its own
    gradients, and nothing is sent until the last of ``every`` calls, on which all workers step
    together. `demo_optax.make_train_step` with ``microbatches`` needs less memory.

    Args:
      tx: any optax transformation that exchanges.
      every: calls for one step of ``tx``.

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
    tx = optax.with_extra_args_support(tx)

    def init_fn(params):
        zeros = jax.tree.map(lambda x: upcast(jnp.zeros(x.shape, x.dtype)), params)
        zero = jnp.zeros((), jnp.int32)
        return optax.MultiStepsState(zero, zero, tx.init(params), zeros, skip_state=())

    def update_fn(updates, state, params=None, **extra_args):
        calls = (state.mini_step + 1).astype(jnp.float32)
        mean = jax.tree.map(
            lambda m, g: m + (g.astype(m.dtype) - m) / calls.astype(m.dtype),
            state.acc_grads,
            updates,
        )

        def step(mean, inner):
            gradient = jax.tree.map(lambda m, g: m.astype(g.dtype), mean, updates)
            return tx.update(gradient, inner, params, **extra_args)

        def wait(_, inner):
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), stepped[0]), inner

        stepped = jax.eval_shape(step, mean, state.inner_opt_state)
        last = state.mini_step == every - 1
        new, inner = jax.lax.cond(
            last,
            *axes.branches_alike(step, wait, mean, state.inner_opt_state),
            mean,
            state.inner_opt_state,
        )
        return new, optax.MultiStepsState(
            mini_step=(state.mini_step + 1) % every,
            gradient_step=state.gradient_step + last.astype(jnp.int32),
            inner_opt_state=inner,
            acc_grads=jax.tree.map(lambda m: jnp.where(last, jnp.zeros_like(m), m), mean),
            skip_state=(),
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)

"""The state of a worker that joins others, where a transport of the user's own carries packets."""

import jax
import jax.numpy as jnp

from demo_optax._src import checks
from demo_optax._src.local_state import nodes
from demo_optax._src.momentum import DecoupledMomentumState
from demo_optax._src.parallel.layout import local_leaves


def join_state(own_state, shared_state):
    """Returns the state of a worker that joins a run: its own half, and the half that all share.

    It is for workers that step by ``send`` and ``apply`` of a `demo_optax.SplitTransformation`,
    also with `demo_optax.local_steps`. The worker takes the parameters of the others as well. From
    the next ``apply`` on its parameters equal theirs to the last bit.

    Args:
      own_state: the state of this worker, new from ``tx.init(params)`` or from an old run of its
        own. The momentum, the preconditioner, a displacement and a round under way stay.
      shared_state: the state of any other worker between two ``apply``, as arrays of JAX or NumPy.
        Counts, metrics, rounds and the state of the base optimizer are taken from it.

    Raises:
      ValueError: the two states were not made by the same optimizer for the same parameters; or
        ``own_state`` has sent a message that still waits for ``apply``.

    Example:
      >>> import jax, jax.numpy as jnp, demo_optax
      >>> tx, params = demo_optax.demo(0.1), jnp.ones((8, 8))
      >>> outbox, theirs = tx.send(jnp.eye(8), tx.init(params), params, worker=0)
      >>> updates, theirs = tx.apply(outbox.packets, outbox, theirs, params, worker=0)
      >>> joined = join_state(tx.init(params), theirs)
      >>> int(joined[0].count), float(jnp.abs(joined[0].momentum).max())
      (1, 0.0)
    """
    remedy = "Make both by tx.init of the same optimizer, for the same parameters."
    checks.state_fits("the shared state", shared_state, own_state, remedy)
    for momentum in nodes(own_state, DecoupledMomentumState):
        checks.require_unsent(momentum)
    return jax.tree.map(
        lambda own, theirs, is_own: own if is_own else jnp.asarray(theirs),
        own_state,
        shared_state,
        local_leaves(own_state, ("local_fields", "own_fields")),
    )

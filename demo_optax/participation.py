"""Who takes part in a step, and what stays where somebody does not.

A worker decides once a step, before anything is accumulated, by one boolean. It sits the step out
where its gradient is infinite or NaN, or so large that its squares overflow float32. Then it sends
packets that do not count, keeps everything that is its own, and applies what the others sent.
A train step passes its answer on as the extra argument `PARTICIPATES`; a link of an optax chain
that stands in front of the exchange may turn a yes into a no.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from demo_optax import axes
from demo_optax.arrays import (
    BoolScalar,
    FloatScalar,
    IntScalar,
    energy,
    in_dtype_of,
)
from demo_optax.axes import AxisName

PARTICIPATES = "participates"


def decide(
    gradient, axis_name: AxisName, extra_args: dict[str, Any], sharded: tuple[str, ...] = ()
) -> BoolScalar:
    """Whether this worker takes part with a gradient, the same on all of its devices.

    Args:
      gradient: the worker's own, or its device's shard.
      axis_name: the workers' axis, or axes.
      extra_args: of the update. A train step may say there that the worker sits out; a link of the
        chain may still have made a finite gradient infinite or NaN.
      sharded: axes along which the worker's devices hold shards, for where the types are silent.
    """
    finite = on_all_shards(jnp.isfinite(energy(jax.tree.leaves(gradient))), sharded)
    finite = axes.on_all_devices(finite, axis_name)
    return finite & extra_args[PARTICIPATES] if PARTICIPATES in extra_args else finite


def on_all_shards(condition: BoolScalar, sharded: tuple[str, ...]) -> BoolScalar:
    """Whether a condition holds on all devices along some axes."""
    return jax.lax.pmin(condition.astype(jnp.int32), sharded) > 0 if sharded else condition


def settings_are_finite(weight: ArrayLike, decay: ArrayLike) -> BoolScalar:
    """Whether a step's settings, which may be schedules, are finite, and the weight's square is."""
    return jnp.isfinite(decay) & jnp.isfinite(jnp.square(jnp.asarray(weight, jnp.float32)))


def all_finite(tree: Any) -> BoolScalar:
    """Whether no element of any floating leaf is infinite or NaN."""
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.array([jnp.isfinite(x).all() for x in leaves], bool).all()


def choose(condition: BoolScalar, tree: Any, otherwise: Any) -> Any:
    """One of two trees, in the dtypes of the second."""
    return jax.tree.map(lambda x, y: in_dtype_of(jnp.where(condition, x, y), y), tree, otherwise)


def reset_nonfinite_leaves(state: Any, fresh: Any) -> Any:
    """A state whose floating leaves start again where they hold anything infinite or NaN."""

    def leaf(x, anew):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return jnp.where(jnp.isfinite(x).all(), x, in_dtype_of(anew, x))

    return jax.tree.map(leaf, state, fresh)


def reset_nonfinite_blocks(momenta: Any) -> tuple[Any, tuple[FloatScalar, IntScalar]]:
    """A tree of momenta ``(..., n)`` whose blocks start from zero where their energy is not finite.

    Also the energy of all of them, and how many started again. One flipped bit of an exponent
    would otherwise exclude its worker for ever.
    """
    leaves, structure = jax.tree.flatten(momenta)
    energies = [jnp.sum(jnp.square(m.astype(jnp.float32)), axis=-1) for m in leaves]
    finite = list(map(jnp.isfinite, energies))
    total = jnp.zeros((), jnp.float32) + sum(map(jnp.sum, map(_or_zero, finite, energies)))
    restarted = jnp.zeros((), jnp.int32) + sum(jnp.sum(~f, dtype=jnp.int32) for f in finite)
    new = [_or_zero(f[..., None], m) for f, m in zip(finite, leaves, strict=True)]
    return jax.tree.unflatten(structure, new), (total, restarted)


def _or_zero(condition: Bool[Array, "..."], x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    return jnp.where(condition, x, 0)


@functools.cache
def _schedule_states() -> tuple[type, ...]:
    """States that hold nothing but the count of a schedule."""
    decayed = optax.add_decayed_weights(optax.constant_schedule(0.0))
    return optax.ScaleByScheduleState, type(decayed.init(()))


def keep_base_if_nobody(participants: IntScalar, updates, new, old):
    """Updates and state of what stands behind an exchange.

    On a step on which no worker took part, the updates are zero and the state stays as it was, but
    for counts by which schedules find their step. Those go on, as that of the momentum does: a
    learning rate inside the momentum and one behind it stay at the same step.
    """
    anyone = participants > 0

    injected = optax.InjectStatefulHyperparamsState

    def is_schedule(x) -> bool:
        return isinstance(x, (*_schedule_states(), injected))

    def kept(new, old):
        if isinstance(new, _schedule_states()):
            return new
        if isinstance(new, injected):
            return new._replace(inner_state=stay(new.inner_state, old.inner_state))
        return in_dtype_of(jnp.where(anyone, new, old), new)

    def stay(new, old):
        return jax.tree.map(kept, new, old, is_leaf=is_schedule)

    updates = jax.tree.map(lambda u: jnp.where(anyone, u, jnp.zeros_like(u)), updates)
    return updates, stay(new, old)


def zero_updates_if_nobody(updates, participants: IntScalar):
    """The updates; zeros on a step on which no worker took part.

    For a base that stands behind `decoupled_momentum` in a chain made by hand.
    """
    return jax.tree.map(lambda u: jnp.where(participants > 0, u, jnp.zeros_like(u)), updates)


def keep_own(new, old, is_own, participates: BoolScalar, sharded: tuple[str, ...] = ()):
    """Restores a worker's own state if it skipped the step.

    So no second moment is lost to one bad batch. States whose type says ``handles_nonfinite`` do
    this themselves.

    Args:
      new: state after the step.
      old: state before it.
      is_own: a tree of bools, which leaves differ between workers.
      participates: whether the worker takes part.
      sharded: axes along which the worker's devices hold shards.
    """

    def handles_nonfinite(x) -> bool:
        return getattr(type(x), "handles_nonfinite", False) or isinstance(x, optax.MultiStepsState)

    def kept(new, old, is_own):
        if isinstance(new, optax.MultiStepsState):
            # A non-finite accumulator excludes the worker from the exchange.
            finite = participates & on_all_shards(all_finite(old.acc_grads), sharded)
            inner = new.inner_opt_state, old.inner_opt_state, is_own.inner_opt_state
            return new._replace(inner_opt_state=keep_own(*inner, finite, sharded))
        if handles_nonfinite(new) or not is_own:
            return new
        return jnp.where(participates, new, old)

    return jax.tree.map(kept, new, old, is_own, is_leaf=handles_nonfinite)

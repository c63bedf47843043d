"""Holds the state of local steps, and finds the parameters at which a worker differentiates."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr
from jaxtyping import Array, Float32

from demo_optax._src.arrays import BoolScalar, IntScalar, unboxed
from demo_optax._src.decoupled import LookAheadState


class LocalStepsState(NamedTuple):
    """Holds the state of `local_steps`, as one worker sees it.

    Attributes:
      round: int32 scalar, the number of rounds, or of fragments, whose result was applied; the same
        on all workers.
      first_step, last_step: int32 scalars, the steps of the run that this round, or the steps up to
        the next fragment, begins and ends with; the same on all workers. They are those of the
        schedules of the inner optimizer, and a new ``every`` holds from the next round on.
      mini_step: int32 scalar, the number of inner steps so far in this round, or since the last
        fragment was sent. In a job with an axis of workers it is the same on all of them.
      weight: float32 scalar, or a vector with an entry for each fragment: the sum of the
        ``message_weight`` of those steps whose gradient was finite, which will be the weight of the
        message; differs between workers.
      displacement: a tree like the parameters, float32 or wider: the worker's own parameters minus
        the shared ones.
      inner: state of the inner optimizer; differs between workers.
      outer: state of the outer optimizer.
      pending: with fragments, the one that was sent last and is exchanged when the next one is due;
        otherwise ``()``.

    Example:
      >>> import demo_optax
      >>> tx = demo_optax.local_steps(optax.adam(0.1), optax.sgd(1.0), every=4)
      >>> tx.init(jnp.ones(3)).displacement
      Array([0., 0., 0.], dtype=float32)
    """

    round: IntScalar
    first_step: IntScalar
    last_step: IntScalar
    mini_step: IntScalar
    weight: Float32[Array, "..."]
    displacement: optax.Updates
    inner: optax.OptState
    outer: optax.OptState
    pending: Any = ()

    handles_nonfinite = True
    local_fields = ("mini_step", "weight", "displacement", "inner", "pending")


def local_parameters(params, opt_state):
    """Returns the parameters at which a worker computes its gradient.

    Args:
      params: the shared parameters.
      opt_state: an optimizer's state, which may hold that of `local_steps`, or of an optimizer with
        ``look_ahead``, at any depth.

    Returns:
      A tree like ``params``, in their dtypes. With local steps or a look-ahead these are the
      worker's own parameters, with a leading worker axis if the state has one. Otherwise they are
      ``params``.

    Raises:
      ValueError: `local_steps` covers only some of the parameters; the parameters are not those of
        the state.

    Example:
      >>> params = jnp.float32(8.0)
      >>> local_parameters(params, optax.sgd(1.0).init(params))
      Array(8., dtype=float32)
    """
    states = nodes(unboxed(opt_state), (LocalStepsState, LookAheadState))
    if not states:
        return params
    trees = [_displacement(state) for state in states]
    wanted, *held = map(_paths, (unboxed(params), *trees))
    if any(isinstance(state, LocalStepsState) for state in states) and held != [wanted]:
        raise ValueError(
            f"local_steps must cover all parameters, {list(map('/'.join, wanted))}, but the state "
            f"has local steps of {[list(map('/'.join, paths)) for paths in held]}: put it "
            "outermost, and partition and mask inside inner and outer."
        )
    displacements = {
        path: d
        for tree, paths in zip(trees, held, strict=True)
        for path, d in zip(paths, jax.tree.leaves(tree), strict=True)
    }
    if not displacements:
        return params
    if unknown := displacements.keys() - set(wanted):
        raise ValueError(
            f"the state has displacements of {sorted(map('/'.join, unknown))}, but the parameters "
            f"are {list(map('/'.join, wanted))}: pass the "
            "parameters that the optimizer was initialised with, and do not flatten them around an "
            "optimizer that looks ahead."
        )
    leaves, structure = jax.tree.flatten(params)
    pairs = [(x, displacements.get(path)) for path, x in zip(wanted, leaves, strict=True)]
    for path, (x, d) in zip(wanted, pairs, strict=True):
        if d is not None and d.shape[max(d.ndim - jnp.ndim(x), 0) :] != jnp.shape(x):
            raise ValueError(
                f"the state has a displacement of shape {d.shape} for the parameter "
                f"{'/'.join(path)} of shape {jnp.shape(x)}: make the state by "
                "demo_optax.init_opt_state, which gives it an axis of workers."
            )
    leading = next(d.shape[: d.ndim - jnp.ndim(x)] for x, d in pairs if d is not None)

    def moved(x, d):
        if d is None:
            return jnp.broadcast_to(x, (*leading, *jnp.shape(x)))
        return (jnp.expand_dims(x, tuple(range(len(leading)))) + d).astype(jnp.result_type(x))

    return structure.unflatten([moved(x, d) for x, d in pairs])


def _displacement(state: LocalStepsState | LookAheadState):
    """Returns the displacement of a state, with that of an outer optimizer that looks ahead."""
    outer = state.outer if isinstance(state, LocalStepsState) else ()
    ahead = [x.displacement for x in nodes(outer, LookAheadState)]
    return jax.tree.map(lambda x, *more: sum(more, x), state.displacement, *ahead)


def has_exchanged(opt_state) -> BoolScalar:
    """Tells whether the update that returned this state ended a round; True without rounds."""
    rounds = nodes(opt_state, LocalStepsState)
    outside = jax.tree.map(
        lambda x: x.outer if isinstance(x, LocalStepsState) else x,
        opt_state,
        is_leaf=lambda x: isinstance(x, LocalStepsState),
    )
    counting = rounds + nodes(outside, optax.MultiStepsState)
    return jnp.all(jnp.array([x.mini_step == 0 for x in counting], bool))


def nodes(tree, kind: type | tuple[type, ...]) -> list:
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
    return [node for node in nodes if isinstance(node, kind)]


def _paths(tree) -> list[tuple[str, ...]]:
    """Returns the paths of the leaves, whether their containers have keys or attributes."""
    paths = (path for path, _ in jax.tree.leaves_with_path(tree))
    return [tuple(keystr((key,), simple=True) for key in path) for path in paths]

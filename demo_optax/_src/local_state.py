"""Holds the state of local steps, and finds the parameters at which a worker differentiates."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import FlattenedIndexKey, keystr
from jaxtyping import Array, Float32

from demo_optax._src.arrays import BoolScalar, IntScalar, unboxed


class LocalStepsState(NamedTuple):
    """Holds the state of `local_steps`, as one worker sees it.

    Attributes:
      round: int32 scalar, the number of rounds, or of fragments, whose result was applied; the same
        on all workers. If the momentum of ``outer`` counts more updates, the state is that of a
        worker that joins, and goes on with the round and the steps that they stand for.
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
      pending: with fragments, the outbox of the one that was sent last, which is exchanged when the
        next one is due; otherwise ``()``.

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
    local_fields = ("weight", "displacement", "inner")
    own_fields = ("mini_step", "pending")  # of a worker that does not step together with the others


def local_parameters(params, opt_state):
    """Returns the parameters at which a worker computes its gradient.

    Args:
      params: the shared parameters.
      opt_state: an optimizer's state, which may hold that of `local_steps`, or of an optimizer with
        ``look_ahead``, at any depth. Its containers may be ``nnx.State`` or dicts with the names of
        the fields, as in a restored checkpoint.

    Returns:
      A tree like ``params``, in their dtypes. With local steps or a look-ahead these are the
      worker's own parameters, with a leading worker axis if the state has one. Otherwise they are
      ``params``.

    Raises:
      ValueError, TypeError: `local_steps` covers only some of the parameters; the parameters are
        not those of the state; the state holds a displacement that cannot be read.

    Example:
      >>> params = jnp.float32(8.0)
      >>> local_parameters(params, optax.sgd(1.0).init(params))
      Array(8., dtype=float32)
    """
    wanted = _paths(unboxed(params))
    displacements = _displacements(unboxed(opt_state), wanted)
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
        dtype = jnp.result_type(x)
        wide = jnp.promote_types(dtype, d.dtype)
        stacked = jnp.expand_dims(x, tuple(range(len(leading)))).astype(wide)
        return (stacked + d.astype(wide)).astype(dtype)

    return structure.unflatten([moved(x, d) for x, d in pairs])


def _displacements(opt_state, wanted: list[tuple[str, ...]]) -> dict[tuple[str, ...], Any]:
    """Returns the displacement of each parameter, with that of an outer optimizer that looks ahead.

    The states are recognized by the names of their fields, because ``nnx.State`` and restored
    checkpoints hold dicts in place of named tuples, and numbers in place of the entries of tuples.
    """
    leaves = dict(zip(_paths(opt_state), jax.tree.leaves(opt_state), strict=True))
    rounds = [
        path[:-1]
        for path in leaves
        if path[-1:] == ("mini_step",)
        and all((*path[:-1], name) in leaves for name in ("round", "weight"))
    ]
    held: dict[tuple[str, ...], set] = {path: set() for path in rounds}
    displacements = {}
    for path, x in leaves.items():
        if not isinstance(x, (bool, int, float, complex)) and not hasattr(x, "dtype"):
            raise TypeError(
                f"opt_state holds a leaf {'/'.join(path)} of type {type(x).__name__}, which is no "
                "array, so that a displacement inside it would not be found: pass the optimizer's "
                "state itself, such as the field opt_state of an object that holds it."
            )
        around = next((r for r in rounds if path[: len(r)] == r), None)
        if around is not None and path[len(around)] not in ("displacement", "outer"):
            continue
        ends = [
            i
            for i, name in enumerate(path)
            if name == "displacement"
            and (
                path[:i] in rounds
                or (path[i - 1 : i] == ("2",) and (*path[: i - 1], "0", "sent") in leaves)
            )
        ]
        if ends:
            of = path[ends[0] + 1 :]
            held.setdefault(path[: ends[0]] if around is None else around, set()).add(of)
            displacements[of] = displacements[of] + x if of in displacements else x
        elif "displacement" in "/".join(path) and _holds_displacement(path, wanted):
            raise ValueError(f"opt_state has a displacement {'/'.join(path)}{_UNREADABLE}")
    has_names = any(name.isidentifier() for path in leaves for name in path)
    if leaves and isinstance(opt_state, list) and not has_names:
        raise ValueError(f"opt_state is a list and may hold a displacement{_UNREADABLE}")
    nameless = any(
        isinstance(key, FlattenedIndexKey)
        for path, _ in jax.tree.leaves_with_path(opt_state)
        for key in path
    )
    if nameless and not displacements and "'displacement'" in str(jax.tree.structure(opt_state)):
        raise ValueError(f"opt_state has a displacement{_UNREADABLE}")
    if rounds and list(held.values()) != [set(wanted)]:
        raise ValueError(
            f"local_steps must cover all parameters, {list(map('/'.join, wanted))}, but the state "
            f"has local steps of {[sorted(map('/'.join, paths)) for paths in held.values()]}: put "
            "it outermost, and partition and mask inside inner and outer."
        )
    return displacements


def _holds_displacement(path: tuple[str, ...], wanted: list[tuple[str, ...]]) -> bool:
    """Tells whether a path leads through a displacement to a parameter.

    Neither a parameter nor a label, as those of ``optax.partition``, is one by its name.
    """
    words = re.findall(r"\w+", "/".join(path))
    names = [re.findall(r"\w+", "/".join(name)) for name in wanted]
    behind = [words[i + 1 :] for i, word in enumerate(words) if word == "displacement"]
    is_parameter = any(
        path[-len(name) :] == name and "displacement" not in path[: -len(name)] for name in wanted
    )
    leads = any(rest[: len(name)] == name for rest in behind for name in names)
    return leads and not is_parameter


_UNREADABLE = (
    ", but the names around it are not those of the state of local steps or of an optimizer that "
    "looks ahead, so that the gradient would be taken at the shared parameters: pass the whole "
    "state as the optimizer or flax.nnx.state(optimizer) returns it, or as a nested dict with the "
    "names of its fields."
)


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

"""Holds the state of local steps, and finds the parameters at which a worker differentiates."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr
from jaxtyping import Array, Float32

from demo_optax._src.arrays import BoolScalar, IntScalar, unboxed


class LocalStepsState(NamedTuple):
    """Holds the state of `local_steps` or `multi_steps`, as one worker sees it.

    Attributes:
      round: int32 scalar, the number of rounds, or of fragments, whose result was applied; the same
        on all workers, and of a worker that joins behind the momentum's ``count``.
      first_step, last_step: int32 scalars, the steps of the run that this round, or the steps up to
        the next fragment, begins and ends with; the same on all workers. The schedules of the inner
        optimizer count them. With `multi_steps` they stay at zero.
      mini_step: int32 scalar, the number of inner steps so far in this round, or since the last
        fragment was sent; on an axis of workers the same on all of them.
      weight: float32 scalar, or with an entry for each fragment: the sum of the ``message_weight``
        of the steps whose gradient was finite; differs between workers.
      displacement: a tree like the parameters, float32 or wider: the worker's own parameters minus
        the shared ones. With `multi_steps` it is ``()``.
      inner: state of the inner optimizer, or with `multi_steps` the sum of the gradients so far,
        times their weights, in float32 or wider; differs between workers.
      outer: state of the outer optimizer. With fragments its arrays have an axis of fragments in
        front, except for the metrics of the last exchange.
      pending: with fragments, the outbox of the one that was sent last; otherwise ``()``.

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
            f"are {list(map('/'.join, wanted))}: pass the parameters that the optimizer was "
            "initialised with, and do not flatten them around an optimizer that looks ahead."
        )
    leaves, structure = jax.tree.flatten(params)
    pairs = [(x, displacements.get(path)) for path, x in zip(wanted, leaves, strict=True)]
    leading = next(d.shape[: d.ndim - jnp.ndim(x)] for x, d in pairs if d is not None)
    for path, (x, d) in zip(wanted, pairs, strict=True):
        if d is not None and d.shape != (*leading, *jnp.shape(x)):
            raise ValueError(
                f"the state has a displacement of shape {d.shape} for the parameter "
                f"{'/'.join(path)} of shape {jnp.shape(x)}: make the state by "
                "demo_optax.init_opt_state, which gives it an axis of workers."
            )

    def moved(x, d):
        x = jnp.broadcast_to(x, (*leading, *jnp.shape(x)))
        if d is None:
            return x
        wide = jnp.promote_types(x.dtype, d.dtype)
        return (x.astype(wide) + d.astype(wide)).astype(x.dtype)

    return structure.unflatten([moved(x, d) for x, d in pairs])


def _displacements(opt_state, wanted: list[tuple[str, ...]]) -> dict[tuple[str, ...], Any]:
    """Returns the displacement of each parameter that has one.

    The states are recognized by the names of their fields, because ``nnx.State`` and restored
    checkpoints hold dicts in place of named tuples, and numbers in place of the entries of tuples.
    """
    leaves = dict(zip(_paths(opt_state), jax.tree.leaves(opt_state), strict=True))
    rounds: dict[tuple[str, ...], set] = {}
    displacements, known = {}, set(wanted)
    for path, x in leaves.items():
        if not isinstance(x, (bool, int, float, complex)) and not hasattr(x, "dtype"):
            raise TypeError(
                f"opt_state holds a leaf {'/'.join(path)} of type {type(x).__name__}, which is no "
                "array, so that a displacement inside it would not be found: pass the optimizer's "
                "state itself, such as the field opt_state of an object that holds it."
            )
        for i in (i for i, name in enumerate(path) if _FIELD.search(name)):
            holder, of = path[:i], path[i + 1 :]
            in_round = all((*holder, field) in leaves for field in ("mini_step", "round", "weight"))
            looks_ahead = path[i - 1 : i] == ("2",) and (*path[: i - 1], "0", "sent") in leaves
            if path[i] == "displacement" and (in_round or looks_ahead):
                displacements[of] = x
                if in_round:
                    rounds.setdefault(holder, set()).add(of)
                break
            is_field = path[i] != "displacement" or of in known
            if is_field and not any(path[start:] in known for start in range(i + 1)):
                raise ValueError(f"opt_state has a displacement {'/'.join(path)}{_UNREADABLE}")
    is_nameless = leaves and not any(name.isidentifier() for path in leaves for name in path)
    structure = jax.tree.structure(opt_state)
    if is_nameless and (isinstance(opt_state, list) or "'displacement'" in str(structure)):
        raise ValueError(f"opt_state may hold a displacement{_UNREADABLE}")
    if rounds and list(rounds.values()) != [known]:
        raise ValueError(
            f"local_steps must cover all parameters, {list(map('/'.join, wanted))}, but the state "
            f"has local steps of {[sorted(map('/'.join, paths)) for paths in rounds.values()]}: "
            "put it outermost, and partition and mask inside inner and outer."
        )
    return displacements


_FIELD = re.compile(r"\bdisplacement\b")  # may stand in one name with others, as in a flat dict
_UNREADABLE = (
    ", but the names around it are not those of the state of local steps or of an optimizer that "
    "looks ahead, so that the gradient would be taken at the shared parameters: pass the whole "
    "state as the optimizer or flax.nnx.state(optimizer) returns it, or as a nested dict with the "
    "names of its fields."
)


def has_exchanged(opt_state) -> BoolScalar:
    """Tells whether the update that returned this state ended a round; True without rounds."""
    rounds = nodes(opt_state, LocalStepsState)
    return jnp.array([(x.mini_step == 0) & has_exchanged(x.outer) for x in rounds], bool).all()


def nodes(tree, kind: type | tuple[type, ...]) -> list:
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
    return [node for node in nodes if isinstance(node, kind)]


def _paths(tree) -> list[tuple[str, ...]]:
    """Returns the paths of the leaves, whether their containers have keys or attributes."""
    paths = (path for path, _ in jax.tree.leaves_with_path(tree))
    return [tuple(keystr((key,), simple=True) for key in path) for path in paths]

"""Decides which workers take part in a step, and which state stays unchanged for the others.

A worker *participates* if its own gradient is finite. A packet is *intact* if its checksum and
header are right where it arrives. It is *accepted*, and enters the mean, if everything else in it
is usable too (`demo_optax._src.exchange.averaging.decode_accepted`). No packet is trusted, so the
norms and weights in its header are capped.

A worker decides once per step whether it participates, from its gradient; later stages can only
clear the flag. It is False if the gradient is infinite or NaN, or so large that its squares
overflow float32. The worker then skips the step: it sends packets with a deliberately wrong
checksum, which every worker rejects, keeps its local state, and applies the packets of the others.

The train step passes the flag on as the extra argument `PARTICIPATES`. A link of an optax chain
before the exchange may still make the gradient non-finite, which excludes the worker for the rest
of the step. Where a preconditioner does so, it is reset together with the blocks concerned.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from demo_optax._src import axes, checks
from demo_optax._src.arrays import BoolScalar, FloatScalar, IntScalar, energy, in_dtype_of, reusable
from demo_optax._src.axes import AxisName
from demo_optax._src.local_state import LocalStepsState

PARTICIPATES = "participates"
Injected = optax.InjectStatefulHyperparamsState
INJECTED_STATES = "hyperparams_states", "inner_state"


def decide(
    gradient,
    axis_name: AxisName,
    extra_args: Mapping[str, Any],
    allowed: BoolScalar | bool = True,
) -> BoolScalar:
    """Tells whether this worker participates with a gradient, the same on all of its devices.

    A train step may already have excluded the worker by ``extra_args``, and the caller by
    ``allowed``.
    """
    checks.real_leaves("gradient", gradient)
    energies = [0.0, *[energy([x]) for x in jax.tree.leaves(gradient)]]
    # Of a sum of the energies, or of a conjunction of scalars, XLA would repeat all operations
    # wherever the flag is used.
    allowed &= jnp.broadcast_to(extra_args.get(PARTICIPATES, True), ()).astype(bool)
    finite = (jnp.isfinite(jnp.array(energies, jnp.float32)) & allowed).all()
    return axes.on_all_devices(finite, axis_name, extra_args)


def all_finite(tree: Any) -> BoolScalar:
    """Tells whether no element of any floating or complex leaf is infinite or NaN."""
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.array([jnp.isfinite(x).all() for x in leaves], bool).all()


def choose(condition: BoolScalar, tree: Any, otherwise: Any) -> Any:
    """Returns ``tree`` if the condition holds, else ``otherwise``, in the dtypes of the latter."""
    return jax.tree.map(
        lambda x, y: in_dtype_of(jnp.where(condition, x, reusable(y)), y), tree, otherwise
    )


def is_intact(
    state: Any, initial: Any, axis_name: AxisName, extra_args: Mapping[str, Any]
) -> BoolScalar:
    """Tells whether every leaf that is finite in the initial state is finite in this one too."""
    finite = []
    for tree in state, initial:
        leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
        largest = [jnp.max(jnp.abs(x)).astype(jnp.float32) for x in leaves if x.size]
        finite.append(jnp.isfinite(jnp.array(largest, jnp.float32)))
    intact = (finite[0] | ~finite[1]).all()
    return axes.on_all_devices(intact, axis_name, extra_args)


def choose_state(condition: BoolScalar, state: Any, otherwise: Any) -> Any:
    """Returns ``state`` if the condition holds, else ``otherwise``, in the dtypes of ``state``.

    Schedule counts and injected hyperparameters are always those of ``state``, except for
    hyperparameters that are infinite or NaN.
    """

    def chosen(x, other):
        if isinstance(x, Injected):
            inner = choose_state(condition, x.inner_state, other.inner_state)
            given = jax.tree.map(
                lambda x, other: in_dtype_of(jnp.where(condition | all_finite(x), x, other), x),
                x.hyperparams,
                other.hyperparams,
            )
            return x._replace(inner_state=inner, hyperparams=given)
        if _has_count(x):
            return x
        other = in_dtype_of(reusable(axes.varying_like(other, x)), x)
        return jnp.where(condition, x, other)

    return jax.tree.map(chosen, state, otherwise, is_leaf=_has_count)


def with_counts(state: Any, count: IntScalar) -> Any:
    """Returns a state whose schedules all stand at ``count``, except for those of accumulators."""

    def is_leaf(x) -> bool:
        return _has_count(x) or hasattr(x, "mini_step")

    def replaced(x):
        if not _has_count(x):
            return x
        own = axes.varying_like(count.astype(x.count.dtype), x.count)
        if not isinstance(x, Injected):
            return x._replace(count=own)
        inside = {name: with_counts(getattr(x, name), count) for name in INJECTED_STATES}
        return x._replace(count=own, **inside)

    return jax.tree.map(replaced, state, is_leaf=is_leaf)


def _has_count(x) -> bool:
    """Recognizes the states of schedules and of injected hyperparameters, which count steps."""
    if isinstance(x, Injected):
        return True
    is_alone = getattr(x, "_fields", ()) == ("count",)
    return is_alone and jnp.issubdtype(getattr(x.count, "dtype", float), jnp.integer)


def reset_nonfinite_blocks(momenta: Any) -> tuple[Any, FloatScalar, IntScalar]:
    """Sets to zero each block of momenta ``(..., n)`` whose energy is not finite.

    Otherwise a single flipped bit of an exponent would exclude its worker permanently. Returns the
    momenta, the energy of all blocks, and the number of blocks that were reset.
    """
    leaves, structure = jax.tree.flatten(momenta)
    total, restarted, new = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32), []
    for m in leaves:
        energies = jnp.sum(jnp.square(m.astype(jnp.float32)), axis=-1)
        finite = jnp.isfinite(energies)
        total += jnp.sum(jnp.where(finite, energies, 0))
        restarted += jnp.sum(~finite, dtype=jnp.int32)
        new.append(jnp.where(finite[..., None], m, 0))
    return structure.unflatten(new), total, restarted


def keep_local_state(new, old, varies_over_workers, participates: BoolScalar):
    """Keeps the old value of leaves that vary over workers, on a worker that skipped the step.

    One bad batch thus destroys no second moment. States whose type says ``handles_nonfinite`` do
    this themselves.
    """

    def kept_node(new, old, varies_over_workers):
        if isinstance(new, Injected):
            inner = new.inner_state, old.inner_state, varies_over_workers.inner_state
            kept = keep_local_state(*inner, participates)
            return new._replace(inner_state=kept)
        if _has_count(new):  # a worker that skips a step keeps pace with the others' schedules
            return new
        if isinstance(new, LocalStepsState):
            if jax.tree.leaves(new.displacement):  # local_steps decides by itself
                return new
            took_part = participates | (old.weight > 0)
            outer = new.outer, old.outer, varies_over_workers.outer
            return new._replace(outer=keep_local_state(*outer, took_part))
        if getattr(type(new), "handles_nonfinite", False) or not varies_over_workers:
            return new
        return jnp.where(participates, new, reusable(old))

    return jax.tree.map(
        kept_node,
        new,
        old,
        varies_over_workers,
        is_leaf=lambda x: hasattr(type(x), "handles_nonfinite") or _has_count(x),
    )

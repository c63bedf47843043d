"""Which leaves of an optimizer's state differ between workers, read from JAX's types.

One update is evaluated abstractly: what comes out varying over an axis differs along it.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core

from demo_optax import axes
from demo_optax.axes import EXTRA_ARGS, AxisName
from demo_optax.parallel import shards


class Variation(NamedTuple):
    """What an update does along the axes of a mesh.

    Attributes:
      state: a tree of frozensets, the axes over which each leaf of the new state differs.
      updates: the same of the updates.
      frozen: a tree of bools, which updates are zero whatever the gradient, as those of
        ``optax.set_to_zero``. By their type they may differ.
      sent: int, bytes that one device hands to collectives between workers.
    """

    state: Any
    updates: Any
    frozen: Any
    sent: int


def variation(
    tx: optax.GradientTransformation,
    parts,
    single,
    specs,
    mesh_shape: Mapping[str, int],
    axis_name: AxisName,
) -> Variation:
    """Evaluates updates abstractly under ``jax.shard_map(check_vma=True)``.

    With gradients that vary over ``axis_name`` and the axes of their parameter's spec, until
    nothing of the state comes out varying that did not go in so.

    Args:
      tx: any optax transformation that exchanges over ``axis_name``.
      parts: shapes of one device's shards of the parameters.
      single: shapes of one worker's state of these.
      specs: the parameters' PartitionSpecs inside a worker.
      mesh_shape: sizes of the mesh's axes.
      axis_name: the workers' axis, or axes.

    Raises:
      ValueError: the updates themselves differ between workers, because ``tx`` does not exchange.
    """
    tx = optax.with_extra_args_support(tx)
    outcome = []

    def probe(varying_axes):
        def zeros(x, spec):
            return axes.as_varying(jnp.zeros(x.shape, x.dtype), shards.axes_of(spec))

        def vary(x, names):
            return axes.as_varying(x, tuple(names))

        def update():
            values = jax.tree.map(zeros, parts, specs)
            old = jax.tree.map(vary, tx.init(values), varying_axes)
            gradient = axes.as_varying(values, axis_name)
            updates, state = tx.update(gradient, old, values, **EXTRA_ARGS)
            state = shards.metrics_of_worker(state, old, shards.sharded_axes(specs))
            outcome.append(jax.tree.map(axes.varying, (old, state, updates)))

        program = axes.trace_worker(update, mesh_shape)
        old, state, updates = outcome[-1]
        state = jax.tree.map(frozenset.union, old, state)
        frozen = jax.tree.map(lambda _: False, updates)
        sent = axes.bytes_handed_over(program, axis_name)
        return old, Variation(state, updates, frozen, sent)

    nowhere = jax.tree.map(lambda _: frozenset(), single)
    try:
        before, found = probe(nowhere)
        while jax.tree.leaves(before) != jax.tree.leaves(found.state):
            before, found = probe(found.state)
    except (TypeError, ValueError) as error:
        if "required keyword-only argument" in str(error):
            raise TypeError(
                f"{error}, and is evaluated abstractly before any step. Of extra arguments only "
                f"{', '.join(EXTRA_ARGS)} is known then: give the others a default."
            ) from error
        if not _decides_alone(single):
            raise
        raise type(error)(
            f"{error}\n\noptax.MultiSteps and optax.apply_if_finite let each worker decide alone "
            "whether it takes part in a step: accumulate with make_train_step(microbatches=...) "
            "instead; workers whose gradient is not finite are left out already."
        ) from error
    worker_axes = frozenset(axes.names(axis_name))
    if not any(names & worker_axes for names in jax.tree.leaves(found.updates)):
        return found
    frozen = _frozen(tx, parts, single, mesh_shape, axis_name)
    updates = jax.tree.map(
        lambda x, names: names - worker_axes if x else names, frozen, found.updates
    )
    for path, names in jax.tree.leaves_with_path(updates):
        if names & worker_axes:
            raise ValueError(
                f"the optimizer's updates differ between the workers of axis {axis_name!r} (first: "
                f"parameter{jax.tree_util.keystr(path)}), so their parameters would drift apart "
                "unseen. It must exchange over that axis: give demo_optax.decoupled_momentum (or "
                f"demo_optax.demo, ...) axis_name={axis_name!r}, or put "
                f"demo_optax.mean_over_workers({axis_name!r}) in front of an ordinary optimizer. "
                "To freeze parameters, leave optax.partition with optax.set_to_zero outermost."
            )
    return found._replace(updates=updates, frozen=frozen)


def _decides_alone(state) -> bool:
    alone = optax.MultiStepsState, optax.ApplyIfFiniteState
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, alone))
    return any(isinstance(node, alone) for node in nodes)


_ZERO_OF_ZEROS = {
    *("add", "add_any", "broadcast_in_dim", "clamp", "convert_element_type", "copy", "max", "min"),
    *("neg", "pcast", "reshape", "sign", "squeeze", "sub", "transpose"),
}


def _frozen(tx, parts, single, mesh_shape, axis_name):
    """A tree of bools: which updates the program of ``tx`` makes of zeros alone."""

    def update(gradient, state, params):
        return tx.update(gradient, state, params, **EXTRA_ARGS)[0]

    of_workers: Callable = update
    for name in axes.names(axis_name):
        of_workers = functools.partial(_of_all, of_workers, name, mesh_shape[name])
    program, updates = jax.make_jaxpr(of_workers, return_shape=True)(parts, single, parts)
    found = _zeros(program.jaxpr, [False] * len(program.jaxpr.invars))
    return jax.tree.unflatten(jax.tree.structure(updates), found)


def _zeros(jaxpr, zero_inputs) -> list[bool]:
    """Which results of a program are zero, given which of its inputs are."""
    zeros = {x for x, zero in zip(jaxpr.invars, zero_inputs, strict=True) if zero}

    def is_zero(x):
        return not np.any(x.val) if isinstance(x, core.Literal) else x in zeros

    for equation in jaxpr.eqns:
        name, inputs = equation.primitive.name, list(map(is_zero, equation.invars))
        if name == "mul":
            found = [any(inputs)]
        elif name == "div":
            found = inputs[:1]
        elif name == "select_n":
            found = [all(inputs[1:])]
        elif name in ("jit", "pjit"):
            found = _zeros(equation.params["jaxpr"].jaxpr, inputs)
        else:
            found = [name in _ZERO_OF_ZEROS and bool(inputs) and all(inputs)]
        zeros.update(x for x, zero in zip(equation.outvars, found, strict=False) if zero)
    return list(map(is_zero, jaxpr.outvars))


def _of_all(fn, name, size, *args):
    """What a function gives on all workers of an axis, which see the same."""
    return jax.vmap(lambda _: fn(*args), axis_name=name)(jnp.arange(size))

"""Which leaves of an optimizer's state differ between workers, read from JAX's types.

One update is evaluated abstractly: what comes out varying over an axis differs along it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from demo_optax import axes, metrics
from demo_optax.axes import AxisName
from demo_optax.parallel import shards


class Variation(NamedTuple):
    """What an update does along the axes of a mesh.

    Attributes:
      state: a tree of frozensets, the axes over which each leaf of the new state differs.
      updates: the same of the updates.
      sent: int, bytes that one device hands to collectives between workers.
    """

    state: Any
    updates: Any
    sent: int


def variation(
    tx: optax.GradientTransformation,
    parts,
    specs,
    mesh_shape: Mapping[str, int],
    axis_name: AxisName,
) -> Variation:
    """Evaluates updates abstractly under ``jax.shard_map(check_vma=True)``.

    With gradients that vary over ``axis_name`` and the axes of their parameter's spec, until
    nothing more of the state comes out varying.

    Args:
      tx: any optax transformation that exchanges over ``axis_name``.
      parts: shapes of one device's shards of the parameters.
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
            state = jax.tree.map(vary, tx.init(values), varying_axes)
            updates, state = tx.update(axes.as_varying(values, axis_name), state, values)
            state = metrics.of_worker(state, shards.sharded_axes(specs))
            outcome.append(jax.tree.map(axes.varying, (state, updates)))

        program = axes.trace_worker(update, mesh_shape)
        state, updates = outcome[-1]
        return Variation(state, updates, axes.bytes_handed_over(program, axis_name))

    found = Variation(jax.tree.map(lambda _: frozenset(), jax.eval_shape(tx.init, parts)), None, 0)
    before = None
    try:
        while before != jax.tree.leaves(found.state):
            before = jax.tree.leaves(found.state)
            new = probe(found.state)
            found = new._replace(state=jax.tree.map(frozenset.union, found.state, new.state))
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"{error}\n\nThis came up while an update was evaluated abstractly, to find which "
            "parts of the state differ between workers. optax.MultiSteps and "
            "optax.apply_if_finite cannot be evaluated so: accumulate with "
            "make_train_step(microbatches=...) instead; workers whose gradient is not finite are "
            "left out already."
        ) from error
    for path, names in jax.tree.leaves_with_path(found.updates):
        if names & set(axes.names(axis_name)):
            raise ValueError(
                f"the optimizer's updates differ between the workers of axis {axis_name!r} (first: "
                f"parameter{jax.tree_util.keystr(path)}), so their parameters would drift apart "
                "unseen. It must exchange over that axis: give demo_optax.decoupled_momentum (or "
                f"demo_optax.demo, ...) axis_name={axis_name!r}, or put "
                f"demo_optax.mean_over_workers({axis_name!r}) in front of an ordinary optimizer."
            )
    return found

"""The shared half of a worker's state: parameters, and what is the same on all workers."""

from typing import Any

import jax
from jax.sharding import Mesh

from demo_optax._src.arrays import unwrap_keys, wrap_keys
from demo_optax._src.parallel import shards
from demo_optax._src.parallel.layout import StateLayout
from demo_optax._src.swarm.lead import to_devices


def local_leaves(opt_state) -> Any:
    """Bools, whether each leaf of a state belongs to its worker, as the states' types say."""

    def names_fields(node) -> bool:
        return hasattr(type(node), "local_fields")

    def mark(node):
        if not names_fields(node):
            return False
        marks = {
            name: jax.tree.map(lambda _: True, value)
            if name in node.local_fields
            else local_leaves(value)
            for name, value in node._asdict().items()
        }
        return node._replace(**marks)

    return jax.tree.map(mark, opt_state, is_leaf=names_fields)


def shared_leaves(params, opt_state) -> list[jax.Array]:
    """Parameters first, then the state's leaves; random keys as numbers."""
    leaves = zip(jax.tree.leaves(opt_state), jax.tree.leaves(local_leaves(opt_state)), strict=True)
    shared = [x for x, is_local in leaves if not is_local]
    return list(map(unwrap_keys, [*jax.tree.leaves(params), *shared]))


def with_shared_leaves(layout: StateLayout, mesh: Mesh, params, opt_state, leaves: list[Any]):
    """Parameters and state with other shared leaves, on the mesh."""
    values, placed = iter(leaves), shards.shardings(mesh, (layout.params, layout.state))
    params = jax.tree.map(lambda x: wrap_keys(next(values), x), params)
    opt_state = jax.tree.map(
        lambda x, is_local: x if is_local else wrap_keys(next(values), x),
        opt_state,
        local_leaves(opt_state),
    )
    return to_devices((params, opt_state), placed)

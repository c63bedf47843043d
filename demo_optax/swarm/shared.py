"""What all workers share: parameters, and the leaves of the optimizer state that do not differ."""

from typing import Any

import jax
from jax.sharding import Mesh

from demo_optax.arrays import unwrap_keys, wrap_keys
from demo_optax.parallel import shards
from demo_optax.parallel.layout import StateLayout
from demo_optax.swarm.lead import to_devices


def shared_leaves(layout: StateLayout, params, opt_state) -> list[jax.Array]:
    """Parameters first, then the state's leaves; random keys as numbers."""
    own = jax.tree.leaves(layout.varies_over_workers)
    leaves = zip(jax.tree.leaves(opt_state), own, strict=True)
    shared = [x for x, varies_over_workers in leaves if not varies_over_workers]
    return list(map(unwrap_keys, [*jax.tree.leaves(params), *shared]))


def with_shared_leaves(layout: StateLayout, mesh: Mesh, params, opt_state, leaves: list[Any]):
    """Parameters and state with other shared leaves, on the mesh."""
    values, placed = iter(leaves), shards.shardings(mesh, (layout.params, layout.state))
    params = jax.tree.map(lambda x: wrap_keys(next(values), x), params)
    opt_state = jax.tree.map(
        lambda x, own: x if own else wrap_keys(next(values), x),
        opt_state,
        layout.varies_over_workers,
    )
    return to_devices((params, opt_state), placed)

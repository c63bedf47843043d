"""The state that is equal on all workers: the parameters, and the shared half of opt_state."""

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding

from demo_optax._src.arrays import is_key, unwrap_keys, wrap_keys
from demo_optax._src.parallel.worker_axis import local_leaves


def shared_leaves(params, opt_state) -> list[jax.Array]:
    """Returns the leaves of the parameters, then of the shared state, with keys as numbers."""
    leaves = zip(jax.tree.leaves(opt_state), jax.tree.leaves(_is_local(opt_state)), strict=True)
    shared = [x for x, is_local in leaves if not is_local]
    return list(map(unwrap_keys, [*jax.tree.leaves(params), *shared]))


def replace_leaves(shardings: Any, params, opt_state, leaves: list[Any]) -> tuple[Any, Any]:
    """Returns parameters and state with other shared leaves, placed by their shardings."""
    values = iter(leaves)
    params = jax.tree.map(lambda x: wrap_keys(next(values), x), params)
    opt_state = jax.tree.map(
        lambda x, is_local: x if is_local else wrap_keys(next(values), x),
        opt_state,
        _is_local(opt_state),
    )
    return to_devices((params, opt_state), shardings)


def _is_local(opt_state) -> Any:
    """Marks the leaves that belong to one worker, as the states' types say."""
    return local_leaves(opt_state, ("local_fields", "own_fields"))


def to_host(x: jax.Array) -> np.ndarray:
    """Gathers a whole array on the host; all processes of the worker must call this."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def to_devices(values: Any, shardings: Any) -> Any:
    """Places arrays on the devices; every process must have whole arrays of the host."""
    if jax.process_count() == 1:
        return jax.device_put(values, shardings)

    def put(x, sharding: Sharding) -> jax.Array:
        if is_key(x):
            return wrap_keys(put(unwrap_keys(x), sharding), x)
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return jax.device_put(x, sharding)
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(put, values, shardings)

"""A worker of several processes: the first one talks to the store, and tells the others."""

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding

from demo_optax._src.arrays import is_key, unwrap_keys, wrap_keys
from demo_optax._src.parallel.processes import by_lead as by_lead
from demo_optax._src.parallel.processes import is_lead as is_lead


def to_host(x: jax.Array) -> np.ndarray:
    """A whole array, wherever its shards lie; all processes must call this."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def to_devices(values: Any, shardings: Any) -> Any:
    """Arrays with these shardings; on the host every process has all of them."""
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

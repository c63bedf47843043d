"""A worker of several processes: the first one talks to the store, and tells the others."""

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding

T = TypeVar("T")

_SMALLEST = 1024  # bytes; each size is a program of its own


def is_lead() -> bool:
    """Whether this process talks to the store."""
    return jax.process_index() == 0


def by_lead(fn: Callable[[], T]) -> T:
    """What a function returns, or raises, in the first process; all processes must call this."""
    if jax.process_count() == 1:
        return fn()
    data = b""
    if is_lead():
        try:
            data = pickle.dumps((fn(), None))
        except Exception as error:
            data = pickle.dumps((None, error))
    size = int(multihost_utils.broadcast_one_to_all(np.array(len(data), np.uint32)))
    sent = np.zeros(max(1 << (size - 1).bit_length(), _SMALLEST), np.uint8)
    sent[: len(data)] = np.frombuffer(data, np.uint8)
    received = multihost_utils.broadcast_one_to_all(sent)
    # bytes from this job's own first process; nothing from the store is unpickled
    found, error = pickle.loads(np.asarray(received)[:size].tobytes())
    if error is not None:
        raise error
    return found


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
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return jax.device_put(x, sharding)
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(put, values, shardings)

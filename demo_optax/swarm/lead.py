"""A worker of several processes: the first one talks to the store, and tells the others."""

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding

T = TypeVar("T")

_SMALLEST, _LARGEST = 2**10, 2**28  # bytes at a time; each size is a program of its own


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
    words = np.array(divmod(len(data), 2**32), np.uint32)
    high, low = map(int, multihost_utils.broadcast_one_to_all(words))
    received = [_broadcast(data, at, high * 2**32 + low) for at in _pieces(high * 2**32 + low)]
    # bytes from this job's own first process; nothing from the store is unpickled
    found, error = pickle.loads(b"".join(received))
    if error is not None:
        raise error
    return found


def _pieces(size: int) -> range:
    return range(0, size, _LARGEST)


def _broadcast(data: bytes, at: int, size: int) -> bytes:
    """A piece of the first process's data; sizes are rounded up, so that few programs do."""
    length = min(_LARGEST, size - at)
    sent = np.zeros(max(1 << (length - 1).bit_length(), _SMALLEST), np.uint8)
    if is_lead():
        sent[:length] = np.frombuffer(data, np.uint8, length, at)
    return np.asarray(multihost_utils.broadcast_one_to_all(sent))[:length].tobytes()


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

"""Digests, by which a restore finds damage to a stored tree, down to a single bit.

A leaf's digest is a sum of hashes, of each element at its place in the whole. Each device adds up
those of its shard, so that the sum is the same on any mesh.
"""

import hashlib
import json
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from demo_optax._src.compression.bits import contiguous_strides, hashes, positions, to_words

_PIECE = 2**24  # words of a host's array that are put on a device at once
_ROW = 2**14  # words that are hashed in one go at least


def digests(leaves: dict) -> dict[str, dict]:
    """For each leaf its kind, its shape, and the checksum of its bits, in JSON.

    Args:
      leaves: arrays, NumPy arrays and strings, by their paths. Arrays over several processes are
        read by all of them together.
    """
    parts = {
        name: _sums_of_shards(x, number) if isinstance(x, jax.Array) else _sums_of_pieces(x)
        for number, (name, x) in enumerate(leaves.items())
    }
    local = np.array([sum(map(int, each)) % 2**32 for each in parts.values()], np.uint32)
    everywhere = multihost_utils.process_allgather(local).reshape(jax.process_count(), len(leaves))
    of_host = np.array([not isinstance(x, jax.Array) for x in leaves.values()])
    sums = np.where(of_host, local, everywhere.sum(0, dtype=np.uint32))
    return {
        name: {"kind": _kind(x), "shape": list(np.shape(x)), "checksum": int(number)}
        for (name, x), number in zip(leaves.items(), sums, strict=True)
    }


def _kind(x) -> str:
    return "text" if isinstance(x, str) else x.dtype.name


def template(digest: dict, sharding=None):
    """The restore target of a leaf: on devices with a sharding, otherwise a NumPy array."""
    if digest["kind"] == "text":
        return ""
    dtype = jnp.dtype(digest["kind"])
    if sharding is None:
        return np.empty(digest["shape"], dtype)
    return jax.ShapeDtypeStruct(digest["shape"], dtype, sharding=sharding)


def seal(description: dict) -> str:
    """A hash of a description, except for its entry ``seal``, which holds this hash."""
    rest = {name: value for name, value in description.items() if name != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _sums_of_shards(x: jax.Array, number: int) -> list[jax.Array]:
    """The sums of a leaf's shards on this process's devices.

    Where several devices hold the same shard, one of them computes it: a different one per leaf.
    """
    shard_size = math.prod(x.sharding.shard_shape(x.shape))
    copies = x.sharding.num_devices * shard_size // max(x.size, 1) or 1
    whole = jax.eval_shape(to_words, jax.ShapeDtypeStruct(x.shape, x.dtype)).shape
    strides = contiguous_strides(whole)
    along = strides[1:] if jnp.issubdtype(x.dtype, jnp.complexfloating) else strides
    sums = []
    for shard in x.addressable_shards:
        if shard.replica_id == number % copies:
            starts = (part.start or 0 for part in shard.index)
            first = sum(start * stride for start, stride in zip(starts, along, strict=False))
            sums.append(_sum_of_hashes(shard.data, np.uint32(first % 2**32), strides))
    return sums


def _sums_of_pieces(x) -> list[jax.Array]:
    words = _words(x)
    return [
        _sum_of_hashes(words[first : first + _PIECE], np.uint32(first % 2**32), (1,))
        for first in range(0, len(words), _PIECE)
    ]


@partial(jax.jit, static_argnums=2)
def _sum_of_hashes(x, first, strides: tuple[int, ...]):
    """The sum of a shard's hashes: row by row, added up at the end, as CPUs do it fastest."""
    words = to_words(x)
    sizes = [math.prod(words.shape[axis:]) for axis in range(words.ndim)]
    axis = max((axis for axis, size in enumerate(sizes) if size >= _ROW), default=0)
    rows = words.reshape(-1, *words.shape[axis:])
    begins = first + positions(words.shape[:axis], strides[:axis]).reshape(-1)

    def add(totals, row):
        words, begin = row
        return totals + hashes(words, begin, strides[axis:]), None

    zeros = jnp.zeros(rows.shape[1:], jnp.uint32)
    return jnp.sum(jax.lax.scan(add, zeros, (rows, begins))[0], dtype=jnp.uint32)


def _words(x) -> np.ndarray:
    """The words of `to_words` for a host's value."""
    if isinstance(x, str):
        x = np.frombuffer(x.encode(), np.uint8)
    x = np.asarray(x)
    if np.iscomplexobj(x):
        x = np.stack([x.real, x.imag])
    x = np.ascontiguousarray(x).reshape(-1)
    if x.dtype == bool or x.dtype.itemsize == 1:
        return x.view(np.uint8)
    return x.view(f"uint{min(8 * x.dtype.itemsize, 32)}")

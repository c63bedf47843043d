"""Digests, by which a restore finds damage to a stored tree, down to a single bit.

A leaf's digest is a checksum of its elements at their places in the whole. Each device computes
that of its shard, and their sum is the same on any mesh. Host values are hashed as words, too.
"""

import hashlib
import json
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from demo_optax.compression.bits import contiguous, hashes, positions, to_words

_PIECE = 2**24
"""Words of a host's array that are put on a device at once."""

_ROW = 2**14
"""Words that are hashed in one go at least."""

_SCALARS = {f"Python {x.__name__}": x for x in (bool, int, float, str)}


def digests(leaves: dict) -> dict[str, dict]:
    """For each leaf its kind, its shape, and the checksum of its bits, in JSON.

    Args:
      leaves: arrays, NumPy arrays, numbers and strings, by their paths. Arrays over several
        processes are read by all of them together.
    """
    parts = {
        name: _of_array(x, number) if isinstance(x, jax.Array) else _of_host(x)
        for number, (name, x) in enumerate(leaves.items())
    }
    own = np.array([sum(map(int, found)) % 2**32 for found in parts.values()], np.uint32)
    everywhere = multihost_utils.process_allgather(own).reshape(-1, len(leaves))
    of_host = np.array([not isinstance(x, jax.Array) for x in leaves.values()])
    sums = np.where(of_host, own, everywhere.sum(0, dtype=np.uint32))
    return {
        name: {**kind(x), "checksum": int(number)}
        for (name, x), number in zip(leaves.items(), sums, strict=True)
    }


def kind(x) -> dict:
    """What a leaf is without its values: its dtype or Python's type, and its shape."""
    name = x.dtype.name if hasattr(x, "dtype") else f"Python {type(x).__name__}"
    return {"kind": name, "shape": list(np.shape(x))}


def like(digest: dict):
    """A host's value of that kind, as Orbax wants one to be told what to read."""
    if digest["kind"] in _SCALARS:
        return _SCALARS[digest["kind"]]()
    return np.empty(digest["shape"], jnp.dtype(digest["kind"]))


def sealed(description: dict) -> dict:
    """The description with a hash of itself."""
    return {**description, "seal": _hash(description)}


def is_sealed(description: dict) -> bool:
    """Whether it is as `sealed` made it."""
    rest = {name: value for name, value in description.items() if name != "seal"}
    return description.get("seal") == _hash(rest)


def _hash(description: dict) -> str:
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def _of_array(x: jax.Array, number: int) -> list[jax.Array]:
    """The checksums of a leaf's shards on this process's devices, still being computed.

    Where several devices hold the same, one of them computes it: another one for each leaf.
    """
    shard_size = math.prod(x.sharding.shard_shape(x.shape))
    copies = x.sharding.num_devices * shard_size // max(x.size, 1) or 1
    whole = jax.eval_shape(to_words, jax.ShapeDtypeStruct(x.shape, x.dtype)).shape
    strides = contiguous(whole)
    along = strides[1:] if jnp.issubdtype(x.dtype, jnp.complexfloating) else strides
    found = []
    for shard in x.addressable_shards:
        if shard.replica_id == number % copies:
            starts = (part.start or 0 for part in shard.index)
            first = sum(start * stride for start, stride in zip(starts, along, strict=False))
            found.append(_part(shard.data, np.uint32(first % 2**32), strides))
    return found


def _of_host(x) -> list[jax.Array]:
    words, found = _words(x), []
    for first in range(0, len(words), _PIECE):
        piece = words[first : first + _PIECE]
        rows = piece.reshape(-1, _ROW) if len(piece) % _ROW == 0 else piece
        found.append(_part(rows, np.uint32(first % 2**32), contiguous(rows.shape)))
    return found


@partial(jax.jit, static_argnums=2)
def _part(x, first, strides: tuple[int, ...]):
    """The checksum of a shard: row by row, added up at the end, as CPUs do it fastest."""
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
    """The words of `to_words` for a host's value, of unsigned integers up to 32 bits."""
    if isinstance(x, str):
        x = np.frombuffer(x.encode(), np.uint8)
    x = np.asarray(x)
    if np.iscomplexobj(x):
        x = np.stack([x.real, x.imag])
    x = np.ascontiguousarray(x).reshape(-1)
    if x.dtype == bool or x.dtype.itemsize == 1:
        return x.view(np.uint8)
    return x.view(f"uint{min(8 * x.dtype.itemsize, 32)}")

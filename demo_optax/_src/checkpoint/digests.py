"""Digests, by which a restore finds damage to a stored tree, down to a single bit.

The digest of a leaf sums the hashes of its elements at their places in the whole array. Each device
adds up those of its shard, so that the sum is the same on any mesh.
"""

import hashlib
import json
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from demo_optax._src.compression.bits import contiguous_strides, hashed, positions, to_words

_PIECE = 2**24  # words of a host's array that are put on a device at once


def digests(leaves: dict) -> dict[str, dict]:
    """Returns the kind, the shape and the checksum of the bits of each leaf, for JSON.

    All processes read arrays together, but each reads NumPy arrays and strings for itself.
    """
    parts = [_sums(x, number) for number, x in enumerate(leaves.values())]
    local = np.array([sum(map(int, each)) % 2**32 for each in parts], np.uint32)
    everywhere = multihost_utils.process_allgather(local).reshape(jax.process_count(), len(leaves))
    of_host = np.array([not isinstance(x, jax.Array) for x in leaves.values()])
    sums = np.where(of_host, local, everywhere.sum(0, dtype=np.uint32))
    kinds = ["text" if isinstance(x, str) else x.dtype.name for x in leaves.values()]
    return {
        name: {"kind": kind, "shape": list(np.shape(x)), "checksum": int(number)}
        for (name, x), kind, number in zip(leaves.items(), kinds, sums, strict=True)
    }


def template(digest: dict, sharding=None):
    """Returns the restore target of a leaf, on devices if a sharding is given, else in NumPy."""
    if digest["kind"] == "text":
        return ""
    dtype = jnp.dtype(digest["kind"])
    if sharding is None:
        return np.empty(digest["shape"], dtype)
    return jax.ShapeDtypeStruct(digest["shape"], dtype, sharding=sharding)


def seal(description: dict) -> str:
    """Returns a hash of a description without its entry ``seal``, which holds this hash."""
    rest = {name: value for name, value in description.items() if name != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _sums(x, number: int) -> list[jax.Array]:
    """Returns the sums of a leaf's shards on this process's devices, or of a host array's pieces.

    Where several devices hold the same shard, only one of them computes its sum. It is a different
    one for each leaf, so that every process checks a part of what it has read.
    """
    if not isinstance(x, jax.Array):
        words = _words(x)
        starts = range(0, len(words), _PIECE)
        return [_sum_of_hashes(words[i : i + _PIECE], np.uint32(i % 2**32), (1,)) for i in starts]
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


@partial(jax.jit, static_argnums=2)
def _sum_of_hashes(x, first, strides: tuple[int, ...]):
    words = to_words(x)
    return jnp.sum(hashed(words, first + positions(words.shape, strides)), dtype=jnp.uint32)


def _words(x) -> np.ndarray:
    """Returns the words of `to_words` for a value on the host, which may have 64 bits."""
    x = np.frombuffer(x.encode(), np.uint8) if isinstance(x, str) else np.asarray(x)
    x = np.stack([np.real(x), np.imag(x)]) if np.iscomplexobj(x) else x
    return np.ascontiguousarray(x).reshape(-1).view(f"uint{min(8 * x.dtype.itemsize, 32)}")

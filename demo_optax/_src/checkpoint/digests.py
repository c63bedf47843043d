"""Digests, by which a restore finds damage to a stored leaf, down to a single bit.

The checksum of a leaf sums the hashes of its elements at their places in the whole array, so that
it is the same on any mesh.
"""

import jax
import jax.numpy as jnp
import numpy as np

from demo_optax._src.compression.bits import checksum, hashed, to_words

_AT_ONCE = 2**24  # words of a host's array that are put on a device at once


def digests(x) -> list[dict]:
    """Returns dtype, shape and checksum of each copy of a leaf that this process holds, for JSON.

    All processes digest an array together, but each digests NumPy arrays for itself.
    """
    if isinstance(x, jax.Array):
        checksums = [int(copy.data) for copy in _checksum(x).addressable_shards]
    else:
        checksums = [_checksum_on_host(x)]
    return [{"dtype": x.dtype.name, "shape": [*x.shape], "checksum": one} for one in checksums]


@jax.jit
def _checksum(x):
    return checksum(to_words(x))


def _checksum_on_host(x: np.ndarray) -> int:
    """Returns the same checksum for a value on the host, which may have 64 bits."""
    x = np.stack([np.real(x), np.imag(x)]) if np.iscomplexobj(x) else x
    words = np.ascontiguousarray(x).reshape(-1).view(f"uint{min(8 * x.dtype.itemsize, 32)}")
    starts = range(0, len(words), _AT_ONCE)
    parts = [_part(words[i : i + _AT_ONCE], np.uint32(i % 2**32)) for i in starts]
    return sum(map(int, parts)) % 2**32


@jax.jit
def _part(words, start):
    places = start + jnp.arange(len(words), dtype=jnp.uint32)
    return jnp.sum(hashed(words.astype(jnp.uint32), places), dtype=jnp.uint32)

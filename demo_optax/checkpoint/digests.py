"""Digests: what tells a stored tree from one that is damaged by as little as a bit.

A leaf's is a checksum of its elements at their places, computed by the devices that hold them and
summed over them: the same number on any mesh. Host values are read as words and go the same way.
"""

import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np

from demo_optax.compression.bits import checksum, to_words

_PIECE = 2**24
"""Words of a host's array that are put on a device at once."""

_SCALARS = {f"Python {x.__name__}": x for x in (bool, int, float, str)}


def digests(leaves: dict) -> dict[str, dict]:
    """Of each leaf its kind, its shape, and the checksum of its bits, in JSON.

    Args:
      leaves: arrays, NumPy arrays, numbers and strings, by their paths. Arrays over several
        processes are read by all of them together.
    """
    sums = {name: _of_host(x) for name, x in leaves.items() if not isinstance(x, jax.Array)}
    on_devices: dict = {}
    for name, x in leaves.items():
        if isinstance(x, jax.Array):
            on_devices.setdefault(frozenset(x.sharding.device_set), {})[name] = x
    for arrays in on_devices.values():
        sums |= zip(arrays, _of_arrays(tuple(arrays.values())), strict=True)
    return {name: {**kind(x), "checksum": int(sums[name])} for name, x in leaves.items()}


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


def _of_arrays(arrays) -> list[int]:
    return [int(x) for x in np.asarray(_checksums(arrays).addressable_data(0))]


@jax.jit
def _checksums(arrays):
    """uint32 ``(arrays,)``, over all devices that hold them."""
    return jnp.stack([checksum(to_words(x)) for x in arrays])


def _of_host(x) -> int:
    words = _words(x)
    pieces = (_piece(words[i : i + _PIECE], i) for i in range(0, len(words), _PIECE))
    return sum(int(x) for x in pieces) % 2**32


@jax.jit
def _piece(words, first):
    return checksum(words.astype(jnp.uint32), first)


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

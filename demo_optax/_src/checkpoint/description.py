"""Descriptions of saved states: leaves by their paths, and the meaning of their numbers in JSON."""

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore
from jax.tree_util import GetAttrKey, keystr

from demo_optax._src.arrays import is_key, key_impl, unwrap_keys, wrap_keys
from demo_optax._src.axes import names, sharded_axes
from demo_optax._src.compression.settings import StoredMomenta, word_of
from demo_optax._src.exchange.protocol import Pending
from demo_optax._src.parallel import shards
from demo_optax._src.parallel.worker_axis import StateLayout

FORMAT = 18
"""The version of the saved format, which rises whenever the numbers of a state change meaning."""

PLAIN = bool, int, float, str
"""The types of leaves that are stored as JSON, and not as arrays."""


def describe(layout: StateLayout, opt_state) -> dict:
    """Describes a state of arrays or shapes, so that a restore can compare it with what it needs.

    The description has these entries:

    * ``sizes``: the number of workers, and the sizes of the axes inside a worker that divide
      parameters;
    * ``over``: for each leaf and each of its dimensions, the indices in ``sizes`` of the axes that
      divide it, where an axis of workers in front is ``[0]``;
    * ``words``: the word of each leaf that stands for settings;
    * ``states``: for each `DecoupledMomentumState`, under its path, the ``format`` of its momenta,
      the ``shapes`` of a device's parameters, and the path of the state that keeps a message under
      way (``holder``) with the ``compression`` of that message, or None.
    """
    mesh, spec_at = layout.mesh, dict(jax.tree.leaves_with_path(layout.state))
    inner = [name for name in mesh.axis_names if name in sharded_axes(layout.params)]
    workers = shards.num_workers(mesh, layout.axis_name or ())
    sizes = [workers, *(mesh.shape[name] for name in inner)]

    def indices(entry) -> list[int]:
        return list({1 + inner.index(name) if name in inner else 0: None for name in names(entry)})

    over = {
        storable(path, x)[0]: [indices(entry) for entry in spec_at[path]]
        for path, x in jax.tree.leaves_with_path(opt_state)
    }

    def paths(is_one) -> list[tuple]:
        found = jax.tree.leaves_with_path(opt_state, is_leaf=is_one)
        return [path for path, x in found if is_one(x)]

    def holds_message(x) -> bool:
        return isinstance(getattr(x, "pending", None), Pending)

    holders, states = paths(holds_message), {}
    for path in paths(shards.is_momentum):
        stored: StoredMomenta = layout.settings[keystr((*path, GetAttrKey("format")))]
        holder = next((keystr(x) for x in holders if x == path[: len(x)]), None)
        message = layout.settings[f"{holder}.pending.format"] if holder is not None else None
        states[keystr(path)] = {
            "format": _in_json(stored.format),
            "shapes": stored.shapes,
            "holder": holder,
            "compression": message and _in_json(message),
        }
    words = {name: int(word_of(settings)) for name, settings in layout.settings.items()}
    described = {"sizes": sizes, "over": over, "words": words, "states": states}
    return json.loads(json.dumps(described, default=int))


def _in_json(settings: Any) -> dict:
    """Returns settings by their names; one of the user's own is the text that stands for it."""
    given = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    return {k: x if isinstance(x, (int, str)) else {"own": repr(x)} for k, x in given.items()}


def is_of_exchange(name: str, described: dict) -> bool:
    """Tells whether a leaf is kept by an exchange, or for one that is under way."""
    return any(
        name.startswith((f"{path}.exchange", f"{state['holder']}.pending"))
        for path, state in described["states"].items()
    )


def by_path(tree, part: str) -> dict:
    """Returns the leaves of a tree by their paths as they are stored, without empty arrays."""
    leaves = {}
    for path, x in jax.tree.leaves_with_path(tree):
        name, stored = storable(path, x)
        try:
            _ = isinstance(stored, PLAIN) or tensorstore.dtype(stored.dtype)
        except (AttributeError, TypeError, ValueError):
            raise TypeError(
                f"{part}{name} is {x!r:.60} of {type(x)}, which cannot be stored: give random "
                "keys, numbers, strings, bytes, None, or arrays of a dtype that TensorStore knows, "
                "such as x.astype('bfloat16')."
            ) from None
        if 0 not in np.shape(stored):
            leaves[name] = stored
    return leaves


def storable(path, x) -> tuple[str, Any]:
    """Returns a leaf's path, with its kind if the stored leaf does not show it, and that leaf."""
    name = keystr(path)
    if is_key(x):
        return f"{name} ({key_impl(x)})", unwrap_keys(x)
    if isinstance(x, bytes):
        return f"{name} (bytes)", x.decode("latin-1")
    return name, np.asarray(x) if isinstance(x, (np.generic, complex)) else x


def from_paths(leaves: dict[str, Any], like):
    """Inverts `by_path`, with the structure and the dtypes of another tree."""

    def restore(path, original):
        is_empty, name = 0 in np.shape(original), storable(path, original)[0]
        x: Any = np.zeros(original.shape, original.dtype) if is_empty else leaves[name]
        if is_key(original):
            return wrap_keys(x, original)
        if isinstance(original, bytes):
            return x.encode("latin-1")
        given, wanted = (getattr(v, "dtype", None) or np.asarray(v).dtype for v in (x, original))
        if jnp.issubdtype(given, jnp.inexact) and not jnp.issubdtype(wanted, jnp.inexact):
            raise ValueError(
                f"{keystr(path)} of the checkpoint is of dtype {given}, but "
                f"{original!r:.60} is expected: restore it as what it was saved as."
            )
        if not hasattr(original, "dtype"):
            return type(original)(x)
        if isinstance(original, jax.ShapeDtypeStruct):
            return jax.device_put(x, original.sharding).astype(original.dtype)
        x = jnp.asarray(x) if isinstance(original, jax.Array) else np.asarray(x)
        return x.astype(original.dtype)[() if isinstance(original, np.generic) else ...]

    return jax.tree.map_with_path(restore, like)


def require_same(part: str, expected: Iterable[str], held: Iterable[str]) -> None:
    """Raises unless a part of a checkpoint holds the leaves that are expected."""
    lacking, besides = sorted({*expected} - {*held}), sorted({*held} - {*expected})
    if lacking or besides:
        raise ValueError(
            f"the leaves of the checkpoint's {part} are not those that are expected: it lacks "
            f"{lacking[:3] or 'nothing'} and holds {besides[:3] or 'nothing'} instead. Restore it "
            "with the model and the optimizer that it was saved with, and pass an extra=... of the "
            "same structure; for the parameters alone use demo_optax.checkpoint.load_params."
        )

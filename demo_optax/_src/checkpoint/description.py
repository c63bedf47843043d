"""Descriptions of saved states: leaves by their paths, and the meaning of their numbers in JSON."""

import dataclasses
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore
from jax.tree_util import GetAttrKey, keystr

from demo_optax._src.arrays import is_key, key_impl, unwrap_keys, wrap_keys
from demo_optax._src.axes import names, sharded_axes
from demo_optax._src.compression.settings import MomentumFormat, StoredMomenta, word_of
from demo_optax._src.exchange.protocol import Pending
from demo_optax._src.local_state import LocalStepsState
from demo_optax._src.parallel import shards
from demo_optax._src.parallel.worker_axis import StateLayout

FORMAT = 16
"""The version of the saved format, which rises whenever the numbers of a state change meaning."""


def describe(layout: StateLayout, opt_state) -> dict:
    """Describes a state of arrays or shapes, so that a restore can compare it with what it needs.

    The description has these entries:

    * ``sizes``: the number of workers, and the sizes of the axes inside a worker that divide
      parameters;
    * ``over``: for each leaf and each of its dimensions, the indices in ``sizes`` of the axes that
      divide it, where an axis of workers in front is ``[0]``;
    * ``words``: the word of each leaf that stands for settings;
    * ``states``: for each `DecoupledMomentumState`, under its path, the format of its momenta, the
      ``shapes`` of a device's parameters, the ``settings`` of its blocks and of a message under
      way, whether there is one (``pending``), the path of the state that keeps it (``holder``), and
      the number of ``fragments`` or None.
    """
    mesh, spec_at = layout.mesh, dict(jax.tree.leaves_with_path(layout.state))
    inner = [name for name in mesh.axis_names if name in sharded_axes(layout.params)]
    workers = shards.num_workers(mesh, layout.axis_name or ())
    sizes = [workers, *(mesh.shape[name] for name in inner)]

    def indices(entry) -> list[int]:
        return list({1 + inner.index(name) if name in inner else 0: None for name in names(entry)})

    over = {
        _storable(path, x)[0]: [indices(entry) for entry in spec_at[path]]
        for path, x in jax.tree.leaves_with_path(opt_state)
    }

    def is_fragmented(x) -> bool:
        return isinstance(x, LocalStepsState) and isinstance(x.pending, Pending)

    def nodes(is_one) -> list[tuple[tuple, Any]]:
        found = jax.tree.leaves_with_path(opt_state, is_leaf=is_one)
        return [(path, x) for path, x in found if is_one(x)]

    states, rounds = {}, nodes(is_fragmented)
    for path, node in nodes(shards.is_momentum):
        at, momenta = (*path, GetAttrKey("momentum")), {}
        around = [(outside, x) for outside, x in rounds if path[: len(outside)] == outside]
        holder, keeper = around[0] if around else (path, node)
        leaves = jax.tree.leaves_with_path(node.momentum)
        stored: StoredMomenta = layout.settings[keystr((*path, GetAttrKey("format")))]
        for (inside, _), shape in zip(leaves, stored.shapes, strict=True):
            name = keystr((*at, *inside))
            counts = [math.prod(sizes[i] for i in axes) for axes in over[name] if axes != [0]]
            momenta[name] = _format(stored.format, shape, [] if around else counts)
        is_pending = isinstance(keeper.pending, Pending)
        settings = stored.format
        if is_pending:
            settings = layout.settings[f"{keystr(holder)}.pending.format"]
        states[keystr(path)] = {
            "momenta": momenta,
            "shapes": stored.shapes,
            "settings": {
                field.name: _in_json(getattr(settings, field.name))
                for field in dataclasses.fields(settings)
            },
            "pending": is_pending,
            "holder": keystr(holder),
            "fragments": keeper.weight.shape[-1] if around else None,
        }
    words = {name: int(word_of(settings)) for name, settings in layout.settings.items()}
    described = {"sizes": sizes, "over": over, "words": words, "states": states}
    return json.loads(json.dumps(described, default=int))


def _in_json(setting: Any) -> Any:
    """Returns a setting, or the text of one of the user's own."""
    return setting if isinstance(setting, (int, str)) else {"own": repr(setting)}


def _format(momentum_format: MomentumFormat, shape, counts: list[int]) -> dict:
    """Returns what a stored momentum means; shards matter only where they are padded."""
    geometry = momentum_format.geometry(shape)
    counts = counts + [1] * (len(shape) - len(counts))
    dims = zip(geometry.shape, geometry.sides, counts, strict=True)
    return {
        "transform": _in_json(momentum_format.transform),
        "seed": momentum_format.seed,
        "block sides": geometry.sides,
        "shards": [count if dim % side else 1 for dim, side, count in dims],
    }


def is_of_exchange(name: str, described: dict) -> bool:
    """Tells whether a leaf is kept by an exchange, or for one that is under way."""
    return any(
        name.startswith((f"{path}.exchange", f"{state['holder']}.pending"))
        for path, state in described["states"].items()
    )


def by_path(tree, part: str = "params") -> dict:
    """Returns the leaves of a tree by their paths as Orbax can save them, without empty arrays."""
    leaves = {}
    for path, x in jax.tree.leaves_with_path(tree):
        name, stored = _storable(path, x)
        try:
            _ = isinstance(stored, str) or tensorstore.dtype(stored.dtype)
        except (AttributeError, TypeError, ValueError):
            where = name.removeprefix("['tree']")
            raise TypeError(
                f"{part}{where} is {x!r:.60} of {type(x)}, which cannot be stored: give random "
                "keys, numbers, strings, bytes, None, or arrays of a dtype that TensorStore knows, "
                "such as x.astype('bfloat16')."
            ) from None
        if 0 not in np.shape(stored):
            leaves[name] = stored
    return leaves


def _storable(path, x) -> tuple[str, Any]:
    """Returns a leaf's path, with its kind if the stored leaf does not show it, and that leaf.

    Orbax does not support random keys, bytes, integers of more than 64 bits or most scalars.
    """
    name = keystr(path)
    if is_key(x):
        return f"{name} ({key_impl(x)})", unwrap_keys(x)
    if isinstance(x, bytes):
        return f"{name} (bytes)", x.decode("latin-1")
    if isinstance(x, int) and not -(2**63) <= x < 2**63:
        return name, str(x)
    return name, np.asarray(x) if isinstance(x, (np.generic, int, float, complex)) else x


def from_paths(leaves: dict, like):
    """Inverts `by_path`, with the structure and the dtypes of another tree."""

    def restore(path, original):
        if 0 in np.shape(original):
            empty = np.zeros(original.shape, original.dtype)
            sharding = getattr(original, "sharding", None)
            return jax.device_put(empty, sharding) if sharding else empty
        x = leaves[_storable(path, original)[0]]
        if is_key(original):
            return wrap_keys(x, original)
        if isinstance(original, (bytes, str)):
            return x.encode("latin-1") if isinstance(original, bytes) else str(x)
        given, wanted = (getattr(v, "dtype", None) or np.asarray(v).dtype for v in (x, original))
        if jnp.issubdtype(given, jnp.inexact) and not jnp.issubdtype(wanted, jnp.inexact):
            raise ValueError(
                f"{keystr(path)} of the checkpoint is of dtype {given}, but "
                f"{original!r:.60} is expected: restore it as what it was saved as."
            )
        if not hasattr(original, "dtype"):
            return type(original)(x)
        x = jnp.asarray(x) if isinstance(original, jax.Array) else x
        x = x.astype(original.dtype)
        return x[()] if isinstance(original, np.generic) else x

    return jax.tree.map_with_path(restore, like)


def require_same(what: str, tree, saved: dict, ignored=lambda name: False, shapes: bool = True):
    """Raises unless digests have the leaves and shapes of a tree, but for ``ignored`` names."""

    def listed(name: str, shape) -> str:
        return f"{name} of shape {tuple(shape)}" if shapes else name

    leaves = by_path(tree, what)
    expected = {listed(name, np.shape(x)) for name, x in leaves.items() if not ignored(name)}
    held = {listed(name, x["shape"]) for name, x in saved.items() if not ignored(name)}
    if expected != held:
        raise ValueError(
            f"the leaves of the checkpoint's {what} are not those that are expected: it lacks "
            f"{sorted(expected - held)[:3] or 'nothing'} and holds "
            f"{sorted(held - expected)[:3] or 'nothing'} instead. Restore it with the model and "
            "the optimizer that it was saved with, and pass an extra=... of the same structure; "
            "for the parameters alone use demo_optax.checkpoint.load_params."
        )

"""Descriptions of saved states: leaves by their paths, and the meaning of their numbers in JSON."""

import dataclasses
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey, keystr

from demo_optax._src import axes
from demo_optax._src.arrays import is_key, key_impl, unwrap_keys, wrap_keys
from demo_optax._src.axes import axes_of, sharded_axes
from demo_optax._src.exchange.protocol import Pending
from demo_optax._src.local_state import LocalStepsState
from demo_optax._src.parallel import shards
from demo_optax._src.parallel.layout import StateLayout

FORMAT = 13
"""The version of the saved format, which rises whenever the numbers of a state change meaning."""


_OUTBOX = GetAttrKey("pending"), GetAttrKey("outbox")


def describe(layout: StateLayout, opt_state) -> dict:
    """Describes a state of arrays or shapes, so that a restore can compare it with what it needs.

    Each `DecoupledMomentumState` is described under its path by the following entries, whose axes
    are numbered in the order of the mesh:

    * ``momenta``: for each leaf, the format of the momentum (``coordinates``), the shape of a
      device's shard of its parameter, the number of shards along each dimension, and the axes
      inside a worker that divide it (``cuts``, empty if the exchange has no state);
    * ``kept``: for each leaf of the exchange's state, its shape and the ``[axis, size]`` inside a
      worker along which every device has its own;
    * ``pending``: the compression of a message under way, or None without a delay;
    * ``outbox``: such leaves of the outbox that holds it;
    * ``fragments``: with fragments of local steps, of which one is under way, their number, the
      name of the leaf that tells how many were applied, and the leaves of the ``progress`` that was
      sent, by section, and of the ``displacement``.
    """
    mesh, spec_at = layout.mesh, dict(jax.tree.leaves_with_path(layout.state))
    inner = [name for name in mesh.axis_names if name in sharded_axes(layout.params)]
    sizes = [mesh.shape[name] for name in inner]

    def kept_on_devices(tree, *path) -> dict[str, dict[str, Any]]:
        kept = {}
        for inside, x in jax.tree.leaves_with_path(tree):
            place = *path, *inside
            own = [inner.index(axis) for axis in axes_of(spec_at[place]) if axis in inner]
            over = [(axis, sizes[axis]) for axis in own]
            kept[keystr(inside)] = {"name": keystr(place), "shape": x.shape, "axes": over}
        return kept

    def leaves_of(tree, *path) -> list[dict[str, Any]]:
        leaves = jax.tree.leaves_with_path(tree)
        return [{"name": keystr((*path, *inside)), "shape": x.shape} for inside, x in leaves]

    def is_local(x) -> bool:
        return isinstance(x, LocalStepsState) and isinstance(x.pending, Pending)

    states, nodes = {}, jax.tree.leaves_with_path(opt_state, is_leaf=is_local)
    in_fragments = [(path, node) for path, node in nodes if is_local(node)]
    for path, node in jax.tree.leaves_with_path(opt_state, is_leaf=shards.is_momentum):
        if not shards.is_momentum(node):
            continue
        momenta, shapes = [], iter(node.shapes)
        keeps = jax.tree.leaves((node.exchange, node.pending))
        for inside, _ in jax.tree.leaves_with_path(node.momentum):
            place = *path, GetAttrKey("momentum"), *inside
            shape = next(shapes)
            entries = [*map(axes.names, spec_at[place][1:]), *[()] * len(shape)][: len(shape)]
            cuts = [[inner.index(name) for name in names] for names in entries]
            leaf: dict[str, Any] = {"name": keystr(place), "shape": shape}
            leaf["coordinates"] = dataclasses.asdict(node.momentum_format)
            leaf["shards"] = [math.prod(sizes[axis] for axis in cut) for cut in cuts]
            leaf["cuts"] = cuts if keeps else []
            momenta.append(leaf)
        at, pending, fragments = path, node.pending, {}
        for outside, rounds in in_fragments:
            if path[: len(outside)] == outside:
                at, pending = outside, rounds.pending
                progress = pending.outbox.progress
                place = *at, *_OUTBOX, GetAttrKey("progress")
                own: dict[str, Any] = {
                    "count": rounds.weight.shape[-1],
                    "applied": keystr((*at, GetAttrKey("round"))),
                    "progress": dict(zip(progress, leaves_of(progress, *place), strict=True)),
                    "displacement": leaves_of(rounds.displacement, *at, GetAttrKey("displacement")),
                }
                fragments = {"fragments": own}
        is_pending = isinstance(pending, Pending)
        outbox = pending.outbox._replace(progress=()) if is_pending else ()
        states[keystr(path)] = {
            "momenta": momenta,
            "kept": kept_on_devices(node.exchange, *path, GetAttrKey("exchange")),
            "pending": dataclasses.asdict(pending.compression) if is_pending else None,
            "outbox": kept_on_devices(outbox, *at, *_OUTBOX),
        } | fragments
    workers = shards.num_workers(mesh, layout.axis_name or ())
    described = {"format": FORMAT, "workers": workers, "states": states}
    return json.loads(json.dumps(described, default=int))


def names_kept(described: dict) -> set[str]:
    """Returns the names of the leaves that exchanges keep, without the empty ones."""
    kept = [
        leaf
        for state in described["states"].values()
        for of in (state["kept"], state["outbox"])
        for leaf in of.values()
    ]
    return {leaf["name"] for leaf in kept if 0 not in leaf["shape"]}


def by_path(tree, part: str = "params") -> dict:
    """Returns the leaves of a tree by their paths as Orbax can save them, without empty arrays."""
    leaves = {}
    for path, x in jax.tree.leaves_with_path(tree):
        name, stored = _storable(path, x)
        try:
            _ = isinstance(stored, str) or jax.typeof(stored)
        except TypeError as error:
            where = name.removeprefix("['tree']")
            raise TypeError(
                f"{part}{where} is {x!r:.60} of {type(x)}, which cannot be stored: give arrays of "
                "numbers, random keys, numbers, strings, bytes or None."
            ) from error
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


def with_sharding(x, sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def require_same(what: str, tree, saved: dict, but=(), shapes: bool = True) -> None:
    """Raises unless digests have the leaves and shapes of a tree, ``but`` for some leaves."""

    def listed(name: str, shape) -> str:
        return f"{name} of shape {tuple(shape)}" if shapes else name

    leaves = by_path(tree, what)
    expected = {listed(name, np.shape(x)) for name, x in leaves.items() if name not in but}
    held = {listed(name, x["shape"]) for name, x in saved.items() if name not in but}
    if expected != held:
        raise ValueError(
            f"the leaves of the checkpoint's {what} are not those that are expected: it lacks "
            f"{sorted(expected - held)[:3] or 'nothing'} and holds "
            f"{sorted(held - expected)[:3] or 'nothing'} instead. Restore it with the model, the "
            "optimizer and an extra of the structure that it was saved with; for the parameters "
            "alone use demo_optax.checkpoint.load_params."
        )

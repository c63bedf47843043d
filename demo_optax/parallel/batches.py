"""Arguments of a train step: where they lie on the mesh, and how a batch is divided."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from demo_optax import axes
from demo_optax.axes import AxisName
from demo_optax.parallel import shards


def leaf_specs(batch, batch_specs, mesh: Mesh, axis_name: AxisName):
    """A PartitionSpec for every leaf of a batch, from a tree or a prefix of one.

    Where there is none, the first dimension is divided among all devices, worker after worker.

    Raises:
      ValueError: a spec names an axis that the mesh lacks; a dimension cannot be divided so.
    """
    whole = P((*axes.names(axis_name), *shards.inner_axes(mesh, axis_name)))
    given = whole if batch_specs is None else batch_specs
    specs = shards.broadcast("batch_specs", given, batch)
    leaves = zip(jax.tree.leaves_with_path(batch), jax.tree.leaves(specs), strict=True)
    for (path, x), spec in leaves:
        what = f"batch{jax.tree_util.keystr(path)}"
        _require_divisible(what, np.shape(x), spec, mesh)
        _require_rows(what, spec, axes.names(axis_name))
    return specs


def _require_rows(what: str, spec: P, worker_axes: tuple[str, ...]) -> None:
    """One dimension is divided among all workers, before it is divided inside of them, or none."""
    named = [axes.names(entry) for entry in spec if set(axes.names(entry)) & set(worker_axes)]
    if named and (len(named) > 1 or named[0][: len(worker_axes)] != worker_axes):
        raise ValueError(
            f"{what} has the spec {spec}, but among the workers a batch is divided along one "
            f"dimension, by all of their axes, {worker_axes}, in this order and before any other: "
            f"give P({worker_axes}) for rows in front, and P() for what all workers share."
        )


def _require_divisible(what: str, shape: tuple[int, ...], spec: P, mesh: Mesh) -> None:
    if missing := [name for name in shards.axes_of(spec) if name not in mesh.shape]:
        raise ValueError(
            f"batch_specs names the axis {missing[0]!r} for {what}, but the mesh has the axes "
            f"{tuple(mesh.shape)}."
        )
    for dimension, entry in enumerate(spec):
        devices = math.prod(mesh.shape[name] for name in axes.names(entry))
        if dimension >= len(shape):
            raise ValueError(
                f"{what} of shape {shape} has no dimension {dimension} to divide among {devices} "
                "devices: give arrays of rows, or say with batch_specs that all workers share it, "
                "P()."
            )
        if shape[dimension] % devices:
            raise ValueError(
                f"{what} has shape {shape}, whose dimension {dimension} cannot be divided among "
                f"{devices} devices: choose a batch size that is a multiple of their number, or "
                "say with batch_specs how the batch is divided; P() is for a leaf that all "
                "workers share."
            )


def rows_of(specs, axis_name: AxisName) -> tuple[int | None, ...]:
    """Of each leaf the dimension that is divided among the workers; None of what they share."""
    worker_axes = set(axes.names(axis_name))

    def row_dimension(spec):
        divided = [d for d, entry in enumerate(spec) if worker_axes & set(axes.names(entry))]
        return divided[0] if divided else None

    return tuple(map(row_dimension, jax.tree.leaves(specs)))


def typed(batch, mesh: Mesh, axis_name: AxisName):
    """PartitionSpecs of a traced batch, whose first dimension is divided among the workers.

    Or another, if that is divided among them already. On an Explicit mesh, where a loss sees the
    sharding of its batch, it stays as it lies inside of a worker; else nothing is said of that.
    """
    worker_axes = axes.names(axis_name)
    if AxisType.Explicit not in mesh.axis_types:
        return P(worker_axes)

    def of_type(x):
        entries = [axes.names(entry) for entry in jax.typeof(x).sharding.spec] or [()]
        (row,) = rows_of(P(*entries), axis_name)
        kept = tuple(name for name in entries[row or 0] if name not in worker_axes)
        entries[row or 0] = worker_axes + kept
        return P(*entries)

    return jax.tree.map(of_type, batch)


def divided(batch, specs, rows, mesh: Mesh, axis_name: AxisName):
    """The batch with an axis of workers in front of each leaf's rows; shared leaves unchanged."""
    workers, worker_axes = shards.num_workers(mesh, axis_name), axes.names(axis_name)

    def divide(x, spec, row):
        if row is None:
            return x
        shape = *x.shape[:row], workers, -1, *x.shape[row + 1 :]
        inner = tuple(name for name in axes.names(spec[row]) if name not in worker_axes)
        return shards.reshaped(
            x, shape, mesh, P(*spec[:row], axis_name, inner or None, *spec[row + 1 :])
        )

    structure: Any
    leaves, structure = jax.tree.flatten(batch)
    return structure.unflatten(map(divide, leaves, jax.tree.leaves(specs), rows))


def microbatches_of(batch, rows, number: int):
    """One worker's batch, cut along its rows: ``(number, ...)``; shared leaves are repeated."""

    def cut(x, row):
        if row is None:
            return jnp.broadcast_to(x, (number, *np.shape(x)))
        if x.shape[row] % number:
            raise ValueError(
                f"a part of the batch has {x.shape[row]} rows, which cannot be cut into {number} "
                "equal microbatches: choose a batch size that is a multiple of the devices that "
                "divide it x microbatches."
            )
        parts = x.reshape(*x.shape[:row], number, -1, *x.shape[row + 1 :])
        return jnp.moveaxis(parts, row, 0)

    structure: Any
    leaves, structure = jax.tree.flatten(batch)
    return structure.unflatten(map(cut, leaves, rows))


def put(mesh: Mesh, tree, specs):
    """The tree, each leaf placed as its spec says, or as that of a prefix.

    An array that lies so stays, and all others are copied: the step donates what it is given, and
    must not give away an array of the caller's, or one that is used for two leaves.
    """
    seen: set[int] = set()

    def place(x, spec):
        wanted = NamedSharding(mesh, spec)
        if isinstance(x, Tracer):
            return jax.device_put(x, wanted)
        if id(x) not in seen and _lies_as(x, wanted):
            seen.add(id(x))
            return x
        return jax.device_put(jnp.copy(x) if isinstance(x, jax.Array) else np.asarray(x), wanted)

    return jax.tree.map(place, tree, jax.tree.broadcast(specs, tree))


def _lies_as(x, wanted: NamedSharding) -> bool:
    given = getattr(x, "sharding", None)
    if not isinstance(given, NamedSharding) or given.mesh != wanted.mesh:
        return False
    return given.spec == wanted.spec or given.is_equivalent_to(wanted, np.ndim(x))


def described(tree, mesh: Mesh, specs):
    """Shapes and dtypes of a tree, and how it lies on the mesh."""

    def describe(x, spec):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(describe, tree, specs)


def require_global(batch, specs):
    """With several processes no array of one of them alone can be what all divide."""
    leaves = zip(jax.tree.leaves_with_path(batch), jax.tree.leaves(specs), strict=True)
    for (path, leaf), spec in leaves:
        if isinstance(leaf, Tracer) or jax.process_count() == 1 or not any(spec):
            continue
        if getattr(leaf, "is_fully_addressable", True):
            raise ValueError(
                f"with several processes a batch must be a global array, but batch"
                f"{jax.tree_util.keystr(path)} is of type {type(leaf).__name__} and shape "
                f"{np.shape(leaf)} of this process alone: make it of each process's own part with "
                "jax.make_array_from_process_local_data(jax.NamedSharding(mesh, spec), part)."
            )

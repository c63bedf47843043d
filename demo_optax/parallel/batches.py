"""How a batch is divided among workers, and into microbatches."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
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
    prefix = whole if batch_specs is None else batch_specs
    specs = jax.tree.broadcast(prefix, batch)
    leaves = zip(jax.tree.leaves_with_path(batch), jax.tree.leaves(specs), strict=True)
    for (path, x), spec in leaves:
        _require_divisible(f"batch{jax.tree_util.keystr(path)}", np.shape(x), spec, mesh)
    return specs


def _require_divisible(what: str, shape: tuple[int, ...], spec: P, mesh: Mesh) -> None:
    if missing := [name for name in shards.axes_of(spec) if name not in mesh.shape]:
        raise ValueError(
            f"batch_specs names the axis {missing[0]!r} for {what}, but the mesh has the axes "
            f"{tuple(mesh.shape)}."
        )
    for dimension, entry in enumerate(spec):
        devices = math.prod(mesh.shape[name] for name in axes.names(entry))
        if dimension >= len(shape) or shape[dimension] % devices:
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


def divided(batch, specs, rows, mesh: Mesh, axis_name: AxisName):
    """The batch with an axis of workers in front of each leaf's rows; shared leaves unchanged."""
    workers, worker_axes = shards.num_workers(mesh, axis_name), axes.names(axis_name)

    def divide(x, spec, row):
        if row is None:
            return x, spec
        x = x.reshape(*x.shape[:row], workers, -1, *x.shape[row + 1 :])
        inner = tuple(name for name in axes.names(spec[row]) if name not in worker_axes)
        return x, P(*spec[:row], axis_name, inner or None, *spec[row + 1 :])

    structure: Any
    leaves, structure = jax.tree.flatten(batch)
    parts = map(divide, leaves, jax.tree.leaves(specs), rows)
    return structure.unflatten([shards.lay(x, mesh, spec) for x, spec in parts])


def microbatches_of(batch, rows, number: int):
    """One worker's batch, cut along its rows: ``(number, ...)``; shared leaves are repeated."""

    def cut(x, row):
        if row is None:
            return jnp.broadcast_to(x, (number, *np.shape(x)))
        if x.shape[row] % number:
            raise ValueError(
                f"a worker's part of the batch has {x.shape[row]} rows, which cannot be cut into "
                f"{number} equal microbatches: choose a batch size that is a multiple of "
                "workers x microbatches."
            )
        parts = x.reshape(*x.shape[:row], number, -1, *x.shape[row + 1 :])
        return jnp.moveaxis(parts, row, 0)

    structure: Any
    leaves, structure = jax.tree.flatten(batch)
    return structure.unflatten(map(cut, leaves, rows))

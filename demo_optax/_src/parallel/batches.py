"""How a batch is divided: among the workers, and each worker's part into microbatches."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr

from demo_optax._src import axes
from demo_optax._src.axes import AxisName
from demo_optax._src.parallel.shards import num_workers


def row_dimensions(specs, axis_name: AxisName) -> tuple[int | None, ...]:
    """Returns the dimension of each leaf that is divided among the workers, or None."""
    worker_axes = set(axes.names(axis_name))

    def row_dimension(spec):
        divided = [d for d, entry in enumerate(spec) if worker_axes & set(axes.names(entry))]
        return divided[0] if divided else None

    return tuple(map(row_dimension, jax.tree.leaves(specs)))


def typed_batch_specs(batch, mesh: Mesh | AbstractMesh, axis_name: AxisName):
    """Returns PartitionSpecs of a traced batch whose first dimension is divided among the workers.

    If the type of a leaf already has a dimension that is divided among them, it is that dimension.
    On an Explicit mesh, where a loss sees the sharding of its batch, the specs keep the sharding
    inside a worker.
    """
    worker_axes = axes.names(axis_name)
    if AxisType.Explicit not in mesh.axis_types:
        return P(worker_axes)

    def typed_spec(x):
        if needs_device_put(x, mesh):
            return P(worker_axes)
        entries = [axes.names(entry) for entry in jax.typeof(x).sharding.spec] or [()]
        row = row_dimensions(P(*entries), axis_name)[0] or 0
        inner = tuple(name for name in entries[row] if name not in worker_axes)
        entries[row] = worker_axes + inner
        return P(*entries)

    return jax.tree.map(typed_spec, batch)


def split_workers(batch, specs, rows, mesh: Mesh | AbstractMesh, axis_name: AxisName):
    """Adds an axis of workers before each leaf's rows; undivided leaves are unchanged.

    Leaves on a different mesh are put on this one.

    Raises:
      ValueError: that mesh has a different number of devices.
    """
    workers, worker_axes = num_workers(mesh, axis_name), axes.names(axis_name)

    def split(path, x, spec, row):
        if needs_device_put(x, mesh):
            given = jax.typeof(x).sharding.mesh
            if not given.empty and given.size != mesh.size:
                raise ValueError(
                    f"batch{keystr(path)} lies on {given}, but the workers' mesh is {mesh}, which "
                    f"has {mesh.size} devices and not {given.size}: give a batch on that mesh, as "
                    f"by jax.device_put(x, jax.NamedSharding(mesh, jax.P({axis_name!r})))."
                )
            x = jax.device_put(x, NamedSharding(mesh, spec))
        if row is None:
            return x
        shape = *x.shape[:row], workers, -1, *x.shape[row + 1 :]
        inner = tuple(name for name in axes.names(spec[row]) if name not in worker_axes)
        entries = *spec[:row], axis_name, inner or None, *spec[row + 1 :]
        if isinstance(mesh, AbstractMesh):
            return x.reshape(shape)
        if AxisType.Explicit in mesh.axis_types:
            return jnp.reshape(x, shape, out_sharding=NamedSharding(mesh, P(*entries)))
        # Auto axes may divide the rest.
        free = [P.UNCONSTRAINED if entry is None else entry for entry in entries]
        free += [P.UNCONSTRAINED] * (len(shape) - len(free))
        return jax.lax.with_sharding_constraint(x.reshape(shape), NamedSharding(mesh, P(*free)))

    structure: Any = jax.tree.structure(batch)
    leaves = zip(jax.tree.leaves_with_path(batch), jax.tree.leaves(specs), rows, strict=True)
    return structure.unflatten([split(path, x, spec, row) for (path, x), spec, row in leaves])


def needs_device_put(x, mesh: Mesh | AbstractMesh) -> bool:
    """Tells whether a traced array must be put on a mesh with devices before it is used there.

    Its type names no mesh or a different one, and one of the two meshes is Explicit.
    """
    given = jax.typeof(x).sharding.mesh
    same = (given.shape_tuple, given.axis_types) == (mesh.shape_tuple, mesh.axis_types)
    is_explicit = AxisType.Explicit in (*given.axis_types, *mesh.axis_types)
    simulated = isinstance(mesh, AbstractMesh)
    return is_explicit and not (same or simulated or given.manual_axes)


def split_microbatches(batch, rows, number: int):
    """Divides one worker's batch along its rows, ``(number, ...)``; undivided leaves repeat."""

    def split(x, row):
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
    return structure.unflatten(map(split, leaves, rows))


def require_global(batch, specs) -> None:
    """Refuses arrays that belong to one process alone, if there are several processes."""
    leaves = zip(jax.tree.leaves_with_path(batch), jax.tree.leaves(specs), strict=True)
    for (path, leaf), spec in leaves:
        if isinstance(leaf, Tracer) or jax.process_count() == 1 or not any(spec):
            continue
        if getattr(leaf, "is_fully_addressable", True):
            raise ValueError(
                "with several processes a batch must be a global array, but batch"
                f"{keystr(path)} is of type {type(leaf).__name__} and shape "
                f"{np.shape(leaf)} of this process alone: make it of each process's own part with "
                "jax.make_array_from_process_local_data(jax.NamedSharding(mesh, spec), part)."
            )

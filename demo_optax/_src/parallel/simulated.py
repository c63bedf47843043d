"""Simulated workers: all on one device, along the only axis of a mesh that has no devices.

A ``jax.sharding.AbstractMesh`` stands for them. ``jax.vmap`` takes the place of ``jax.shard_map``.
"""

import functools
from collections.abc import Callable

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from demo_optax._src import axes
from demo_optax._src.axes import AxisName


def is_simulated(mesh: Mesh | AbstractMesh, axis_name: AxisName) -> bool:
    """Tells whether a mesh has no devices, so that its workers are simulated on one device.

    Raises:
      ValueError: the mesh is the abstract form of one with devices, or has other axes than the
        workers' axis.
    """
    if isinstance(mesh, Mesh):
        return False
    if mesh.abstract_device is not None:
        raise ValueError(
            f"{mesh} is the abstract form of a mesh with devices: pass that mesh itself, or "
            "jax.sharding.AbstractMesh((workers,), (name,)) to simulate workers on one device."
        )
    if len(mesh.axis_names) > 1 or mesh.axis_names != axes.names(axis_name):
        raise ValueError(
            f"the mesh {mesh} has no devices, so that its workers are simulated, and must have the "
            f"workers' axis {axis_name!r} alone, not {mesh.axis_names}: make it with "
            "jax.sharding.AbstractMesh((workers,), (name,)), or with jax.make_mesh for workers on "
            "devices."
        )
    return True


def with_devices(mesh: Mesh | AbstractMesh) -> Mesh:
    """Returns the mesh itself, or for simulated workers a mesh of JAX's default device.

    Raises:
      ValueError: the workers are simulated, but a mesh is set by ``jax.set_mesh``.
    """
    if isinstance(mesh, Mesh):
        return mesh
    if not (current := jax.sharding.get_abstract_mesh()).empty:
        raise ValueError(
            f"workers are simulated on one device, but {current} is set by jax.set_mesh: leave "
            "that out, or pass the mesh itself for workers on its devices."
        )
    default = jax.config.jax_default_device  # type: ignore[attr-defined]
    device = default if isinstance(default, jax.Device) else jax.local_devices(backend=default)[0]
    return _mesh_of_device(device, mesh.axis_names)


@functools.lru_cache
def _mesh_of_device(device, axis_names: tuple[str, ...]) -> Mesh:
    sizes, auto = (1,) * len(axis_names), (AxisType.Auto,) * len(axis_names)
    return jax.make_mesh(sizes, axis_names, auto, devices=[device])


def map_workers(
    fn: Callable, mesh: Mesh | AbstractMesh, axis_name: AxisName, in_specs, out_specs
) -> Callable:
    """Maps a function of one device by ``jax.shard_map``, for simulated workers by ``jax.vmap``.

    ``jax.vmap`` computes only once what is the same on all workers.
    """
    if not is_simulated(mesh, axis_name):
        return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs)

    def run_worker(*args):
        results = fn(*_where_own(lambda x: x[None], in_specs, args))
        return _where_own(lambda x: x[0], out_specs, results)

    in_axes, out_axes = jax.tree.map(lambda spec: 0 if spec else None, (in_specs, out_specs))
    return jax.vmap(run_worker, in_axes, out_axes, axis_name, mesh.size)


def _where_own(fn: Callable, specs, tree):
    """Applies ``fn`` to leaves whose spec, from a prefix of the tree, names the workers' axis."""
    leaves, structure = jax.tree.flatten(tree)
    leaf_specs = jax.tree.leaves(jax.tree.broadcast(specs, tree))
    pairs = zip(leaves, leaf_specs, strict=True)
    return structure.unflatten([fn(x) if spec else x for x, spec in pairs])

"""Handles meshes of workers, and the sharding of parameters and batches on them.

A mesh may have further axes (``fsdp``, ``tensor``, ``local``). The devices along these inner axes
form one worker: they hold its parameters as the PartitionSpecs say, and average their gradients.
Each device compresses its own shard, and blocks never cross shard borders (From et al.,
"DeToNATION", FlexDeMo). Copies that several devices of a worker hold must stay equal.

Simulated workers are all on one device. They are represented by a ``jax.sharding.AbstractMesh`` of
their axis alone, which has no devices, and ``jax.vmap`` replaces ``jax.shard_map``.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr

from demo_optax._src import axes, metrics
from demo_optax._src.arrays import is_key, unboxed, unwrap_keys, wrap_keys
from demo_optax._src.axes import AxisName, axes_of, broadcast_specs
from demo_optax._src.momentum import DecoupledMomentumState


@contextlib.contextmanager
def no_context_mesh() -> Iterator[None]:
    """Leaves the mesh of ``jax.set_mesh``, for arrays on other devices, also as a decorator.

    It leaves ``jax.transfer_guard`` too, since what is done outside of steps moves arrays anyway.
    """
    with jax.set_mesh(Mesh(np.empty((), object), ())), jax.transfer_guard("allow"):
        yield


@contextlib.contextmanager
def auto_axes(mesh: Mesh | AbstractMesh) -> Iterator[tuple[Mesh | AbstractMesh, Callable]]:
    """Gives a mesh of the same devices whose axes are all Auto, and a function that moves arrays.

    Inside, the types of arrays that were moved there name no axis, whatever mesh they come from.
    """
    if isinstance(mesh, AbstractMesh):
        yield mesh, lambda tree: tree
        return
    auto = Mesh(mesh.devices, mesh.axis_names)

    def move(x):
        given = jax.typeof(x).sharding
        if AxisType.Explicit not in given.mesh.axis_types or given.mesh.manual_axes:
            return x
        same = given.mesh.shape_tuple == mesh.shape_tuple
        return jax.device_put(x, NamedSharding(auto, given.spec if same else P()))

    context = contextlib.nullcontext()
    if AxisType.Explicit in (*mesh.axis_types, *jax.sharding.get_abstract_mesh().axis_types):
        context = jax.sharding.use_abstract_mesh(auto.abstract_mesh)
    with context:
        yield auto, functools.partial(jax.tree.map, move)


def num_workers(mesh: Mesh | AbstractMesh, axis_name: AxisName) -> int:
    names = axes.names(axis_name)
    if axis_name is None or any(name not in mesh.shape for name in names):
        raise ValueError(
            f"axis_name must be one or several of the mesh's axes {tuple(mesh.shape)}, not "
            f"{axis_name!r}."
        )
    return math.prod(mesh.shape[name] for name in names)


def inner_axes(mesh: Mesh | AbstractMesh, axis_name: AxisName) -> tuple[str, ...]:
    return tuple(name for name in mesh.axis_names if name not in axes.names(axis_name))


def leaf_specs(params, param_specs, mesh: Mesh | AbstractMesh, axis_name: AxisName):
    """Returns a spec for each parameter, from a prefix of specs, NamedShardings and None."""
    specs = broadcast_specs("param_specs", param_specs, unboxed(params))
    inner = inner_axes(mesh, axis_name)
    for path, spec in jax.tree.leaves_with_path(specs):
        if wrong := [name for name in axes_of(spec) if name not in inner]:
            what = "the workers' axis" if wrong[0] in axes.names(axis_name) else "not among them"
            raise ValueError(
                f"param_specs{keystr(path)} is {spec}, but parameters are sharded "
                f"inside a worker only, over the axes {inner}: {wrong[0]!r} is {what}. Leave it "
                "out, or name another axis."
            )
    structure: Any = jax.tree.structure(params)
    return structure.unflatten(jax.tree.leaves(specs))


def stacked_specs(specs, axis_name: AxisName):
    """Returns the specs of arrays that have an axis of workers in front, if there is one."""
    front = (axis_name,) if axes.names(axis_name) else ()
    return jax.tree.map(lambda spec: P(*front, *spec), specs)


def shardings(mesh: Mesh | AbstractMesh, specs):
    """Returns a NamedSharding for each spec; simulated workers divide nothing."""
    concrete, simulated = with_devices(mesh), isinstance(mesh, AbstractMesh)
    return jax.tree.map(lambda spec: NamedSharding(concrete, P() if simulated else spec), specs)


def counts(shape: tuple[int, ...], spec: P, mesh: Mesh | AbstractMesh) -> tuple[int, ...]:
    """Returns the number of shards into which a spec divides each dimension."""
    divided = [math.prod(mesh.shape[name] for name in axes.names(entry)) for entry in spec]
    return (*divided, *[1] * (len(shape) - len(divided)))


def constrain_sharding(tree, mesh: Mesh | AbstractMesh, specs):
    """Constrains each leaf to the sharding of its spec, or of a prefix, inside ``jax.jit``."""
    if isinstance(mesh, AbstractMesh):
        return tree
    place = jax.device_put  # only this works if axis types are mixed
    if set(mesh.axis_types) == {AxisType.Auto}:
        place = jax.lax.with_sharding_constraint
    elif set(mesh.axis_types) == {AxisType.Explicit}:
        place = jax.sharding.reshard  # device_put would send gradients from worker to worker
    return jax.tree.map(place, tree, jax.tree.broadcast(shardings(mesh, specs), tree))


def copies(params, mesh: Mesh | AbstractMesh, axis_name: AxisName, specs):
    """Copies the parameters for each worker that is not simulated, ``(workers, *shape)``.

    Without copies XLA may fetch a part of the replicated parameters from a different worker.
    """
    if isinstance(mesh, AbstractMesh):
        return params
    workers = num_workers(mesh, axis_name)
    copied = jax.tree.map(lambda x: jnp.broadcast_to(x, (workers, *jnp.shape(x))), params)
    return constrain_sharding(copied, mesh, stacked_specs(specs, axis_name))


def put(mesh: Mesh | AbstractMesh, tree, specs, *, donated: bool, beside=(), kept: Any = True):
    """Places each leaf as its spec says, or the spec of a prefix.

    An array that already has the sharding is returned. Otherwise an array to be ``donated`` is
    copied, since its buffer may be one that the caller keeps, unless ``kept``, a prefix of the
    tree, says that it is not. An array that occurs twice in a donated tree, or in the donated trees
    ``beside``, is copied too. Traced values of simulated workers stay where they are.
    """
    seen = set(map(id, jax.tree.leaves(beside)))

    def place(x, wanted, kept):
        if isinstance(x, Tracer):
            return x if isinstance(mesh, AbstractMesh) else jax.device_put(x, wanted)
        is_taken = id(x) in seen
        if donated:
            seen.add(id(x))
        if getattr(x, "weak_type", False):  # a step returns no weak types
            x = jnp.asarray(x, x.dtype)
        given = getattr(x, "sharding", None)
        if (
            not is_taken
            and isinstance(given, NamedSharding)
            and given.mesh == wanted.mesh
            and (given.spec == wanted.spec or given.is_equivalent_to(wanted, np.ndim(x)))
        ):
            return x
        if not isinstance(x, jax.Array):
            x = np.asarray(x)
        elif (donated and kept) or is_taken:
            x = jnp.copy(x)
        return jax.device_put(x, wanted)

    wanted = shardings(mesh, jax.tree.broadcast(specs, tree))
    return jax.tree.map(place, tree, wanted, jax.tree.broadcast(kept, tree))


def signature(mesh: Mesh | AbstractMesh, tree):
    """Returns a cheap summary of a mesh and live arrays, or None if a leaf is not concrete."""
    leaves, structure = jax.tree.flatten(tree)
    try:
        types = [(x.aval, x.sharding) for x in leaves if not x.is_deleted()]
    except (AttributeError, TypeError):
        return None
    return with_devices(mesh), structure, types, len(set(map(id, leaves)))


def batch_leaf_specs(batch, batch_specs, mesh: Mesh | AbstractMesh, axis_name: AxisName):
    """Returns a PartitionSpec for every leaf of a batch, from a tree or a prefix of one.

    Without specs, the first dimension is divided among all devices, worker by worker. With them,
    either all workers' axes divide one dimension, before any inner axis does, or they divide none.
    """
    worker_axes = axes.names(axis_name)
    all_axes = P((*worker_axes, *inner_axes(mesh, axis_name)))
    given = all_axes if batch_specs is None else batch_specs
    specs = broadcast_specs("batch_specs", given, batch)
    parts = "workers" if isinstance(mesh, AbstractMesh) else "devices"
    leaves = zip(jax.tree.leaves_with_path(batch), jax.tree.leaves(specs), strict=True)
    for (path, x), spec in leaves:
        what, shape = f"batch{keystr(path)}", np.shape(x)
        if missing := [name for name in axes_of(spec) if name not in mesh.shape]:
            raise ValueError(
                f"batch_specs names the axis {missing[0]!r} for {what}, but the mesh has the axes "
                f"{tuple(mesh.shape)}."
            )
        for dimension, devices in enumerate(counts(shape, spec, mesh)):
            if dimension >= len(shape) or shape[dimension] % devices:
                raise ValueError(
                    f"{what} has shape {shape}, whose dimension {dimension} cannot be divided "
                    f"among {devices} {parts}: say with batch_specs how the batch is divided, "
                    "where P() is for a leaf that all workers share, or choose a batch size that "
                    "is a multiple of their number."
                )
        named = [axes.names(entry) for entry in spec if set(axes.names(entry)) & set(worker_axes)]
        if named and (len(named) > 1 or named[0][: len(worker_axes)] != worker_axes):
            raise ValueError(
                f"{what} has the spec {spec}, but among the workers a batch is divided along one "
                f"dimension, by all of their axes, {worker_axes}, in this order and before any "
                f"other: give P({worker_axes}) for rows in front, and P() for what all workers "
                "share."
            )
    return specs


def row_dimension(spec, axis_name: AxisName) -> int | None:
    """Returns the dimension that a spec divides among the workers, or None."""
    worker_axes = {*axes.names(axis_name)}
    return next((i for i, entry in enumerate(spec) if worker_axes & {*axes.names(entry)}), None)


def require_global(batch, specs) -> None:
    """Refuses arrays that belong to one process alone if there are several processes."""
    if jax.process_count() == 1:
        return
    leaves = zip(jax.tree.leaves_with_path(batch), jax.tree.leaves(specs), strict=True)
    for (path, leaf), spec in leaves:
        is_local = not isinstance(leaf, Tracer) and getattr(leaf, "is_fully_addressable", True)
        if any(spec) and is_local:
            raise ValueError(
                "with several processes a batch must be a global array, but batch"
                f"{keystr(path)} is of type {type(leaf).__name__} and shape "
                f"{np.shape(leaf)} of this process alone: make it of each process's own part with "
                "jax.make_array_from_process_local_data(jax.NamedSharding(mesh, spec), part)."
            )


def made_equal(tree, specs, may_have_copies: Any, axis_name: AxisName):
    """Gives all devices of a worker the first one's values of what they hold copies of.

    Each of them exchanged its own copy. If one of their packets were rejected, the copies would
    differ from then on. ``may_have_copies`` is a bool, or one for each leaf.
    """
    copied_axes = jax.tree.map(
        lambda x, spec: axes.varying(x) - {*axes_of(spec), *axes.names(axis_name)}, tree, specs
    )
    allowed = jax.tree.broadcast(may_have_copies, tree)
    for (path, x), over, is_allowed in zip(
        jax.tree.leaves_with_path(tree), *map(jax.tree.leaves, (copied_axes, allowed)), strict=True
    ):
        if over and not is_allowed:
            raise ValueError(
                f"leaf{keystr(path)} of the optimizer state, of shape {x.shape}, differs between "
                f"the shards of a worker, over {sorted(over)}, but cannot be sharded "
                "like a parameter. Leave its parameter whole (param_specs=P()), or use an "
                "optimizer whose state has the shapes of the parameters."
            )
    return jax.tree.map(from_first, tree, copied_axes)


def from_first(x: jax.Array, copied_axes: Collection[str]) -> jax.Array:
    """Gives all devices along some axes the value of the first."""
    if not copied_axes:
        return x
    names = tuple(sorted(copied_axes))
    number = x.astype(jnp.int32) if x.dtype == bool else unwrap_keys(x)
    is_first = jax.lax.axis_index(names) == 0
    first = jax.lax.psum(jnp.where(is_first, number, 0), names)
    return wrap_keys(first, x) if is_key(x) else first.astype(x.dtype)


def merge_shard_metrics(new, old, sharded: tuple[str, ...]):
    """Merges new metrics over a worker's shards, and keeps the old ones without an exchange."""

    def combine(new, old):
        if not is_momentum(new):
            return new
        exchanged = new.count != old.count
        merged = metrics.merge_shards(new.metrics, sharded)
        chosen = [jnp.where(exchanged, x, y) for x, y in zip(merged, old.metrics, strict=True)]
        return new._replace(metrics=merged._make(chosen))

    return jax.tree.map(combine, new, old, is_leaf=is_momentum) if sharded else new


def is_momentum(x) -> bool:
    return isinstance(x, DecoupledMomentumState)


def is_simulated(mesh: Mesh | AbstractMesh, axis_name: AxisName) -> bool:
    """Tells whether a mesh has no devices, so that its workers are simulated on one device."""
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
    """Returns the mesh itself, or for simulated workers a mesh of JAX's default device."""
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
    """Maps a function as `map_devices` does, or by ``jax.vmap`` for simulated workers.

    ``jax.vmap`` computes a result that is the same on all workers only once.
    """
    if not is_simulated(mesh, axis_name):
        return map_devices(fn, mesh, axis_name, in_specs, out_specs)
    in_axes, out_axes = jax.tree.map(lambda spec: 0 if spec else None, (in_specs, out_specs))
    return jax.vmap(fn, in_axes, out_axes, axis_name, mesh.size)


def map_devices(
    fn: Callable, mesh: Mesh | AbstractMesh, axis_name: AxisName, in_specs, out_specs
) -> Callable:
    """Maps a function of one device of a worker over all of them, by ``jax.shard_map``.

    Leaves whose spec names the workers' axis are stacked, and the function takes and returns one
    worker's entries of them.
    """
    worker_axes = {*axes.names(axis_name)}

    def where_stacked(change: Callable, specs, tree):
        specs = jax.tree.broadcast(specs, tree)
        return jax.tree.map(
            lambda x, spec: change(x) if worker_axes & {*axes_of(spec)} else x, tree, specs
        )

    def on_device(*args):
        results = fn(*where_stacked(lambda x: x[0], in_specs, args))
        return where_stacked(lambda x: axes.as_varying(x, axis_name)[None], out_specs, results)

    return jax.shard_map(on_device, mesh=mesh, in_specs=in_specs, out_specs=out_specs)

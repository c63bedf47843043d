"""Copies that should be equal and are not: found by a checksum, repaired by the majority.

A bit that flips in one device's memory stays: the workers exchange gradients, not parameters,
so nothing brings its replica back to the others.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from demo_optax import axes
from demo_optax.axes import AxisName
from demo_optax.compression.bits import checksum, from_words, to_words
from demo_optax.parallel import shards


class Drift(NamedTuple):
    """One device's copy of a leaf that is not what it should be.

    Attributes:
      leaf: str, the path of the leaf in the tree, such as ``"[0]['w']"``.
      worker: int, index of the worker along ``axis_name``.
      position: ints, the device's place on the mesh: it is ``mesh.devices[position]``.
      repairable: bool, whether more than half of the copies are equal, and this is another. Where
        False, nobody can tell who is right, and every copy is listed.

    Example:
      >>> found = Drift("['w']", worker=3, position=(3, 0), repairable=True)
      >>> f"leaf {found.leaf} of worker {found.worker}"
      "leaf ['w'] of worker 3"
    """

    leaf: str
    worker: int
    position: tuple[int, ...]
    repairable: bool


class _Difference(NamedTuple):
    """A leaf whose copies differ.

    Attributes:
      number: among the leaves of the tree.
      leaf: its path.
      copies: ``(parts, copies)``, the devices that hold each part, in the order of the mesh.
      trusted: bool like ``copies``, those that are as more than half of that part's copies are.
    """

    number: int
    leaf: str
    copies: np.ndarray
    trusted: np.ndarray


def check_replicas(tree, mesh: Mesh, axis_name: AxisName = "data") -> tuple[Drift, ...]:
    """Compares, bit by bit, what should be the same on several devices.

    What should be the same is read from each array's sharding. A leaf under ``P()`` is compared
    between all devices, one under ``P("fsdp")`` between those that hold the same part of it. A leaf
    that is divided among the workers, like a momentum, belongs to one each, and is compared only
    where a worker's own devices hold copies of it.

    Each device sends four bytes a leaf in one all-gather: a checksum of the bits, which sees NaNs,
    signs of zeros and the order of elements. It differs for certain where one element does (of
    64-bit numbers: one half), and misses any other difference with a chance of 2**-32. The
    program compiles once for each tree of shapes and shardings. With several processes all call
    this together, and all get the same answer.

    Args:
      tree: arrays on the mesh of any dtype, such as ``(params, opt_state)``.
      mesh: the workers' mesh; it may have further axes, inside each replica.
      axis_name: the workers' axis, or axes.

    Returns:
      A `Drift` for each copy that differs from the majority of its peers, in the order of the
      leaves; ``()`` where all is well.

    Raises:
      ValueError: a leaf does not lie on the mesh; the mesh has no such axis.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> params = jax.device_put({"w": jnp.ones((8, 8))}, jax.NamedSharding(mesh, P()))
      >>> check_replicas(params, mesh)
      ()
    """
    return tuple(
        _drift(found.leaf, int(device), bool(found.trusted[part].any()), mesh, axis_name)
        for found in _differences(tree, mesh, axis_name)
        for part, devices in enumerate(found.copies)
        for device in devices[~found.trusted[part]]
    )


def repair_replicas(tree, mesh: Mesh, axis_name: AxisName = "data"):
    """Gives every device the copy that more than half of its peers hold.

    What `check_replicas` compares becomes equal to the last bit. Leaves that belong to one worker
    stay as they are: its momentum may hold gradients taken at damaged parameters, which training
    outlives, and which are nobody else's to replace.

    Args:
      tree: as for `check_replicas`.
      mesh: the workers' mesh.
      axis_name: the workers' axis, or axes.

    Returns:
      The tree, with the same shardings. Leaves that agree everywhere are the very same arrays.

    Raises:
      ValueError: no copy has a majority, as when two workers differ; and as `check_replicas`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> params = jax.device_put({"w": jnp.ones((8, 8))}, jax.NamedSharding(mesh, P()))
      >>> repair_replicas(params, mesh)["w"] is params["w"]
      True
    """
    differences = _differences(tree, mesh, axis_name)
    _require_majorities(differences, mesh, axis_name)
    leaves, structure = jax.tree.flatten(tree)
    for found in differences:
        first = np.argmax(found.trusted, axis=1)
        source = np.zeros(mesh.devices.shape, bool)
        source.flat[found.copies[np.arange(len(first)), first]] = True
        leaf = leaves[found.number]
        repaired = _spread(leaf, source, mesh, leaf.sharding.spec)
        # Explicit meshes write P() as P(None, None), for which a train step would compile again.
        leaves[found.number] = jax.device_put(repaired, leaf.sharding)
    return jax.tree.unflatten(structure, leaves)


def _differences(tree, mesh, axis_name) -> list[_Difference]:
    shards.num_workers(mesh, axis_name)
    leaves = [(jax.tree_util.keystr(path), x) for path, x in jax.tree.leaves_with_path(tree)]
    specs = [_spec(name, x, mesh) for name, x in leaves]
    copies = [_copies(mesh, spec) for spec in specs]
    compared = [i for i, devices in enumerate(copies) if devices.shape[1] > 1]
    if not compared:
        return []
    arrays, shared = zip(*[(leaves[i][1], specs[i]) for i in compared], strict=True)
    sums = np.asarray(_checksums(arrays, mesh, shared))
    found = []
    for i, column in zip(compared, sums.T, strict=True):
        held = column[copies[i]]
        if (held != held[:, :1]).any():
            equal = (held[:, :, None] == held[:, None]).sum(axis=-1)
            found.append(_Difference(i, leaves[i][0], copies[i], 2 * equal > held.shape[1]))
    return found


def _drift(leaf, device, repairable, mesh, axis_name) -> Drift:
    position = tuple(int(i) for i in np.unravel_index(device, mesh.devices.shape))
    places = dict(zip(mesh.axis_names, position, strict=True))
    names = axes.names(axis_name)
    worker = np.ravel_multi_index([places[n] for n in names], [mesh.shape[n] for n in names])
    return Drift(leaf, int(worker), position, repairable)


def _require_majorities(differences, mesh, axis_name):
    found = [
        f"leaf{difference.leaf} differs between the workers {sorted(workers)}"
        for difference in differences
        if (workers := _disputing(difference, mesh, axis_name))
    ]
    if found:
        raise ValueError(
            f"no copy is held by more than half of the devices that should agree: "
            f"{'; '.join(found[:3])}{f'; and {len(found) - 3} more leaves' if found[3:] else ''}. "
            "Nobody can tell which is right: restore the last checkpoint from before the drift. "
            "Checks in shorter intervals, and three workers or more, leave a majority to repair "
            "from."
        )


def _disputing(difference, mesh, axis_name) -> set[int]:
    """The workers that hold the parts of a leaf of which no copy has a majority."""
    disputed = difference.copies[~difference.trusted.any(axis=1)]
    return {_drift("", device, False, mesh, axis_name).worker for device in disputed.flat}


def _spec(name, x, mesh) -> P:
    """How a leaf lies on the mesh."""
    concrete = isinstance(x, jax.Array) and not isinstance(x, Tracer)
    sharding = x.sharding if concrete else None
    if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
        return sharding.spec
    raise ValueError(
        f"leaf{name} must be an array on the mesh {mesh}, but it is of type {type(x).__name__} "
        f"with sharding {sharding}, of which the devices hold no copies to compare. Put it there "
        "with jax.device_put(x, jax.NamedSharding(mesh, spec)), pass the arrays that "
        "demo_optax.make_train_step returned, and call this outside of jax.jit."
    )


def _copies(mesh, spec) -> np.ndarray:
    """``(parts, copies)``, for each part of an array the numbers of the devices that hold it."""
    dividing = [i for i, name in enumerate(mesh.axis_names) if name in shards.axes_of(spec)]
    parts = int(np.prod([mesh.devices.shape[i] for i in dividing]))
    devices = np.arange(mesh.size).reshape(mesh.devices.shape)
    return np.moveaxis(devices, dividing, range(len(dividing))).reshape(parts, -1)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _checksums(leaves, mesh, specs):
    """uint32 ``(devices, leaves)``, of each device's copy or part, the same everywhere."""

    def device(*leaves):
        sums = axes.as_varying([checksum(to_words(x)) for x in leaves], mesh.axis_names)
        return jax.lax.all_gather(jnp.stack(sums), mesh.axis_names, to="invarying")

    return jax.shard_map(device, mesh=mesh, in_specs=specs, out_specs=P())(*leaves)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _spread(leaf, source, mesh, spec):
    """The leaf with the bits that the ``source`` of each of its parts holds, in all copies."""
    copied = tuple(name for name in mesh.axis_names if name not in shards.axes_of(spec))

    def device(x, source):
        own = source[tuple(jax.lax.axis_index(name) for name in mesh.axis_names)]
        words = jnp.where(own, axes.as_varying(to_words(x), copied), jnp.uint32(0))
        return from_words(jax.lax.psum(words, copied), x)

    return jax.shard_map(device, mesh=mesh, in_specs=(spec, P()), out_specs=spec)(leaf, source)

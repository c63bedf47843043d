"""Finds replicas that drifted apart, by checksums, and repairs them by majority.

A bit that flips in one device's memory stays flipped: the workers exchange gradients, not
parameters, so nothing makes its replica equal to the others again.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr

from demo_optax._src import axes
from demo_optax._src.axes import AxisName, axes_of
from demo_optax._src.compression.bits import checksum, from_words, to_words
from demo_optax._src.parallel import shards


class Drift(NamedTuple):
    """Identifies a copy of a leaf that differs from the majority, or for which there is none.

    Attributes:
      leaf: str, the path of the leaf in the tree, such as ``"[0]['w']"``.
      worker: int, index of the worker along ``axis_name``.
      position: ints, the device's place on the mesh: it is ``mesh.devices[position]``.
      repairable: bool, whether more than half of the copies are equal and this one differs from
        them. If False, the right copy is unknown and every copy is listed.

    Example:
      >>> drift = Drift("['w']", worker=3, position=(3, 0), repairable=True)
      >>> f"leaf {drift.leaf} of worker {drift.worker}"
      "leaf ['w'] of worker 3"
    """

    leaf: str
    worker: int
    position: tuple[int, ...]
    repairable: bool


def check_replicas(
    tree, mesh: Mesh | AbstractMesh, axis_name: AxisName = "data"
) -> tuple[Drift, ...]:
    """Compares, bit by bit, the arrays that should be the same on several devices.

    Each array's sharding says which copies should be the same. A leaf under ``P()`` is compared
    between all devices, and one under ``P("fsdp")`` between those that hold the same part of it. A
    leaf that is divided among the workers, such as a momentum, is compared only where the devices
    of one worker hold copies of it.

    In one all-gather each device sends a checksum of four bytes for each leaf. It always differs if
    a single element does (or one half of a 64-bit number), and misses any other difference with a
    probability of 2**-32. If there are several processes, all must call this together.

    Args:
      tree: arrays on the mesh of any dtype, such as ``(params, opt_state)``. Those of simulated
        workers may lie anywhere, since there is one copy of them and no difference.
      mesh: the workers' mesh; it may have further axes, inside each replica.
      axis_name: the workers' axis, or axes.

    Returns:
      A `Drift` for each copy that differs from the majority of its peers, in the order of the
      leaves; ``()`` if all copies agree.

    Raises:
      ValueError: a leaf is not on the mesh; the mesh has no such axis.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> params = jax.device_put({"w": jnp.ones((8, 8))}, jax.NamedSharding(mesh, P()))
      >>> check_replicas(params, mesh)
      ()
    """
    differences = _differences(tree, mesh, axis_name)
    return tuple(drift for _, drifts, _ in differences for drift in drifts)


def repair_replicas(tree, mesh: Mesh | AbstractMesh, axis_name: AxisName = "data"):
    """Gives every device the copy that more than half of its peers hold.

    All copies that `check_replicas` compares become equal to the last bit. Leaves that belong to
    one worker do not change, since no other worker has a copy of them. Its momentum may hold
    gradients taken at damaged parameters, which decay as training goes on.

    The arguments are those of `check_replicas`.

    Returns:
      The tree, with the same shardings. Leaves that agree everywhere are the given arrays.

    Raises:
      ValueError: no copy has a majority, as when two workers differ; a leaf is not on the mesh; the
        mesh has no such axis.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> params = jax.device_put({"w": jnp.ones((8, 8))}, jax.NamedSharding(mesh, P()))
      >>> repair_replicas(params, mesh)["w"] is params["w"]
      True
    """
    leaves, structure = jax.tree.flatten(tree)
    differences = list(_differences(tree, mesh, axis_name))
    disputed = [drift for _, drifts, _ in differences for drift in drifts if not drift.repairable]
    lines = [
        f"leaf{leaf} differs between the workers {sorted({x.worker for x in of_leaf})}"
        for leaf, of_leaf in itertools.groupby(disputed, lambda drift: drift.leaf)
    ]
    if lines:
        raise ValueError(
            f"no copy is held by more than half of the devices that should agree: "
            f"{'; '.join(lines[:3])}{f'; and {len(lines) - 3} more leaves' if lines[3:] else ''}"
            ". It is unknown which is right: restore the last checkpoint from before the drift. "
            "Checks in shorter intervals, and three workers or more, leave a majority to repair "
            "from."
        )
    for number, _, source in differences:
        leaf = leaves[number]
        with shards.no_context_mesh():
            repaired = _spread(leaf, source, mesh, leaf.sharding.spec)
        # Explicit meshes write P() as P(None, None), for which a train step would compile again.
        leaves[number] = jax.device_put(repaired, leaf.sharding)
    return jax.tree.unflatten(structure, leaves)


def _differences(tree, mesh, axis_name) -> Iterator[tuple[int, list[Drift], np.ndarray]]:
    """Yields the number of each leaf whose copies differ, its drifts, and a mask of the mesh.

    In the mask is one device for each part of the leaf, which holds the copy of the majority.
    """
    shards.num_workers(mesh, axis_name)
    if shards.is_simulated(mesh, axis_name):  # they share the only copy
        return
    leaves = jax.tree.leaves_with_path(tree)
    specs = [_spec(keystr(path), x, mesh) for path, x in leaves]
    compared = [i for i, spec in enumerate(specs) if _holders(mesh, spec).shape[1] > 1]
    if not compared:
        return
    arrays, compared_specs = zip(*[(leaves[i][1], specs[i]) for i in compared], strict=True)
    with shards.no_context_mesh():
        sums = np.asarray(_checksums(arrays, mesh, compared_specs))
    order = [mesh.axis_names.index(name) for name in axes.names(axis_name)]
    sizes = [mesh.devices.shape[i] for i in order]
    for number, column in zip(compared, sums.T, strict=True):
        holders = _holders(mesh, specs[number])
        held = column[holders]
        equal = (held[:, :, None] == held[:, None]).sum(axis=-1)
        in_majority = 2 * equal > held.shape[1]
        if in_majority.all():
            continue
        drifts = []
        for part, copy in np.argwhere(~in_majority):
            position = np.unravel_index(holders[part, copy], mesh.devices.shape)
            worker = int(np.ravel_multi_index([position[i] for i in order], sizes))
            repairable = bool(in_majority[part].any())
            drifts.append(
                Drift(keystr(leaves[number][0]), worker, tuple(map(int, position)), repairable)
            )
        source = np.zeros(mesh.axis_sizes, bool)
        source.flat[holders[np.arange(len(held)), np.argmax(in_majority, axis=1)]] = True
        yield number, drifts, source


def _spec(name, x, mesh) -> P:
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


def _holders(mesh, spec) -> np.ndarray:
    """Returns ``(parts, copies)``, the devices that hold a copy of each part of an array."""
    dividing = [i for i, name in enumerate(mesh.axis_names) if name in axes_of(spec)]
    parts = int(np.prod([mesh.devices.shape[i] for i in dividing]))
    devices = np.arange(mesh.size).reshape(mesh.devices.shape)
    return np.moveaxis(devices, dividing, range(len(dividing))).reshape(parts, -1)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _checksums(leaves, mesh, specs):
    """Gathers the checksums of each device's copies, uint32 ``(devices, leaves)``."""

    def device(*leaves):
        sums = axes.as_varying([checksum(to_words(x)) for x in leaves], mesh.axis_names)
        return jax.lax.all_gather(jnp.stack(sums), mesh.axis_names, to="invarying")

    return jax.shard_map(device, mesh=mesh, in_specs=specs, out_specs=P())(*leaves)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _spread(leaf, source, mesh, spec):
    """Copies the bits of each part from its ``source`` device to all devices that hold the part."""
    copied = tuple(name for name in mesh.axis_names if name not in axes_of(spec))

    def device(x, source):
        is_source = source[tuple(jax.lax.axis_index(name) for name in mesh.axis_names)]
        words = jnp.where(is_source, axes.as_varying(to_words(x), copied), jnp.uint32(0))
        return from_words(jax.lax.psum(words, copied), x)

    return jax.shard_map(device, mesh=mesh, in_specs=(spec, P()), out_specs=spec)(leaf, source)

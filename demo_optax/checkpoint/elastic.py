"""Restoring on other workers, or in other blocks: momenta keep their mean and their meaning."""

import functools
import itertools
import math
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from demo_optax import axes
from demo_optax.arrays import widest
from demo_optax.axes import AxisName
from demo_optax.checkpoint.description import names_kept
from demo_optax.compression import Compression, make_plan
from demo_optax.compression.blocks import BlockGeometry
from demo_optax.compression.packet import Layout, Origin
from demo_optax.compression.plan import Part
from demo_optax.compression.settings import Coordinates
from demo_optax.exchange.delayed import decode_pending
from demo_optax.exchange.protocol import Subtraction
from demo_optax.parallel import shards

Shape = tuple[int, ...]
Placed = tuple[Coordinates, Shape]
"""Coordinates, and the number of shards along every dimension, whose blocks end where they end."""


def convert(state: dict, saved: dict, wanted: dict, description: dict, axis_name: AxisName) -> dict:
    """Arrays on the mesh, from a state in memory that other workers or settings have left.

    Args:
      state: NumPy arrays by their paths.
      saved: the description that was saved with them.
      wanted: shapes, dtypes and shardings by their paths.
      description: of the state that is wanted.
      axis_name: the workers' axis, or axes.
    """
    state = state | put_back_pending(state, saved)
    state |= divide_residuals(state, saved, wanted, description)
    before, now, kept = _momenta(saved), _momenta(description), names_kept(description)
    workers, worker_axes = description["workers"], set(axes.names(axis_name))
    carried_over, result = [], {}
    for name, target in wanted.items():
        x = np.asarray(state[name])
        differs = worker_axes & set(shards.axes_of(target.sharding.spec))
        stacked = bool(differs) and x.ndim > 0 and name not in kept
        if stacked and len(x) > workers:
            x = redistribute(x, workers)
        old, new = before.get(name), now.get(name)
        if old and new and old["shape"] == new["shape"] and not _same_numbers(name, old, new):
            shape, step = tuple(new["shape"]), max(int(state[new["count"]]) - 1, 0)
            tensors = [to_parameters(own, _placed(old), shape, step) for own in x]
            x = np.stack([from_parameters(tensor, _placed(new), step) for tensor in tensors])
            carried_over.append(name)
        if stacked:
            x = redistribute(x, workers)
        if x.shape != target.shape:
            raise ValueError(
                f"the optimizer state{name} was saved with shape {state[name].shape}, which does "
                f"not fit the {target.shape} that is needed. Restore it with the model and the "
                "optimizer that it was saved with."
            )
        x = x.astype(target.dtype)
        result[name] = jax.make_array_from_callback(x.shape, target.sharding, x.__getitem__)
    if carried_over:
        warnings.warn(
            f"{len(carried_over)} momenta (first: {carried_over[0]}) were saved in other blocks, "
            "under another transform or in other shards than the optimizer has now. They were "
            "carried over through parameter space, equal but for rounding.",
            stacklevel=3,
        )
    return result


def _momenta(described: dict) -> dict[str, dict]:
    return {leaf["name"]: leaf for of in described["states"].values() for leaf in of["momenta"]}


def _placed(momentum: dict) -> Placed:
    return Coordinates(**momentum["coordinates"]), tuple(momentum["shards"])


def put_back_pending(state: dict, saved: dict) -> dict:
    """The momenta, with the messages put back that left them in packets that are still pending."""
    found: dict[str, np.ndarray] = {}
    for path, described in saved["states"].items():
        if not described["pending"]:
            continue
        kept = described["kept"]
        packets, factors = (
            np.asarray(state[kept[of]["name"]]) for of in (".pending", ".subtracted")
        )
        sizes = dict(kept[".pending"]["axes"])
        devices = math.prod(sizes.values())
        packets = packets.reshape(len(packets), devices, -1, packets.shape[2])
        decode = _decoder(described["pending"], owners=packets.shape[2])
        step = np.int32(state[f"{path}.count"]) - 1
        for worker, device in np.ndindex(packets.shape[:2]):
            own = decode(packets[worker, device], np.int32(worker), step, factors[worker])
            place = dict(zip(sizes, np.unravel_index(device, [*sizes.values()]), strict=True))
            for leaf, x in zip(described["momenta"], own, strict=True):
                name, where = leaf["name"], [worker]
                for cut, size in zip(leaf["cuts"], x.shape, strict=False):
                    number = functools.reduce(lambda n, i: n * sizes[i] + place[i], cut, 0)
                    where.append(slice(number * size, (number + 1) * size))
                if x.size:  # devices that hold the same also put back the same
                    old = state[name][tuple(where)]
                    found.setdefault(name, state[name].astype(widest(old.dtype)))
                    found[name][tuple(where)] = old + np.asarray(x)
    return found


def _decoder(packet_format: dict, owners: int) -> Callable:
    """What a device's pending packets add to the momenta of its tensors, as these are stored."""
    shapes = tuple(map(tuple, packet_format["shapes"]))
    plan = make_plan(Compression(**packet_format["compression"]), shapes)
    layout = Layout(plan.sections, packet_format["extra"], packet_format["multiple"]).share(owners)

    def decode(packets, worker, step, factor):
        numbers = worker * owners + jnp.arange(owners, dtype=jnp.int32)
        message = decode_pending(plan, layout, packets, Origin(step, numbers))
        taken = Subtraction(message, [jnp.full((s.blocks, 1), -factor) for s in plan.sections])
        stored = []
        for part, rows in zip(plan.parts, plan.rows_per_part(taken.rows()), strict=True):
            zeros = part.momenta([jnp.zeros(x.stored_shape) for x in part.geometries])
            stored += part.stored(part.subtract(zeros, rows, step, delay=0))
        return stored

    return jax.jit(decode)


def divide_residuals(state: dict, saved: dict, wanted: dict, description: dict) -> dict:
    """What exchanges keep, for the workers that are wanted.

    Divides what owners have yet to send among the new owners. All else starts from zero.
    """
    names = names_kept(description)
    result = {name: np.zeros(wanted[name].shape, wanted[name].dtype) for name in names}
    for path, before in saved["states"].items():
        now = description["states"].get(path, {"kept": {}})
        for key, leaf in before["kept"].items():
            x = np.asarray(state[leaf["name"]])
            if key in (".pending", ".subtracted") or not x.any():
                continue
            if key not in now["kept"]:
                raise ValueError(
                    f"the optimizer state{leaf['name']} of the checkpoint holds what owners have "
                    "yet to send, but the optimizer's exchange has no owners: restore it with "
                    "exchange=TwoPhase(...)."
                )
            to = now["kept"][key]
            if before["momenta"] != now["momenta"] or leaf["axes"] != to["axes"]:
                raise ValueError(
                    f"the optimizer state{leaf['name']} of the checkpoint holds what owners have "
                    "yet to send, in blocks or shards that are not those of the optimizer now: "
                    "restore it with the old ones."
                )
            parts = math.prod(size for _, size in leaf["axes"])
            result[to["name"]] = divide_among(x, wanted[to["name"]].shape, parts)
    return result


def divide_among(x: np.ndarray, shape: Shape, parts: int) -> np.ndarray:
    """Divides the rows of owners' shares ``(owners, parts * share, n)`` among other owners.

    Each of the parts, a device inside every owner, keeps its own rows. Zeros pad the last shares.

    Example:
      >>> divide_among(np.array([[[1], [2]], [[3], [0]]]), (3, 1, 1), parts=1).ravel().tolist()
      [1, 2, 3]
    """
    rows = np.swapaxes(x.reshape(len(x), parts, -1, x.shape[2]), 0, 1)
    rows = rows.reshape(parts, -1, x.shape[2])
    share = shape[1] // parts
    missing = max(shape[0] * share - rows.shape[1], 0)
    rows = np.pad(rows, ((0, 0), (0, missing), (0, 0)))[:, : shape[0] * share]
    return np.swapaxes(rows.reshape(parts, shape[0], share, -1), 0, 1).reshape(shape)


def redistribute(x: np.ndarray, workers: int) -> np.ndarray:
    """Entries ``(workers, ...)`` for another number of workers; their mean stays the same.

    Where the old number is a multiple of the new, neighbours are merged to their mean. Where the
    new is a multiple of the old, entries are copied. Otherwise all workers get the mean of all. Of
    integers, such as counters, the first of those that are merged is kept.

    Example:
      >>> redistribute(np.array([1.0, 3.0, 5.0, 7.0]), 2)
      array([2., 6.])
      >>> redistribute(np.array([1.0, 3.0]), 4)
      array([1., 1., 3., 3.])
      >>> redistribute(np.array([1.0, 3.0]), 3)
      array([2., 2., 2.])
    """
    groups = math.gcd(len(x), workers)
    if groups not in (len(x), workers):
        groups = 1
    grouped = x.reshape(groups, -1, *x.shape[1:])
    if jnp.issubdtype(x.dtype, jnp.floating):
        merged = grouped.mean(axis=1, dtype=np.float64).astype(x.dtype)
    else:
        merged = grouped[:, 0]
    return np.repeat(merged, workers // groups, axis=0)


def _same_numbers(name: str, old: dict, new: dict) -> bool:
    """Whether a tensor's coefficients are the same numbers as they were described before."""
    if old["shape"] is None and old["coordinates"] != new["coordinates"]:
        raise ValueError(
            f"the momentum{name} of the checkpoint is of tensors that optax.flatten made one, with "
            f"{old['coordinates']}, and cannot be carried over to {new['coordinates']}: restore it "
            "with the old settings."
        )

    def blocks(momentum: dict):
        coordinates, counts = _placed(momentum)
        geometry = coordinates.geometry(_shard_shape(tuple(momentum["shape"]), counts))
        starts = [
            [shard * dim + start for shard in range(count) for start in range(0, dim, side)]
            for dim, side, count in zip(geometry.shape, geometry.sides, counts, strict=True)
        ]
        return coordinates.transform, coordinates.seed, geometry.sides, starts

    return old["shape"] is None or blocks(old) == blocks(new)


def to_parameters(coefficients: np.ndarray, placed: Placed, shape: Shape, step: int) -> np.ndarray:
    """The tensor ``shape`` whose coefficients these are, after the update of ``step``."""
    part, result = _part_of_shard(placed, shape), np.zeros(shape, np.float32)
    for stored, elements in _shards(part.geometries[0], placed[1]):
        pieces = part.momenta([jnp.asarray(coefficients[stored], jnp.float32)])
        blocks = part.inverse(list(map(jnp.concatenate, pieces)), jnp.int32(step))
        (result[elements],) = part.to_tensors(blocks)
    return result


def from_parameters(tensor: np.ndarray, placed: Placed, step: int) -> np.ndarray:
    """Its coefficients, float32, as they stand after the update of ``step``."""
    part, counts = _part_of_shard(placed, tensor.shape), placed[1]
    (geometry,) = part.geometries
    grid = [n * count for n, count in zip(geometry.grid, counts, strict=True)]
    result = np.zeros((*grid, geometry.block_size), np.float32)
    for stored, elements in _shards(geometry, counts):
        blocks = part.blocks([jnp.asarray(tensor[elements], jnp.float32)])
        coefficients = part.transform(blocks, jnp.int32(step))
        pieces = part.split([x.reshape(len(x), -1) for x in coefficients])
        (result[stored],) = part.stored(pieces)
    return result


def _part_of_shard(placed: Placed, shape: Shape) -> Part:
    coordinates, counts = placed
    (part,) = make_plan(Compression(**vars(coordinates)), (_shard_shape(shape, counts),)).parts
    return part


def _shard_shape(shape: Shape, counts: Shape) -> Shape:
    return tuple(dim // count for dim, count in zip(shape, counts, strict=True))


def _shards(geometry: BlockGeometry, counts: Shape):
    """For each shard where its coefficients are stored, and where the tensor has its elements."""
    for place in itertools.product(*map(range, counts)):
        yield tuple(
            tuple(slice(i * n, (i + 1) * n) for i, n in zip(place, sizes, strict=True))
            for sizes in (geometry.grid, geometry.shape)
        )

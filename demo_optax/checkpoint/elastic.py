"""Restoring on other workers, or in other blocks: momenta keep their mean and their meaning."""

import itertools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from demo_optax import axes
from demo_optax.axes import AxisName
from demo_optax.compression import Compression, Plan, make_plan
from demo_optax.compression.blocks import BlockGeometry
from demo_optax.compression.settings import Coordinates
from demo_optax.parallel import shards

Shape = tuple[int, ...]
Placed = tuple[Coordinates, Shape]
"""Coordinates, and the number of shards along every dimension, whose blocks end where they end."""


def converted(
    state: dict, saved: dict, wanted: dict, description: dict, axis_name: AxisName
) -> dict:
    """Arrays on the mesh, from a state in memory that other workers or settings have left.

    Args:
      state: NumPy arrays by their paths.
      saved: the description that was saved with them.
      wanted: shapes, dtypes and shardings by their paths.
      description: of the state that is wanted.
      axis_name: the workers' axis, or axes.
    """
    carried_over, result = [], {}
    workers = description["workers"]
    state = {**state, **exchanged_before(state, saved, wanted, description)}
    for name, target in wanted.items():
        x = np.asarray(state[name])
        if name in description["beside"]:
            result[name] = jax.make_array_from_callback(x.shape, target.sharding, x.__getitem__)
            continue
        differs = set(axes.names(axis_name)) & set(shards.axes_of(target.sharding.spec))
        if differs and x.ndim and len(x) > workers:
            x = redistribute(x, workers)
        old, new = (momenta["momenta"].get(name) for momenta in (saved, description))
        if old and new and old["shape"] == new["shape"] is None:
            _require_same_coordinates(name, old, new)
        elif old and new and old["shape"] == new["shape"]:
            before, after, shape = _coordinates(old), _coordinates(new), tuple(new["shape"])
            if not same_numbers(before, after, shape):
                step = max(int(state[new["count"]]) - 1, 0)
                tensors = [to_parameters(own, before, shape, step) for own in x]
                x = np.stack([from_parameters(tensor, after, step) for tensor in tensors])
                carried_over.append(name)
        if differs and x.ndim:
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


def _require_same_coordinates(name: str, old: dict, new: dict) -> None:
    if old["coordinates"] != new["coordinates"]:
        raise ValueError(
            f"the momentum{name} of the checkpoint is of tensors that optax.flatten made one, with "
            f"{old['coordinates']}, and cannot be carried over to {new['coordinates']}: restore it "
            "with the old settings."
        )


def exchanged_before(state: dict, saved: dict, wanted: dict, description: dict) -> dict:
    """What an exchange keeps beside the momenta, for the workers that are wanted.

    Packets that wait are left out: the momenta still hold what they carry. What owners have yet to
    send is divided among the new owners.
    """
    before, now = saved.get("beside", {}), description["beside"]
    owed = [name for name in before if not name.endswith(".waiting") and np.any(state[name])]
    if lost := [name for name in owed if name not in now]:
        raise ValueError(
            f"the optimizer state{lost[0]} of the checkpoint holds what owners have yet to send, "
            "but the optimizer knows no owners: restore it with exchange='two-phase'."
        )
    if owed and (
        any(saved[of] != description[of] for of in ("momenta", "devices"))
        or any(before[name]["parts"] != now[name]["parts"] for name in owed)
    ):
        raise ValueError(
            f"the optimizer state{owed[0]} of the checkpoint holds what owners have yet to send, "
            "in blocks or shards that are not those of the optimizer now: restore it with the old "
            "ones."
        )
    result = {name: np.zeros(wanted[name].shape, wanted[name].dtype) for name in now}
    for name in owed:
        parts = before[name]["parts"]
        result[name] = divided_anew(np.asarray(state[name]), wanted[name].shape, parts)
    return result


def divided_anew(x: np.ndarray, shape: Shape, parts: int) -> np.ndarray:
    """Rows of owners' shares ``(owners, parts * share, n)`` for other owners.

    Those of each shard inside the owners follow one another; what is over holds zeros.

    Example:
      >>> divided_anew(np.array([[[1], [2]], [[3], [0]]]), (3, 1, 1), parts=1).ravel().tolist()
      [1, 2, 3]
    """
    rows = np.swapaxes(x.reshape(len(x), parts, -1, x.shape[2]), 0, 1)
    rows = rows.reshape(parts, -1, x.shape[2])
    share = shape[1] // parts
    missing = max(shape[0] * share - rows.shape[1], 0)
    rows = np.pad(rows, ((0, 0), (0, missing), (0, 0)))[:, : shape[0] * share]
    return np.swapaxes(rows.reshape(parts, shape[0], share, -1), 0, 1).reshape(shape)


def _coordinates(momentum: dict) -> Placed:
    return Coordinates(**momentum["coordinates"]), tuple(momentum["shards"])


def redistribute(x: np.ndarray, workers: int) -> np.ndarray:
    """Entries ``(workers, ...)`` for another number of workers; their mean stays the same.

    Neighbours are merged by their mean where the old number is a multiple of the new, entries are
    copied where it is the other way round, and otherwise all get the mean of all. Of what is not
    floating, such as counters, the first of those that are merged is kept.

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


def same_numbers(one: Placed, other: Placed, shape: Shape) -> bool:
    """Whether a tensor's coefficients are the same numbers in both coordinates."""

    def blocks(coordinates, counts):
        geometry = coordinates.geometry(_part(shape, counts))
        starts = [
            [shard * dim + start for shard in range(count) for start in range(0, dim, side)]
            for dim, side, count in zip(geometry.shape, geometry.sides, counts, strict=True)
        ]
        return coordinates.transform, coordinates.seed, geometry.sides, starts

    return blocks(*one) == blocks(*other)


def to_parameters(coefficients: np.ndarray, placed: Placed, shape: Shape, step: int) -> np.ndarray:
    """The tensor ``shape`` whose coefficients these are, after the update of ``step``."""
    plan, counts = _plan_of_a_shard(placed, shape), placed[1]
    result = np.zeros(shape, np.float32)
    for stored, elements in _shards(plan.geometries[0], counts):
        part = jnp.asarray(coefficients[stored], jnp.float32)
        (result[elements],) = plan.tensors(plan.inverse(plan.stacked([part]), jnp.int32(step)))
    return result


def from_parameters(tensor: np.ndarray, placed: Placed, step: int) -> np.ndarray:
    """Its coefficients, float32, as they stand after the update of ``step``."""
    plan, counts = _plan_of_a_shard(placed, tensor.shape), placed[1]
    (geometry,) = plan.geometries
    grid = [n * count for n, count in zip(geometry.grid, counts, strict=True)]
    result = np.zeros((*grid, geometry.block_size), np.float32)
    for stored, elements in _shards(geometry, counts):
        blocks = plan.blocks([jnp.asarray(tensor[elements], jnp.float32)])
        coefficients, _ = plan.transform(blocks, jnp.int32(step))
        (result[stored],) = plan.stored([x.reshape(len(x), -1) for x in coefficients])
    return result


def _plan_of_a_shard(placed: Placed, shape: Shape) -> Plan:
    coordinates, counts = placed
    return make_plan(Compression(**vars(coordinates)), (_part(shape, counts),))


def _part(shape: Shape, counts: Shape) -> Shape:
    """The shape of one of the shards."""
    return tuple(dim // count for dim, count in zip(shape, counts, strict=True))


def _shards(geometry: BlockGeometry, counts: Shape):
    """For each shard where its coefficients are stored, and where the tensor has its elements."""
    for place in itertools.product(*map(range, counts)):
        yield tuple(
            tuple(slice(i * n, (i + 1) * n) for i, n in zip(place, sizes, strict=True))
            for sizes in (geometry.grid, geometry.shape)
        )

"""Restoring on other workers, or with another exchange: momenta keep their mean."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from demo_optax._src import axes
from demo_optax._src.arrays import widest
from demo_optax._src.axes import AxisName
from demo_optax._src.checkpoint.description import names_kept
from demo_optax._src.compression import Compression, make_plan
from demo_optax._src.compression.settings import MomentumFormat
from demo_optax._src.compression.transforms import is_redrawn
from demo_optax._src.exchange.delayed import message_of
from demo_optax._src.exchange.protocol import Subtraction
from demo_optax._src.specs import axes_of


def convert(state: dict, saved: dict, wanted: dict, description: dict, axis_name: AxisName) -> dict:
    """The arrays that a mesh needs, from a state that other workers or settings left in memory.

    Args:
      state: NumPy arrays by their paths.
      saved: the description that was saved with them.
      wanted: shapes, dtypes and shardings by their paths.
      description: the description of the state that is wanted.
      axis_name: the workers' axis, or axes.
    """
    state = state | put_back_pending(state, saved)
    state |= divide_residuals(state, saved, wanted, description)
    before, now, in_exchange = _momenta(saved), _momenta(description), names_kept(description)
    workers, worker_axes = description["workers"], set(axes.names(axis_name))
    result = {}
    for name, target in wanted.items():
        x = np.asarray(state[name])
        differs = worker_axes & set(axes_of(target.sharding.spec))
        if name in before and name in now:
            _require_same_blocks(name, before[name], now[name])
        if differs and x.ndim > 0 and name not in in_exchange:
            x = redistribute(x, workers)
        if x.shape != target.shape:
            raise ValueError(
                f"the optimizer state{name} was saved with shape {state[name].shape}, which does "
                f"not fit the {target.shape} that is needed. Restore it with the model and the "
                "optimizer that it was saved with."
            )
        x = x.astype(target.dtype)
        result[name] = jax.make_array_from_callback(x.shape, target.sharding, x.__getitem__)
    return result


def _momenta(described: dict) -> dict[str, dict]:
    return {x["name"]: x for state in described["states"].values() for x in state["momenta"]}


def put_back_pending(state: dict, saved: dict) -> dict:
    """The momenta of delayed exchanges, with the messages put back that are still under way."""
    result: dict[str, np.ndarray] = {}
    for path, described in saved["states"].items():
        if not described["pending"]:
            continue
        momenta, kept = described["momenta"], described["kept"]
        added_by = _adder(described["pending"], tuple(tuple(leaf["shape"]) for leaf in momenta))
        factors, step = state[kept[".factor"]["name"]], np.int32(state[f"{path}.count"]) - 1
        sizes = dict(kept[".packets"]["axes"])
        for worker, device in np.ndindex(len(factors), math.prod(sizes.values())):
            message = [_of_device(state, kept[key], worker, device) for key in _MESSAGE]
            added = added_by(*message, step, factors[worker])
            place = dict(zip(sizes, np.unravel_index(device, [*sizes.values()]), strict=True))
            for leaf, x in zip(momenta, added, strict=True):
                name, shard = leaf["name"], [worker]
                for cut, size in zip(leaf["cuts"], x.shape, strict=False):
                    number = functools.reduce(lambda n, axis: n * sizes[axis] + place[axis], cut, 0)
                    shard.append(slice(number * size, (number + 1) * size))
                if x.size:  # devices that hold the same also put back the same
                    old = state[name][tuple(shard)]
                    result.setdefault(name, state[name].astype(widest(old.dtype)))
                    result[name][tuple(shard)] = old + np.asarray(x)
    return result


_MESSAGE = ".positions", ".values"
_UNDER_WAY = (".packets", ".factor", *_MESSAGE)


def _of_device(state: dict, leaf: dict, worker: int, device: int) -> np.ndarray:
    """A device's part of a vector that an exchange keeps; empty ones are not stored."""
    x = np.asarray(state.get(leaf["name"], np.zeros(leaf["shape"], np.int32)))[worker]
    devices = math.prod(size for _, size in leaf["axes"])  # 1 where all hold the same
    return np.split(x, devices)[device % devices]


def _adder(compression: dict, shapes: tuple[tuple[int, ...], ...]) -> Callable:
    """What a message under way adds to a device's stored momenta."""
    plan = make_plan(Compression(**compression), shapes)

    def added(positions, values, step, factor):
        message = message_of(plan, positions, values)
        taken = Subtraction.uniform(plan, message, -factor)
        stored = []
        for part, rows in zip(plan.parts, plan.split_rows(taken.rows()), strict=True):
            zeros = part.unpack([jnp.zeros(x.stored_shape) for x in part.geometries])
            stored += part.pack(part.subtract(zeros, rows, step, delay=0))
        return stored

    return jax.jit(added)


def divide_residuals(state: dict, saved: dict, wanted: dict, description: dict) -> dict:
    """What exchanges keep: owners' residuals, divided among the new owners; zeros for the rest."""
    names = names_kept(description)
    result = {name: np.zeros(wanted[name].shape, wanted[name].dtype) for name in names}
    for path, before in saved["states"].items():
        now = description["states"].get(path, {"kept": {}})
        for key, leaf in before["kept"].items():
            target = now["kept"].get(key)
            if key in _UNDER_WAY or not (x := np.asarray(state[leaf["name"]])).any():
                continue
            same_blocks = target and before["momenta"] == now["momenta"]
            has, remedy = "an exchange without owners", "exchange=TwoPhase(...)"
            if target:
                has, remedy = "other blocks or shards", "the old blocks and shards"
            if same_blocks and bool(before["pending"]) != bool(now["pending"]):
                # A delayed residual is in the basis of the step before.
                redrawn = (is_redrawn(x["coordinates"]["transform"]) for x in now["momenta"])
                same_blocks = not any(redrawn)
                has, remedy = "another delay and a random transform", "the old delay"
            if not same_blocks or leaf["axes"] != target["axes"]:
                raise ValueError(
                    f"the optimizer state{leaf['name']} of the checkpoint holds what owners have "
                    f"yet to send, but the optimizer now has {has}: restore it with {remedy}."
                )
            parts = math.prod(size for _, size in leaf["axes"])
            result[target["name"]] = divide_among(x, wanted[target["name"]].shape, parts)
    return result


def divide_among(x: np.ndarray, shape: tuple[int, ...], parts: int) -> np.ndarray:
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
    """Entries ``(workers, ...)`` for a different number of workers; their mean stays the same.

    Where the old number is a multiple of the new, neighbours are merged to their mean. Where the
    new is a multiple of the old, entries are copied. Otherwise all workers get the mean of all. Of
    integers, such as counters, the largest of those that are merged is kept.

    Example:
      >>> redistribute(np.array([1.0, 3.0, 5.0, 7.0]), 2)
      array([2., 6.])
      >>> redistribute(np.array([1.0, 3.0]), 4)
      array([1., 1., 3., 3.])
      >>> redistribute(np.array([3, 400]), 1)
      array([400])
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
        merged = grouped.max(axis=1)
    return np.repeat(merged, workers // groups, axis=0)


def _require_same_blocks(name: str, old: dict, new: dict) -> None:
    """Refuses a momentum whose coefficients mean something else than those that are needed."""

    def meaning(momentum: dict):
        momentum_format = MomentumFormat(**momentum["coordinates"])
        geometry = momentum_format.geometry(tuple(momentum["shape"]))
        # The number of shards matters only where they end in smaller blocks.
        dims = zip(geometry.shape, geometry.sides, momentum["shards"], strict=True)
        uneven = [count if dim % side else 1 for dim, side, count in dims]
        return momentum_format.transform, momentum_format.seed, geometry.sides, uneven

    if meaning(old) != meaning(new):
        raise ValueError(
            f"the momentum{name} of the checkpoint is stored as {old['coordinates']} in "
            f"{old['shards']} shards, but the optimizer has {new['coordinates']} in "
            f"{new['shards']}: restore it with the old transform, block_side, block_rule and "
            "shards, or take the parameters alone with demo_optax.checkpoint.load_params and "
            "begin with a new state."
        )

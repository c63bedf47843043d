"""Restoring on other workers or with another exchange, so that momenta keep their mean."""

import dataclasses
import math
from collections.abc import Collection
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from demo_optax._src.arrays import widest
from demo_optax._src.checkpoint.description import by_path, from_paths, names_kept
from demo_optax._src.compression import Compression, make_plan
from demo_optax._src.compression.packet import Message
from demo_optax._src.compression.settings import MomentumFormat
from demo_optax._src.compression.transforms import is_redrawn
from demo_optax._src.exchange.protocol import divide
from demo_optax._src.fragments import spread


def convert(state: dict, saved: dict, like, description: dict, stacked: Collection[str]):
    """Converts a state that other workers or settings saved into the one that a mesh needs.

    ``state`` holds NumPy arrays by their paths, as ``saved`` describes them. ``like`` is a tree of
    shapes, dtypes and shardings, as described by ``description``. The leaves ``stacked`` have an
    axis of workers, which the shardings of simulated workers do not name.
    """
    _require_same_fragments(saved, description)
    wanted = by_path(like)
    state = state | put_back_pending(state, saved)
    state |= divide_residuals(state, saved, wanted, description)
    before, now = (
        {x["name"]: x for one in described["states"].values() for x in one["momenta"]}
        for described in (saved, description)
    )
    in_exchange = names_kept(description)
    result = {}
    for name, target in wanted.items():
        x = np.asarray(state[name])
        if name in before and name in now:
            _require_same_blocks(name, before[name], now[name])
        if name in stacked and x.ndim > 0 and name not in in_exchange:
            x = redistribute(x, description["workers"])
        if x.shape != target.shape:
            raise ValueError(
                f"the optimizer state{name} was saved with shape {state[name].shape}, which does "
                f"not fit the {target.shape} that is needed. Restore it with the model and the "
                "optimizer that it was saved with."
            )
        x = x.astype(target.dtype)
        result[name] = jax.make_array_from_callback(x.shape, target.sharding, x.__getitem__)
    return from_paths(result, like)


def put_back_pending(state: dict, saved: dict) -> dict:
    """Returns the momenta of delayed exchanges with the messages under way added back.

    With fragments, a message belongs to the rows of its fragment, and its progress leaves the
    displacement, as it does when a result comes.
    """
    result: dict[str, np.ndarray] = {}
    for path, described in saved["states"].items():
        if not described["pending"]:
            continue
        momenta, outbox = described["momenta"], described["outbox"]
        fragments = described.get("fragments")
        count = fragments["count"] if fragments else 1
        fragment = int(state[fragments["applied"]]) % count if fragments else 0
        shapes = tuple(
            (leaf["shape"][0] // count, *leaf["shape"][1:]) if fragments else tuple(leaf["shape"])
            for leaf in momenta
        )
        compression = Compression(**described["pending"])
        stacked = dataclasses.replace(compression, block_rule="stack")
        plan = make_plan(stacked if fragments else compression, shapes)
        factors = state[outbox[".factor"]["name"]]
        sizes = dict(outbox[".packets"]["axes"])
        for worker, *device in np.ndindex(len(factors), *sizes.values()):
            place = dict(zip(sizes, device, strict=True))
            flat = [
                _of_device(state, outbox[f".message.{name}"], worker, place)
                for name in Message._fields
            ]
            added = _added(plan, flat, factors[worker])
            for leaf, x in zip(momenta, added, strict=True):
                name, shard = leaf["name"], [worker]
                for cut, size in zip(leaf["cuts"], x.shape, strict=False):
                    number = 0
                    for axis in cut:
                        number = number * sizes[axis] + place[axis]
                    shard.append(slice(number * size, (number + 1) * size))
                if fragments:  # whose parameters are whole
                    shard[1:] = [slice(fragment * len(x), (fragment + 1) * len(x))]
                if x.size:  # devices with equal shards put back equal messages
                    old = state[name][tuple(shard)]
                    result.setdefault(name, state[name].astype(widest(old.dtype)))
                    result[name][tuple(shard)] = old + np.asarray(x)
        if fragments:
            result[f"{path}.sent"] = np.zeros_like(state[f"{path}.sent"])
            result |= _without_progress(state, fragments, compression, fragment)
    return result


def _without_progress(state: dict, fragments: dict, compression: Compression, number: int) -> dict:
    """Returns displacements without the progress of a fragment under way, and zeros for that."""
    places = [leaf for leaf in fragments["displacement"] if 0 not in leaf["shape"]]
    displacement = [np.asarray(state[leaf["name"]]) for leaf in places]
    progress = {
        section: np.asarray(state[leaf["name"]]) for section, leaf in fragments["progress"].items()
    }
    count = fragments["count"]
    gradient = jax.vmap(lambda x, like: spread(compression, count, x, like, jnp.int32(number)))(
        progress, displacement
    )
    moved = [d + np.asarray(g) for d, g in zip(displacement, gradient, strict=True)]
    left = dict(zip((leaf["name"] for leaf in places), moved, strict=True))
    return left | {
        leaf["name"]: np.zeros_like(progress[section])
        for section, leaf in fragments["progress"].items()
    }


def _of_device(state: dict, leaf: dict, worker: int, place: dict[int, int]) -> np.ndarray:
    """Returns a device's part of an array of its outbox. Empty arrays are not stored."""
    x = np.asarray(state.get(leaf["name"], np.zeros(leaf["shape"], np.int32)))[worker]
    parts = x.reshape(*(size for _, size in leaf["axes"]), -1)
    return parts[tuple(place[axis] for axis, _ in leaf["axes"])]


@partial(jax.jit, static_argnums=0)
def _added(plan, flat: list, factor) -> list:
    """Returns the arrays that a message under way adds to a device's stored momenta."""
    pairs = zip(*divide(plan, flat), strict=True)
    rows = [(p, v, jnp.full((len(v), 1), factor)) for p, v in pairs]
    stored = []
    for part, own in zip(plan.parts, plan.split_rows(rows), strict=True):
        zeros = part.unpack([jnp.zeros(x.stored_shape) for x in part.geometries])
        stored += part.pack(part.add(zeros, own))
    return stored


def divide_residuals(state: dict, saved: dict, wanted: dict, description: dict) -> dict:
    """Returns the state of exchanges, with residuals for the new owners and zeros elsewhere."""
    names = names_kept(description)
    result = {name: np.zeros(wanted[name].shape, wanted[name].dtype) for name in names}
    for path, before in saved["states"].items():
        now = description["states"].get(path, {"kept": {}})
        for key, leaf in before["kept"].items():
            target = now["kept"].get(key)
            if not (x := np.asarray(state.get(leaf["name"], 0))).any():
                continue
            # A delayed residual is in the basis of the previous step.
            transforms = [leaf["coordinates"]["transform"] for leaf in before["momenta"]]
            redrawn = any(map(is_redrawn, transforms))
            if target is None:
                has, remedy = "an exchange without owners", "exchange=TwoPhase(...)"
            elif before["momenta"] != now["momenta"] or leaf["axes"] != target["axes"]:
                has, remedy = "other blocks or shards", "the old blocks and shards"
            elif redrawn and bool(before["pending"]) != bool(now["pending"]):
                has, remedy = "another delay and a random transform", "the old delay"
            else:
                parts = math.prod(size for _, size in leaf["axes"])
                parts *= before.get("fragments", {"count": 1})["count"]
                result[target["name"]] = divide_among(x, wanted[target["name"]].shape, parts)
                continue
            raise ValueError(
                f"the optimizer state{leaf['name']} of the checkpoint holds what owners have "
                f"yet to send, but the optimizer now has {has}: restore it with {remedy}."
            )
    return result


def divide_among(x: np.ndarray, shape: tuple[int, ...], parts: int) -> np.ndarray:
    """Divides the rows of owners' shares ``(owners, parts * share, n)`` among other owners.

    Each part, which is a device inside every owner or a fragment, keeps its own rows. Zeros pad
    the last shares.
    """
    owners, width, n = shape
    old = x.reshape(len(x), parts, -1, n).swapaxes(0, 1).reshape(parts, -1, n)
    new = np.zeros((parts, owners * width // parts, n), x.dtype)
    kept = min(old.shape[1], new.shape[1])
    new[:, :kept] = old[:, :kept]
    return new.reshape(parts, owners, -1, n).swapaxes(0, 1).reshape(shape)


def redistribute(x: np.ndarray, workers: int) -> np.ndarray:
    """Redistributes entries ``(workers, ...)`` among other workers so that their mean is kept.

    If the old number of workers is a multiple of the new, neighbours are merged into their mean. If
    the new number is a multiple of the old, entries are copied. Otherwise all workers get the mean
    of all. When integers such as counters are merged, the largest is kept.

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


def _require_same_fragments(saved: dict, description: dict) -> None:
    for name, old in saved["states"].items():
        new = description["states"].get(name, {})
        old, new = (state.get("fragments", {}).get("count") for state in (old, new))
        if old != new:
            raise ValueError(
                f"the optimizer state{name} of the checkpoint has fragments={old}, but the "
                f"optimizer has fragments={new}: restore it with local_steps(..., "
                f"fragments={old}), or take the parameters alone with "
                "demo_optax.checkpoint.load_params and begin with a new state."
            )


def _require_same_blocks(name: str, old: dict, new: dict) -> None:
    meanings = []
    for momentum in (old, new):
        held = MomentumFormat(**momentum["coordinates"])
        geometry = held.geometry(tuple(momentum["shape"]))
        # The number of shards matters only where they end in smaller blocks.
        dims = zip(geometry.shape, geometry.sides, momentum["shards"], strict=True)
        uneven = [count if dim % side else 1 for dim, side, count in dims]
        meanings.append((held.transform, held.seed, geometry.sides, uneven))
    if meanings[0] != meanings[1]:
        raise ValueError(
            f"the momentum{name} of the checkpoint is stored as {old['coordinates']} in "
            f"{old['shards']} shards, but the optimizer has {new['coordinates']} in "
            f"{new['shards']}: restore it with the old transform, block_side, block_rule and "
            "shards, or take the parameters alone with demo_optax.checkpoint.load_params and "
            "begin with a new state."
        )

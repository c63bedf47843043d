"""Restoring on other workers or with another exchange, so that momenta keep their mean."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from demo_optax._src.arrays import is_key, key_impl, widest
from demo_optax._src.checkpoint.description import (
    by_path,
    from_paths,
    is_of_exchange,
    require_same,
    storable,
)
from demo_optax._src.compression import Compression, Plan, make_plan
from demo_optax._src.compression.packet import Message
from demo_optax._src.compression.settings import MomentumFormat, settings_of_text
from demo_optax._src.exchange.protocol import divide
from demo_optax._src.fragments import Cutter
from demo_optax._src.parallel.worker_axis import with_own_keys


def convert(state: dict, saved: dict, like, needed: dict):
    """Converts a state that other workers or settings saved into the one that a mesh needs.

    ``state`` holds NumPy arrays by their paths, as ``saved`` describes them. ``like`` is a tree of
    shapes, dtypes and shardings, as ``needed`` describes it. What exchanges keep goes back into the
    momenta.
    """
    targets, leaves = by_path(like, "opt_state"), jax.tree.leaves_with_path(like)
    impls = {storable(*leaf)[0]: key_impl(leaf[1]) for leaf in leaves if is_key(leaf[1])}
    kept = {k for x in (saved, needed) for k in x["over"] if is_of_exchange(k, x)}
    require_same("opt_state", targets.keys() - kept, state.keys() - kept)
    _require_same_format(saved, needed)
    state, result = state | put_back(state, saved), {}
    for name, target in targets.items():
        x = np.zeros(target.shape) if is_of_exchange(name, needed) else np.asarray(state[name])
        if name in needed["words"]:
            x = np.full(target.shape, needed["words"][name], np.uint32)
        if needed["over"][name][:1] == [[0]]:
            workers = needed["sizes"][0]
            x = _keys(x, workers, impls[name]) if name in impls else redistribute(x, workers)
        if x.shape != target.shape:
            raise ValueError(
                f"the optimizer state{name} was saved with shape {state[name].shape}, which does "
                f"not fit the {target.shape} that is needed. Restore it with the model, the "
                "optimizer and the fragments that it was saved with."
            )
        x = x.astype(target.dtype)
        result[name] = jax.make_array_from_callback(x.shape, target.sharding, x.__getitem__)
    return from_paths(result, like)


def put_back(state: dict, saved: dict) -> dict:
    """Returns momenta with the messages under way, and what owners have yet to send.

    With fragments, a message belongs to the rows of its fragment, and its progress leaves the
    displacement, as it does when a result comes.
    """
    result: dict[str, np.ndarray] = {}
    empty = np.zeros(0, np.int32)  # which is not stored
    state = dict.fromkeys(saved["over"], empty) | state
    for path, own in saved["states"].items():
        holder, shapes = own["holder"], tuple(map(tuple, own["shapes"]))
        settings = Compression(**_settings_of(own["compression"] or own["format"]))
        count, number, step = 1, 0, state[f"{path}.count"] - 1
        if holder not in (None, path):
            count = state[f"{holder}.weight"].shape[-1]
            number = int(state[f"{holder}.round"]) % count
            step = state[f"{path}.count"][number]
            result[f"{path}.sent"] = np.zeros_like(state[f"{path}.sent"])
            result |= _without_progress(state, holder, Cutter(settings, count), number)
            settings = dataclasses.replace(settings, block_rule="stack")
        plan, outbox = make_plan(settings, shapes), f"{holder}.pending.outbox"
        momenta = [k for k, x in state.items() if k.startswith(f"{path}.momentum") and x.size]
        for device in np.ndindex(*saved["sizes"]):
            place = functools.partial(_place, state, saved, device)
            messages: list[Any] = [None] * count
            if holder is not None:
                names = [f"{outbox}.message.{name}" for name in Message._fields]
                *flat, factor = [state[k][place(k)].ravel() for k in (*names, f"{outbox}.factor")]
                messages[number] = flat, factor, step
            owed = _owed(plan, state, f"{path}.exchange.residual", place, count)
            added = list(map(functools.partial(_added, plan), owed, messages))
            parts = [np.concatenate(x) for x in zip(*added, strict=True) if x[0].size]
            for name, part in zip(momenta, parts, strict=True):
                old, at = state[name], place(name)
                new = result.setdefault(name, old.astype(widest(old.dtype)))
                # Devices with equal shards put back equal messages.
                new[at] = old[at] + part.reshape(old[at].shape)
    return result


def _settings_of(saved: dict) -> dict:
    """Returns the settings of a description; this process has made those of the user's own."""
    settings = dict(saved)
    for name in [name for name, setting in saved.items() if isinstance(setting, dict)]:
        settings[name] = settings_of_text(saved[name]["own"])
        if settings[name] is None:
            raise ValueError(
                f"the checkpoint was saved with {name}={saved[name]['own']}, which this process "
                "has not made, and the restore needs it because workers or settings changed: "
                f"call demo_optax.Compression({name}=...) with it before you restore."
            )
    return settings


def _without_progress(state: dict, holder: str, cutter: Cutter, number: int) -> dict:
    """Returns displacements without the progress of a fragment under way."""

    def leaves(prefix: str) -> dict:
        found = {name: x for name, x in state.items() if name.startswith(f"{holder}.{prefix}")}
        return {name: x for name, x in found.items() if x.size}

    displacement, at = leaves("displacement"), jnp.int32(number)

    def moved(displacement: list, progress: list):
        left = jax.tree.map(jnp.add, cutter.cut(displacement, at), tuple(progress))
        return cutter.put(left, displacement, at)

    progress = list(leaves("pending.outbox.progress").values())
    new = jax.vmap(moved)(list(displacement.values()), progress)
    return dict(zip(displacement, map(np.asarray, new), strict=True))


def _place(state: dict, saved: dict, device: tuple[int, ...], name: str) -> tuple[slice, ...]:
    """Returns the index of a device's shard of a leaf."""
    index = []
    for length, axes in zip(state[name].shape, saved["over"][name], strict=False):
        number, shards = 0, 1
        for axis in axes:
            size = saved["sizes"][axis]
            number, shards = number * size + device[axis], shards * size
        index.append(slice(number * length // shards, (number + 1) * length // shards))
    return tuple(index)


def _owed(plan: Plan, state: dict, prefix: str, place: Callable, count: int) -> list[tuple]:
    """Returns what all owners have yet to send of a device's blocks, by fragment and section."""
    sections = []
    for number, section in enumerate(plan.sections):
        name, n = f"{prefix}[{number}]", section.selector.n
        owed = np.zeros((count, section.num_blocks, n), np.float32)
        if name in state:
            of_owners = state[name][:, *place(name)[1:]]
            shares = of_owners.reshape(len(of_owners), count, -1, n).swapaxes(0, 1)
            owed = shares.reshape(count, -1, n)[:, : section.num_blocks]
        sections.append(owed)
    return list(zip(*sections, strict=True)) or [()] * count


@functools.partial(jax.jit, static_argnums=0)
def _added(plan: Plan, owed: tuple, message: Any) -> list:
    """Returns the arrays that residuals and a message add to a device's stored momenta."""
    sections = list(owed)
    if message:
        flat, factor, step = message
        sections = []
        for x, sides, section, positions, values in zip(
            owed, plan.sides, plan.sections, *divide(plan, flat), strict=True
        ):
            # The residual of what is under way is in the basis of the previous step.
            x = plan.compression.momentum_format.advance(x, sides, step)
            sections.append(section.selector.add(x, positions, factor.reshape(1, 1) * values))
    rows, added = zip(plan.parts, plan.split_rows(sections), strict=True), []
    for part, own in rows:
        added += part.pack(own, [jnp.zeros(x.stored_shape) for x in part.geometries])
    return added


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


def _keys(x: np.ndarray, workers: int, impl: str) -> np.ndarray:
    """Returns the data of random keys for another number of workers, all of them different."""
    if len(x) == workers:
        return x
    numbers = np.arange(workers)
    keys = jax.random.wrap_key_data(jnp.asarray(x[numbers % len(x)]), impl=impl)
    return np.asarray(jax.random.key_data(jax.vmap(with_own_keys)(jnp.asarray(numbers), keys)))


def _require_same_format(saved: dict, needed: dict) -> None:
    """Refuses momenta of another transform, or that are cut into other blocks."""
    for path, new in needed["states"].items():
        pairs = zip(_meaning(saved["states"][path]), _meaning(new), strict=True)
        for held, expected in pairs:
            if held != expected:
                raise ValueError(
                    f"the optimizer state{path}.momentum of the checkpoint is stored as {held}, "
                    f"but the optimizer has {expected}: restore it with the old transform, "
                    "block_side, block_rule and shards, or take the parameters alone with "
                    "demo_optax.checkpoint.load_params and begin with a new state."
                )


def _meaning(described: dict) -> Iterator[Any]:
    """Yields the format of momenta, and how each of a device's tensors is cut into blocks."""
    yield {name: described["format"][name] for name in ("transform", "seed")}
    momentum_format = MomentumFormat(**_settings_of(described["format"]))
    for shape in described["shapes"]:
        own = momentum_format.geometry(tuple(shape))
        dims = zip(own.shape, own.sides, strict=True)
        yield [f"{dim if dim % side else 'whole'} in blocks of {side}" for dim, side in dims]

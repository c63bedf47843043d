"""Snapshots of what all workers share, from which newcomers start; and what is swept after them.

A snapshot is one object in NumPy's format. Orbax writes checkpoints with all processes of a job at
once, but a snapshot is written by one process, in a thread, while the others train.
"""

import hashlib
import io
import uuid
import zipfile
from typing import Any

import jax.numpy as jnp
import numpy as np

from demo_optax._src.swarm import records
from demo_optax._src.swarm.records import Damaged, SnapshotIndex
from demo_optax._src.swarm.slots import SwarmError
from demo_optax._src.swarm.store import Store, StoreError

KEPT = 2
TRIES = 5


def digest(leaves: list[np.ndarray]) -> str:
    """SHA-256 of arrays, with their dtypes and shapes."""
    found = hashlib.sha256()
    for x in leaves:
        found.update(f"{x.dtype}{x.shape}".encode())
        found.update(_as_bytes(x).data)
    return found.hexdigest()


def write(store: Store, step: int, leaves: list[np.ndarray]) -> SnapshotIndex:
    """Writes a snapshot; the first that is complete stands."""
    contents = io.BytesIO()
    np.savez(contents, *map(_as_bytes, leaves))
    data, key = contents.getvalue(), f"snapshots/{step:08d}/{uuid.uuid4().hex}.npz"
    store.put(key, data)
    index = SnapshotIndex(step, key, records.sha256(data), digest(leaves))
    store.create(records.snapshot_key(step), records.to_json(index))
    found = read_index(store, step)
    if found is None:
        raise StoreError(
            f"the snapshot of step {step} vanished from the store after it was written: give the "
            "run a place that nothing else deletes from."
        )
    return found


def read_index(store: Store, step: int) -> SnapshotIndex | None:
    """The index of a snapshot; None where there is none.

    Raises:
      Damaged: it is not one that a worker writes.
    """
    data = store.get(records.snapshot_key(step))
    if data is None:
        return None
    found = records.read_index(data)
    if found.step != step:
        raise Damaged(f"the snapshot of step {step} must not say that it is of {found.step}.")
    return found


def read(store: Store, index: SnapshotIndex, like: list[Any]) -> list[np.ndarray]:
    """Reads a snapshot.

    Raises:
      Damaged: it is not what was written, or its arrays do not have the shapes and dtypes of
        ``like``.
    """
    data = store.get(index.file)
    if data is None or records.sha256(data) != index.sha256:
        raise Damaged(f"{index.file!r} must hold the bytes of its hash")
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as found:
            leaves = [_from_bytes(found[f"arr_{n}"], x) for n, x in enumerate(like)]
            complete = len(found.files) == len(like)
    except (ValueError, KeyError, OSError, zipfile.BadZipFile) as error:
        raise Damaged(f"{index.file!r} cannot be read ({error}): use the run's model") from error
    if not complete or digest(leaves) != index.digest:
        raise Damaged(f"{index.file!r} is of another model or dtype: use those of the run")
    return leaves


def read_newest(
    store: Store, initial: list[np.ndarray], like: list[Any]
) -> tuple[int, list[np.ndarray]]:
    """The newest snapshot that can be read, and its step; the first of all is made of ``initial``.

    Raises:
      SwarmError: none can be read.
    """
    if not steps_of(store):
        write(store, 0, initial)
    failures: list[str] = []
    for _ in range(TRIES):  # one that is swept while it is read has a successor
        for step in reversed(steps_of(store)):
            try:
                index = read_index(store, step)
                if index is not None:
                    return step, read(store, index, like)
            except Damaged as error:
                failures.append(str(error))
    raise SwarmError(
        f"no snapshot can be read: {'; '.join(dict.fromkeys(failures))}. Make sure that model and "
        "optimizer are those of the run, or start a new run in another place."
    )


def steps_of(store: Store) -> list[int]:
    """The steps of all complete snapshots, in order."""
    names = [x for x in store.names("snapshots") if x.endswith(".json") and "/" not in x]
    return sorted(step for step in map(records.step_of, names) if step is not None)


def sweep(store: Store) -> None:
    """Deletes the packets and snapshots that no newcomer needs any more."""
    kept = steps_of(store)[-KEPT:]
    if len(kept) < KEPT:
        return
    # With a delay, what was exchanged in the step before a snapshot is still to be applied.
    for folder, first in ("packets", kept[0] - 1), ("snapshots", kept[0]):
        steps = {name: records.step_of(name) for name in store.names(folder)}
        old = [name for name, step in steps.items() if step is not None and step < first]
        # indices first: whoever finds one should find its files
        old.sort(key=lambda name: not name.endswith(".json"))
        store.delete([f"{folder}/{name}" for name in old])


def is_finite(leaves: list[np.ndarray]) -> bool:
    """Whether all numbers are finite."""
    floating = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
    return all(bool(np.isfinite(x.astype(np.float32)).all()) for x in floating)


def relative_difference(own: list[np.ndarray], other: list[np.ndarray]) -> float:
    """Norm of the difference of floating arrays, relative to that of the others."""
    difference, norm = 0.0, 0.0
    for x, y in zip(own, other, strict=True):
        if jnp.issubdtype(y.dtype, jnp.floating):
            wide = y.astype(np.float64)
            norm += float(np.sum(wide**2))
            difference += float(np.sum((x.astype(np.float64) - wide) ** 2))
    return float(np.sqrt(difference / norm)) if norm else 0.0


def _as_bytes(x: np.ndarray) -> np.ndarray:
    """Its memory: NumPy's format knows no bfloat16."""
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def _from_bytes(x: np.ndarray, like: Any) -> np.ndarray:
    return x.view(like.dtype).reshape(like.shape)

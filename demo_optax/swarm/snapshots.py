"""Snapshots of what all workers share, from which newcomers start; and what is swept after them."""

import hashlib
import pathlib
import tempfile
import threading
import uuid
from typing import Any

import jax.numpy as jnp
import numpy as np

from demo_optax.checkpoint.reading import epath, orbax
from demo_optax.swarm import records
from demo_optax.swarm.records import Damaged, SnapshotIndex
from demo_optax.swarm.slots import SwarmError
from demo_optax.swarm.store import Store, StoreError, in_parallel

KEPT = 2
TRIES = 5

_NAME = "shared"
_ONE_AT_A_TIME = threading.Lock()  # Orbax is not made for several threads of a process


def digest(leaves: list[np.ndarray]) -> str:
    """SHA-256 of arrays, with their dtypes and shapes."""
    found = hashlib.sha256()
    for x in leaves:
        found.update(f"{x.dtype}{x.shape}".encode())
        found.update(np.ascontiguousarray(x).view(np.uint8).data if x.size else b"")
    return found.hexdigest()


def write(store: Store, step: int, leaves: list[np.ndarray]) -> SnapshotIndex:
    """Writes a snapshot by Orbax; the first that is complete stands."""
    folder = f"snapshots/{step:08d}/{uuid.uuid4().hex}"
    with tempfile.TemporaryDirectory() as temporary:
        path = pathlib.Path(temporary) / "snapshot"
        with _ONE_AT_A_TIME:
            orbax.save_checkpointables(epath.Path(path), {_NAME: _named(leaves)})
        files = {str(x.relative_to(path)): x for x in sorted(path.rglob("*")) if x.is_file()}
        contents = {name: x.read_bytes() for name, x in files.items()}
        in_parallel(lambda name: store.put(f"{folder}/{name}", contents[name]), contents)
    hashes = {name: records.sha256(data) for name, data in contents.items()}
    index = SnapshotIndex(step, folder, hashes, digest(leaves))
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
      Damaged: its files are not those that were written, or its arrays do not have the shapes and
        dtypes of ``like``.
    """
    with tempfile.TemporaryDirectory() as temporary:
        path = pathlib.Path(temporary) / "snapshot"

        def fetch(name: str) -> None:
            data = store.get(f"{index.folder}/{name}")
            if data is None or records.sha256(data) != index.files[name]:
                raise Damaged(
                    f"{name!r} of the snapshot of step {index.step} is missing or damaged"
                )
            target = path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)

        in_parallel(fetch, index.files)
        wanted = _named([np.empty(x.shape, x.dtype) for x in like])
        try:
            with _ONE_AT_A_TIME:
                found: Any = orbax.load_checkpointables(epath.Path(path), {_NAME: wanted})[_NAME]
        except (ValueError, KeyError, OSError) as error:
            raise Damaged(
                f"the snapshot of step {index.step} cannot be read ({error}): use the run's model"
            ) from error
    leaves = [np.asarray(found[name]) for name in wanted]
    if [(x.shape, x.dtype) for x in leaves] != [(x.shape, x.dtype) for x in like]:
        raise Damaged(f"the snapshot of step {index.step} is of another model: use that of the run")
    if digest(leaves) != index.digest:
        raise Damaged(f"the snapshot of step {index.step} must hold the bits that were written")
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


def relative_difference(own: list[np.ndarray], other: list[np.ndarray]) -> float:
    """Norm of the difference of floating arrays, relative to that of the others."""
    pairs = [
        (x.astype(np.float64), y.astype(np.float64))
        for x, y in zip(own, other, strict=True)
        if jnp.issubdtype(y.dtype, jnp.floating)
    ]
    difference = sum(float(np.sum((x - y) ** 2)) for x, y in pairs)
    norm = sum(float(np.sum(y**2)) for _, y in pairs)
    return float(np.sqrt(difference / norm)) if norm else 0.0


def _named(leaves: list[Any]) -> dict[str, Any]:
    return {f"{number:06d}": x for number, x in enumerate(leaves)}

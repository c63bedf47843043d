"""Snapshots of what all workers share, from which newcomers start; and what is swept after them."""

import hashlib
import pathlib
import tempfile
import threading
import uuid
from typing import Any

import numpy as np

from demo_optax.checkpoint.reading import orbax
from demo_optax.swarm import records
from demo_optax.swarm.records import Damaged, SnapshotIndex
from demo_optax.swarm.store import Store, StoreError, in_parallel

KEPT = 2

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
            orbax.save_checkpointables(path, {_NAME: _named(leaves)})
        files = {str(x.relative_to(path)): x for x in sorted(path.rglob("*")) if x.is_file()}
        contents = {name: x.read_bytes() for name, x in files.items()}
        in_parallel(lambda name: store.put(f"{folder}/{name}", contents[name]), contents)
    hashes = {name: records.sha256(data) for name, data in contents.items()}
    index = SnapshotIndex(step, folder, hashes, digest(leaves))
    store.create(records.snapshot_key(step), records.to_json(index))
    found = read_index(store, step)
    if found is None:
        raise StoreError(
            f"the snapshot of step {step} vanished from the store after it was written"
        )
    return found


def read_index(store: Store, step: int) -> SnapshotIndex | None:
    """The index of a snapshot; None where there is none."""
    data = store.get(records.snapshot_key(step))
    return None if data is None else records.from_json(SnapshotIndex, data)


def read(store: Store, index: SnapshotIndex, like: list[Any]) -> list[np.ndarray]:
    """Reads a snapshot.

    Raises:
      Damaged: its files are not those that were written, or its arrays do not have the shapes and
        dtypes of ``like``.
    """
    with tempfile.TemporaryDirectory() as temporary:
        path = pathlib.Path(temporary) / "snapshot"

        def fetch(name: str) -> None:
            target = (path / name).resolve()
            data = store.get(f"{index.folder}/{name}")
            if data is None or records.sha256(data) != index.files[name]:
                raise Damaged(f"the snapshot of step {index.step}: {name} is missing or damaged")
            if not target.is_relative_to(path.resolve()):
                raise Damaged(f"the snapshot of step {index.step} names a file outside: {name}")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)

        in_parallel(fetch, index.files)
        wanted = _named([np.empty(x.shape, x.dtype) for x in like])
        try:
            with _ONE_AT_A_TIME:
                found: Any = orbax.load_checkpointables(path, {_NAME: wanted})[_NAME]
        except (ValueError, KeyError, OSError) as error:
            raise Damaged(
                f"the snapshot of step {index.step} cannot be read: {error}. Is it of this model?"
            ) from error
    leaves = [np.asarray(found[name]) for name in wanted]
    if [(x.shape, x.dtype) for x in leaves] != [(x.shape, x.dtype) for x in like]:
        raise Damaged(f"the snapshot of step {index.step} is of another model or optimizer")
    if digest(leaves) != index.digest:
        raise Damaged(f"the snapshot of step {index.step} holds other bits than were written")
    return leaves


def steps_of(store: Store) -> list[int]:
    """The steps of all complete snapshots, in order."""
    names = [x for x in store.names("snapshots") if x.endswith(".json") and "/" not in x]
    return sorted(int(x.removesuffix(".json")) for x in names if x[:-5].isdecimal())


def sweep(store: Store) -> None:
    """Deletes the packets and snapshots that no newcomer needs any more."""
    kept = steps_of(store)[-KEPT:]
    if len(kept) == KEPT:
        # With a delay, what was exchanged in the step before a snapshot is still to be applied.
        for folder, first in ("packets", kept[0] - 1), ("snapshots", kept[0]):
            old = [name for name in store.names(folder) if int(name[:8]) < first]
            store.delete([f"{folder}/{name}" for name in sorted(old, reverse=True)])


def _named(leaves: list[Any]) -> dict[str, Any]:
    return {f"{number:06d}": x for number, x in enumerate(leaves)}

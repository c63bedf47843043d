"""Snapshots of the state that all workers share, from which new workers start.

A snapshot holds the bytes of the arrays, one after another and without a header: whoever reads it
has the same model, which says what they are. It is divided into objects of a few megabytes, so that
packets need not wait long for a slow link. Orbax writes a checkpoint with all processes of a job,
but a single process writes a snapshot, in a thread, while the others train.
"""

import contextlib
import functools
import hashlib
import itertools
import math
import re
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any

import jax.numpy as jnp
import numpy as np

from demo_optax._src.swarm import records
from demo_optax._src.swarm.members_only import MembersOnly
from demo_optax._src.swarm.records import Damaged, Manifest, MemberId, SnapshotIndex, SwarmError
from demo_optax._src.swarm.slots import have_left
from demo_optax._src.swarm.store import PART, Store, in_parallel

Leaves = list[np.ndarray]
Turn = tuple[int, int | None]
"""The step of a snapshot, and the slot of its writer where each slot has one of its own."""

NUM_KEPT = 2
READ_TRIES = 5

_INDEX = re.compile(r"(\d{8,10})(?:\.(\d{3,9}))?\.json")


def digest(leaves: Leaves) -> str:
    """Returns the SHA-256 digest of arrays, with their dtypes and shapes."""
    sha256 = hashlib.sha256()
    for x in leaves:
        sha256.update(f"{x.dtype}{x.shape}".encode())
        sha256.update(_as_bytes(x).data)
    return sha256.hexdigest()


def write(
    store: Store,
    step: int,
    leaves: Leaves,
    before_part: Callable[[], object] = lambda: None,
    slot: int | None = None,
    **chain: Any,
) -> SnapshotIndex | None:
    """Writes a snapshot; the first one of a step stands. Returns its index if it is this one.

    With members only each slot has one of its own in a step. Its index has the `head`, `since` and
    `roster` that it follows.
    """
    data = b"".join(_as_bytes(x).data for x in leaves)
    folder = records.step_key("snapshots", step)
    file, starts = f"{folder}/{uuid.uuid4().hex}", range(0, len(data), PART)
    index = SnapshotIndex(step, file, len(starts), digest(leaves), **chain)
    for number, start in enumerate(starts):
        before_part()
        store.put(_part_key(file, number), data[start : start + PART])
    key, written = _index_key(step, slot), records.encode(index)
    if not store.create(key, written) and store.get(key) != written:  # the answer may be lost
        return None
    attest(store, index)
    return index


def attest(store: Store, index: SnapshotIndex) -> None:
    """Signs a snapshot, in a run for members only."""
    if isinstance(store, MembersOnly):
        store.put(
            _attested_key(index.step, store.slot), records.sha256(records.encode(index)).encode()
        )


def _attested_key(step: int, slot: int) -> str:
    return f"{records.step_key('attested', step)}/{slot:03d}"


def attesters(store: MembersOnly, index: SnapshotIndex) -> set[int]:
    """Returns the slots of the members, under the newest roster too, that have signed it."""
    signed = records.sha256(records.encode(index)).encode()
    slots, members = store.members(index.step), store.roster.members()
    present = [slot for slot, public in slots.items() if public == members.get(slot)]
    found = in_parallel(lambda slot: store.get(_attested_key(index.step, slot)), present)
    return {slot for slot, data in zip(present, found, strict=True) if data == signed}


def is_attested(
    store: Store, index: SnapshotIndex, known: Mapping[int, frozenset[MemberId]] | None = None
) -> bool:
    """Tells whether most of the members that counted since the last one have signed a snapshot.

    Those counted are taken from the manifests, which must lead to the snapshot, over at least as
    many steps as lie between two snapshots. No more of them are read than it takes to see that too
    few have signed. The index of a run's first snapshot is enough, as is any in an open run.
    """
    if not isinstance(store, MembersOnly):
        return True
    is_short = index.since > 0 and index.step - index.since < store.every
    if is_short or not store.knows(index.step, index.roster):
        return False
    if index.step == 0 or not (signed := attesters(store, index)):
        return index.step == 0
    unseen, awaited = set(store.roster.members()), set()
    with contextlib.suppress(Damaged):
        for _, counted in counted_before(store, index, known):
            awaited |= {x for x in counted if x[0] in unseen - signed}
            unseen -= {slot for slot, _ in counted}
            if len(awaited) >= len(signed):
                awaited -= have_left(store, awaited)  # they sign nothing any more
                if len(awaited) >= len(signed):
                    return False
        return len(signed - unseen) > len(awaited)
    return False


def counted_before(
    store: MembersOnly,
    index: SnapshotIndex,
    known: Mapping[int, frozenset[MemberId]] | None = None,
) -> Iterator[tuple[int, frozenset[MemberId]]]:
    """Yields the steps since the last attested snapshot, from the last one on, and who counted."""
    steps = range(index.step - 1, index.since - 1, -1)
    if known and all(step in known for step in steps):
        yield from ((step, known[step]) for step in steps)
    else:
        yield from ((manifest.step, manifest.members) for manifest in chain_before(store, index))


def chain_before(store: MembersOnly, index: SnapshotIndex) -> Iterator[Manifest]:
    """Yields the manifests that lead to a snapshot, from the last one to that of `index.since`.

    Raises `Damaged` where one does not.
    """
    steps, found = range(index.step - 1, index.since - 1, -1), []
    head, lost = index.head, index.lost
    for number, step in enumerate(steps):
        if not found:  # ever more at a time, up to 64
            ahead = steps[number : 2 * number + 1][:64]
            found = in_parallel(store.get, [records.step_key("manifests", x) for x in ahead])
        manifest = records.decode(Manifest, found.pop(0))
        signed = (store.is_signed(step, x, manifest.previous) for x in manifest.packets)
        follows = manifest.step == step and records.head(manifest, lost) == head
        if not follows or len(manifest.packets) < store.min_workers or not all(signed):
            raise Damaged(f"{index.file!r} must follow from the manifest of step {step}.")
        head, lost = manifest.previous, manifest.lost
        yield manifest


def _index_key(step: int, slot: int | None) -> str:
    of_slot = "" if slot is None else f".{slot:03d}"
    return f"{records.step_key('snapshots', step)}{of_slot}.json"


def _part_key(file: str, number: int) -> str:
    return f"{file}/{number:06d}"


def read_index(store: Store, step: int, slot: int | None = None) -> SnapshotIndex | None:
    """Reads the index of a snapshot, if there is one; raises `Damaged` where it is not valid."""
    key = _index_key(step, slot)
    data = store.get(key)
    if data is None:
        return None
    index = records.decode(SnapshotIndex, data, key)
    if index.step != step or not index.file.startswith(f"{records.step_key('snapshots', step)}/"):
        raise Damaged(f"{key} must not name the file {index.file!r}.")
    return index


def exists(store: Store, step: int, slot: int | None = None) -> bool:
    return store.get(_index_key(step, slot)) is not None


def read(store: Store, index: SnapshotIndex, like: Leaves) -> Leaves:
    """Reads arrays with the shapes and dtypes of ``like``; raises `Damaged` for all others."""
    other = f"{index.file!r} is damaged, or of another model or dtype: use those of the run"
    size = sum(x.nbytes for x in like)
    if index.parts != math.ceil(size / PART):
        raise Damaged(other)
    parts = in_parallel(store.get, [_part_key(index.file, n) for n in range(index.parts)])
    if None in parts:
        raise Damaged(
            f"{index.file!r} has vanished while it was read, which happens if newer snapshots come "
            "faster than this worker reads one: give all workers a larger --snapshot-every"
        )
    flat = np.frombuffer(b"".join(part or b"" for part in parts), np.uint8)
    if flat.size == size:
        ends = itertools.accumulate(x.nbytes for x in like)
        leaves = [  # copies, which are aligned
            flat[end - x.nbytes : end].copy().view(x.dtype).reshape(x.shape)
            for x, end in zip(like, ends, strict=True)
        ]
        if digest(leaves) == index.digest:
            return leaves
    raise Damaged(other)


def read_newest(
    store: Store,
    own: Leaves,
    first: int = 0,
    is_believed: Callable[[SnapshotIndex], bool] | None = None,
) -> tuple[SnapshotIndex, Leaves]:
    """Returns the index and the arrays of the newest snapshot; writes the first one of a run.

    Snapshots before the step ``first`` are of no use to the worker, nor are those in which it does
    not believe.
    """
    is_believed = is_believed or functools.partial(is_attested, store)
    failures, closed = [], store if isinstance(store, MembersOnly) else None
    if not (found := _newest(store)):
        if not (is_taken := _is_taken(store)):
            write(store, 0, own, roster=closed.roster.name if closed else "")
        found = _newest(store)  # once more, since others may have begun the run
        if is_taken and not found:
            failures.append(
                "there is none, but other objects of a run, perhaps under a newer roster"
            )
    for _ in range(READ_TRIES):  # a snapshot that is swept meanwhile has a successor
        for step, slot in [x for x in found if x[0] >= first]:
            try:
                if (index := read_index(store, step, slot)) is None:
                    continue
                if is_believed(index):
                    return index, read(store, index, like=own)
                unsigned = f"most of those before have not signed that of step {step}"
                failures.append(f"{unsigned}, or are in the roster no more")
                if is_attested(store, index):
                    failures[-1] = f"nothing that this worker knows leads to that of step {step}"
            except Damaged as error:
                failures.append(str(error))
        found = _newest(store)
    failures += [closed.missing] if closed and closed.missing else []
    reasons = "; ".join(dict.fromkeys(failures)) or f"none of step {first} or later is there"
    raise SwarmError(
        f"no snapshot can be read: {reasons}. Make sure that model and optimizer are those of the "
        "run, and start this worker again, or start a new run in another place."
    )


def _is_taken(store: Store) -> bool:
    """Tells whether a run has begun, or there are objects of one that this store does not know."""
    inner, folders = getattr(store, "inner", store), ("slots", "snapshots", "manifests")
    is_foreign = any(len(inner.names(x)) > len(store.names(x)) for x in folders)
    return is_foreign or bool(store.names("manifests"))


def _newest(store: Store, names: list[str] | None = None) -> list[Turn]:
    """Returns the steps and slots of all snapshots, or of some names, the newest ones first."""
    names = store.names("snapshots") if names is None else names
    found = filter(None, map(_INDEX.fullmatch, names))
    pairs = [(int(x[1]), int(x[2]) if x[2] else None) for x in found]
    pairs = [(step, slot) for step, slot in pairs if step or slot is None]  # one begins a run
    return sorted(pairs, key=lambda pair: pair[0], reverse=True)


def attested(
    store: Store,
    turns: Iterable[Turn],
    known: Mapping[int, frozenset[MemberId]] | None = None,
) -> Iterator[SnapshotIndex]:
    """Yields the indices of those of some snapshots that are believed."""
    for step, slot in turns:
        with contextlib.suppress(Damaged):
            index = read_index(store, step, slot)
            if index is not None and is_attested(store, index, known):
                yield index


def indices(store: Store, first: int) -> Iterator[SnapshotIndex]:
    """Yields the indices of all snapshots from a step on, the newest ones first."""
    for step, slot in [x for x in _newest(store) if x[0] >= first]:
        with contextlib.suppress(Damaged):
            if (index := read_index(store, step, slot)) is not None:
                yield index


def is_signed_by_most(store: MembersOnly, index: SnapshotIndex, voters: Set[int]) -> bool:
    return 2 * len(attesters(store, index) & voters) > len(voters)


def signed_by_most(store: MembersOnly, first: int, voters: Set[int]) -> SnapshotIndex | None:
    """Returns the newest snapshot from a step on that more than half of these members signed."""
    for index in indices(store, first):
        if is_signed_by_most(store, index, voters):
            return index
    return None


def attested_steps(
    store: Store,
    until: int = sys.maxsize,
    number: int | None = None,
    names: list[str] | None = None,
) -> list[int]:
    """Returns the steps of the newest snapshots that are believed, in order."""
    found = [x for x in _newest(store, names) if x[0] <= until]
    if not isinstance(store, MembersOnly):  # their names say enough
        return sorted({step for step, _ in found})[-(number or 0) :]
    steps = itertools.groupby(index.step for index in attested(store, found))
    return sorted(step for step, _ in itertools.islice(steps, number))


def sweep(store: Store, step: int) -> None:
    """Deletes the packets and snapshots that no new worker needs.

    The caller has written the snapshot of this step, and can tell nothing of later ones.
    """
    listed = store.names("snapshots")  # once, since a list may be long
    kept = attested_steps(store, step, NUM_KEPT, listed)
    if len(kept) < NUM_KEPT:
        return
    for folder in "packets", "snapshots", "attested":
        names = listed if folder == "snapshots" else store.names(folder)
        steps = {name: records.step_of(name) for name in names}
        old = [name for name, of in steps.items() if of is not None and of < kept[0]]
        # An index is deleted before its file, so that whoever reads an index finds the file.
        old.sort(key=lambda name: not name.endswith(".json"))
        store.delete([f"{folder}/{name}" for name in old])


def _is_floating(x: np.ndarray) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def is_finite(leaves: Leaves) -> bool:
    return all(bool(np.isfinite(x.astype(np.float32)).all()) for x in leaves if _is_floating(x))


def has_equal_integers(own: Leaves, other: Leaves) -> bool:
    """Tells whether all arrays that do not hold floats are equal."""
    pairs = zip(own, other, strict=True)
    return all(_is_floating(y) or np.array_equal(x, y) for x, y in pairs)


def relative_difference(own: Leaves, other: Leaves) -> float:
    """Returns the largest difference of an array of floats, relative to the norm of ``other``.

    An array whose numbers are smaller than those of all arrays on average is taken to have numbers
    of that size. The difference is 1 if ``other`` holds nothing but zeros, and differs.
    """
    measured = [(0.0, 0.0, 0.0)]
    for x, y in zip(own, other, strict=True):
        if _is_floating(y):
            x, y = x.astype(np.float64), y.astype(np.float64)
            difference, norm = float(np.linalg.norm(x - y)), float(np.linalg.norm(y))
            measured.append((math.sqrt(y.size), difference, norm))
    roots, differences, norms = map(np.array, zip(*measured, strict=True))
    usual = roots * np.linalg.norm(norms) / (np.linalg.norm(roots) or 1.0)
    norms = np.maximum(norms, usual)
    norms = np.where(norms > 0, norms, np.where(differences > 0, differences, 1.0))
    return float(np.max(differences / norms))


def _as_bytes(x: np.ndarray) -> np.ndarray:
    """Returns an array's memory; NumPy's buffers know no bfloat16."""
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)

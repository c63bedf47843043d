"""Snapshots of the state that all workers share, from which new workers start.

A snapshot holds the bytes of the arrays, one after another and without a header: whoever reads it
has the same model, which says what they are. It is divided into objects of a few megabytes, so that
packets need not wait long for a slow link. Orbax writes a checkpoint with all processes of a job,
but a single process writes a snapshot, in a thread, while the others train.
"""

import collections
import contextlib
import hashlib
import itertools
import math
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import numpy as np

from demo_optax._src.swarm import records, roster
from demo_optax._src.swarm.member import CUT_STEPS, Member
from demo_optax._src.swarm.members_only import MembersOnly
from demo_optax._src.swarm.records import (
    Damaged,
    Manifest,
    MemberId,
    SnapshotIndex,
    SwarmError,
)
from demo_optax._src.swarm.store import PART, Store, in_parallel

Leaves = list[np.ndarray]

NUM_KEPT = 2
READ_TRIES = 5
LARGEST_DRIFT = 0.1  # that different kinds of devices may explain
SIGNED_DRIFT = 1e-3  # up to which a member signs another's snapshot; measured: below 1e-6
POLL_SECONDS = 0.25
HEARD_SECONDS = 2.0  # between two looks for a snapshot that most have signed

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
) -> bool:
    """Writes a snapshot; the first one of a step stands. Returns whether it is this one.

    With members only each slot has one of its own in a step. Its index has the `head`, `since` and
    `roster` that it follows.
    """
    data = b"".join(_as_bytes(x).data for x in leaves)
    folder = records.step_key("snapshots", step)
    file, starts = f"{folder}/{uuid.uuid4().hex}", range(0, len(data), PART)
    index = SnapshotIndex(step, file, len(starts), records.sha256(data), digest(leaves), **chain)
    for number, start in enumerate(starts):
        before_part()
        store.put(_part_key(file, number), data[start : start + PART])
    key, written = _index_key(step, slot), records.encode(index)
    if not store.create(key, written) and store.get(key) != written:  # the answer may be lost
        return False
    attest(store, index)
    return True


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

    Those counted are taken from the manifests, which must lead to the snapshot. Before the first
    step nobody has counted, and one signature is enough. In an open run every snapshot is believed.
    """
    if not isinstance(store, MembersOnly):
        return True
    if not store.knows(index.step, index.roster) or not index.since < max(index.step, 1):
        return False
    counted = _counted(store, index, known or {})
    if counted is None:
        return False
    members, signed = store.roster.members(), attesters(store, index)
    newest = {slot: n for slot, n in sorted(counted) if slot in members}
    awaited = [x for x in newest.items() if x[0] not in signed]
    if 2 * len(awaited) >= len(newest):  # those who have left for good sign nothing any more
        said = in_parallel(lambda member: store.get(records.left_key(member)), awaited)
        awaited = [x for x, data in zip(awaited, said, strict=True) if data is None]
    return len(signed & newest.keys()) > len(awaited) if newest else bool(signed) and not index.step


def _counted(
    store: MembersOnly, index: SnapshotIndex, known: Mapping[int, frozenset[MemberId]]
) -> set[MemberId] | None:
    """Returns who counted before a snapshot, or None if the manifests do not lead to it."""
    steps = range(index.since, index.step)
    if all(step in known for step in steps):
        return set().union(*(known[step] for step in steps))
    counted, before, found = set(), None, []
    for step in steps:
        if not found:  # few at a time, since an index may name any step
            ahead = steps[step - index.since :][:64]
            found = in_parallel(lambda step: store.get(records.step_key("manifests", step)), ahead)
        try:
            manifest = records.decode(Manifest, found.pop(0))
        except Damaged:
            return None
        signed = (store.is_signed(step, x, manifest.previous) for x in manifest.packets)
        follows = before is None or records.head(before, manifest.lost) == manifest.previous
        if manifest.step != step or not follows or not all(signed):
            return None
        before, counted = manifest, counted | manifest.members
    return counted if before is None or records.head(before, index.lost) == index.head else None


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


def read(
    store: Store,
    index: SnapshotIndex,
    like: Leaves,
    before_part: Callable[[], object] | None = None,
) -> Leaves:
    """Reads arrays with the shapes and dtypes of ``like``; raises `Damaged` for all others.

    The parts are read together, or one after another if there is something to do ``before_part``.
    """
    other = f"{index.file!r} is of another model or dtype: use those of the run"
    size = sum(x.nbytes for x in like)
    if index.parts != math.ceil(size / PART):
        raise Damaged(other)
    keys = [_part_key(index.file, number) for number in range(index.parts)]
    if before_part is None:
        parts = in_parallel(store.get, keys)
    else:
        parts = [(before_part(), store.get(key))[1] for key in keys]
    if None in parts:
        raise Damaged(
            f"{index.file!r} has vanished while it was read, which happens if newer snapshots come "
            "faster than this worker reads one: give all workers a larger --snapshot-every"
        )
    data = b"".join(part or b"" for part in parts)
    if records.sha256(data) != index.sha256:
        raise Damaged(f"{index.file!r} must hold the bytes of its hash")
    if len(data) != size:
        raise Damaged(other)
    flat, ends = np.frombuffer(data, np.uint8), itertools.accumulate(x.nbytes for x in like)
    leaves = [  # copies, which are aligned
        flat[end - x.nbytes : end].copy().view(x.dtype).reshape(x.shape)
        for x, end in zip(like, ends, strict=True)
    ]
    if digest(leaves) != index.digest:
        raise Damaged(other)
    return leaves


def read_newest(store: Store, own: Leaves, first: int = 0) -> tuple[SnapshotIndex, Leaves]:
    """Returns the index and the arrays of the newest snapshot; writes the first one of a run.

    Snapshots before the step ``first`` are of no use to the worker.
    """
    if not steps_of(store):
        chain: dict[str, Any] = {}
        if isinstance(store, MembersOnly):
            chain["roster"] = roster.named(store.roster)
        write(store, 0, own, **chain)
    failures: list[str] = []
    for _ in range(READ_TRIES):  # a snapshot that is swept meanwhile has a successor
        for step, slot in [x for x in _newest(store) if x[0] >= first]:
            try:
                if (index := read_index(store, step, slot)) is None:
                    continue
                if not is_attested(store, index):
                    failures.append(f"most of those before have not signed that of step {step}")
                    continue
                leaves = read(store, index, like=own)
                if step == 0:
                    attest(store, index)
                return index, leaves
            except Damaged as error:
                failures.append(str(error))
    reasons = "; ".join(dict.fromkeys(failures)) or f"none of step {first} or later is there"
    raise SwarmError(
        f"no snapshot can be read: {reasons}. Make sure that model and optimizer are those of the "
        "run, or start a new run in another place."
    )


def _newest(store: Store) -> list[tuple[int, int | None]]:
    """Returns the steps and slots of all snapshots, the newest ones first."""
    found = filter(None, map(_INDEX.fullmatch, store.names("snapshots")))
    pairs = [(int(x[1]), int(x[2]) if x[2] else None) for x in found]
    return sorted(pairs, key=lambda pair: pair[0], reverse=True)


def steps_of(store: Store) -> list[int]:
    """Returns the steps of all complete snapshots, in order."""
    return sorted({step for step, _ in _newest(store)})


def attested_steps(store: Store, until: int, number: int = 0) -> list[int]:
    """Returns the steps of the newest snapshots that are believed, in order."""
    found: set[int] = set()
    for step, slot in [x for x in _newest(store) if x[0] <= until]:
        with contextlib.suppress(Damaged):
            if not isinstance(store, MembersOnly) or (
                (index := read_index(store, step, slot)) and is_attested(store, index)
            ):
                found.add(step)
                if len(found) == number:
                    break
    return sorted(found)


def sweep(store: Store, step: int) -> None:
    """Deletes the packets and snapshots that no new worker needs.

    The caller has written the snapshot of this step, and can tell nothing of later ones.
    """
    kept = attested_steps(store, step, NUM_KEPT)
    if len(kept) < NUM_KEPT:
        return
    for folder in "packets", "snapshots", "attested":
        steps = {name: records.step_of(name) for name in store.names(folder)}
        old = [name for name, of in steps.items() if of is not None and of < kept[0]]
        # An index is deleted before its file, so that whoever reads an index finds the file.
        old.sort(key=lambda name: not name.endswith(".json"))
        store.delete([f"{folder}/{name}" for name in old])


def is_finite(leaves: Leaves) -> bool:
    floating = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
    return all(bool(np.isfinite(x.astype(np.float32)).all()) for x in floating)


def relative_difference(own: Leaves, other: Leaves) -> float:
    """Returns the norm of the difference of all floats, relative to the norm of ``other``.

    It is 1 if ``other`` holds nothing but zeros, and differs.
    """
    differences, norms = [0.0], [0.0]
    for x, y in zip(own, other, strict=True):
        if jnp.issubdtype(y.dtype, jnp.floating):
            norms.append(float(np.linalg.norm(y.astype(np.float64))))
            differences.append(float(np.linalg.norm(x.astype(np.float64) - y.astype(np.float64))))
    difference, norm = math.hypot(*differences), math.hypot(*norms)
    return difference / (norm or difference or 1.0)


def _as_bytes(x: np.ndarray) -> np.ndarray:
    """Returns an array's memory; NumPy's buffers know no bfloat16."""
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


Comparison = tuple[int, float, Leaves | None]
"""The step of a snapshot, the drift from it, and its arrays if a worker should go on from them."""


class SnapshotTurns:
    """Writes snapshots in turn with the other workers, or compares with theirs, in threads."""

    def __init__(self, member: Member, every: int):
        self.member, self.every = member, every
        self._threads = ThreadPoolExecutor(2, "snapshots")
        self._written: Future[None] | None = None
        self._compared: Future[Comparison | None] | None = None
        self._awaited = -1  # the step whose snapshot is awaited
        self._last = 0  # the last step that had a turn
        self._attested = 0  # the last step whose snapshot most members have signed
        self._turns: collections.deque[int] = collections.deque([0, 0], 2)  # its own last ones
        self._closing = threading.Event()

    def take(self, step: int, shared: Leaves, num_params: int, manifest: Manifest) -> None:
        """Writes a snapshot of the arrays before a step, or compares them with its writer's.

        The members of the manifest, which all workers know, take turns. A worker that still writes
        an earlier snapshot, or whose parameters are not finite, writes none.
        """
        members, self._last = [packet.member for packet in manifest.packets], step
        writer = members[step // self.every % len(members)]
        self.member.turns[step] = self.member.head(step - 1)
        if writer != self.member.me:
            if self._compared is None:
                self._awaited = step
                chain, slot = self._chain(step), self._slot_in_index(writer)
                self._compared = self._threads.submit(
                    self._compare, step, slot, shared, num_params, chain
                )
        elif self._written and not self._written.done():
            self._warn(step, "was not written, since an earlier one is still being written")
        elif not is_finite(shared[:num_params]):
            self._warn(step, "was not written, since this worker's parameters are not finite")
        else:  # its own arrays are newer than those that it still compares
            self._awaited, self._compared = -1, None
            self._written = self._threads.submit(self._write, step, shared, self._chain(step))

    def comparison(self) -> Comparison | None:
        """Returns the last comparison once it has ended, and only once."""
        if self._compared is None or not self._compared.done():
            return None
        ended, self._compared = self._compared, None
        return ended.result()

    def close(self) -> None:
        self._awaited = -1
        self._closing.set()
        self._threads.shutdown(wait=True)

    def _chain(self, step: int) -> dict[str, Any]:
        """Returns what the index of a snapshot must say of the steps before."""
        store = self.member.store
        if not isinstance(store, MembersOnly):
            return {"head": self.member.head(step - 1)}
        named = f"{(number := store.number_at(step))} {store.roster.hash_of(number)}"
        lost = self.member.lost(step - 1)
        return {"head": self.member.head(step - 1), "roster": named, "lost": lost}

    def _slot_in_index(self, writer: MemberId) -> int | None:
        return writer[0] if isinstance(self.member.store, MembersOnly) else None

    def _last_attested(self, before: int) -> int:
        """Returns the step of the newest snapshot that most members have signed."""
        store, known, turns = self.member.store, self.member.counted, self.member.turns
        for step, slot in [x for x in _newest(store) if self._attested < x[0] < before]:
            with contextlib.suppress(Damaged):
                index = read_index(store, step, slot)
                if index is None or index.head != turns.get(step, index.head):
                    continue  # or of those who went on from another step
                if is_attested(store, index, known):
                    self._attested = step
                    break
        for step in [x for x in list(known) if x < min(self._attested, before - CUT_STEPS)]:
            known.pop(step, None)
        for step in [x for x in list(turns) if x < self._attested]:
            turns.pop(step, None)
        return self._attested

    def _write(self, step: int, shared: Leaves, chain: dict[str, Any]) -> None:
        try:
            store, wait = self.member.store, self.member.wait_for_transfers
            if isinstance(store, MembersOnly):
                chain["since"] = self._last_attested(step)
                self._wait_until_heard(step, chain["since"])
            slot = self._slot_in_index(self.member.me)
            if write(store, step, shared, wait, slot, **chain):
                sweep(store, step)
            else:
                self._warn(step, "was not written, since another one stands in its place")
        except (OSError, Damaged) as error:  # another worker writes the next one
            self._warn(step, f"was not written: {error}")

    def _wait_until_heard(self, step: int, since: int) -> None:
        """Lets this worker send nothing while nobody's snapshot is signed since two of its turns.

        It may be on the smaller one of two sides that do not see each other.
        """
        if since >= self._turns[0]:
            self._turns.append(step)
            return
        member, store = self.member, self.member.store
        member.is_unheard = True
        member.tell(
            f"{member.unit} {step}: most members have signed no snapshot since that of {since}, so "
            "this worker sends nothing until they do: let the owner take those out of the roster "
            "that are gone for good"
        )
        while not any(x > since for x in attested_steps(store, sys.maxsize, 1)):
            if self._closing.wait(HEARD_SECONDS):
                return
            if isinstance(store, MembersOnly):
                store.look_for_roster()
        self._turns.extend([0, 0])
        member.astray, member.is_unheard = "a newer snapshot was signed by most members", False

    def _compare(
        self, step: int, slot: int | None, own: Leaves, num_params: int, chain: dict[str, Any]
    ) -> Comparison | None:
        """Awaits a step's snapshot; returns None if none comes, or it cannot be read."""
        store, own_digest = self.member.store, digest(own)
        try:
            while (index := read_index(store, step, slot)) is None and self._awaited == step:
                if any(step < later <= self._last for later in steps_of(store)):
                    return None  # its writer was gone, or skipped it
                time.sleep(POLL_SECONDS)
            if index is None or self._awaited != step:
                return None
            may_sign = self._agrees(index, chain)
            if index.digest == own_digest:
                if may_sign:
                    attest(store, index)
                return step, 0.0, None
            leaves = read(store, index, own, before_part=self.member.wait_for_transfers)
        except (OSError, Damaged) as error:
            self._warn(step, f"was not compared: {error}")
            return None
        # Each by itself, since numbers such as a residual's norm may be far larger than the rest.
        state = range(num_params, len(own))
        arrays, numbers = ([n for n in state if bool(own[n].ndim) == b] for b in (True, False))
        drifts = [
            relative_difference([own[n] for n in part], [leaves[n] for n in part])
            for part in (range(num_params), arrays, numbers)
        ]
        drift = float(np.max(drifts))
        is_own_broken = not math.isfinite(drift) and is_finite(leaves)
        is_closed = isinstance(store, MembersOnly)
        if may_sign and drift <= SIGNED_DRIFT:
            attest(store, index)
        if drift <= SIGNED_DRIFT or is_own_broken or (drift < LARGEST_DRIFT and not is_closed):
            return (step, drift, leaves) if self._is_believed(index) else None
        differs = f"differs from this worker's parameters or state by {drift:.2g} of their norm"
        if is_closed and self._is_believed(index):
            self._warn(step, f"{differs}, and was taken over, since most members have signed it")
            return step, drift, leaves
        self._warn(
            step,
            f"{differs}, more than rounding explains, and was not taken over: stop the worker that "
            "is wrong",
        )
        return step, drift, None

    def _agrees(self, index: SnapshotIndex, chain: dict[str, Any]) -> bool:
        """Tells whether this worker has come to the snapshot on the way that its index says."""
        there = {name: getattr(index, name) for name in chain}
        is_long = index.step - index.since >= self.every or not index.since
        return there == chain and is_long and index.since <= self._last_attested(index.step)

    def _is_believed(self, index: SnapshotIndex) -> bool:
        """Waits until most members have signed a snapshot; none is taken over before."""
        store = self.member.store
        while not is_attested(store, index, self.member.counted):
            if self._awaited != index.step or self._last > index.step:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def _warn(self, step: int, what: str) -> None:
        self.member.tell(f"the snapshot before {self.member.unit} {step} {what}")

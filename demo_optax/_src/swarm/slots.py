"""A swarm's slots: which worker has which, and how a process takes one."""

import contextlib
import time

from demo_optax._src.swarm import records
from demo_optax._src.swarm.records import Claim, Damaged, Manifest
from demo_optax._src.swarm.store import Store, in_parallel

IDLE_STEPS = 100  # in which a worker took no part, before another may have its slot
PAUSE = 0.02  # seconds between two tries
IDLE_SECONDS = 600.0  # since it claimed the slot


class SwarmError(RuntimeError):
    """A worker cannot go on with the others."""


def claim(store: Store, worker: str, nonce: str, slots: int) -> tuple[int, int]:
    """Takes a slot: the worker's own of before, a free one, or one whose worker is gone.

    Args:
      store: of the run.
      worker: name.
      nonce: of this process.
      slots: the number of slots.

    Returns:
      The slot, and this process's incarnation in it.

    Raises:
      SwarmError: all slots are taken.
    """
    taken: dict[int, int] = {}  # which a list may not show yet
    for _ in range(100):
        newest = newest_claims(store)
        slot = _choose(store, worker, newest, slots)
        incarnation = max(newest[slot][0] if slot in newest else 0, taken.get(slot, 0)) + 1
        key = records.claim_key((slot, incarnation))
        if store.create(key, records.to_json(Claim(worker, nonce, time.time()))):
            return slot, incarnation
        with contextlib.suppress(Damaged):  # it is this process's own if the answer was lost
            if records.read_claim(store.get(key) or b"").nonce == nonce:
                return slot, incarnation
        taken[slot] = incarnation
        time.sleep(PAUSE)
    raise SwarmError(
        f"worker {worker!r} got none of {slots} slots in 100 tries: give it a name of its own."
    )


def newest_claims(store: Store) -> dict[int, tuple[int, Claim]]:
    """Of each slot that was ever claimed, its newest incarnation and claim."""
    newest: dict[int, int] = {}
    for name in store.names("slots"):
        slot, _, incarnation = name.partition("/")
        if slot.isdecimal() and incarnation.isdecimal():
            newest[int(slot)] = max(int(incarnation), newest.get(int(slot), 0))
    members = list(newest.items())
    found = in_parallel(lambda member: read_claim(store, member), members)
    pairs = zip(members, found, strict=True)
    return {slot: (incarnation, claim) for (slot, incarnation), claim in pairs}


def read_claim(store: Store, member: tuple[int, int]) -> Claim:
    """Who has a slot; a claim that cannot be read is of nobody, and of the first second of 1970."""
    with contextlib.suppress(Damaged):
        return records.read_claim(store.get(records.claim_key(member)) or b"")
    return Claim(f"slot {member[0]}", "", 0.0)


def decided_steps(store: Store) -> list[int]:
    """The steps that have a manifest, in order."""
    steps = map(records.step_of, store.names("manifests"))
    return sorted(step for step in steps if step is not None)


def last_manifests(store: Store, number: int | None = None) -> list[Manifest]:
    """The manifests of all decided steps, or of the last so many, as far as they can be read."""
    steps = decided_steps(store)[-(number or 0) :]
    data = in_parallel(store.get, map(records.manifest_key, steps))
    found = []
    for x in filter(None, data):
        with contextlib.suppress(Damaged):
            found.append(Manifest.decode(x))
    return found


def _choose(store: Store, worker: str, newest: dict[int, tuple[int, Claim]], slots: int) -> int:
    own = [slot for slot, (_, x) in newest.items() if x.worker == worker and slot < slots]
    free = [slot for slot in range(slots) if slot not in newest]
    if own or free:
        return (own or free)[0]
    active = {packet.slot for x in last_manifests(store, IDLE_STEPS) for packet in x.packets}
    before = time.time() - IDLE_SECONDS
    gone = [s for s in range(slots) if s not in active and newest[s][1].time < before]
    if not gone:
        names = ", ".join(newest[slot][1].worker for slot in range(slots))
        raise SwarmError(
            f"all slots={slots} are taken, by {names}. Take the --worker name of one that is gone, "
            f"wait until it has been gone for {IDLE_STEPS} steps and {IDLE_SECONDS / 60:.0f} "
            "minutes, or start all of them in a new place with more slots."
        )
    return min(gone, key=lambda slot: newest[slot][1].time)

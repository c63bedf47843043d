"""The slots of a swarm: which worker owns which, and how a process claims one."""

import contextlib
import re
import time
from collections.abc import Collection

from demo_optax._src.swarm import records, roster
from demo_optax._src.swarm.members_only import MembersOnly
from demo_optax._src.swarm.records import Claim, Damaged, Manifest, MemberId, SwarmError
from demo_optax._src.swarm.store import Store, in_parallel

IDLE_STEPS = 100  # a slot may be taken over if its owner took part in none of these steps,
IDLE_SECONDS = 600.0  # and claimed it longer ago than this
CLAIM_TRIES = 100
POLL_SECONDS = 0.02
FIRST_SECOND = 1_700_000_000  # since 1970: incarnations have nine digits

_CLAIM = re.compile("([0-9]{3,9})/([0-9]{6,9})")  # the next incarnation has a valid number, too


def claim(store: Store, worker: str, nonce: str, slots: int) -> MemberId:
    """Claims the worker's previous slot, a free one, or that of a worker that is gone."""
    if not (is_closed := isinstance(store, MembersOnly)) and store.get(roster.KEY) is not None:
        raise SwarmError(
            "the run there is for members only: give this worker --key with its key and --owner "
            "with the owner's public line."
        )
    taken: dict[int, int] = {}  # incarnations that a listing may not show yet
    for _ in range(CLAIM_TRIES):
        if is_closed:
            slot, last = _own(store, worker, slots)
        else:
            newest = newest_claims(store)
            slot = _choose(store, worker, newest, slots)
            last = newest[slot][0] if slot in newest else 0
        incarnation = max(last, taken.get(slot, 0)) + 1
        key = records.claim_key((slot, incarnation))
        is_new = store.create(key, records.encode(Claim(worker, nonce, time.time())))
        # The nonce tells whether the claim is its own, and only the store's answer was lost.
        if is_new or read_claim(store, (slot, incarnation)).nonce == nonce:
            return slot, incarnation
        taken[slot] = incarnation
        time.sleep(POLL_SECONDS)
    raise SwarmError(
        f"worker {worker!r} got none of {slots} slots in {CLAIM_TRIES} tries: give it a name of "
        "its own."
    )


def _own(store: MembersOnly, worker: str, slots: int) -> MemberId:
    """Returns a member's slot, and the time or the last claim that it has signed if that is later.

    So the next number is larger than those of claims that somebody has deleted.
    """
    if (slot := store.slot) >= slots:
        raise SwarmError(
            f"{worker!r} has slot {slot} of the roster, and slots={slots}: give all workers at "
            f"least slots={slot + 1}."
        )
    return slot, max(last_claim(store, slot), int(time.time()) - FIRST_SECOND)


def last_claim(store: MembersOnly, slot: int) -> int:
    """Returns the incarnation of the last process that has claimed a member's slot, or 0."""
    listed = sorted(int(x) for x in store.names(f"slots/{slot:03d}") if x.isdecimal())
    signed = (n for n in reversed(listed) if store.get(records.claim_key((slot, n))) is not None)
    return next(signed, 0)


def newest_claims(store: Store) -> dict[int, tuple[int, Claim]]:
    """Returns the latest incarnation and claim of every slot that was ever claimed."""
    matches = filter(None, map(_CLAIM.fullmatch, store.names("slots")))
    newest = dict(sorted((int(x[1]), int(x[2])) for x in matches))
    claims = in_parallel(lambda member: read_claim(store, member), newest.items())
    return {slot: (n, x) for (slot, n), x in zip(newest.items(), claims, strict=True)}


def have_left(store: Store, members: Collection[MemberId]) -> frozenset[MemberId]:
    """Returns those of some members that have said that they leave for good."""
    said = in_parallel(lambda member: store.get(records.left_key(member)), members)
    return frozenset(x for x, data in zip(members, said, strict=True) if data is not None)


def read_claim(store: Store, member: MemberId) -> Claim:
    """Reads a claim; unreadable ones, as of names that cannot be printed, are as if expired.

    With keys the names are those of the roster.
    """
    if (entry := getattr(store, "roster", None)) is not None:
        names = {x.slot: x.public.name for x in entry.entries}
        return Claim(names.get(member[0], f"slot {member[0]}"), "", 0.0)
    with contextlib.suppress(Damaged):
        return records.decode(Claim, store.get(records.claim_key(member)))
    return Claim(f"slot {member[0]}", "", 0.0)


def manifests_of(store: Store, steps: Collection[int]) -> dict[int, Manifest]:
    """Returns the manifests of some steps that the store has now, if they can be read."""

    def read(step: int) -> Manifest | None:
        with contextlib.suppress(Damaged):
            return records.decode(Manifest, store.get(records.step_key("manifests", step)))

    found = zip(steps, in_parallel(read, steps), strict=True)
    return {step: manifest for step, manifest in found if manifest is not None}


def last_manifests(store: Store, number: int | None = None) -> list[Manifest]:
    """Returns all readable manifests in order, or those of the last ``number`` steps."""
    steps = records.steps_of(store.names("manifests"))[-(number or 0) :]
    return list(manifests_of(store, steps).values())


def _choose(store: Store, worker: str, newest: dict[int, tuple[int, Claim]], slots: int) -> int:
    own = [slot for slot, (_, x) in newest.items() if x.worker == worker and slot < slots]
    free = [slot for slot in range(slots) if slot not in newest]
    if own or free:
        return (own or free)[0]
    manifests = last_manifests(store, IDLE_STEPS)
    active = {packet.slot for x in manifests for packet in x.packets}
    at_work = {packet.member for x in manifests[-2:] for packet in x.packets}
    said, before = {f"slots/{name}" for name in store.names("slots")}, time.time() - IDLE_SECONDS

    def is_gone(slot: int) -> bool:
        incarnation, claim = newest[slot]
        if records.left_key((slot, incarnation)) in said:
            return (slot, incarnation) not in at_work
        return slot not in active and claim.time < before

    gone = [slot for slot in range(slots) if is_gone(slot)]
    if not gone:
        names = ", ".join(newest[slot][1].worker for slot in range(slots))
        raise SwarmError(
            f"all slots={slots} are taken, by {names}. Take the --worker name of one that is gone, "
            f"wait until one leaves or has been gone for {IDLE_STEPS} steps or rounds and "
            f"{IDLE_SECONDS / 60:.0f} minutes, or start all of them in a new place with more slots."
        )
    return min(gone, key=lambda slot: newest[slot][1].time)

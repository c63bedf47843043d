"""Whose side goes on in a run for members only: votes among those who counted.

A manifest stands if it is valid and lists most of them. Two sides come about where members have
decided a step differently, or where some could not read a packet. In the first step in which
packets follow different heads each member has a vote, for the side that it has signed for last.
"""

from collections.abc import Collection, Mapping, Set

from demo_optax._src.swarm import records
from demo_optax._src.swarm.records import Manifest
from demo_optax._src.swarm.slots import have_left
from demo_optax._src.swarm.steps import ROSTER_SECONDS, Said, Steps
from demo_optax._src.swarm.store import log


def slots_of(manifest: Manifest) -> set[int]:
    return {packet.slot for packet in manifest.packets}


def is_valid(steps: Steps, step: int, manifest: Manifest, absent: float = 0.0) -> bool:
    """Tells whether members have signed enough packets, and the owner the named roster.

    Half of them are still members, or somebody who is one has gone on from it. At the time
    ``absent`` there was no manifest. One that came long after this member knew its roster, and
    names an earlier one, is by somebody to whom that was shown again.
    """
    store = steps.closed
    assert store is not None
    signed = (store.is_signed(step, x, manifest.previous) for x in manifest.packets)
    listed, held = slots_of(manifest), store.members(step)
    is_enough = len(listed) >= store.min_workers and max(listed) < steps.slots
    if manifest.step != step or not is_enough or not all(signed):
        return False
    if not store.knows(step, manifest.roster):
        log.warning("step %d names a roster that is not there", step)
        return False
    is_late = absent > store.known_since + 2 * ROSTER_SECONDS
    if manifest.roster != store.roster.name and is_late:
        return False
    members = store.roster.members()
    stayed = {n for n in listed if held.get(n) == members.get(n)}
    return 2 * len(stayed) >= len(listed) or bool(steps.followers(manifest))


def goes_on(by_head: Mapping[str, Set[int]], decided: Collection[str] = ()) -> str:
    """Returns the head of the side that goes on, of the slots on each side.

    Of equal sides it is one that has ``decided`` the next step, then that of the smallest head.
    """
    return min(by_head, key=lambda head: (-len(by_head[head]), head not in decided, head))


def first_fork(own: Mapping[int, Manifest], stored: Mapping[int, Manifest], step: int) -> int:
    """Returns the first step whose packets may follow different heads, at the last this ``step``.

    It is that after the first one that a worker knows by another manifest than the store has now.
    """
    for n in sorted(own.keys() & stored.keys()):
        if records.head(own[n]) != records.head(stored[n]):
            return n + (own[n].previous == stored[n].previous)
    return step


def leads_to(head: str, before: Manifest, said: Mapping[int, Said], after: Manifest | None) -> bool:
    """Tells whether a step was decided as ``head`` says, for those who follow it afterwards."""
    lost = {x.lost for x in said.values()} | ({after.lost} if after else set())
    return any(records.head(before, x) == head for x in lost)


def votes(
    step: int, said: Mapping[int, Said], followed: Mapping[str, Mapping[int, int]]
) -> dict[str, set[int]]:
    """Returns the slots that follow each head in a step, by what each has signed last.

    These are the packets that are said there, unless some have ``followed`` a head in later steps.
    """
    signed = [
        (n, slot, head) for head, of in reversed(list(followed.items())) for slot, n in of.items()
    ]
    signed += [(step, slot, x.head) for slot, x in said.items()]
    last = {slot: head for _, slot, head in sorted(signed, key=lambda x: x[0])}
    return {head: {slot for slot, x in last.items() if x == head} for head in last.values()}


def lost_later(
    steps: Steps, manifest: Manifest, missing: Collection[int], following: Manifest | None
) -> tuple[int, ...] | None:
    """Returns the slots that nobody applied in a step, or None while this is not known.

    Those who counted sign it in the next step, and the manifest that is ``following`` decides if as
    many of them are in it as are not. Before, their sides decide. Who has not signed yet may lack
    what is ``missing`` here.
    """
    store = steps.closed
    assert store is not None
    later, sent = manifest.step + 1, {x.slot: x.member for x in manifest.packets}
    if following is not None:
        head = records.head(manifest, following.lost)
        signed = {x.slot for x in following.packets if store.is_signed(later, x, head)}
        if signed := signed & sent.keys():
            away = [x for slot, x in sent.items() if slot not in signed]
            others = len(away) - len(have_left(store, away))
            return following.lost if len(signed) >= others else None
    own, by_head, lost = records.head(manifest, missing), {}, {}
    for slot, x in steps.sent(later, sent.keys()).items():
        if x.head == records.head(manifest, x.lost):
            by_head.setdefault(x.head, set()).add(slot)
            lost[x.head] = x.lost
    silent = sent.keys() - set().union(*by_head.values())
    best = goes_on(by_head | {own: by_head.get(own, set()) | silent})
    return None if best == own and silent else lost[best]

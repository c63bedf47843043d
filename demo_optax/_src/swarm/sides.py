"""Whose side goes on in a run for members only: votes among those who counted.

A manifest stands if it is valid and lists most of them. Two sides come about where members have
decided a step differently, or where some could not read a packet. `goes_on` orders sides that meet
in a step, by the members that are there; `goes_before` orders two manifests of a step that is over,
by the packets that they list. Of two that are equal the smaller head goes on.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from typing import NamedTuple

from demo_optax._src.swarm import records, steps
from demo_optax._src.swarm.members_only import MembersOnly
from demo_optax._src.swarm.records import Damaged, Manifest, MemberId
from demo_optax._src.swarm.slots import have_left
from demo_optax._src.swarm.steps import Steps
from demo_optax._src.swarm.store import log


class Decided(NamedTuple):
    """A step that is behind a worker, as far as the worker knows it."""

    head: str = ""  # the hash of what was decided up to it
    learned: float = math.inf  # when the worker learned of it, by its own clock
    manifest: Manifest | None = None  # None in the step before a snapshot
    lost: tuple[int, ...] = ()  # slots whose packets this worker did not apply

    @property
    def slots(self) -> set[int]:
        """The slots whose packets counted."""
        return slots_of(self.manifest) if self.manifest else set()


def slots_of(manifest: Manifest) -> set[int]:
    return {packet.slot for packet in manifest.packets}


def is_valid(
    store: MembersOnly, step: int, manifest: Manifest, slots: int, absent: float = 0.0
) -> bool:
    """Tells whether members have signed enough packets, and the owner the named roster.

    At the time ``absent`` there was no manifest. One that came long after this member knew its
    roster, and names an earlier one, is by somebody to whom that was shown again.
    """
    signed = (store.is_signed(step, x, manifest.previous) for x in manifest.packets)
    listed, held = slots_of(manifest), store.members(step)
    is_enough = len(listed) >= store.min_workers and max(listed) < slots
    if manifest.step != step or not is_enough or not all(signed):
        return False
    if not store.knows(step, manifest.roster):
        log.warning("step %d names a roster that is not there", step)
        return False
    is_late = absent > store.known_since + 2 * steps.ROSTER_SECONDS
    if manifest.roster != store.roster.name and is_late:
        return False
    stayed = store.roster.members()
    return 2 * sum(held.get(n) == stayed.get(n) for n in listed) >= len(listed)


def left_out(
    counted: Iterable[Set[MemberId]], slots: Set[int], votes: Callable[[int], bool]
) -> set[MemberId]:
    """Returns who is not in these slots of those who counted and still vote, if most are not.

    A slot is that of the last process which counted there.
    """
    newest = dict(sorted(set().union(*counted)))
    voters = {x for x in newest.items() if votes(x[0])}
    missing = {x for x in voters if x[0] not in slots}
    return missing if 2 * len(missing) >= len(voters) else set()


def goes_on(by_head: Mapping[str, Set[int]], loses_ties: str | None = None) -> str:
    """Returns the head of the side that goes on, of the slots on each side."""
    last = "~"  # comes after every head
    return min(by_head, key=lambda x: (-len(by_head[x]), last if x == loses_ties else x))


def goes_before(
    store: MembersOnly, step: int, manifest: Manifest, other: Manifest, slots: int
) -> bool:
    """Tells whether the first of two manifests that follow the same step goes on.

    It is the one that is valid, then that of more members, then that of the smaller head.
    """

    def rank(x: Manifest) -> tuple:
        return -len(x.packets), x.previous, records.head(x)

    if not is_valid(store, step, manifest, slots):
        return False
    return rank(manifest) < rank(other) or not is_valid(store, step, other, slots)


def lost_later(
    store: MembersOnly,
    said: Steps,
    manifest: Manifest,
    missing: Collection[int],
    read: Callable[[str], bytes | None],
) -> tuple[int, ...] | None:
    """Returns the slots that nobody applied in a step, or None while this is not known.

    Those who counted sign it in the next step, and the manifest of that step decides if as many of
    them are in it as are not. Before, their sides decide. Who has not signed yet may lack what is
    ``missing`` here.
    """
    later, sent = manifest.step + 1, {x.slot: x.member for x in manifest.packets}
    following = None
    with contextlib.suppress(Damaged):
        following = records.decode(Manifest, read(records.step_key("manifests", later)))
    if following is not None:
        head = records.head(manifest, following.lost)
        signed = {x.slot for x in following.packets if store.is_signed(later, x, head)}
        if signed := signed & sent.keys():
            away = [x for slot, x in sent.items() if slot not in signed]
            others = len(away) - len(have_left(store, away))
            return following.lost if len(signed) >= others else None
    own, by_head, lost = records.head(manifest, missing), {}, {}
    for slot, x in said.sent(later, sent.keys()).items():
        if x.head == records.head(manifest, x.lost):
            by_head.setdefault(x.head, set()).add(slot)
            lost[x.head] = x.lost
    silent = sent.keys() - set().union(*by_head.values())
    best = goes_on(by_head | {own: by_head.get(own, set()) | silent})
    return None if best == own and silent else lost[best]

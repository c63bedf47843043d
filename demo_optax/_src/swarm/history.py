"""The history of a swarm's run, from its store: who took part when, and how well time was used."""

import contextlib
import copy
import datetime
import itertools
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from demo_optax._src.swarm import records
from demo_optax._src.swarm.members_only import MembersOnly
from demo_optax._src.swarm.records import Damaged, Manifest, MemberId
from demo_optax._src.swarm.slots import have_left, last_manifests, newest_claims, read_claim
from demo_optax._src.swarm.snapshots import attested_steps
from demo_optax._src.swarm.store import Store, in_parallel

REFRESH_SECONDS = 10.0
SECONDS_A_REQUEST = 1.0  # at most 60 requests a minute
NAMES_A_REQUEST = 1000  # that a store lists
_SKIPPED = "skipped it, since nothing was finite"


class History(NamedTuple):
    """The history of a run, as its store tells it.

    Attributes:
      manifests: of the requested steps or rounds, in order.
      names: the names of the workers in them, by slot and incarnation. Before the first step it
        holds all workers that have a slot.
      left: slots and incarnations of the workers that said that they leave, or were taken out of
        the roster.
      snapshots: steps or rounds from which a new worker can start.
      snapshot_every: steps or rounds between two snapshots, if the run has begun.
      access: who may take part: whoever may write to the store, or the members of the roster.
    """

    manifests: Sequence[Manifest]
    names: dict[MemberId, str]
    left: frozenset[MemberId]
    snapshots: Sequence[int]
    snapshot_every: int | None = None
    access: str = ""

    def members(self, number: int) -> list[str]:
        """Returns the names of the workers whose packets counted in one of these steps."""
        return [self.names[x.member] for x in self.manifests[number].packets if x.steps]

    def skipped(self, number: int) -> list[str]:
        """Returns the names of the others that sent one, which had nothing finite to send."""
        return [self.names[x.member] for x in self.manifests[number].packets if not x.steps]

    @property
    def unit(self) -> str:
        """What an exchange ends, ``"step"`` or ``"round"``."""
        return "round" if any(x.steps > 1 for m in self.manifests for x in m.packets) else "step"

    def taken(self) -> dict[str, list[int | None]]:
        """Returns how many steps of each worker counted in each exchange.

        The number is 0 where the worker `skipped` the exchange, or was late: its process took part
        before and afterwards. It is None where it was away.
        """
        taken: dict[str, list[int | None]] = {
            name: [None] * len(self.manifests) for name in sorted(set(self.names.values()))
        }
        last: dict[MemberId, int] = {}
        for index, manifest in enumerate(self.manifests):
            for packet in manifest.packets:
                row = taken[self.names[packet.member]]
                missed = range(last.get(packet.member, index) + 1, index)
                row[missed.start : missed.stop] = [0] * len(missed)
                row[index] = packet.steps
                last[packet.member] = index
        return taken

    def ends(self) -> dict[MemberId, int]:
        """Returns the place in ``manifests`` where each worker's process took part last."""
        return {x.member: n for n, manifest in enumerate(self.manifests) for x in manifest.packets}

    def seconds(self) -> list[float]:
        """Returns the seconds between the decisions of each two successive steps."""
        return [max(b.time - a.time, 0.0) for a, b in itertools.pairwise(self.manifests)]

    def tokens_per_second(self) -> float:
        """Returns the sum of the weights that counted: of steps, if the workers have set none."""
        duration = sum(self.seconds())
        tokens = sum(x.tokens for m in self.manifests[1:] for x in m.packets)
        return tokens / duration if duration else 0.0

    def goodput(self, workers: int | None = None) -> float:
        """Returns the share of the workers' time that became steps of their median duration.

        By default each worker is counted while it was there; else the time of so many workers is
        counted from the first of these steps to the last. A worker trains on while its packets
        travel if it has rounds: then see the steps that `taken` counts.
        """
        durations, useful, there = self.seconds(), 0.0, 0.0
        for steps in self.taken().values():
            pairs = [(s, n) for s, n in zip(durations, steps[1:], strict=True) if n is not None]
            there += sum(seconds for seconds, _ in pairs)
            if each := [seconds / n for seconds, n in pairs if n]:
                useful += sum(n for _, n in pairs) * statistics.median(each)
        total = workers * sum(durations) if workers else there
        return min(useful / total, 1.0) if total else 1.0


def read_history(store: Store, last: int | None = None) -> History:
    """Reads the history of the last steps, or of all steps if ``last`` is None or 0.

    Example:
      >>> import tempfile
      >>> from demo_optax.swarm import Member, ObjectStore
      >>> folder = tempfile.TemporaryDirectory()
      >>> store = ObjectStore(folder.name)
      >>> member = Member(store, "paris")
      >>> for step in range(3):
      ...     _ = member.exchange(step, b"a packet")
      >>> history = read_history(store)
      >>> len(history.manifests), history.members(-1), history.taken()
      (3, ['paris'], {'paris': [1, 1, 1]})
      >>> folder.cleanup()
    """
    manifests = last_manifests(store, last)
    if manifests and isinstance(store, MembersOnly):
        first = {x.member: (m, x) for m in reversed(manifests) for x in m.packets}
        signed = sorted(first.items())
        names = {member: store.signer(m.step, x, m.previous) for member, (m, x) in signed}
    elif manifests:
        members = sorted({member for manifest in manifests for member in manifest.members})
        claims = in_parallel(lambda member: read_claim(store, member), members)
        names = {member: x.worker for member, x in zip(members, claims, strict=True)}
    else:
        names = {(slot, n): x.worker for slot, (n, x) in newest_claims(store).items()}
    listed = {f"slots/{name}" for name in store.names("slots")}
    left = have_left(store, [x for x in names if records.left_key(x) in listed])
    access = "open: whoever may write to the place may take part"
    if isinstance(store, MembersOnly):
        present = {x.name for x in store.roster.members().values()}
        left |= {member for member, name in names.items() if name not in present}
        told = ", ".join(sorted(present))
        access = f"members only, roster {store.roster.number}: {told}"
    every = ""
    with contextlib.suppress(Damaged):
        every = str(records.parse(store.get("run.json")).get("snapshot_every"))
    every = int(every) if re.fullmatch("[0-9]{1,10}", every) else None
    return History(manifests, names, left, attested_steps(store), every, access)


class _Kept:
    """Keeps the objects of the last look, since none ever changes, and counts its requests."""

    def __init__(self, store: Store):
        self._store, self.requests = store, 0
        self._before: dict[str, bytes] = {}
        self._now: dict[str, bytes] = {}

    def look_again(self) -> None:
        self._before, self._now, self.requests = self._now, {}, 0

    def get(self, key: str) -> bytes | None:
        found = self._before.get(key, self._now.get(key))
        if found is None:  # it may still come
            self.requests += 1
            found = self._store.get(key)
        if found is not None:
            self._now[key] = found
        return found

    def names(self, folder: str) -> list[str]:
        names = self._store.names(folder)
        self.requests += 1 + len(names) // NAMES_A_REQUEST
        return names


def watch_history(
    store: Store, last: int | None = None, sleep: Callable[[float], object] = time.sleep
) -> Iterator[History]:
    """Yields the history of the last steps again and again, every ten seconds.

    After the first look it sends at most 60 requests a minute, and looks more rarely if new steps
    come faster than it may read them. No object is read twice.

    Example:
      >>> import tempfile
      >>> from demo_optax.swarm import Member, ObjectStore
      >>> folder = tempfile.TemporaryDirectory()
      >>> store = ObjectStore(folder.name)
      >>> member = Member(store, "paris")
      >>> for step, history in zip(range(2), watch_history(store, sleep=lambda seconds: None)):
      ...     print(len(history.manifests))
      ...     _ = member.exchange(step, b"a packet")
      0
      1
      >>> folder.cleanup()
    """
    kept = _Kept(store.inner if isinstance(store, MembersOnly) else store)
    readable: Any = kept  # a store has other methods, which nobody calls
    if isinstance(store, MembersOnly):
        readable = copy.copy(store)
        readable.inner = kept
    yield read_history(readable, last)
    kept.requests = 0
    while True:
        sleep(max(REFRESH_SECONDS, SECONDS_A_REQUEST * kept.requests))
        kept.look_again()
        yield read_history(readable, last)


def status(history: History) -> str:
    """Summarizes a run in a few lines: its last step or round, who is there, left or missing."""
    manifests, names, unit = history.manifests, history.names, history.unit
    if not manifests:
        return f"no step yet; joined: {', '.join(names.values()) or 'nobody'}\n{history.access}"
    end, ends, durations = manifests[-1], history.ends(), history.seconds()
    newest = {names[member]: member for member, _ in sorted(ends.items(), key=lambda x: x[1])}
    told: dict[str, list[str]] = {"members": [], _SKIPPED: [], "left": [], "missing": []}
    for name, member in sorted(newest.items()):
        if member in end.members - history.left:
            told[_SKIPPED if name in history.skipped(-1) else "members"].append(name)
        else:
            after = f"{name} after {unit} {manifests[ends[member]].step}"
            told["left" if member in history.left else "missing"].append(after)
    told["members"] = told["members"] or ["nobody"]
    told[f"snapshots before {unit}s"] = list(map(str, history.snapshots)) or ["none"]
    decided = datetime.datetime.fromtimestamp(end.time, datetime.UTC)
    lines = [
        f"{unit} {end.step}, decided at {decided:%Y-%m-%d %H:%M:%S} UTC, "
        f"{time.time() - end.time:.0f} s ago",
        *(f"{what}: {', '.join(which)}" for what, which in told.items() if which),
    ]
    if every := history.snapshot_every:
        due = itertools.count(end.step + 1 + -(end.step + 1) % every, every)
        lines[-1] += f"; next before {next(n for n in due if n not in history.snapshots)}"
    if durations:
        each, goodput = f"{statistics.median(durations):.3f} s each", ""
        if unit == "round":
            steps = [max(1, *(x.steps for x in m.packets)) for m in manifests[1:]]
            of_step = statistics.median(s / n for s, n in zip(durations, steps, strict=True))
            each += f" and {of_step:.3f} s a step (medians)"
        else:
            each, goodput = f"{each} (median)", f", goodput {history.goodput():.0%}"
        tokens, packets = history.tokens_per_second(), [x for m in manifests for x in m.packets]
        weights = "steps" if all(x.tokens == x.steps for x in packets) else "tokens"
        lines.append(
            f"last {len(manifests)} {unit}s: {each}, "
            f"{tokens:{',.0f' if tokens >= 100 else '.3g'}} {weights} a second counted"
            f"{goodput}"
        )
    return "\n".join([*lines, history.access])

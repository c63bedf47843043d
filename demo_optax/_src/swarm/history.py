"""The history of a swarm's run, from its store: who took part when, and how well time was used."""

import datetime
import itertools
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

from demo_optax._src.swarm import records
from demo_optax._src.swarm.records import Manifest, MemberId
from demo_optax._src.swarm.slots import last_manifests, newest_claims, read_claim
from demo_optax._src.swarm.snapshots import steps_of
from demo_optax._src.swarm.store import Store, in_parallel


class History(NamedTuple):
    """The history of a run, as its store tells it.

    Attributes:
      manifests: of the requested steps, in order.
      names: the names of these steps' workers, by slot and incarnation. Before the first step it
        holds all workers that have a slot.
      left: slots and incarnations of the workers that said, after the last step, that they leave.
      snapshots: steps from which a new worker can start.
    """

    manifests: Sequence[Manifest]
    names: dict[MemberId, str]
    left: frozenset[MemberId]
    snapshots: Sequence[int]

    def members(self, number: int) -> list[str]:
        """Returns the names of the workers whose packets counted in one of these steps."""
        return [self.names[x.member] for x in self.manifests[number].packets]

    def seconds(self) -> list[float]:
        """Returns the seconds between the decisions of each two successive steps."""
        return [max(b.time - a.time, 0.0) for a, b in itertools.pairwise(self.manifests)]

    def seconds_per_step(self) -> float:
        """Returns the median time of a worker's step; in a round they take many."""
        steps = [max(x.steps for x in m.packets) for m in self.manifests[1:]]
        each = [s / max(n, 1) for s, n in zip(self.seconds(), steps, strict=True)]
        return statistics.median(each) if each else 0.0

    def tokens_per_second(self) -> float:
        """Returns the tokens that counted, if the workers' weights are those of their batches."""
        duration = sum(self.seconds())
        tokens = sum(x.tokens for m in self.manifests[1:] for x in m.packets)
        return tokens / duration if duration else 0.0

    def goodput(self, workers: int | None = None) -> float:
        """Returns the share of worker-seconds that became steps of median duration.

        By default it counts the time of all workers that ever took part.
        """
        durations, step = self.seconds(), self.seconds_per_step()
        if not durations or not sum(durations):
            return 1.0
        total = max(self.manifests[-1].time - self.manifests[0].time, step)
        workers = workers or len({self.names[x] for m in self.manifests for x in m.members})
        useful = sum(x.steps for m in self.manifests[1:] for x in m.packets) * step
        return min(useful / (workers * total), 1.0)


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
      >>> len(history.manifests), history.members(-1)
      (3, ['paris'])
      >>> folder.cleanup()
    """
    manifests = last_manifests(store, last)
    if not manifests:
        claims = newest_claims(store).items()
        return History([], {(slot, n): x.worker for slot, (n, x) in claims}, frozenset(), [])
    members = sorted({member for manifest in manifests for member in manifest.members})
    claims = in_parallel(lambda member: read_claim(store, member), members)
    names = {member: x.worker for member, x in zip(members, claims, strict=True)}
    # With a delay, one more step is in progress.
    following = [records.step_key("packets", manifests[-1].step + n) for n in (1, 2)]
    left = [records.read_folder(store.names(folder)).left for folder in following]
    return History(manifests, names, frozenset().union(*left), steps_of(store))


def status(history: History) -> str:
    """Summarizes a run in a few lines: its step, its members, who is gone, and its goodput."""
    if not history.manifests:
        return f"no step yet; joined: {', '.join(history.names.values()) or 'nobody'}"
    end, durations = history.manifests[-1], history.seconds()
    members = [history.names[x] for x in sorted(end.members - history.left)]
    gone = sorted(set(history.names.values()) - set(members))
    decided = datetime.datetime.fromtimestamp(end.time, datetime.UTC)
    lines = [
        f"step {end.step}, decided at {decided:%Y-%m-%d %H:%M:%S} UTC, "
        f"{time.time() - end.time:.0f} s ago",
        f"members: {', '.join(members) or 'nobody'}",
        f"gone: {', '.join(gone) or 'nobody'}",
        f"snapshots before steps: {', '.join(map(str, history.snapshots)) or 'none'}",
    ]
    if durations:
        lines.append(
            f"last {len(history.manifests)} exchanges: {statistics.median(durations):.3f} s each "
            f"and {history.seconds_per_step():.3f} s a step (medians), "
            f"{history.tokens_per_second():,.0f} tokens a second counted, goodput "
            f"{history.goodput():.0%} of all workers that took part"
        )
    steps = {history.names[x.member]: x.steps for x in end.packets}
    if max(steps.values()) > 1:
        trained = ", ".join(f"{name} {count}" for name, count in steps.items())
        lines.append(f"steps in round {end.step}: {trained}")
    return "\n".join(lines)


def draw(history: History, path: str) -> None:
    """Draws the life of a run: one row per worker, dark where its packets counted."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(f"to draw {path!r}, install matplotlib.") from error
    rows, manifests = sorted(set(history.names.values())), history.manifests
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.35 * len(rows)), layout="constrained")
    for row, name in enumerate(rows):
        spans = [
            (before.time - manifests[0].time, max(after.time - before.time, 0.0))
            for before, after in itertools.pairwise(manifests)
            if name in {history.names[x] for x in after.members}
        ]
        axes.broken_barh(spans, (row - 0.4, 0.8), color="#2a6f97", linewidth=0)
    axes.set_yticks(range(len(rows)), rows)
    first, last = manifests[0].step, manifests[-1].step
    axes.set_xlabel(f"seconds since step {first}; the last is step {last}")
    axes.set_title("Who took part when")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)

"""What a swarm's store tells of its run: who took part when, and what became of their time."""

import datetime
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

from demo_optax._src.swarm import records
from demo_optax._src.swarm.records import Manifest
from demo_optax._src.swarm.slots import last_manifests, newest_claims, read_claim
from demo_optax._src.swarm.snapshots import steps_of
from demo_optax._src.swarm.store import Store, in_parallel


class History(NamedTuple):
    """A run, from its store alone.

    Attributes:
      manifests: of the steps that were asked for, in their order.
      names: of the workers of these steps, by slot and incarnation; before the first step, of
        those that have a slot.
      left: slots and incarnations of those that left after the last step, and said so.
      snapshots: steps from which a new worker can start.
    """

    manifests: Sequence[Manifest]
    names: dict[tuple[int, int], str]
    left: frozenset[tuple[int, int]]
    snapshots: Sequence[int]

    def members(self, number: int) -> list[str]:
        """Names of the workers that counted in one of these steps."""
        return [self.names[x.member] for x in self.manifests[number].packets]

    def seconds(self) -> list[float]:
        """Of each step, from the decision before to its own; the first has none."""
        pairs = zip(self.manifests, self.manifests[1:], strict=False)
        return [max(after.time - before.time, 0.0) for before, after in pairs]

    def goodput(self, workers: int | None = None) -> float:
        """The share of worker-seconds that became steps.

        A worker's step counts as the median duration of a step. All workers that ever took part,
        or so many, could have worked all the time.
        """
        durations = self.seconds()
        if not durations or not sum(durations):
            return 1.0
        whole = max(self.manifests[-1].time - self.manifests[0].time, statistics.median(durations))
        everybody = workers or len({self.names[x] for m in self.manifests for x in m.members})
        useful = sum(len(m.packets) for m in self.manifests[1:]) * statistics.median(durations)
        return min(useful / (everybody * whole), 1.0)


def read_history(store: Store, last: int | None = None) -> History:
    """Reads the manifests of the last so many steps; of all where ``last`` is None or 0.

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
    return History(manifests, names, _left_after(store, manifests[-1].step), steps_of(store))


def status(history: History) -> str:
    """A few lines on a run: its step, its members, who is gone, and its goodput."""
    if not history.manifests:
        return f"no step yet; joined: {', '.join(history.names.values()) or 'nobody'}"
    end, durations = history.manifests[-1], history.seconds()
    members = [history.names[x] for x in sorted(end.members - history.left)]
    gone = sorted(set(history.names.values()) - set(members))
    lines = [
        f"step {end.step}, decided at {_clock(end.time)}, {time.time() - end.time:.0f} s ago",
        f"members: {', '.join(members) or 'nobody'}",
        f"gone: {', '.join(gone) or 'nobody'}",
        f"snapshots before steps: {', '.join(map(str, history.snapshots)) or 'none'}",
    ]
    if durations:
        lines.append(
            f"last {len(history.manifests)} steps: {statistics.median(durations):.3f} s a step "
            f"(median), goodput {history.goodput():.0%} of all workers that took part"
        )
    return "\n".join(lines)


def _left_after(store: Store, step: int) -> frozenset[tuple[int, int]]:
    folders = [records.step_folder(step + n) for n in (1, 2)]  # with a delay, one is under way
    return frozenset().union(*[records.read_folder(store.names(x)).left for x in folders])


def _clock(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def draw(history: History, path: str) -> None:
    """A picture of the run's life: a row for each worker, dark where its packets counted."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(f"to draw {path!r}, install matplotlib.") from error
    rows = sorted(set(history.names.values()))
    start = history.manifests[0].time
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.35 * len(rows)), layout="constrained")
    for row, name in enumerate(rows):
        for before, after in zip(history.manifests, history.manifests[1:], strict=False):
            if name in {history.names[x] for x in after.members}:
                width = max(after.time - before.time, 0.0)
                axes.barh(row, width, 0.8, before.time - start, color="#2a6f97", linewidth=0)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xlabel(
        f"seconds since step {history.manifests[0].step}; the last is step "
        f"{history.manifests[-1].step}"
    )
    axes.set_title("Who took part when")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)

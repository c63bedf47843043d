"""Trains as a swarm while workers and store are broken at random: `make chaos`.

    python -m benchmarks.chaos --store s3
    python -m benchmarks.chaos --every 60 --steps 600 --preset tiny      a worker killed each minute

It prints each fault as it happens, and a report; the exit status is 1 where anything was lost: a
worker that ended by itself, a step after which parameters differed, or a hang.
"""

import functools
import os
import pathlib
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from demo_optax.swarm import History, ObjectStore, draw, read_history

from . import faults as kinds
from .fleet import ROOT, Worker, compare_steps, lag
from .stores import Served, StoreName, served

LONGEST_JOIN = 300.0  # seconds
NANO = ("--text", str(ROOT / "demo_optax" / "_src" / "compression"), "--sequence-length", "16")


@dataclass(frozen=True)
class Options:
    store: StoreName = "folder"
    """Where the workers exchange: a folder, moto's S3 or Azurite."""
    workers: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 4
    """Workers that shall be there."""
    faults: int = 67
    """How many faults to let happen; with --every, as many as come before the last step."""
    every: float | None = None
    """Seconds between two kills, the only faults then. By default faults of all kinds follow each
    other."""
    steps: int = 10**6
    """Steps after which the run ends; by default it ends after the faults."""
    preset: str = "nano"
    """The trainer's preset."""
    batch_size: int = 4
    """Of each worker."""
    delay: int | None = None
    """Of the exchange, by default the trainer's."""
    optimizer: str = "demo-scaled"
    """The trainer's optimizer; diloco and sparseloco exchange in rounds."""
    local_steps: int | None = None
    """Steps in a round."""
    round_seconds: float | None = None
    """Seconds in a round."""
    hang: float = 90.0
    """Seconds without a step of a worker that count as a hang."""
    seed: int = 0
    """Of the faults, and of the run."""
    picture: pathlib.Path | None = None
    """Draws who took part when."""


class Chaos:
    """A run that is broken, and what was seen."""

    def __init__(self, options: Options, place: Served, folder: pathlib.Path, console: Console):
        self.options, self.place, self.console = options, place, console
        self.drawn = random.Random(options.seed)
        words = ["--swarm", place.url, "--preset", options.preset, "--steps", str(options.steps)]
        words += ["--batch-size", str(options.batch_size), "--optimizer", options.optimizer]
        words += ["--seed", str(options.seed), "--evaluate-every", "1000000"]
        words += ["--snapshot-every", "50", "--min-workers", "1", "--log-checksums"]
        for flag in ("delay", "local_steps", "round_seconds"):
            if (value := getattr(options, flag)) is not None:
                words += [f"--{flag.replace('_', '-')}", str(value)]
        words += NANO if options.preset == "nano" else []
        self.workers = [
            Worker(f"worker-{n}", folder, words, place.environment) for n in range(options.workers)
        ]
        self.counts: Counter[str] = Counter()
        self.kills: list[tuple[str, float]] = []
        self.errors: list[str] = []
        self.hangs = 0

    def run(self) -> None:
        for worker in self.workers:
            worker.start()
        self.wait_for_all()
        self.began = time.time()
        self.console.print(f"{len(self.workers)} workers train")
        if self.options.every:
            self.kill_regularly()
        else:
            self.break_everything()
        self.ended = time.time()

    def wait_for_all(self) -> None:
        while not all(worker.joined for worker in self.workers):
            self.look()
            time.sleep(0.2)

    def kill_regularly(self) -> None:
        every = self.options.every or 0.0
        following = time.monotonic() + every
        while any(worker.held_out() is None for worker in self.workers):
            self.look(finished=True)
            joined = [x for x in self.workers if x.joined and x.held_out() is None]
            if time.monotonic() > following and len(joined) == len(self.workers):
                following += every
                worker = self.drawn.choice(joined)
                does = functools.partial(kinds.kill, worker, 0.0)
                self.happen(kinds.Fault("kill", worker.name, does), worker).join()
            time.sleep(0.2)

    def break_everything(self) -> None:
        possible = kinds.PROCESS_KINDS + (kinds.STORE_KINDS if self.place.faults else ())
        order = [possible[n % len(possible)] for n in range(self.options.faults)]
        self.drawn.shuffle(order)
        of_store: threading.Thread | None = None
        for kind in order:
            if kind in kinds.ENDING or not any(worker.joined for worker in self.workers):
                self.wait_for_all()
            if kind in kinds.STORE_KINDS and of_store:
                of_store.join()
            fault = kinds.draw(kind, self.workers, self.place.faults, self.drawn)
            name = fault.what.partition(",")[0]
            thread = self.happen(fault, next((x for x in self.workers if x.name == name), None))
            if kind in kinds.STORE_KINDS:  # lasts while processes are broken
                of_store = thread
            else:
                thread.join()
            self.look()
            time.sleep(self.drawn.uniform(0.2, 1.5))
        self.wait_for_all()

    def happen(self, fault: kinds.Fault, worker: Worker | None) -> threading.Thread:
        self.counts[fault.kind] += 1
        self.console.print(f"{sum(self.counts.values()):4} {fault.kind}: {fault.what}")
        if fault.kind == "kill" and worker:
            self.kills.append((worker.name, time.time()))
        return kinds.in_background(fault, self.errors)

    def look(self, finished: bool = False) -> None:
        """Notes hangs, and workers that ended by themselves, which are started again."""
        if lag(self.workers) > self.options.hang:
            self.hangs += 1
            raise TimeoutError(f"a worker took no step for {self.options.hang:.0f} s")
        if late := [worker.name for worker in self.workers if worker.joining_for > LONGEST_JOIN]:
            self.hangs += 1
            raise TimeoutError(f"{', '.join(late)} did not join within {LONGEST_JOIN:.0f} s")
        for worker in self.workers:
            if not worker.alive and not (finished and worker.held_out() is not None):
                self.errors.append(f"{worker.name} ended by itself: {worker.last_words()}")
                worker.start()

    def end(self) -> None:
        for worker in self.workers:
            worker.send(signal.SIGCONT)
            worker.send(signal.SIGTERM)
        for worker in self.workers:
            status = worker.wait(60)
            if status not in (0, 143) and worker.held_out() is None:
                self.errors.append(f"{worker.name} at SIGTERM: {status}, {worker.last_words()}")
                worker.send(signal.SIGKILL)
                worker.wait(10)


def seconds_until_noticed(history: History, kills: list[tuple[str, float]]) -> list[float]:
    """From each kill to the first decision without the worker that was killed."""
    seconds = []
    for name, at in kills:
        for manifest in history.manifests:
            names = {history.names[member] for member in manifest.members}
            if manifest.time > at and name not in names:
                seconds.append(manifest.time - at)
                break
    return seconds


def seconds_until_joined(workers: list[Worker]) -> list[float]:
    """From each start of a process to the end of its first step that counted."""
    seconds = []
    for worker in workers:
        lines = [line for line in worker.lines() if worker.name in line.members]
        for start, following in zip(worker.starts, [*worker.starts[1:], float("inf")], strict=True):
            times = [line.time for line in lines if start < line.time < following]
            seconds += [min(times) - start] if times else []
    return seconds


def report(chaos: Chaos, history: History, console: Console) -> bool:
    """Prints what came of it; whether nothing was lost."""
    options, (compared, differing) = chaos.options, compare_steps(chaos.workers)
    noticed = seconds_until_noticed(history, chaos.kills)
    again = seconds_until_joined(chaos.workers)[options.workers :]
    during = [m for m in history.manifests if chaos.began <= m.time <= chaos.ended]
    goodput = history._replace(manifests=during).goodput(options.workers)
    durations = history._replace(manifests=during).seconds()
    losses = [worker.held_out() for worker in chaos.workers]
    counted = sum(packet.steps for m in history.manifests for packet in m.packets)
    trained = sum(len(list(worker.lines())) for worker in chaos.workers)
    table = Table(show_header=False)
    kinds_seen = ", ".join(f"{n} {kind}" for kind, n in sorted(chaos.counts.items()))
    table.add_row("store", f"{options.store}, {options.optimizer}")
    table.add_row("faults", f"{sum(chaos.counts.values())}: {kinds_seen}")
    exchanges = f"{len(history.manifests)} exchanges in {chaos.ended - chaos.began:.0f} s"
    table.add_row("steps", f"{counted} of {trained} that were trained counted, in {exchanges}")
    table.add_row("exchanges compared, and different", f"{compared}, {len(differing)}")
    table.add_row("lost, and why", f"{len(chaos.errors)} {'; '.join(chaos.errors)}")
    table.add_row("hangs", str(chaos.hangs))
    table.add_row("goodput", f"{goodput:.1%} of {options.workers} workers' time")
    if durations:
        table.add_row(
            "seconds an exchange",
            f"median {statistics.median(durations):.3f}, most {max(durations):.1f}",
        )
    for what, seconds in ("a kill is noticed after", noticed), ("a start takes part after", again):
        if seconds:
            median = statistics.median(seconds)
            table.add_row(what, f"median {median:.1f} s, most {max(seconds):.1f} s")
    joins = [join for worker in chaos.workers for join in worker.joins()[1:]]
    if joins:
        imports, compiling, catching_up = (
            statistics.median(x) for x in list(zip(*joins, strict=True))[1:]
        )
        table.add_row(
            "of which",
            f"{imports:.1f} s imports and data, {compiling:.1f} s compiling, "
            f"{catching_up:.1f} s catching up",
        )
    if any(losses):
        table.add_row("held-out loss", ", ".join(f"{x:.4f}" for x in losses if x is not None))
    console.print(table)
    return not (differing or chaos.errors or chaos.hangs)


def main(options: Options) -> int:
    console = Console(width=140)
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        with served(options.store, folder, options.seed) as place:
            chaos = Chaos(options, place, folder, console)
            try:
                chaos.run()
            except TimeoutError as error:
                chaos.errors.append(str(error))
                chaos.ended = time.time()
                chaos.began = getattr(chaos, "began", chaos.ended)
            finally:
                chaos.end()
            os.environ.update(place.environment)
            history = read_history(ObjectStore(place.url))
            good = report(chaos, history, console)
            if options.picture:
                draw(history, str(options.picture))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))

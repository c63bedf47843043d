"""Trains as a swarm while workers and store are broken at random: `make chaos`.

    python -m benchmarks.chaos --store s3
    python -m benchmarks.chaos --every 60 --steps 1200 --preset tiny     a worker killed each minute

It prints each fault as it happens, and a report. The exit status is 1 where anything was lost (a
worker that ended by itself, a step after which parameters differed, a hang) or settings are wrong.
"""

import argparse
import functools
import itertools
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from typing import get_args

from rich.console import Console
from rich.table import Table

from demo_optax.swarm import History, MembersOnly, ObjectStore, draw, read_history

from . import faults as kinds
from .fleet import ROOT, Worker, compare_steps, lag
from .stores import Served, StoreName, served

LONGEST_JOIN = 300.0  # seconds
NANO = ("--text", str(ROOT / "demo_optax" / "_src" / "compression"), "--sequence-length", "16")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--store", choices=get_args(StoreName), default="folder", help="Azurite is azure's")
    add("--workers", "-n", type=int, default=4, help="workers that shall be there")
    add("--faults", type=int, default=67, help="how many faults to let happen, of all kinds")
    add("--every", type=float, help="seconds between two kills, the only faults then")
    add("--steps", type=int, default=10**6, help="by default the run ends after the faults")
    add("--preset", default="nano", help="the trainer's, as these are:")
    add("--batch-size", type=int, default=4, help="of each worker")
    add("--delay", type=int, help="of the exchange")
    add("--optimizer", default="demo-scaled", help="diloco and sparseloco exchange in rounds")
    add("--local-steps", type=int, help="steps in a round")
    add("--round-seconds", type=float, help="seconds in a round")
    add("--seed", type=int, default=0, help="of the faults, and of the run")
    add("--hang", type=float, default=90.0, help="seconds without a step that count as a hang")
    add("--keys", action="store_true", help="a run for members only, where others forge too")
    add("--picture", type=pathlib.Path, help="draws who took part when")
    return parser.parse_args()


class Chaos:
    """A run that is broken, and what was seen."""

    def __init__(self, options, place: Served, folder: pathlib.Path, console: Console):
        self.options, self.place, self.console = options, place, console
        self.drawn = random.Random(options.seed)
        settings = {"--swarm": place.url, "--min-workers": 1}
        settings |= {"--evaluate-every": 10**6, "--snapshot-every": 50}
        own = ("preset", "steps", "batch_size", "optimizer", "seed")
        for name in (*own, "delay", "local_steps", "round_seconds"):
            if (value := getattr(options, name)) is not None:
                settings["--" + name.replace("_", "-")] = value
        words = [str(word) for pair in settings.items() for word in pair] + ["--log-checksums"]
        words += NANO if options.preset == "nano" else []
        names = [f"worker-{n}" for n in range(options.workers)]
        keys = make_keys(folder, place.url, names) if options.keys else {}
        self.workers = [
            Worker(name, folder, [*words, *keys.get(name, ())], place.environment) for name in names
        ]
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self.hangs = 0
        self.began = self.ended = time.time()

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
                does = functools.partial(kinds.kill, [worker], 0.0)
                self.happen(kinds.Fault("kill", worker.name, does)).join()
            time.sleep(0.2)

    def break_everything(self) -> None:
        possible = kinds.PROCESS_KINDS + (kinds.STORE_KINDS if self.place.faults else ())
        possible += ("forge",) * self.options.keys
        order = [possible[n % len(possible)] for n in range(self.options.faults)]
        self.drawn.shuffle(order)
        of_store: threading.Thread | None = None
        for kind in order:
            if kind in kinds.ENDING or not any(worker.joined for worker in self.workers):
                self.wait_for_all()
            if kind in kinds.STORE_KINDS and of_store:
                of_store.join()
            fault = kinds.draw(kind, self.workers, self.place, self.drawn)
            thread = self.happen(fault)
            if kind in kinds.STORE_KINDS:  # lasts while processes are broken
                of_store = thread
            else:
                thread.join()
            self.look()
            time.sleep(self.drawn.uniform(0.2, 1.5))
        self.wait_for_all()

    def happen(self, fault: kinds.Fault) -> threading.Thread:
        self.counts[fault.kind] += 1
        self.console.print(f"{sum(self.counts.values()):4} {fault.kind}: {fault.what}")
        return kinds.in_background(fault, self.errors)

    def look(self, finished: bool = False) -> None:
        """Notes hangs, and workers that ended by themselves, which are started again."""
        if lag(self.workers) > self.options.hang:
            raise TimeoutError(f"a worker took no step for {self.options.hang:.0f} s")
        for worker in self.workers:
            if worker.joining_for > LONGEST_JOIN:
                raise TimeoutError(f"{worker.name} did not join, and said: {worker.last_words()}")
            if not worker.alive and not (finished and worker.held_out() is not None):
                if worker.wait(0) == 2:  # the trainer refuses its settings, and always would
                    sys.exit(worker.last_words())
                self.errors.append(f"{worker.name} ended by itself: {worker.last_words()}")
                self.console.print(self.errors[-1], markup=False)
                worker.start()

    def end(self) -> None:
        for worker in self.workers:
            worker.send(signal.SIGCONT)
            worker.send(signal.SIGTERM)
        for worker in self.workers:
            if (status := worker.wait(60)) not in (0, 143) and worker.held_out() is None:
                self.errors.append(f"{worker.name} at SIGTERM: {status}, {worker.last_words()}")
                worker.send(signal.SIGKILL)
                worker.wait(10)


def make_keys(folder: pathlib.Path, url: str, names: list[str]) -> dict[str, list[str]]:
    """Writes keys and a roster; returns the trainer's settings for each member."""
    command = str(pathlib.Path(sys.executable).with_name("demo-optax"))
    all_words = [["key", name] for name in ("owner", *names)]
    all_words += [["roster", url, "--owner", "owner.key", "--add", *(f"{x}.pub" for x in names)]]
    for words in all_words:
        subprocess.run([command, *words], cwd=folder, check=True, capture_output=True)
    owner = str(folder / "owner.pub")
    return {name: ["--key", str(folder / f"{name}.key"), "--owner", owner] for name in names}


def seconds_until_joined(workers: list[Worker]) -> list[float]:
    """From each later start of a worker to the end of its first step that counted."""
    seconds = []
    for worker in workers:
        times = [step["time"] for step in worker.steps() if worker.name in step["members"]]
        for start, following in itertools.pairwise([*worker.starts[1:], float("inf")]):
            first = next((at for at in times if start < at < following), None)
            seconds += [first - start] if first is not None else []
    return seconds


def report(chaos: Chaos, history: History, console: Console) -> bool:
    """Prints what came of it; whether nothing was lost."""
    options, (compared, differing) = chaos.options, compare_steps(chaos.workers)
    during = [m for m in history.manifests if chaos.began <= m.time <= chaos.ended]
    goodput = history._replace(manifests=during).goodput(options.workers)
    counted = sum(packet.steps for m in history.manifests for packet in m.packets)
    trained = sum(len(worker.steps()) for worker in chaos.workers)
    kinds_seen = ", ".join(f"{n} {kind}" for kind, n in sorted(chaos.counts.items()))
    exchanges = f"{len(history.manifests)} exchanges in {chaos.ended - chaos.began:.0f} s"
    joins = [join for worker in chaos.workers for join in worker.joins()[1:]]
    losses = [f"{loss:.4f}" for x in chaos.workers if (loss := x.held_out()) is not None]
    rows = {
        "store": f"{options.store}, {options.optimizer}",
        "faults": f"{sum(chaos.counts.values())}: {kinds_seen}",
        "steps": f"{trained} that workers logged, {counted} that counted, in {exchanges}",
        "exchanges compared, and different": f"{compared}, {len(differing)}",
        "lost, and why": f"{len(chaos.errors)} {'; '.join(chaos.errors)}",
        "hangs": str(chaos.hangs),
        "goodput": f"{goodput:.1%} of {options.workers} workers' time",
        "seconds of an exchange": spread(history._replace(manifests=during).seconds()),
        "seconds until a start takes part": spread(seconds_until_joined(chaos.workers)),
        "of which imports and data, compiling, catching up": "; ".join(
            spread(seconds) for seconds in list(zip(*joins, strict=True))[1:]
        ),
        "held-out loss": ", ".join(losses),
    }
    table = Table(show_header=False)
    for row in filter(all, rows.items()):
        table.add_row(*row)
    console.print(table)
    return not (differing or chaos.errors or chaos.hangs)


def spread(values: list[float]) -> str:
    return f"median {statistics.median(values):.3f}, most {max(values):.1f}" if values else ""


def main(options: argparse.Namespace) -> int:
    console = Console(width=140)
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        with served(options.store, folder, options.seed) as place:
            os.environ.update(place.environment)
            chaos = Chaos(options, place, folder, console)
            try:
                chaos.run()
            except TimeoutError as error:
                chaos.hangs += 1
                chaos.errors.append(str(error))
                chaos.ended = time.time()
            finally:
                chaos.end()
            store, owner = ObjectStore(place.url), (folder / "owner.key", folder / "owner.pub")
            history = read_history(MembersOnly(store, *owner) if options.keys else store)
            good = report(chaos, history, console)
            if options.picture:
                draw(history, str(options.picture))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(parsed()))

"""Trains what studies.yaml asks for and is not on file yet, and shows what came of it.

    python -m benchmarks.quality train [STUDY ...] [--only PATTERN ...] [--jobs 2]
    python -m benchmarks.quality show [STUDY ...]
    python -m benchmarks.quality write

`train` appends a line of JSON to results/STUDY.jsonl for each run, and goes on from there when it
is started again. `show` prints the tables. `write` puts them between their marks in the
documentation, the losses that `demo-optax choose` weighs into the package, and draws the pictures.
"""

import fnmatch
import json
import os
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Annotated

import tyro
from rich.console import Console

from . import choices, pictures, tables
from .study import Job, Method, Result, Study, read

console = Console()
Names = tyro.conf.Positional[tuple[str, ...]]


@dataclass(frozen=True)
class Train:
    """Trains what is not on file yet."""

    studies: Names = ()
    only: tuple[str, ...] = ("*",)
    """Patterns of the methods' names."""
    seeds: int | None = None
    """How many of each study's seeds, all by default."""
    jobs: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """Runs at the same time, each on a core of its own."""


@dataclass(frozen=True)
class Show:
    """Prints the tables."""

    studies: Names = ()


@dataclass(frozen=True)
class Write:
    """Puts tables between their marks, and draws the pictures."""


Command = (
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Show, tyro.conf.subcommand("show")]
    | Annotated[Write, tyro.conf.subcommand("write")]
)


def main(command: Command) -> None:
    studies = read()
    if isinstance(command, Write):
        tables.write(studies)
        choices.write(studies)
        return pictures.draw(studies)
    chosen = [studies[name] for name in command.studies or studies]
    if isinstance(command, Show):
        for study in chosen:
            console.print(
                f"\n{study.name}\n\n{tables.of_study(study)}", markup=False, soft_wrap=True
            )
        return None
    return train(chosen, command)


def train(chosen: list[Study], command: Train) -> None:
    """Each core takes the next method that needs a run, until none does."""
    studies = {study.name: study for study in chosen}
    cores: Queue[int] = Queue()
    for core in sorted(os.sched_getaffinity(0))[: command.jobs]:
        cores.put(core)
    waiting = [
        (study, method)
        for study in chosen
        for method in study.methods.values()
        if any(fnmatch.fnmatch(method.name, pattern) for pattern in command.only)
    ]
    busy: set[str] = set()
    lock = threading.Condition()

    def take() -> Job | None:
        """The next job; waits for those under way where only they can tell which it is."""
        with lock:
            while True:
                jobs = [study.next_job(method, study.results()) for study, method in waiting]
                free = [
                    job
                    for (study, _), job in zip(waiting, jobs, strict=True)
                    if job and job.key not in busy and job.seed in study.seeds[: command.seeds]
                ]
                if free:
                    # Every method's search and first seed come before the others' seeds.
                    job = min(free, key=lambda job: job.seed)
                    busy.add(job.key)
                    return job
                if not busy:
                    return None
                lock.wait()

    def work() -> None:
        core = cores.get()
        while job := take():
            result = None
            try:
                result = run(job, core)
            finally:
                with lock:
                    busy.discard(job.key)
                    if result is None:
                        _forget(waiting, job)
                    else:
                        _append(studies[job.study], result)
                    lock.notify_all()

    with ThreadPoolExecutor(command.jobs) as pool:
        try:
            for each in [pool.submit(work) for _ in range(command.jobs)]:
                each.result()
        except BaseException:
            waiting.clear()  # what is under way ends; nothing else begins
            raise


def run(job: Job, core: int) -> Result | None:
    """Trains in a process of its own; None where that failed, which is told."""
    cache = Path(tempfile.gettempdir()) / "demo_optax-quality-cache"
    environment = {
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        **os.environ,
    }
    words = [sys.executable, "-m", f"{__package__}.train_one", str(core), json.dumps(job._asdict())]
    ended = subprocess.run(
        words, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    what = f"{job.study}: {job.method}, rate {job.learning_rate:g}, seed {job.seed}"
    if ended.returncode:
        console.print(f"{what} failed:\n{ended.stderr[-2000:]}", markup=False, soft_wrap=True)
        return None
    result = Result(**json.loads(ended.stdout.splitlines()[-1]))
    told = f"{result.loss}, {result.bytes_per_step:,.0f} bytes a step, {result.seconds} s"
    console.print(f"{what}: {told}", markup=False, soft_wrap=True)
    return result


def _append(study: Study, result: Result) -> None:
    study.results_path.parent.mkdir(exist_ok=True)
    with study.results_path.open("a") as file:
        print(json.dumps(result._asdict()), file=file)


def _forget(waiting: list[tuple[Study, Method]], job: Job) -> None:
    waiting[:] = [x for x in waiting if (x[0].name, x[1].name) != (job.study, job.method)]


if __name__ == "__main__":
    main(tyro.cli(Command, description=__doc__))

"""Trains what studies.yaml asks for and is not on file yet, and shows what came of it.

    python -m benchmarks.quality train [STUDY ...] [--only PATTERN ...] [--jobs 2]
    python -m benchmarks.quality show [STUDY ...]
    python -m benchmarks.quality write

`train` appends a line of JSON to results/STUDY.jsonl for each run, and goes on from there when it
is started again. `show` prints the tables. `write` puts them between their marks in the
documentation, and draws the pictures.
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

from . import pictures, tables
from .study import Job, Result, Study, read

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
    """Every method's first seed comes before the others' seeds."""
    cores: Queue[int] = Queue()
    for core in sorted(os.sched_getaffinity(0))[: command.jobs]:
        cores.put(core)
    keeping = threading.Lock()

    def work(study: Study, job: Job) -> None:
        core = cores.get()
        try:
            result = run(job, core)
        finally:
            cores.put(core)
        if result is not None:
            with keeping:
                _append(study, result)

    jobs = [
        (study, study.job(method, seed))
        for study in chosen
        for seed in study.seeds[: command.seeds]
        for method in study.methods.values()
        if any(fnmatch.fnmatch(method.name, pattern) for pattern in command.only)
    ]
    waiting = [(study, job) for study, job in jobs if job.key not in study.results()]
    with ThreadPoolExecutor(command.jobs) as pool:
        try:
            for each in [pool.submit(work, *one) for one in waiting]:
                each.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)  # what is under way ends; nothing else begins
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


if __name__ == "__main__":
    main(tyro.cli(Command, description=__doc__))

"""Trains what studies.yaml asks for and is not on file yet, and shows what came of it.

    python -m benchmarks.quality train [STUDY ...] [--only PATTERN ...] [--jobs 2]
    python -m benchmarks.quality show [STUDY ...]
    python -m benchmarks.quality write

`train` appends a line of JSON to results/STUDY.jsonl for each run, and goes on from there when it
is started again. `show` prints the tables. `write` puts them between their marks in the
documentation, the losses that `demo-optax choose` weighs into the package, and draws the pictures.
"""

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

from benchmarks.tools import pages
from demo_optax._src.accounting.methods import LOSSES, read_losses

from . import pictures, tables
from .study import Job, Result, Study, read

CORES = sorted(os.sched_getaffinity(0))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("train", "show", "write"))
    parser.add_argument("studies", nargs="*", help="all by default")
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of the methods' names")
    parser.add_argument("--seeds", type=int, help="how many of each study's, all by default")
    parser.add_argument("--jobs", type=int, default=len(CORES), help="runs at the same time")
    given = parser.parse_args()
    studies = read()
    chosen = [studies[name] for name in given.studies or studies]
    if given.command == "train":
        train(chosen, given.only, given.seeds, given.jobs)
    elif given.command == "show":
        print("\n\n".join(f"{study.name}\n\n{tables.of_study(study)}" for study in chosen))
    else:
        pages.write(tables.PAGES, tables.KIND, tables.table_of(studies))
        LOSSES.write_text(tables.losses(studies, read_losses()))
        pictures.draw(studies)


def train(
    chosen: Sequence[Study],
    only: Sequence[str] = ("*",),
    seeds: int | None = None,
    jobs: int = len(CORES),
) -> None:
    """Every method's first seed comes before the others' seeds."""
    cores: Queue[str] = Queue()
    for first in range(min(jobs, len(CORES))):
        cores.put(",".join(map(str, CORES[first::jobs])))
    keeping = threading.Lock()

    def work(study: Study, job: Job) -> None:
        own = cores.get()
        try:
            result = run(job, own)
        finally:
            cores.put(own)
        if result is not None:
            with keeping:
                study.append(result)

    wanted = [
        (study, study.job(method, seed))
        for study in chosen
        for seed in study.seeds[:seeds]
        for method in study.methods.values()
        if any(fnmatch.fnmatch(method.name, pattern) for pattern in only)
    ]
    missing = [(study, job) for study, job in wanted if job.key not in study.results()]
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for each in [pool.submit(work, *one) for one in missing]:
                each.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)  # what is under way ends; nothing else begins
            raise


def run(job: Job, cores: str) -> Result | None:
    """Trains in a process of its own; None where that failed, which is told."""
    cache = Path(tempfile.gettempdir()) / "demo_optax-quality-cache"
    environment = {
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        **os.environ,
    }
    words = [sys.executable, "-m", f"{__package__}.train_one", cores, json.dumps(job._asdict())]
    ended = subprocess.run(
        words, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    what = f"{job.study}: {job.method}, rate {job.learning_rate:g}, seed {job.seed}"
    if ended.returncode:
        print(f"{what} failed:\n{ended.stderr[-2000:]}", flush=True)
        return None
    result = Result(**json.loads(ended.stdout.splitlines()[-1]))
    told = f"{result.loss}, {result.bytes_per_step:,.0f} bytes a step, {result.seconds} s"
    print(f"{what}: {told}", flush=True)
    return result


if __name__ == "__main__":
    main()

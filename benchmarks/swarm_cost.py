"""What a step costs in a swarm, beside the same workers in one JAX job.

    python benchmarks/swarm_cost.py --preset small --steps 30 --repeats 3

Two workers train with one all-gather (`examples/launch_local.py`), as a swarm over a local folder,
and with a delay as a swarm over moto's S3 server, once as it is and once with 200 ms before each
answer. Times say something on idle cores only. It needs the group `chaos` (`make chaos`).
"""

import itertools
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass

import tyro

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.chaos.fleet import Worker  # noqa: E402
from benchmarks.chaos.stores import served  # noqa: E402


@dataclass(frozen=True)
class Options:
    preset: str = "small"
    """The trainer's preset."""
    batch_size: int = 32
    """Sequences of each worker."""
    steps: int = 30
    """Steps of each run."""
    warm_up: int = 5
    """First steps that do not count."""
    repeats: int = 3
    """Runs of each kind, in turn."""
    latency: float = 0.2
    """Seconds before each answer of the slow store."""


def words(options: Options, batch_size: int) -> list[str]:
    settings = {
        "--preset": options.preset,
        "--steps": options.steps,
        "--batch-size": batch_size,
        "--evaluate-every": 10**6,
    }
    return [str(x) for pair in settings.items() for x in pair]


def of_job(options: Options, folder: pathlib.Path) -> float:
    """Median seconds of a step of two processes of one JAX job."""
    command = [sys.executable, str(ROOT / "examples" / "launch_local.py"), "-n", "2", "--"]
    command += [
        *words(options, 2 * options.batch_size),
        "--workers",
        "2",
        "--log-dir",
        str(folder / "job"),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
    lines = (folder / "job" / "steps.jsonl").read_text().splitlines()
    return statistics.median(json.loads(x)["seconds"] for x in lines[options.warm_up :])


def of_swarm(
    options: Options, folder: pathlib.Path, store: str, delay: int, latency: float
) -> float:
    """Median seconds between two steps of a swarm's first worker."""
    given = [
        *words(options, options.batch_size),
        "--min-workers",
        "2",
        "--delay",
        str(delay),
        "--deadline",
        "60",
    ]
    with served(store, folder, seed=0) as place:
        if place.faults:
            place.faults.delay = latency
        workers = [
            Worker(f"worker-{n}", folder, ["--swarm", place.url, *given], place.environment)
            for n in range(2)
        ]
        try:
            for worker in workers:
                worker.start()
            for worker in workers:
                if worker.wait(900) != 0:
                    sys.exit(f"{worker.name} failed: {worker.last_words()}")
        finally:
            for worker in workers:
                worker.send(signal.SIGKILL)
        times = [line.time for line in workers[0].lines()][options.warm_up :]
    return statistics.median(b - a for a, b in itertools.pairwise(times))


def main(options: Options) -> None:
    kinds = {
        "one JAX job, all-gather": of_job,
        "swarm, folder": lambda o, f: of_swarm(o, f, "folder", 0, 0.0),
        "swarm, S3, delay": lambda o, f: of_swarm(o, f, "s3", 1, 0.0),
        f"swarm, S3 with {1000 * options.latency:.0f} ms, delay": (
            lambda o, f: of_swarm(o, f, "s3", 1, o.latency)
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(options.repeats):
        for name, measure in kinds.items():
            with tempfile.TemporaryDirectory() as folder:
                seconds[name].append(measure(options, pathlib.Path(folder)))
            print(f"{name:32} {seconds[name][-1]:.3f} s a step", flush=True)
    medians = {name: statistics.median(x) for name, x in seconds.items()}
    job, folder, near, far = medians.values()
    print(
        f"\nmedians of {options.repeats}, two workers of {options.preset}, {os.cpu_count()} cores"
    )
    for name, x in medians.items():
        print(f"{name:32} {x:.3f} s a step")
    print(f"folder beside one job: {folder / job - 1:+.1%}")
    print(f"with {1000 * options.latency:.0f} ms beside without: {far / near - 1:+.1%}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))

"""A swarm of two kinds of devices beside one of a single kind: held-out loss and drift.

    python benchmarks/swarm_kinds.py --seeds 3

Two workers train. For two kinds one of them computes without vector instructions newer than SSE4.2,
so that its sums round differently. Each run prints the held-out loss, the steps after which the
workers' parameters differed, and the largest drift that a snapshot ended.
"""

import os
import pathlib
import signal
import statistics
import sys
import tempfile
from dataclasses import dataclass
from typing import NamedTuple

import tyro

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.chaos.fleet import Worker, compare_steps  # noqa: E402

OTHER_KIND = {"XLA_FLAGS": "--xla_cpu_max_isa=SSE4_2"}


@dataclass(frozen=True)
class Options:
    preset: str = "tiny"
    """The trainer's preset."""
    batch_size: int = 16
    """Sequences of each worker."""
    steps: int = 600
    """Steps of each run."""
    snapshot_every: int = 100
    """Steps between two snapshots, at which a drift ends."""
    seeds: int = 3
    """Runs of each kind."""


class Outcome(NamedTuple):
    losses: list[float]
    """Held-out loss of each worker, in nats per byte."""
    differing: int
    """Steps after which the parameters differed."""
    drift: float
    """The largest."""


def train(options: Options, seed: int, of_second: dict[str, str]) -> Outcome:
    settings = {
        "--preset": options.preset,
        "--steps": options.steps,
        "--batch-size": options.batch_size,
        "--snapshot-every": options.snapshot_every,
        "--evaluate-every": 10**6,
        "--min-workers": 2,
        "--seed": seed,
    }
    words = [str(x) for pair in settings.items() for x in pair] + ["--log-checksums"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        words += ["--swarm", (folder / "store").as_uri()]
        environments = {}, of_second
        workers = [Worker(f"w{n}", folder, words, x) for n, x in enumerate(environments)]
        try:
            for worker in workers:
                worker.start()
            for worker in workers:
                if worker.wait(3600) != 0:
                    sys.exit(f"{worker.name} failed: {worker.last_words()}")
        finally:
            for worker in workers:
                worker.send(signal.SIGKILL)
        losses = [x for worker in workers if (x := worker.held_out()) is not None]
        drifts = [x.get("drift") or 0.0 for worker in workers for x in worker.records()]
        return Outcome(losses, len(compare_steps(workers)[1]), max(drifts))


def main(options: Options) -> None:
    kinds = {"one kind": {}, "two kinds": OTHER_KIND}
    found: dict[str, list[Outcome]] = {name: [] for name in kinds}
    for seed in range(options.seeds):
        for name, environment in kinds.items():
            outcome = train(options, seed, environment)
            found[name].append(outcome)
            losses = ", ".join(f"{x:.4f}" for x in outcome.losses)
            print(
                f"seed {seed}, {name:9}: loss {losses}; parameters differed after "
                f"{outcome.differing} of {options.steps} steps, drift {outcome.drift:.1e}",
                flush=True,
            )
    means = {
        n: statistics.mean(x for o in outcomes for x in o.losses) for n, outcomes in found.items()
    }
    one, two = means.values()
    print(
        f"\n{options.preset}, {options.steps} steps, {options.seeds} seeds, {os.cpu_count()} cores"
    )
    print(f"mean loss {one:.4f} with one kind, {two:.4f} with two: {two - one:+.4f}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))

"""Trains one run of a study in a process of its own: a job as JSON in, a result as JSON out.

    python -m benchmarks.quality.train_one CORES JOB

It keeps to its cores, as in 0,1, so that several can run at the same time.
"""

import itertools
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path


def main() -> None:
    os.sched_setaffinity(0, set(map(int, sys.argv[1].split(","))))
    print(json.dumps(result_of(json.loads(sys.argv[2]))))


def result_of(job: dict) -> dict:
    """A run's figures, as the fields of `study.Result`."""
    import jax

    from benchmarks.tools.kept import commit
    from demo_optax import local_parameters
    from lm.config import Config
    from lm.report import console
    from lm.setup import make_evaluation, prepare
    from lm.train import LAST_EVALUATION_TOKENS, train

    from . import levers

    console.quiet = True
    own = {"learning_rate": job["learning_rate"], "seed": job["seed"]}
    make = {"make_optimizer": levers.maker(**job["lever"])} if job["lever"] else {}
    with tempfile.TemporaryDirectory() as folder:
        config = Config(**job["settings"], **own, log_dir=folder)
        run = prepare(config, **make)
        last: list = []  # parameters and state of the latest step
        trained = train(run._replace(train_step=_remembering(run.train_step, last)))
        lines = (Path(folder) / "steps.jsonl").read_text().splitlines()
    loss = trained.loss
    if job["lever"].get("look_ahead"):  # one dense delivery of what the workers hold back
        delivered = jax.tree.map(lambda x: x.mean(axis=0), local_parameters(*last))
        loss = make_evaluation(run, lambda: None)(delivered, LAST_EVALUATION_TOKENS)
    steps = [json.loads(line) for line in lines]
    exchanged = [step for step in steps if step["exchange"] and step["packet_bytes"]]
    ends = [at.step for at in trained.log.evaluations]
    return {
        **{name: job[name] for name in ("method", "settings", "lever", "learning_rate", "seed")},
        "loss": _rounded(loss),
        "bytes_per_step": round(trained.log.bytes_per_step * job["lever"].get("fragments", 1), 1),
        "evaluations": [(at.step, _rounded(at.loss)) for at in trained.log.evaluations],
        "seconds": round(time.process_time()),
        "versions": {name: version(name) for name in ("jax", "optax", "flax")},
        "commit": commit(),
        "residuals": _means(exchanged, "residual_norm", ends),
        "sent_shares": _means(exchanged, "sent_share", ends),
    }


def _remembering(step: Callable, last: list) -> Callable:
    def train_step(*args):
        result = step(*args)
        last[:] = result[:2]
        return result

    return train_step


def _means(steps: list[dict], name: str, ends: list[int]) -> list[tuple[int, float]] | None:
    """Means of a metric from each end to the next one; None where there are none."""
    found = []
    for first, last in itertools.pairwise([0, *ends]):
        values = [step["exchange"][name] for step in steps if first < step["number"] <= last]
        if values and math.isfinite(mean := math.fsum(values) / len(values)):
            found.append((last, float(f"{mean:.4g}")))
    return found or None


def _rounded(x: float) -> float | None:
    return round(x, 4) if math.isfinite(x) else None


if __name__ == "__main__":
    main()

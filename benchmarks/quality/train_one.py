"""Trains one run of a study in a process of its own: a job as JSON in, a result as JSON out.

    python -m benchmarks.quality.train_one CORE JOB

It keeps to one core, so that as many run beside each other as there are cores.
"""

import json
import math
import os
import sys
import time
from importlib.metadata import version


def main() -> None:
    os.sched_setaffinity(0, {int(sys.argv[1])})
    print(json.dumps(result_of(json.loads(sys.argv[2]))))


def result_of(job: dict) -> dict:
    """As `study.Result` has it."""
    import numpy as np

    from lm.config import Config
    from lm.report import console
    from lm.setup import prepare
    from lm.train import train

    from . import levers

    console.quiet = True
    config = Config(**job["settings"], learning_rate=job["learning_rate"], seed=job["seed"])
    make = levers.maker(**job["lever"]) if job["lever"] else None
    trained = train(prepare(config, make) if make else prepare(config))
    shares = trained.log.sent_shares
    return {
        **{name: job[name] for name in ("method", "settings", "lever", "learning_rate", "seed")},
        "loss": _rounded(trained.loss),
        "bytes_per_step": round(trained.log.bytes_per_step, 1),
        "evaluations": [(at.step, _rounded(at.loss)) for at in trained.log.evaluations],
        "sent_share": _rounded(float(np.mean(shares))) if shares else None,
        "seconds": round(time.process_time()),
        "versions": {name: version(name) for name in ("jax", "optax", "flax")},
    }


def _rounded(x: float) -> float | None:
    return round(x, 4) if math.isfinite(x) else None


if __name__ == "__main__":
    main()

"""What each value coding costs in loss and in bytes, on the `tiny` model.

    python benchmarks/value_codings.py          every coding, k of 8 and 32, three seeds

All runs of a setting have the same number of steps, and the same text for the same seed. The
table gives the mean over the seeds of the held-out loss, its difference from float32 seed by
seed (with the standard error of that difference), and bytes per step and worker.
"""

import dataclasses
import itertools
import math
import pathlib
import statistics
import sys
from dataclasses import dataclass

import numpy as np
import tyro
from rich.progress import Progress
from rich.table import Table

import demo_optax
from demo_optax._src.compression.values import VALUE_CODINGS, ValueCoding

sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))
from lm.config import Config
from lm.model import PRESETS, build
from lm.report import console
from lm.setup import Run, batches_of, make_evaluation, prepare
from lm.train import LAST_EVALUATION_TOKENS


@dataclass(frozen=True)
class Study:
    values: tuple[ValueCoding, ...] = VALUE_CODINGS
    """Codings to compare; float32 is always among them."""
    topk: tuple[int, ...] = (8, 32)
    """Coefficients that are sent of each block."""
    seeds: int = 3
    """Runs of each setting."""
    steps: int = 200
    """Updates of the parameters in each run."""
    learning_rate: float = 2e-3
    """The highest, of all runs."""


def train(run: Run, seeds: int, advance) -> tuple[list[float], int]:
    """Held-out loss for each seed, and bytes per step and worker."""
    config = run.config
    step = demo_optax.make_train_step(run.loss_fn, run.tx, run.mesh, clip_norm=1.0)
    evaluate = make_evaluation(run, lambda: None)
    losses = []
    for seed in range(seeds):
        _, params = build(PRESETS[config.preset], seed)
        opt_state = demo_optax.init_opt_state(run.tx, params, run.mesh)
        own = run._replace(config=dataclasses.replace(config, seed=seed))
        for batch in itertools.islice(batches_of(own, 0), config.steps):
            params, opt_state, metrics = step(params, opt_state, batch)
            metrics.loss.block_until_ready()
            advance()
        losses.append(evaluate(params, LAST_EVALUATION_TOKENS))
    return losses, demo_optax.packet_bytes(run.tx, run.params)


def row(name: str, losses: list[float], baseline: list[float], size: int) -> list[str]:
    differences = np.subtract(losses, baseline)
    error = differences.std(ddof=1) / math.sqrt(len(losses)) if len(losses) > 1 else math.nan
    difference = "" if name == "float32" else f"{differences.mean():+.3f} ± {error:.3f}"
    return [name, f"{statistics.mean(losses):.3f}", difference, f"{size:,}"]


def main() -> None:
    study = tyro.cli(Study, description=__doc__)
    others: list[ValueCoding] = [coding for coding in study.values if coding != "float32"]
    codings: list[ValueCoding] = ["float32", *others]
    total = len(study.topk) * len(codings) * study.seeds * study.steps
    with Progress(console=console) as bar:
        task = bar.add_task("steps", total=total)
        for k in study.topk:
            table = Table("values", "loss", "against float32", "bytes", title=f"k = {k}")
            baseline = None
            for coding in codings:
                config = Config(
                    selection="topk",
                    value_coding=coding,
                    topk=k,
                    steps=study.steps,
                    learning_rate=study.learning_rate,
                )
                losses, size = train(prepare(config), study.seeds, lambda: bar.advance(task))
                baseline = baseline or losses
                table.add_row(*row(coding, losses, baseline, size))
                bar.print(f"k = {k}, {coding}: {', '.join(f'{loss:.3f}' for loss in losses)}")
            bar.print(table)


if __name__ == "__main__":
    main()

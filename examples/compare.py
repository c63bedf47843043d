"""Trains with DeMo and with AdamW, and draws what each loss cost in bytes.

    python examples/compare.py                          four minutes on two CPU cores
    python examples/compare.py --steps 600 --topk 8     any setting of train_lm.py

Each optimizer has the learning rate that suits it, and everything else in common: model, text and
its order, number of steps. The picture, loss_against_bytes.png, and each run's log go to --log-dir.
"""

import dataclasses
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from rich.table import Table

from lm import config as configuration
from lm.config import Config
from lm.recipes import OptimizerName
from lm.report import console
from lm.train import Trained, run_or_exit

BASELINE: OptimizerName = "adamw"
COLOURS = ("#1b6ca8", "#c8553d")


def main() -> None:
    default = Config(steps=400, topk=64, evaluate_every=40, log_dir=Path("runs"))
    config = configuration.from_command_line(__doc__, default=default)
    folder = config.log_dir or Path("runs")
    if config.optimizer == BASELINE or config.checkpoint_dir:
        configuration.refuse(
            f"this compares an --optimizer with {BASELINE}, from the first step to the "
            f"last: choose another than {BASELINE}, and train_lm.py to use a --checkpoint-dir."
        )
    baseline = dataclasses.replace(
        config,
        optimizer=BASELINE,
        learning_rate=None,
        decay=None,
        weight_decay=None,
        local_steps=None,
    )
    compared: dict[OptimizerName, Trained] = {
        each.optimizer: run_or_exit(of_its_own(each, folder)) for each in (config, baseline)
    }
    picture = folder / "loss_against_bytes.png"
    draw(compared, picture)
    console.print(table(compared))
    console.print(f"loss against bytes sent: {picture}", soft_wrap=True)


def of_its_own(config: Config, folder: Path) -> Config:
    """With a folder that only this optimizer writes to."""
    return dataclasses.replace(config, log_dir=folder / config.optimizer)


def table(compared: dict[OptimizerName, Trained]) -> Table:
    packets = {name: run.log.bytes_per_step / 1e6 for name, run in compared.items()}
    smallest = min(packets.values())
    workers = len(next(iter(compared.values())).log.devices)
    # As rings: packets of all others come by, a dense all-reduce passes the gradient nearly twice.
    rounds = dict.fromkeys(compared, workers - 1)
    rounds |= dict.fromkeys((BASELINE, "diloco"), 2 * (workers - 1) / workers)
    rows = {
        "loss on held-out text, nats per byte": lambda name, run: f"{run.loss:.3f}",
        "each worker's packet or gradient, MB per step": lambda name, run: f"{packets[name]:.4g}",
        "the same, relative": lambda name, run: f"{packets[name] / smallest:.3g}",
        "in all steps, MB": lambda name, run: f"{run.log.megabytes:,.4g}",
        f"over each link of a ring of {workers}, MB per step": lambda name, run: (
            f"{packets[name] * rounds[name]:.4g}"
        ),
        "steps": lambda name, run: f"{run.log.done}",
        "seconds per step": lambda name, run: f"{1 / (run.log.steps_per_second or np.nan):.3f}",
    }
    made = Table("", *compared)
    for title, cell in rows.items():
        made.add_row(title, *(cell(name, run) for name, run in compared.items()))
    return made


def draw(compared: dict[OptimizerName, Trained], path: Path) -> None:
    """Held-out loss, once over bytes and once over steps."""
    figure, (by_bytes, by_steps) = plt.subplots(1, 2, figsize=(10, 4), sharey=True, dpi=150)
    for (name, run), colour in zip(compared.items(), COLOURS, strict=False):
        evaluations = [*run.log.evaluations[:-1], run.log.evaluations[-1]._replace(loss=run.loss)]
        steps, megabytes, losses = zip(*evaluations, strict=True)
        style = {"color": colour, "marker": "o", "markersize": 3}
        by_bytes.plot(megabytes, losses, **style)
        by_steps.plot(steps, losses, label=name, **style)
        by_bytes.annotate(
            f"{name}: {megabytes[-1]:,.4g} MB",
            (megabytes[-1], losses[-1]),
            xytext=(0, -14),
            textcoords="offset points",
            ha="right" if name == BASELINE else "center",
            color=colour,
        )
    by_bytes.margins(x=0.12, y=0.12)
    by_bytes.set(xscale="log", xlabel="packets or gradients of a worker, MB in all")
    by_bytes.set_ylabel("held-out loss, nats per byte")
    by_steps.set(xlabel="steps")
    by_steps.legend(frameon=False)
    for axes in (by_bytes, by_steps):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    main()

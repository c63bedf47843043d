"""Trains with DeMo and with AdamW, and draws the loss against the bytes sent.

    python examples/compare.py                          four minutes on two CPU cores
    python examples/compare.py --steps 600 --topk 8     any setting of train_lm.py
    python examples/compare.py --seeds 3                three runs of each, with mean and error
    python examples/compare.py --optimizer demo-muon demo-scaled    three curves

Each optimizer gets its own learning rate. Model, text, order of the text and number of steps are
the same for all. The picture, loss_against_bytes.png, and the log of each run go to --log-dir.
"""

import dataclasses
import sys

import matplotlib.pyplot as plt
import numpy as np
from rich.table import Table

from demo_optax.checkpoint import folder_of
from lm import config as configuration
from lm import output
from lm.config import Config, Count
from lm.recipes import OptimizerName
from lm.report import console
from lm.train import Trained, run_or_exit
from lm.validation import OF_PACKETS

BASELINE: OptimizerName = "adamw"
Runs = dict[OptimizerName, list[Trained]]


@dataclasses.dataclass(frozen=True)
class Comparison(Config):
    optimizer: tuple[OptimizerName, ...] = ("demo-muon",)  # type: ignore[assignment]
    """Optimizers to compare with adamw; train_lm.py --help explains them."""
    seeds: Count = 1
    """Runs of each optimizer. Their seeds are --seed, --seed + 1, and so on."""


def main() -> None:
    default = Comparison(steps=400, evaluate_every=40, log_dir="runs")
    config = configuration.from_command_line(__doc__, default=default)
    folder = config.log_dir or "runs"
    names = config.optimizer
    if not names or BASELINE in names or len({*names}) < len(names) or config.checkpoint_dir:
        configuration.refuse(
            f"compare.py compares each --optimizer with {BASELINE}, from the first step to the "
            f"last: name optimizers other than {BASELINE}, each once. It takes no "
            "--checkpoint-dir: use train_lm.py for that."
        )
    given = {each.name: getattr(config, each.name) for each in dataclasses.fields(Config)}
    del given["optimizer"]
    compared = [Config(**given, optimizer=name) for name in names]
    baseline = dataclasses.replace(
        compared[0],
        optimizer=BASELINE,
        learning_rate=None,
        decay=None,
        weight_decay=None,
        b2=None,
        local_steps=None,
        **{name: getattr(configuration.DEFAULT, name) for name in OF_PACKETS},
    )
    seeds = range(config.seed, config.seed + config.seeds)
    runs: Runs = {
        each.optimizer: [run_or_exit(of_its_own(each, folder, seed)) for seed in seeds]
        for each in (*compared, baseline)
    }
    console.print(table(runs, config.exchange == "all-gather", config.simulate))
    picture = str(folder_of(f"{folder}/loss_against_bytes.png"))
    try:
        draw(runs, picture)
    except OSError as error:
        sys.exit(f"error: the picture could not be written: {error}")
    console.print(f"loss against bytes sent: {picture}", soft_wrap=True)


def of_its_own(config: Config, folder: str, seed: int) -> Config:
    """A configuration with a log folder of its own for this optimizer and seed."""
    folder = f"{folder}/{config.optimizer}"
    if seed != config.seed:
        folder += f"/seed-{seed}"
    return dataclasses.replace(config, log_dir=folder, seed=seed)


def table(compared: Runs, rings: bool, simulated: int | None = None) -> Table:
    """Figures of all; with ``rings``, where packets go to all others, also those of each link."""
    firsts = {name: runs[0].log for name, runs in compared.items()}
    packets = {name: log.bytes_per_step / 1e6 for name, log in firsts.items()}
    smallest = min(packets.values())
    workers = simulated or len(next(iter(firsts.values())).devices)
    # In a ring, packets of all others cross a link; an all-reduce passes a gradient almost twice.
    rounds = dict.fromkeys(compared, workers - 1)
    rounds |= dict.fromkeys((BASELINE, "diloco"), 2 * (workers - 1) / workers)
    over_links = f"over each link of a ring of {workers}, MB per step"
    rows = {
        "loss on held-out text, nats per byte": lambda name, log: mean(compared[name]),
        "each worker's packet or gradient, MB per step": lambda name, log: f"{packets[name]:.4g}",
        "the same, relative": lambda name, log: f"{packets[name] / smallest:.3g}",
        "in all steps, MB": lambda name, log: f"{log.megabytes:,.4g}",
        over_links: lambda name, log: f"{packets[name] * rounds[name]:.4g}",
        "optimizer state of a worker, bytes per parameter": lambda name, log: (
            f"{compared[name][0].state_bytes:.2f}"
        ),
        "steps": lambda name, log: f"{log.done}",
        "seconds per step": lambda name, log: f"{1 / (log.steps_per_second or np.nan):.3f}",
    }
    made = Table("", *compared)
    if not rings:
        del rows[over_links]
    for title, cell in rows.items():
        made.add_row(title, *(cell(name, log) for name, log in firsts.items()))
    if len(compared[BASELINE]) > 1:
        made.add_row(f"loss minus that of {BASELINE}, seed by seed", *differences(compared))
    return made


def mean(runs: list[Trained]) -> str:
    """The mean loss, with its standard error where there are several."""
    return written([run.loss for run in runs], ".3f")


def differences(compared: Runs) -> list[str]:
    """The mean difference from the baseline of the same seed."""
    return [
        written([a.loss - b.loss for a, b in zip(runs, compared[BASELINE], strict=True)], "+.3f")
        for name, runs in compared.items()
        if name != BASELINE
    ]


def written(values: list[float], form: str) -> str:
    """A mean, and its standard error where there are several values."""
    error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else None
    return f"{np.mean(values):{form}}" + ("" if error is None else f" ± {error:.3f}")


def draw(compared: Runs, path: str) -> None:
    """Held-out loss, once over bytes and once over steps."""
    figure, (by_bytes, by_steps) = plt.subplots(1, 2, figsize=(10, 4), sharey=True, dpi=150)
    for number, (name, runs) in enumerate(compared.items()):
        colour = f"C{number}"
        for run in runs:
            last = run.log.evaluations[-1]._replace(loss=run.loss)
            steps, megabytes, losses = zip(*run.log.evaluations[:-1], last, strict=True)
            style = {"color": colour, "marker": "o", "markersize": 3}
            by_bytes.plot(megabytes, losses, **style)
            told = f"{name}: {run.log.megabytes:,.4g} MB" if run is runs[0] else None
            by_steps.plot(steps, losses, label=told, **style)
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
    output.end_no_training()
    main()

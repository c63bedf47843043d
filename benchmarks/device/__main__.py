"""Checks the optimizers on this machine's accelerator, and measures their time and memory.

    python -m benchmarks.device
    python -m benchmarks.device --preset tiny --minutes 2 --folder results

It runs from the top folder of a checkout, with Python 3.12, JAX, optax, Flax, chex, jaxtyping and
orbax-checkpoint, and nothing to install or download. It prints a table, and writes
FOLDER/device-PRESET.json after each part. The exit status is 0 if all checks passed, and no part
raised an error.
"""

import argparse
import datetime
import functools
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from . import checks, models, steps
from .models import SIZES, Model
from .report import Run

RESULTS = Path(__file__).parents[1] / "results"
# Seconds that must be left before a part of each kind begins.
CHECK, COMPILE, ARRAYS, FIRST_STEPS, TIMING = 30, 45, 10, 15, 20


def main() -> int:
    args = _arguments()
    _keep_a_cpu()
    size = SIZES[args.preset]
    jax.config.update("jax_disable_most_optimizations", not size.optimized)
    model, all_checks = models.model_of(size.measured), _checks(size)
    file, end = args.folder / f"device-{args.preset}.json", 60 * args.minutes
    run = Run(file, end, _about(args.preset, model), all_checks)
    run.stop_at_the_end()
    for name, check in all_checks.items():
        run.record("checks", name, **(run.part(name, CHECK, check) or {}))
    _measure_updates(run, model, size.rounds)
    _measure_train_steps(run, model, size)
    return run.finish()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=SIZES, default="300m", help="size of the model")
    parser.add_argument("--minutes", type=float, default=8, help="time that the run may take")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="folder of the JSON file")
    return parser.parse_args()


def _keep_a_cpu() -> None:
    """Lets JAX use the CPU too, where the environment names other platforms alone."""
    platforms = os.environ.get("JAX_PLATFORMS")
    if platforms and "cpu" not in platforms.split(","):
        jax.config.update("jax_platforms", f"{platforms},cpu")


def _about(preset: str, model: Model) -> dict[str, Any]:
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
        "preset": preset,
        "parameters": sum(x.size for x in jax.tree.leaves(model.shapes)),
    }


def _checks(size: models.Size) -> dict[str, Callable[[], checks.Figures]]:
    made: dict[str, Any] = models.optimizers()
    replicas = {
        f"equal replicas, {name}": functools.partial(checks.equal_replicas, made[name])
        for name in ("demo", "demo_scaled", "demo_muon")
    }
    by_hand = replicas | {
        "nothing is lost of a momentum": checks.conservation,
        "coefficients equal those of a CPU": checks.coefficients_of_a_cpu,
    }
    return {
        "simulated workers agree": lambda: checks.simulated_workers(
            models.model_of(size.simulated)
        ),
        "packets equal those of a CPU": checks.packets_of_a_cpu,
        **{name: functools.partial(check, size.matrices) for name, check in by_hand.items()},
    }


def _measure_updates(run: Run, model: Model, rounds: int) -> None:
    shapes = model.named_shapes
    made = {name: steps.update_step(tx) for name, tx in models.optimizers().items()}
    programs = _compiled(run, "updates", made, shapes, shapes)
    _measure(run, "updates", programs, shapes, lambda: models.random(shapes, seed=1), rounds)


def _measure_train_steps(run: Run, model: Model, size: models.Size) -> None:
    made = {name: steps.train_step(tx, model) for name, tx in models.trained_optimizers().items()}
    batch = models.tokens(model, size.sequences, size.length)
    programs = _compiled(run, "train_steps", made, model.shapes, batch)
    _measure(run, "train_steps", programs, model.shapes, lambda: jax.device_put(batch), size.rounds)


def _compiled(
    run: Run, section: str, made: Mapping[str, steps.Step], shapes, given
) -> dict[str, steps.Program]:
    """Compiles all steps before there are arrays, since XLA tries kernels out in memory."""
    programs: dict[str, steps.Program] = {}
    for name, step in made.items():
        part = f"{section}: compile {name}"
        if program := run.part(part, COMPILE, steps.compile_step, step, shapes, given):
            programs[name] = program
            found = dict(compile_seconds=program.seconds, planned_bytes=program.planned_bytes)
            run.record(section, name, **found)
    return programs


def _measure(
    run: Run,
    section: str,
    programs: Mapping[str, steps.Program],
    shapes,
    make_given: Callable[[], Any],
    rounds: int,
) -> None:
    """Runs each program alone, and then all in turn."""
    made = run.part(f"{section}: arrays", ARRAYS, lambda: (models.random(shapes, 0), make_given()))
    if not made:
        return
    running: dict[str, steps.Running] = {}
    for name, program in programs.items():
        part = f"{section}: first steps of {name}"
        if one := run.part(part, FIRST_STEPS, steps.start, program, *made):
            running[name] = one
            run.record(section, name, peak_bytes=one.peak_bytes, **one.figures)
    in_turn = f"{section}: steps in turn"
    times = run.part(in_turn, TIMING, steps.time_in_turn, running, made[1], rounds)
    for name, ms in (times or {}).items():
        run.record(section, name, ms=ms)


if __name__ == "__main__":
    sys.exit(main())

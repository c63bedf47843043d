"""Breaks runs in every way we know: `make torture`, or a kind alone with ARGS="--only kills".

    python -m benchmarks.torture [--only KIND ...] [--tries N] [--seed N]

It prints whatever is lost, and a table of tries, survived and lost; the exit status is 1 where
anything was. A try is lost where something that was broken is not noticed, or not said in a line,
or costs more than the steps since the last good checkpoint; each kind's module says what it asks.
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import jax
import tyro
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from . import byzantine, checkpoints, kills, mismatches, outcomes, packets, signals, stops
from .outcomes import Try


class Kind(NamedTuple):
    """Rows of the table, how many tries each has, and what runs them: count and seed to tries."""

    rows: tuple[str, ...]
    each: int
    run: Callable[[int, int], Iterator[Try]]


MODULES = {
    "packets": packets,
    "byzantine": byzantine,
    "checkpoints": checkpoints,
    "kills": kills,
    "signals": signals,
    "stops": stops,
    "mismatches": mismatches,
}
KINDS = {name: Kind(module.ROWS, module.EACH, module.run) for name, module in MODULES.items()}
Name = Literal["packets", "byzantine", "checkpoints", "kills", "signals", "stops", "mismatches"]


@dataclass(frozen=True)
class Options:
    only: tuple[Name, ...] = ()
    """Kinds to run, all by default."""
    tries: Annotated[int | None, tyro.conf.arg(aliases=["-n"])] = None
    """Tries of each row of the table; by default as many as its kind has."""
    seed: int = 0
    """Seed of all that is drawn."""


def main(options: Options, console: Console) -> int:
    tries: list[Try] = []
    seconds: dict[str, float] = {}
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for name, kind in KINDS.items():
            if options.only and name not in options.only:
                continue
            begun, each = time.monotonic(), options.tries or kind.each
            task = progress.add_task(name, total=each * len(kind.rows))
            for one in kind.run(each, options.seed):
                tries.append(one)
                progress.advance(task)
                if one.lost:
                    console.print(f"lost, {one.row}: {one.lost}", markup=False, soft_wrap=True)
            seconds[kind.rows[0]] = time.monotonic() - begun
    tallies = outcomes.counted(tries)
    console.print(outcomes.table(tallies, seconds))
    return 1 if any(tally.lost for tally in tallies.values()) else 0


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    sys.exit(main(tyro.cli(Options, description=__doc__), Console()))

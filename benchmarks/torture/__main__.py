"""Breaks runs in every way we know: `make torture`, or a kind alone with ARGS="--only kills".

    python -m benchmarks.torture [--only KIND ...] [--tries N] [--seed N]

It prints whatever is lost, and a table of tries, survived and lost; the exit status is 1 where
anything was. A try is lost where something that was broken is not noticed, or not said in a line,
or costs more than the steps since the last good checkpoint; each kind's module says what it asks.
"""

import argparse
import sys
import time

import jax
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from . import byzantine, checkpoints, kills, mismatches, outcomes, packets, signals, stops
from .outcomes import Try

# Each has the rows of the table, how many tries each has, and `run`, from count and seed to tries.
MODULES = (packets, byzantine, checkpoints, kills, signals, stops, mismatches)
KINDS = {module.__name__.rpartition(".")[2]: module for module in MODULES}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--tries", "-n", type=int, help="of each row, by default as its kind has")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn")
    options, console = parser.parse_args(), Console()
    tries: list[Try] = []
    seconds: dict[str, float] = {}
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for name in options.only:
            kind, begun = KINDS[name], time.monotonic()
            each = options.tries or kind.EACH
            task = progress.add_task(name, total=each * len(kind.ROWS))
            for one in kind.run(each, options.seed):
                tries.append(one)
                progress.advance(task)
                if one.lost:
                    console.print(f"lost, {one.row}: {one.lost}", markup=False, soft_wrap=True)
            seconds[kind.ROWS[0]] = time.monotonic() - begun
    console.print(outcomes.table(outcomes.counted(tries), seconds))
    return 1 if any(one.lost for one in tries) else 0


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    sys.exit(main())

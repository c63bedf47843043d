"""Prints the table of what slow_link.sh recorded.

    python benchmarks/slow_link_table.py WARM_UP_STEPS [--keep COMMAND ROUND_TRIP_MS] < RECORDS

A record is a line of five columns between tabs: link, optimizer, time, bytes sent so far, and the
line of the trainer's log, JSON with the `packet_bytes` that a worker sends on one step. With --keep
the figures go to results/slow_link.jsonl, which `python -m benchmarks.step_tables write` makes a
table of.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections import defaultdict
from typing import NamedTuple

import jax
import kept


class Run(NamedTuple):
    seconds: float
    """Median time of a step."""
    sent: float
    """Bytes per step, as the kernel counted."""
    counted: float
    """Bytes per step, as the accounting has them."""


def measure(records: list[tuple[float, int, int]]) -> Run:
    times, sent, counted = zip(*records, strict=True)
    seconds = statistics.median(after - before for before, after in itertools.pairwise(times))
    return Run(seconds, (sent[-1] - sent[0]) / (len(sent) - 1), counted[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("warm_up", type=int)
    parser.add_argument(
        "--keep", nargs=2, metavar=("COMMAND", "ROUND_TRIP"), help="append the figures to results/"
    )
    args = parser.parse_args()
    records = defaultdict(list)
    for record in sys.stdin:
        link, optimizer, time, sent, line = record.rstrip().split("\t")
        counted = json.loads(line)["packet_bytes"]
        records[link, optimizer].append((float(time), int(sent), counted))
    runs = {setting: measure(rows[args.warm_up - 1 :]) for setting, rows in records.items()}
    show(runs)
    if args.keep:
        keep(runs, *args.keep)


def show(runs: dict[tuple[str, str], Run]) -> None:
    print("MB (10^6 bytes) are those that one worker sends on one step.\n")
    print(
        f"{'link':10} {'optimizer':20} {'s/step':>8} {'MB, kernel':>11} {'MB, counted':>12} "
        f"{'ratio':>7} {'of unlimited':>13} {'over adamw':>11}"
    )
    for (link, optimizer), run in runs.items():
        print(
            f"{link:10} {optimizer:20} {run.seconds:8.3f} {run.sent / 1e6:11.3f} "
            f"{run.counted / 1e6:12.3f} {run.sent / run.counted:7.3f} "
            f"{runs['unlimited', optimizer].seconds / run.seconds:13.1%} "
            f"{runs[link, 'adamw'].seconds / run.seconds:10.2f}x"
        )


def keep(runs: dict[tuple[str, str], Run], command: str, round_trip: str) -> None:
    for (link, optimizer), run in runs.items():
        free = runs["unlimited", optimizer].seconds
        figures = {
            "seconds per step": float(f"{run.seconds:.3g}"),
            "MB sent, by the kernel": float(f"{run.sent / 1e6:.4g}"),
            "MB sent, by the accounting": float(f"{run.counted / 1e6:.4g}"),
            "of its speed without a limit": f"{free / run.seconds:.1%}",
            "times the speed of adamw": round(runs[link, "adamw"].seconds / run.seconds, 2),
        }
        where = link if link == "unlimited" else f"{link}, {round_trip} ms"
        own = dict(version=f"jax {jax.__version__}", figures=figures, command=command)
        kept.append("slow_link", optimizer, "small, 9.9M parameters", where, **own)


if __name__ == "__main__":
    main()

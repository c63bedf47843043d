"""Prints the table of what slow_link.sh recorded.

    python benchmarks/slow_link_table.py WARM_UP_STEPS < RECORDS

A record is a line of five columns between tabs: link, optimizer, time, bytes sent so far, and the
line of the trainer's log, JSON with the `packet_bytes` that a worker sends on one step.
"""

import itertools
import json
import statistics
import sys
from collections import defaultdict
from typing import NamedTuple


class Run(NamedTuple):
    seconds: float
    """Of a step, the median."""
    sent: float
    """Bytes per step, as the kernel counted."""
    counted: float
    """Bytes per step, as the accounting has them."""


def measure(records: list[tuple[float, int, int]]) -> Run:
    times, sent, counted = zip(*records, strict=True)
    seconds = statistics.median(after - before for before, after in itertools.pairwise(times))
    return Run(seconds, (sent[-1] - sent[0]) / (len(sent) - 1), counted[-1])


def main() -> None:
    warm_up = int(sys.argv[1])
    records = defaultdict(list)
    for record in sys.stdin:
        link, optimizer, time, sent, line = record.rstrip().split("\t")
        counted = json.loads(line)["packet_bytes"]
        records[link, optimizer].append((float(time), int(sent), counted))
    runs = {setting: measure(rows[warm_up - 1 :]) for setting, rows in records.items()}

    print("MB (10^6 bytes) are those that one worker sends on one step.\n")
    print(
        f"{'link':10} {'optimizer':10} {'s/step':>8} {'MB, kernel':>11} {'MB, counted':>12} "
        f"{'ratio':>7} {'of unlimited':>13} {'over adamw':>11}"
    )
    for (link, optimizer), run in runs.items():
        print(
            f"{link:10} {optimizer:10} {run.seconds:8.3f} {run.sent / 1e6:11.3f} "
            f"{run.counted / 1e6:12.3f} {run.sent / run.counted:7.3f} "
            f"{runs['unlimited', optimizer].seconds / run.seconds:13.1%} "
            f"{runs[link, 'adamw'].seconds / run.seconds:10.2f}x"
        )


if __name__ == "__main__":
    main()

"""What became of each try, and the table of all."""

import itertools
import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.table import Table


class Try(NamedTuple):
    """One try, and why it is lost; an empty reason where the run survived."""

    row: str
    lost: str = ""


def in_turn(items: Sequence, count: int, seed: int) -> list:
    """So many of them in a random order, each as often as any other."""
    draws = random.Random(seed)
    rounds = [draws.sample(items, len(items)) for _ in range(0, count, len(items))]
    return list(itertools.chain(*rounds))[:count]


def counted(tries: Iterable[Try]) -> dict[str, tuple[int, int]]:
    """For each row the number of tries, and of those that are lost."""
    tallies: dict[str, tuple[int, int]] = {}
    for row, reason in tries:
        count, lost = tallies.get(row, (0, 0))
        tallies[row] = count + 1, lost + bool(reason)
    return tallies


def table(tallies: dict[str, tuple[int, int]], seconds: dict[str, float]) -> Table:
    """Tries, survived, lost; the seconds of each kind stand beside its first row."""
    result = Table("", "tries", "survived", "lost", "seconds")
    for column in result.columns[1:]:
        column.justify = "right"
    total = tuple(map(sum, zip(*tallies.values(), strict=True)))
    seconds = seconds | {"all": sum(seconds.values())}
    for row, (tries, lost) in (tallies | {"all": total}).items():
        if row == "all":
            result.add_section()
        took = f"{seconds[row]:.0f}" if row in seconds else ""
        shown = f"{tries:,}", f"{tries - lost:,}", f"{lost:,}", took
        result.add_row(row, *shown, style="red" if lost else None)
    return result

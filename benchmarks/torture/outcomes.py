"""What became of each try, and the table of all."""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from rich.table import Table


class Try(NamedTuple):
    """One try, and why it is lost; an empty reason where the run survived."""

    row: str
    lost: str = ""


class Tally(NamedTuple):
    """The tries of one row of the table."""

    tries: int = 0
    lost: int = 0

    def plus(self, one: Try) -> "Tally":
        return Tally(self.tries + 1, self.lost + bool(one.lost))


def counted(tries: Iterable[Try]) -> dict[str, Tally]:
    """A tally of each row."""
    tallies: dict[str, Tally] = defaultdict(Tally)
    for one in tries:
        tallies[one.row] = tallies[one.row].plus(one)
    return dict(tallies)


def table(tallies: dict[str, Tally], seconds: dict[str, float]) -> Table:
    """Tries, survived, lost; the seconds of each kind stand beside its first row."""
    result = Table("", "tries", "survived", "lost", "seconds")
    for column in result.columns[1:]:
        column.justify = "right"
    for row, (tries, lost) in tallies.items():
        style = "red" if lost else None
        took = f"{seconds[row]:.0f}" if row in seconds else ""
        result.add_row(row, f"{tries:,}", f"{tries - lost:,}", f"{lost:,}", took, style=style)
    total = Tally(sum(t.tries for t in tallies.values()), sum(t.lost for t in tallies.values()))
    result.add_section()
    shown = [f"{n:,}" for n in (total.tries, total.tries - total.lost, total.lost)]
    result.add_row("all", *shown, f"{sum(seconds.values()):.0f}")
    return result

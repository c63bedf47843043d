"""Tables of speed and memory, written from the measurements that were kept.

    python -m benchmarks.tools.step_tables write      puts them between their marks
    python -m benchmarks.tools.step_tables show       prints all of them
    python -m benchmarks.tools.step_tables commands   prints what measures all of it anew

`compile_only.py`, `step_cost.py` and `slow_link.py` keep what they measure with `--keep`.
"""

import argparse
import fnmatch
from collections.abc import Sequence

from . import kept, pages
from .kept import Kept

PAGES = ("docs/explanation/step_cost.md",)
KIND = "runs"


def table(file: str, patterns: Sequence[str] = ("*",)) -> str:
    """The kept measurements with a name like one of these patterns, and the runs they come from.

    Raises:
      ValueError: there are none.
    """
    rows = [r for r in kept.read(file) if any(fnmatch.fnmatchcase(r.name, p) for p in patterns)]
    if not rows:
        raise ValueError(f"results/{file}.jsonl has no measurement named {' or '.join(patterns)}.")
    runs = list(dict.fromkeys(map(_run, rows)))
    headings = list(dict.fromkeys(heading for row in rows for heading in row.figures))
    lines = [["", "model", "where", *headings, "run"], ["---"] * (len(headings) + 4)]
    lines += [
        [row.name, row.model, row.where]
        + [_cell(row.figures.get(heading, "")) for heading in headings]
        + [str(runs.index(_run(row)) + 1)]
        for row in rows
    ]
    written = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([*written, "", *(f"{n}. {run}" for n, run in enumerate(runs, 1))])


def _run(row: Kept) -> str:
    return f"`{row.command}` ({row.version}, commit {row.commit or 'unknown'})"


def _cell(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("write", "show", "commands"))
    command = parser.parse_args().command
    files = sorted(path.stem for path in kept.FOLDER.glob("*.jsonl"))
    if command == "write":
        pages.write(PAGES, KIND, table)
    elif command == "show":
        print("\n\n".join(f"{file}\n\n{table(file)}" for file in files))
    else:
        rows = [row for file in files for row in kept.read(file)]
        print("\n".join(dict.fromkeys(row.command for row in rows)))


if __name__ == "__main__":
    main()

"""Kept measurements of speed and memory: a line of JSON for each, in results/NAME.jsonl."""

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "results"
LARGE_PAGES = "GLIBC_TUNABLES=glibc.malloc.hugetlb=1"


class Kept(NamedTuple):
    """One measurement, a row of a table.

    Attributes:
      name: what was measured, as in "demo, top-8, int4".
      model: its size, as in "12.6M parameters in 9 tensors".
      where: the machine it ran on, or "compiled for" one.
      version: of the framework, as in "jax 0.10.2".
      commit: of the checkout; "-dirty" where files had changed.
      command: that repeats it.
      figures: headings and cells of the table.
    """

    name: str
    model: str
    where: str
    version: str
    commit: str | None
    command: str
    figures: dict[str, float | str]


def append(file: str, **fields: Any) -> None:
    """Keeps a measurement in results/FILE.jsonl, with the fields of `Kept`.

    The commit is this checkout's; the command is that of this process by default.
    """
    row = Kept(**{"commit": commit(), "command": command_line()} | fields)
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / f"{file}.jsonl").open("a") as lines:
        print(json.dumps(row._asdict(), ensure_ascii=False), file=lines)


def read(file: str) -> list[Kept]:
    """The latest measurement of each name, model and place, in the order of the first ones."""
    lines = (FOLDER / f"{file}.jsonl").read_text().splitlines()
    rows = [Kept(**json.loads(line)) for line in lines]
    return list({(row.name, row.model, row.where): row for row in rows}.values())


def machine() -> str:
    """This CPU, its cores that may be used, and whether memory comes in large pages."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    name = found[1] if found else platform.processor() or platform.machine()
    cores = f"{len(os.sched_getaffinity(0))} cores of {name}"
    return cores + ", large pages" * _has_large_pages()


def commit() -> str | None:
    """The commit of this checkout; "-dirty" where more than results have changed."""

    def git(*words: str) -> str:
        run = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return run.stdout.strip()

    found = git("rev-parse", "--short=12", "HEAD")
    results = (":!benchmarks/quality/results", ":!benchmarks/results")
    changed = git("status", "--porcelain", "--", ".", *results)
    return f"{found}-dirty" if found and changed else found or None


def command_line() -> str:
    """The command line of this process."""
    words = [word for word in sys.argv[1:] if word != "--keep"]
    line = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])
    return f"{LARGE_PAGES} {line}" if _has_large_pages() else line


def _has_large_pages() -> bool:
    return LARGE_PAGES.partition("=")[2] in os.environ.get("GLIBC_TUNABLES", "")

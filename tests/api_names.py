"""The lines of docs/reference/api.md: each public name, and the first sentence of its docstring.

python -m tests.api_names writes them between their marks, for the directives that follow a mark.
"""

import importlib
import inspect
import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.tools import pages

PAGES = ("docs/reference/api.md",)
KIND = "names"
PAGE = Path(__file__).parents[1] / PAGES[0]


def table(name: str, patterns: Sequence[str] = ("*",)) -> str:
    """The lines of a section's names."""
    del patterns
    before, mark, after = PAGE.read_text().partition(f"<!-- {KIND} {name} -->")
    block = after.partition("```{eval-rst}\n")[2].partition("```")[0]
    module = re.findall(r"currentmodule:: (\S+)", before + mark + block)[-1]
    documented = re.findall(r"\.\. auto\w+:: (\w+)", block)
    return "\n".join(f"- `{x}`: {summary(module, x)}" for x in documented)


def summary(module: str, name: str) -> str:
    """The first sentence of a docstring, without its full stop."""
    documented = inspect.getdoc(getattr(importlib.import_module(module), name)) or ""
    first = " ".join(documented.partition("\n\n")[0].split())
    return re.split(r"\.(?: |$)", first)[0]


def names() -> list[str]:
    """The names on the page that have a line of their own."""
    return re.findall(r"^- `(\w+)`: ", PAGE.read_text(), re.MULTILINE)


if __name__ == "__main__":
    pages.write(PAGES, KIND, table)

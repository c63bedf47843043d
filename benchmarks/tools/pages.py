"""Tables between marks in Markdown pages, so that a command can write them and a test compare them.

A mark is ``<!-- KIND NAME -->``, or ``<!-- KIND NAME: PATTERN; PATTERN -->`` for some rows; the
table ends at ``<!-- end -->``.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
Table = Callable[[str, Sequence[str]], str]
"""From the name and the patterns of a mark to the lines between the marks."""


def replaced(text: str, kind: str, table: Table) -> str:
    """The text of a page with new tables between the marks of a kind."""

    def between(mark: re.Match) -> str:
        patterns = mark[3].split("; ") if mark[3] else ("*",)
        return f"{mark[1]}\n{table(mark[2], patterns)}\n{mark[4]}"

    marks = rf"(<!-- {kind} (\w+)(?:: (.*?))? -->).*?(<!-- end -->)"
    return re.sub(marks, between, text, flags=re.DOTALL)


def write(pages: Iterable[str], kind: str, table: Table) -> None:
    """Brings pages up to date, which are named by their path from the root."""
    for page in map(ROOT.__truediv__, pages):
        page.write_text(replaced(page.read_text(), kind, table))


def outdated(pages: Iterable[str], kind: str, table: Table) -> list[str]:
    """The pages whose tables are not what the command writes."""
    texts = {page: (ROOT / page).read_text() for page in pages}
    return [page for page, text in texts.items() if replaced(text, kind, table) != text]

"""How easy the README and the pages of docs/ are to read, in figures.

    python docs/reading_ease.py            a line for each page
    python docs/reading_ease.py --check    exit status 1 if a page is over its limits

Sentences are those of paragraphs and lists. Code blocks, tables, headings, comments, pictures and
the targets of links do not count. A sentence ends at a full stop, a question mark or an exclamation
mark, and at the end of its paragraph. A word is whatever stands between two spaces and holds a
letter or a digit; inline code counts like other words.
"""

import argparse
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
README_LINES = 140
README_BYTES = 12_000
README_FIRST_PYTHON = 40  # line
PAGE_MEAN = 16.0  # words
PAGE_LONGEST = 30  # words

FENCE = re.compile(r"^ *(`{3,}|\$\$).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
PICTURE = re.compile(r"!\[[^\]]*\]\([^)]*\)")
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
NO_PROSE = re.compile(r"^ *(#|\||-{3,} *$).*$", re.MULTILINE)
ITEM = re.compile(r"^ *([-*]|\d+\.) ", re.MULTILINE)
CODE = re.compile(r"`[^`]*`")
END = re.compile(r"(?<=[.!?])[*_\")]*\s+")
WORD = re.compile(r"\S*\w\S*")


class Ease(NamedTuple):
    """Figures of one page; ``first_python`` is a line's number, or None without Python."""

    lines: int
    size: int
    words: int
    mean: float
    longest: int
    first_python: int | None


def sentences(markdown: str) -> Iterator[str]:
    """The sentences of paragraphs and lists."""
    prose = markdown
    for pattern in (FENCE, COMMENT, PICTURE, NO_PROSE):
        prose = pattern.sub("\n", prose)
    prose = LINK.sub(r"\1", prose)
    prose = CODE.sub(lambda code: re.sub(r"[.!?]", "", code[0]), prose)
    prose = ITEM.sub("\n\n", prose)
    for paragraph in re.split(r"\n\s*\n", prose):
        yield from (each for each in END.split(" ".join(paragraph.split())) if WORD.search(each))


def measure(markdown: str) -> Ease:
    """The figures of a page."""
    counts = [len(WORD.findall(sentence)) for sentence in sentences(markdown)]
    lines = markdown.splitlines()
    python = [number for number, line in enumerate(lines, 1) if line.startswith("```python")]
    mean = sum(counts) / len(counts) if counts else 0.0
    size = len(markdown.encode())
    longest = max(counts, default=0)
    return Ease(len(lines), size, sum(counts), mean, longest, python[0] if python else None)


def faults(name: str, ease: Ease) -> list[str]:
    """What is over its limits, a sentence each."""
    limits = {
        "words a sentence": (round(ease.mean, 1), PAGE_MEAN),
        "words in its longest sentence": (ease.longest, PAGE_LONGEST),
    }
    of_readme = {
        "lines": (ease.lines, README_LINES),
        "bytes": (ease.size, README_BYTES),
        "lines before the first Python": (ease.first_python or ease.lines, README_FIRST_PYTHON),
    }
    if name == "README.md":
        limits |= of_readme
    return [
        f"{name}: {value} {what}, more than {most}"
        for what, (value, most) in limits.items()
        if value > most
    ]


def pages() -> dict[str, str]:
    """The README and the pages of the documentation, by their paths."""
    built = ROOT / "docs" / "_build"
    found = [path for path in sorted((ROOT / "docs").rglob("*.md")) if built not in path.parents]
    return {str(path.relative_to(ROOT)): path.read_text() for path in [ROOT / "README.md", *found]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 if a page is over limits")
    check = parser.parse_args().check
    found = []
    print(f"{'page':36}{'lines':>7}{'bytes':>8}{'words':>7}{'mean':>7}{'longest':>9}{'Python':>8}")
    for name, markdown in pages().items():
        ease = measure(markdown)
        found += faults(name, ease)
        print(
            f"{name:36}{ease.lines:7}{ease.size:8}{ease.words:7}{ease.mean:7.1f}{ease.longest:9}"
            f"{ease.first_python or '-':>8}"
        )
    if check and found:
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()

"""How easy the README and the pages of docs/ are to read, in figures.

    python docs/reading_ease.py            a line for each page
    python docs/reading_ease.py --check    exit status 1 if a page is over its limits

Sentences are those of paragraphs and lists. Code blocks, tables, headings, comments, pictures and
the targets of links do not count. A sentence ends at a full stop, a question mark or an exclamation
mark, and at the end of its paragraph. A word is whatever stands between two spaces and holds a
letter or a digit; inline code counts like other words.

A page may have no fragments, which are sentences without a finite verb. The check ignores bold
labels, items of a list without a full stop, and the definitions of the glossary. A word counts as
a finite verb if ``AUXILIARIES``, ``PASTS`` or ``VERBS`` has it, the last also with an "s", and it
does not follow a word such as "the" or "to". If a sentence is reported although it has a verb, add
the verb to its list. Nouns that look like verbs can hide a fragment from this rule.
"""

import argparse
import itertools
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
README_LINES = 140
README_BYTES = 12_000
README_FIRST_PYTHON = 40  # line
PAGE_MEAN = 18.0  # words a sentence
GLOSSARY = "docs/explanation/glossary.md"

FENCE = re.compile(r"^ *(`{3,}|\$\$).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
PICTURE = re.compile(r"!\[[^\]]*\]\([^)]*\)")
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
NO_PROSE = re.compile(r"^ *(#|\||-{3,} *$).*$", re.MULTILINE)
ITEM = re.compile(r"^ *([-*]|\d+\.) ", re.MULTILINE)
CODE = re.compile(r"`[^`]*`")
END = re.compile(r"(?<=[.!?])(?<!et al\.)[*_\")]*\s+")
WORD = re.compile(r"\S*\w\S*")
LABEL = re.compile(r"\*\*[^*]+[.:?]\**(\s+|$)")
STOP = re.compile(r"[.!?][*_\")]*$")

AUXILIARIES = """
am is are was were has have had do does did can cannot could will would may might must shall should
"""
PASTS = """
aimed began came changed chose compiled consumed cut ended fell found gave happened installed kept
led left looked made met missed participated passed raised ran returned rose saved searched sent
spent summed took trained tried used wanted went
"""
VERBS = """
accept access accumulate add adopt affect agree aim all-reduce allocate allow answer appear apply
ascend ask assign assume average avoid become begin belong bind break bring build call carry catch
change check choose cite clip close come commit compare compile compute connect consist consume
contain continue contribute copy cost count cover create cross cut decay decide decode define
deliver depend describe die differ disagree divide draw drift drop enable end ensure enter equal
evaluate exceed exchange exclude expect explain expose fail fall find fit follow form gain gather
get give go grant grow halve hand handle happen help hide hold ignore implement import impose
improve include install invite join keep kill know lack learn leave let lie limit link list live
load log look lose lower maintain make map match matter mean measure merge miss move multiply name
need notice occur offer open outweigh own pack pass pay pick prefer press prevent price print
produce prove put raise reach read receive record reduce reflect refuse reject relay rely remain
remove rename repair repeat replace reply report request require resemble reset restore resume
return reuse rewrite rise run save say scatter seal search see select send serve set shard share
show shrink simulate skip sort speak spend split stack stand start state stay stop subtract
suffice sum support swap take tell test think trace train transform translate travel treat trust
try tune turn unbox understand update upload use vary verify wait want warn weigh weight widen
work wrap write yield
"""
NO_VERB_AFTER = "a an another by every for from in its no of on our the their to with"
FINITE = set(f"{AUXILIARIES} {PASTS} {VERBS}".split())
FINITE |= {verb + ending for verb in VERBS.split() for ending in ("s", "es")}
FINITE |= {verb[:-1] + "ies" for verb in VERBS.split()}


class Ease(NamedTuple):
    """Figures of one page; ``first_python`` is a line's number, or None without Python."""

    lines: int
    size: int
    words: int
    mean: float
    fragments: list[str]
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


def is_fragment(sentence: str) -> bool:
    """Whether a sentence that ends in a full stop or its like has no finite verb."""
    text = LABEL.sub("", CODE.sub("code", sentence), count=1)
    words = ["", *re.findall(r"[\w-]+|[,;:]", text.lower())]
    verbs = [x for before, x in itertools.pairwise(words) if before not in NO_VERB_AFTER.split()]
    return bool(STOP.search(text)) and FINITE.isdisjoint(verbs)


def measure(markdown: str) -> Ease:
    """The figures of a page."""
    found = list(sentences(markdown))
    counts = [len(WORD.findall(sentence)) for sentence in found]
    lines = markdown.splitlines()
    python = [number for number, line in enumerate(lines, 1) if line.startswith("```python")]
    mean = sum(counts) / len(counts) if counts else 0.0
    size = len(markdown.encode())
    fragments = list(filter(is_fragment, found))
    return Ease(len(lines), size, sum(counts), mean, fragments, python[0] if python else None)


def faults(name: str, ease: Ease) -> list[str]:
    """What is over its limits and what is a fragment, a line each."""
    limits = {"words a sentence": (round(ease.mean, 1), PAGE_MEAN)}
    of_readme = {
        "lines": (ease.lines, README_LINES),
        "bytes": (ease.size, README_BYTES),
        "lines before the first Python": (ease.first_python or ease.lines, README_FIRST_PYTHON),
    }
    if name == "README.md":
        limits |= of_readme
    over = [
        f"{name}: {value} {what}, more than {most}"
        for what, (value, most) in limits.items()
        if value > most
    ]
    fragments = [] if name == GLOSSARY else ease.fragments
    return over + [
        f"{name}: {sentence!r} has no verb: write a full sentence, or add its verb to the list of "
        "docs/reading_ease.py"
        for sentence in fragments
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
    print(f"{'page':36}{'lines':>7}{'bytes':>8}{'words':>7}{'mean':>7}{'Python':>8}")
    for name, markdown in pages().items():
        ease = measure(markdown)
        found += faults(name, ease)
        print(
            f"{name:36}{ease.lines:7}{ease.size:8}{ease.words:7}{ease.mean:7.1f}"
            f"{ease.first_python or '-':>8}"
        )
    if check and found:
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()

"""The documents tell what the studies found."""

from pathlib import Path

import pytest

from benchmarks.quality import study, tables
from benchmarks.tools import pages

ROOT = Path(__file__).parents[1]
STUDIES = study.read()


def test_pages_say_what_was_found():
    table = tables.table_of(STUDIES)
    outdated = pages.outdated(tables.PAGES, tables.KIND, table)
    assert outdated == [], "run python -m benchmarks.quality write"
    assert "<!-- study final -->" in (ROOT / "docs/explanation/quality.md").read_text()
    marks = "<!-- study tiny: Muon; DeMo, k = ? -->\n<!-- end -->"
    some = pages.replaced(marks, tables.KIND, table)
    assert [line.split(" | ")[0] for line in some.splitlines()[3:-1]] == [
        "| Muon", "| DeMo, k = 8", "| DeMo, k = 4",
    ]  # fmt: skip


def test_a_pattern_of_a_table_that_means_no_method_is_refused():
    with pytest.raises(ValueError, match="no method of the study 'final' has a name like 'Muo'"):
        tables.of_study(STUDIES["final"], ("Muon*", "Muo"))


def test_the_readme_has_the_differences_of_the_unseen_seeds():
    text = (ROOT / "README.md").read_text()
    found = {row.method.name: row.difference for row in tables.rows(STUDIES["final"])}
    quoted = {name for name, mean in found.items() if mean and mean.written("+.3f") in text}
    assert {"DeMo-Muon", "DeMo-scaled"} <= quoted

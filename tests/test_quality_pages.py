"""The documents tell what the studies found."""

import re
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


def test_the_page_of_the_finished_studies_names_the_tag_that_keeps_them():
    text = (ROOT / "docs/explanation/quality_studies.md").read_text()
    assert "`git checkout studies-2026-11`" in text


def test_a_pattern_of_a_table_that_means_no_method_is_refused():
    with pytest.raises(ValueError, match="no method of the study 'final' has a name like 'Muo'"):
        tables.of_study(STUDIES["final"], ("Muon*", "Muo"))


def test_the_readme_has_the_differences_of_the_unseen_seeds():
    text = (ROOT / "README.md").read_text()
    found = {row.method.name: row.difference for row in tables.rows(STUDIES["final"])}
    quoted = {name for name, mean in found.items() if mean and mean.written("+.3f") in text}
    assert {"DeMo-Muon", "DeMo-scaled"} <= quoted


NOW = {
    "Muon with a dense all-reduce": ("final", "Muon"),
    "DeMo with Muon, one gather": ("final", "DeMo-Muon"),
    "two phases, four bits back": ("final", "DeMo-Muon, two phases"),
    "a delay of one step": ("final", "DeMo-Muon, delayed"),
    "two phases, delayed": ("final", "DeMo-Muon, two phases, delayed"),
    "64 workers, one gather": ("workers", "DeMo-Muon"),
    "64 workers, two phases": ("workers", "DeMo-scaled, two phases, 512 int4 back"),
    "5,100 steps, `demo_scaled`": ("long", "DeMo-scaled"),
    "DiLoCo, H = 30": ("local", "DiLoCo, H = 30"),
    "SparseLoCo, H = 30, k = 64, now 512": ("local", "SparseLoCo, H = 30, k = 512"),
}


def test_what_is_better_now_is_in_the_tables():
    text = (ROOT / "docs/explanation/quality_studies.md").read_text()
    table = text.split("## Before and now")[1].split("\n\n")[2]
    lines = [line[2:].split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    said = {label: re.match(r"[-+]\d\.\d{3}( ± \d\.\d{3})?", now)[0] for label, _, now, _ in lines}
    found = {
        name: {r.method.name: r for r in tables.rows(STUDIES[name])} for name, _ in NOW.values()
    }
    assert said == {
        label: found[name][method].difference.written("+.3f")
        for label, (name, method) in NOW.items()
    }


TRIED = {
    "DiLoCo, H = 10": "DiLoCo, H = 10",
    "SparseLoCo, k = 64": "SparseLoCo, H = 30",
    "k = 256": "SparseLoCo, H = 30, k = 256",
}


def test_what_was_tried_with_local_steps_is_in_the_tables():
    """Of what was tried, the rest has left the tree for the tag."""
    text = (ROOT / "docs/explanation/quality_studies.md").read_text()
    table = text.split("Local steps miss what we aimed at")[1].split("\n\n")[1]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    said = {label: value for row in cells for label, value in (row[:2], row[2:])}
    rows = {row.method.name: row for row in tables.rows(STUDIES["local"])}
    found = {label: rows[name].difference_first.written("+.3f") for label, name in TRIED.items()}
    assert said.items() >= found.items()


SIZES = ("tiny_short", "small_short", "medium")


def test_the_times_of_the_three_sizes_are_those_of_the_runs():
    text = (ROOT / "docs/explanation/quality.md").read_text()
    table = text.split("The time of each run")[1].split("\n\n")[1]
    said = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    found = {}
    for name in SIZES:
        each = STUDIES[name]
        results = each.results()
        for method in ("AdamW", "Muon", "DeMo-scaled", "DeMo-Muon"):
            seconds = each.of_method(each.methods[method], results)[0].seconds
            found.setdefault(method, []).append(f"{seconds:,}")
    assert {name: seconds for name, *seconds in said} == found

"""Tables of speed and memory: what is kept, and whether the page says it."""

import pytest

from benchmarks.tools import kept, pages, step_tables


@pytest.fixture
def results(monkeypatch, tmp_path):
    monkeypatch.setattr(kept, "FOLDER", tmp_path)
    return tmp_path


def keep(name, **figures):
    own = dict(name=name, model="2 tensors", where="compiled for 8 chips", version="jax 1.0")
    kept.append("some", **own, command=f"run {name}", figures=figures)


def test_the_page_says_what_was_kept():
    outdated = pages.outdated(step_tables.PAGES, step_tables.KIND, step_tables.table)
    assert outdated == [], "run python -m benchmarks.tools.step_tables write"
    for page in step_tables.PAGES:
        text = (pages.ROOT / page).read_text()
        for path in kept.FOLDER.glob("*.jsonl"):
            shown = [row.name for row in kept.read(path.stem) if f"| {row.name} |" in text]
            assert shown == [row.name for row in kept.read(path.stem)], path.stem


def test_the_latest_measurement_replaces_an_older_one(results):
    keep("a", bytes=1.0)
    keep("b", bytes=2.0)
    keep("a", bytes=3.0, sorts="none")
    assert [(row.name, row.figures) for row in kept.read("some")] == [
        ("a", {"bytes": 3.0, "sorts": "none"}),
        ("b", {"bytes": 2.0}),
    ]


def test_a_table_numbers_the_runs_that_it_is_from(results):
    keep("a, 1", bytes=1.25)
    keep("a, 2", bytes=2.5, sorts="2 sort")
    keep("b", bytes=3.0)
    rows = step_tables.table("some", ["a, *"]).splitlines()
    assert rows[0] == "|  | model | where | bytes | sorts | run |"
    assert rows[2:4] == [
        "| a, 1 | 2 tensors | compiled for 8 chips | 1.25 |  | 1 |",
        "| a, 2 | 2 tensors | compiled for 8 chips | 2.5 | 2 sort | 2 |",
    ]
    assert rows[5].startswith("1. `run a, 1` (jax 1.0, commit ")
    assert len(rows) == 7


def test_patterns_without_a_measurement_are_an_error(results):
    keep("a", bytes=1.0)
    with pytest.raises(ValueError, match="no measurement named c or d"):
        step_tables.table("some", ["c", "d"])

"""Tables of speed and memory: what is kept, and whether the page says it."""

from benchmarks.tools import kept, pages, step_tables


def test_the_page_says_what_was_kept():
    outdated = pages.outdated(step_tables.PAGES, step_tables.KIND, step_tables.table)
    assert outdated == [], "run python -m benchmarks.tools.step_tables write"
    for page in step_tables.PAGES:
        text = (pages.ROOT / page).read_text()
        for path in kept.FOLDER.glob("*.jsonl"):
            shown = [row.name for row in kept.read(path.stem) if f"| {row.name} |" in text]
            assert shown == [row.name for row in kept.read(path.stem)], path.stem

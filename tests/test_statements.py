"""What several pages say, they say alike, and as the code and the kept results have it."""

import json
import re
from pathlib import Path

from benchmarks.quality import study, tables
from benchmarks.tools import kept

ROOT = Path(__file__).parents[1]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if "_build" not in path.parts
}
STUDIES = study.read()


def test_the_largest_model_is_the_same_everywhere():
    presets = {
        each.methods[row.method].settings["preset"]
        for each in STUDIES.values()
        for row in each.results().values()
        if row.method in each.methods
    }
    largest = max(map(tables.dense_gradient, presets)) / 4
    claim = r"(?:[Ll]argest model[^.|]*?|at most|models above) (\d+(?:\.\d+)?)M\b"
    said = {name: set(re.findall(claim, text)) for name, text in PAGES.items()}
    said = {name: sizes for name, sizes in said.items() if sizes}
    assert {"README.md", "docs/explanation/why_it_works.md", "docs/reference/versions.md"} <= set(
        said
    )
    assert set.union(*said.values()) == {f"{largest / 1e6:.0f}"}


def test_seconds_over_a_slow_link_are_those_of_the_kept_runs():
    seconds = {
        (row.name, row.where.partition(",")[0]): row.figures["seconds per step"]
        for row in kept.read("slow_link")
    }
    free, limited = seconds["demo_scaled", "unlimited"], seconds["demo_scaled", "100mbit"]
    dense = seconds["adamw", "100mbit"]
    times = f"**{dense / limited:.1f} times** as long"
    said = f"a step took {limited} s, and with AdamW {dense} s, which is {times}"
    assert said in PAGES["README.md"]
    page = PAGES["docs/explanation/step_cost.md"]
    assert f"could hide at most {limited - free:.2f} s" in page
    apart = abs(seconds["demo_scaled, delayed", "unlimited"] - free)
    assert f"already differ by {apart:.2f} s" in page


def test_the_sample_of_a_swarm_is_the_output_of_the_notebook():
    notebook = json.loads((ROOT / "notebooks" / "06_swarm.ipynb").read_text())
    outputs = [
        "".join(output.get("text", ""))
        for x in notebook["cells"]
        for output in x.get("outputs", [])
    ]
    page = PAGES["docs/how_to/swarm.md"]
    (sample,) = re.findall(r"```text\n(step \d+, decided .*?)```", page, re.DOTALL)
    assert any(sample.strip() == output.strip() for output in outputs)

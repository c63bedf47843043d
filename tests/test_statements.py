"""What several pages say, they say alike, and as the code and the kept results have it."""

import inspect
import json
import re
from pathlib import Path

import pytest

import demo_optax
from benchmarks.quality import study, tables
from benchmarks.tools import kept
from tests.pages import TEXTS

ROOT = Path(__file__).parents[1]
STUDIES = study.read()
OF_A_MODEL = {"preset", "steps", "evaluate_every", "batch_size", "workers", "simulate"}


def test_the_largest_model_is_the_same_everywhere():
    presets = {
        each.methods[row.method].settings["preset"]
        for each in STUDIES.values()
        for row in each.results().values()
        if row.method in each.methods
    }
    largest = max(map(tables.dense_gradient, presets)) / 4
    claim = r"(?:[Ll]argest model[^.|]*?|at most|models above) (\d+(?:\.\d+)?)M\b"
    said = {name: set(re.findall(claim, text)) for name, text in TEXTS.items()}
    said = {name: sizes for name, sizes in said.items() if sizes}
    assert {"README.md", "docs/explanation/why_it_works.md", "docs/reference/versions.md"} <= set(
        said
    )
    assert set.union(*said.values()) == {f"{largest / 1e6:.0f}"}


BEGIN = r"[Bb]egin with (`demo_\w+`)|(`demo_\w+`), the optimizer to begin with"


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/explanation/faq.md",
        "docs/reference/api.md",
        "docs/reference/settings.md",
        "docs/tutorials/from_scratch.md",
    ],
)
def test_one_optimizer_to_begin_with(page):
    paragraph = next(each for each in TEXTS[page].split("\n\n") if re.search(BEGIN, each))
    first, *_ = filter(None, re.search(BEGIN, paragraph).groups())
    assert first == "`demo_muon`"
    exception = paragraph[paragraph.index("`demo_muon`") :]
    assert "`demo_scaled`" in exception and "small" in exception


def test_no_page_has_another_optimizer_to_begin_with():
    for page, text in TEXTS.items():
        for paragraph in text.split("\n\n"):
            found = re.search(BEGIN, paragraph)
            assert not found or "`demo_muon`" in found[0], f"{page}: {paragraph}"
            assert "recommended optimizer" not in paragraph, page


def test_the_docstrings_say_the_same_of_where_to_begin():
    muon, scaled = map(inspect.getdoc, (demo_optax.demo_muon, demo_optax.demo_scaled))
    assert "This is the optimizer to begin with, at the learning rate of an AdamW" in muon
    assert re.search(r"Take it in place of `demo_muon` if the batch of a worker is small", scaled)
    limit = re.search(r"``5 \* width / tokens`` above\s+([\d.]+)", scaled)[1]
    said = f"5 · width / (tokens in one worker's batch) exceeds {limit}"
    assert said in TEXTS["README.md"]


def test_methods_of_one_name_have_the_same_settings():
    """Such as one look-ahead. They differ in the model, the steps and the workers alone."""
    found = {}
    for each in STUDIES.values():
        for method in each.methods.values():
            own = {key: value for key, value in method.settings.items() if key not in OF_A_MODEL}
            own.setdefault("decay", 0.9 if own["optimizer"] == "adamw" else None)
            assert found.setdefault(method.name, (own, method.lever)) == (own, method.lever), method


SEARCHED = {"AdamW": "AdamW", "Muon": "Muon", "DeMo-scaled": "32 bins, sign"}


def test_rates_on_the_unseen_seeds_are_those_of_the_searches():
    tiny, final = STUDIES["tiny"], STUDIES["final"]
    for name, searched in SEARCHED.items():
        assert tiny.methods[searched].settings["b2"] == 0.95
        assert final.methods[name].learning_rate == tiny.methods[searched].learning_rate


def test_seconds_over_a_slow_link_are_those_of_the_kept_runs():
    seconds = {
        (row.name, row.where.partition(",")[0]): row.figures["seconds per step"]
        for row in kept.read("slow_link")
    }
    free, limited = seconds["demo_scaled", "unlimited"], seconds["demo_scaled", "100mbit"]
    dense = seconds["adamw", "100mbit"]
    times = f"**{dense / limited:.1f} times** as long"
    said = f"a step took {limited} s, and with AdamW {dense} s, which is {times}"
    assert said in TEXTS["README.md"]
    page = TEXTS["docs/explanation/step_cost.md"]
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
    page = TEXTS["docs/how_to/swarm.md"]
    (sample,) = re.findall(r"```text\n(step \d+, decided .*?)```", page, re.DOTALL)
    assert any(sample.strip() == output.strip() for output in outputs)

"""The benchmarks still run; what they measure here means nothing. The folder stays small."""

import pathlib
import re
import runpy
import subprocess
import sys
import types
from typing import Any

import pytest
from rich.console import Console

from benchmarks.chaos.__main__ import Chaos, seconds_until_joined
from tests.pages import TEXTS

ROOT = pathlib.Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
MOST_LINES = 4700
TAG = "`studies-2026-11`"
SMALL = ("--layers", "1", "--width", "64")
# What a line of figures looks like in each.
CASES = {("step_cost.py", *SMALL, "--rounds", "1", "--topk", "4"): r"^demo, topk 4.* \d+\.\d\d ns"}


@pytest.mark.slow
@pytest.mark.parametrize("words", CASES, ids=lambda words: words[0])
def test_benchmarks_run(words):
    script, *arguments = words
    run = subprocess.run(
        [sys.executable, BENCHMARKS / script, *arguments],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert re.search(CASES[words], run.stdout, re.MULTILINE), run.stdout


@pytest.mark.parametrize("script", ["compile_only", "slow_link", "slow_swarm", "step_cost"])
def test_each_script_says_how_it_is_used(script, capsys, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(BENCHMARKS / f"{script}.py"), run_name="__main__")
    assert f"benchmarks/{script}.py" in capsys.readouterr().out


def test_a_start_of_a_worker_that_comes_back_lasts_until_its_first_step_that_counts():
    def worker(name, starts, times, members):
        steps = [{"time": x, "members": members} for x in times]
        return types.SimpleNamespace(name=name, starts=starts, steps=lambda: steps)

    killed = worker("a", [0.0, 100.0, 200.0], [34.0, 90.0, 110.0, 120.0, 205.0], ["a", "b"])
    never = worker("b", [0.0, 50.0], [34.0], ["a", "b"])
    alone = worker("c", [0.0, 50.0], [60.0], ["a", "b"])
    assert seconds_until_joined([killed, never, alone]) == [10.0, 5.0]


@pytest.mark.parametrize(("status", "starts"), [(1, ["a"]), (-9, ["a"]), (2, [])])
def test_a_worker_that_ends_is_started_again_unless_its_settings_are_refused(
    status, starts, capsys
):
    worker = types.SimpleNamespace(
        name="a",
        alive=False,
        joined=False,
        joining_for=0.0,
        held_out=lambda: None,
        wait=lambda seconds: status,
        last_words=lambda: "error: choose a multiple.",
        start=lambda: started.append("a"),
    )
    options, started = types.SimpleNamespace(hang=90.0), []
    run: Any = types.SimpleNamespace(
        workers=[worker], options=options, errors=[], console=Console(width=140)
    )
    if status == 2:
        with pytest.raises(SystemExit, match=r"^error: choose a multiple\.$"):
            Chaos.look(run)
    else:
        Chaos.look(run)
        assert run.errors == ["a ended by itself: error: choose a multiple."]
        assert run.errors[0] in capsys.readouterr().out
    assert started == starts


def test_studies_with_kept_results_leave_the_folder():
    found = [path for path in BENCHMARKS.rglob("*") if path.suffix in (".py", ".sh", ".yaml")]
    lines = sum(len(path.read_text().splitlines()) for path in found)
    assert lines <= MOST_LINES, (
        f"benchmarks/ has {lines:,} lines, of at most {MOST_LINES:,}. Tag the studies whose "
        "results are kept, name the tag on the pages that show them, and take them out."
    )


@pytest.mark.parametrize("page", TEXTS)
def test_a_page_names_the_tag_of_files_that_left_the_tree(page):
    text = TEXTS[page]
    named = re.findall(r"benchmarks/[\w/]+\.(?:py|sh)", text)
    left = [name for name in named if not (ROOT / name).exists()]
    assert not left or TAG in text, f"{left}: there is no such file, and no tag is named"

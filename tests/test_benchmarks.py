"""The benchmarks still run; what they measure here means nothing."""

import pathlib
import re
import subprocess
import sys

import pytest

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"
SMALL = ("--layers", "1", "--width", "64")
# What a line of figures looks like in each.
CASES = {
    ("step_cost.py", *SMALL, "--rounds", "1", "--topk", "4"): r"^demo, topk 4.* \d+\.\d\d ns",
    ("stages.py", *SMALL, "--topk", "4", "--selection", "bins"): r"^k=4 +int4( +-?\d+\.\d{3}){6}$",
    ("swarm_replay.py", "--steps", "10", "--batch-size", "4"): r"^replay: .* times as fast",
    ("swarm_kinds.py", "--steps", "12", "--seeds", "1", "--snapshot-every", "5"): r"mean loss \d",
    ("many_workers.py", "--workers", "16", "--steps", "2", "--seeds", "2"): r"\d\.\d{3} ± \d",
    ("save_cost.py", "--parameters", "3", "--repeats", "1"): r"\d%",
    ("momentum_dtype.py", "--steps", "2", "--seeds", "2", "--decay", "0.95"): r"\d\.\d{3}",
    ("value_codings.py", "--steps", "2", "--seeds", "2", "--topk", "4", "--values", "sign"): (
        r"sign.*\d\.\d{3}"
    ),
}


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

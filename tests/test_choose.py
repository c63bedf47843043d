"""The table of docs/how_to/choose.md is what its rules and the accounting say."""

import dataclasses
import re
from pathlib import Path

import pytest

import demo_optax
from demo_optax import accounting
from demo_optax.accounting import preset_shapes

PAGE = (Path(__file__).parents[1] / "docs/how_to/choose.md").read_text()
UNITS = {"Gbit/s": 1e9, "Mbit/s": 1e6}
WORKERS = (4, 8, 16, 64)
SENT = demo_optax.Compression(32, value_coding="sign", selection="bins")
OWNERS = demo_optax.TwoPhase("data", value_coding_back="int4")
EVERY_STEP = {
    "B": (SENT, demo_optax.AllGather("data")),
    "C": (SENT, demo_optax.Delayed(demo_optax.AllGather("data"))),
    "D": (SENT, demo_optax.Delayed(OWNERS)),
}
OF_ROUNDS = demo_optax.Compression(64, value_coding="int2", transform="identity"), OWNERS


def seconds(bandwidth: float, workers: int) -> dict[str, float]:
    link = dict(workers=workers, bandwidth=bandwidth, latency=1e-3, compute_time=1.0)
    steps = accounting.step_times(preset_shapes("300m"), EVERY_STEP, **link)
    rounds = accounting.step_times(preset_shapes("300m"), {"E": OF_ROUNDS}, local_steps=30, **link)
    found = steps | {"A": steps["AdamW, bfloat16"], "E": rounds["E"]}
    return {name: time.step for name, time in found.items()}


# The lines of the page, in their order, for a compute of one second.
RULES = {
    "- **A** if a dense all-reduce takes at most a quarter of the compute.": (
        lambda step: "A" if step["A"] - 1 <= 1 / 4 else None
    ),
    "- **B** if its exchange takes at most a fifth of the compute.": (
        lambda step: "B" if step["B"] - 1 <= 1 / 5 else None
    ),
    "- **C** if the exchange of B takes longer than that, but not longer than the compute.": (
        lambda step: "C" if step["B"] - 1 <= 1 else None
    ),
    "- **C** or **D**, whichever has the shorter step, if that is at most twice the compute.": (
        lambda step: min("CD", key=step.get) if min(step["C"], step["D"]) <= 2 else None
    ),
    "- **E** otherwise.": lambda step: "E",
}


def letter(step: dict[str, float]) -> str:
    return next(found for rule in RULES.values() if (found := rule(step)))


def rows() -> dict[float, list[str]]:
    table = PAGE.split("| Link between workers |")[1].split("\n\n")[0].splitlines()[2:]
    cells = [line.strip("| ").split(" | ") for line in table]
    found = {}
    for link, *rest in cells:
        number, unit = link.partition(";")[0].split()
        found[float(number) * UNITS[unit]] = rest
    return found


def as_written(text: str):
    """Equal to each number that is written like this when it is rounded."""
    digits = len(text.partition(".")[2])
    return pytest.approx(float(text.replace(",", "")), abs=0.5001 * 10**-digits)


@pytest.mark.parametrize("bandwidth", rows())
def test_each_cell_has_the_letter_of_the_rules_and_its_seconds(bandwidth):
    *cells, dense = rows()[bandwidth]
    steps = [seconds(bandwidth, workers) for workers in WORKERS]
    for cell, step in zip(cells, steps, strict=True):
        of_page, time = re.fullmatch(r"\*\*([A-E])\*\* ([\d.]+)", cell).groups()
        assert of_page == letter(step)
        assert step[of_page] == as_written(time)
    assert [steps[0]["A"], steps[-1]["A"]] == [as_written(text) for text in dense.split(" to ")]


def test_the_rules_are_those_of_the_page():
    lines = [line for line in PAGE.splitlines() if line in RULES]
    assert lines == list(RULES)


def test_few_workers_on_a_slow_link_take_a_delayed_gather():
    step = seconds(60e6, 4)
    assert letter(step) == "C"
    assert step["C"] < step["D"]


def test_more_coefficients_back_fit_one_link_and_not_the_other():
    back = demo_optax.Delayed(dataclasses.replace(OWNERS, topk_back=512))
    for bandwidth, fits in (1e9, True), (1e8, False):
        step = accounting.step_times(
            preset_shapes("300m"), {"D": (SENT, back)}, 64, bandwidth, 1e-3, 1.0
        )["D"].step
        assert f"({step:.2f} s)" in PAGE
        assert (step <= 2) is fits

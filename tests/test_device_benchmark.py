"""The run for an accelerator needs nothing but its few packages, and tells what it finds."""

import ast
import json
import os
import pathlib
import subprocess
import sys
from importlib import metadata
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.device import checks, report, steps
from demo_optax._src.metrics import init_metrics

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = "jax", "optax", "flax", "chex", "orbax-checkpoint", "jaxtyping"
MODULES = {"jax", "numpy", "optax", "flax", "chex", "orbax", "jaxtyping"}
OWN = {"benchmarks", "demo_optax", "lm"}
LOADED = """
import sys
import benchmarks.device.__main__
print(*[file for module in [*sys.modules.values()] if (file := getattr(module, "__file__", None))])
"""
ENDLESS = """
import pathlib, sys, time
from benchmarks.device import report
about = {"device": "a device", "jax": "0", "date": "2026-11-22", "parameters": 1000}
run = report.Run(pathlib.Path(sys.argv[1]), report.seconds() + 0.5, about, ["one"])
run.stop_at_the_end()
run.part("one", 0, time.sleep, 50)
"""
ABOUT = {"device": "a device", "jax": "0", "date": "2026-11-22", "parameters": 1000}
UPDATES = "adamw", "muon", "demo", "demo_scaled", "demo_muon"
TRAINED = "adamw", "demo_scaled", "demo_muon"
SHAPES = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}


def with_requirements(names):
    """The distributions of these names, and all that they require."""
    found, left = set(), [(name, "") for name in names]
    while left:
        name, extra = left.pop()
        if (name, extra) in found:
            continue
        found.add((name, extra))
        for requirement in map(Requirement, metadata.requires(name) or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                needed = canonicalize_name(requirement.name)
                left += [(needed, other) for other in ("", *requirement.extras)]
    return {name for name, _ in found}


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """What starts Python with these packages and the standard library alone."""
    folder = tmp_path_factory.mktemp("packages")
    for name in with_requirements(PACKAGES):
        installed = metadata.distribution(name)
        for top in {file.parts[0] for file in installed.files or [] if file.parts[0] != ".."}:
            if not (folder / top).exists():
                (folder / top).symlink_to(installed.locate_file(top))
    env = {**os.environ, "PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu"}

    def start(*words):
        command = [sys.executable, "-S", *words]
        return subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400, check=False
        )

    return start


@pytest.mark.slow
def test_it_runs_with_these_packages_alone(bare, tmp_path):
    run = bare("-m", "benchmarks.device", "--preset", "tiny", "--folder", str(tmp_path))
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads((tmp_path / "device-tiny.json").read_text())
    assert found["left_out"] == [] and found["errors"] == {}
    assert {name: check["passed"] for name, check in found["checks"].items()} == {
        "simulated workers agree": True,
        "packets equal those of a CPU": True,
        "equal replicas, demo": True,
        "equal replicas, demo_scaled": True,
        "equal replicas, demo_muon": True,
        "nothing is lost of a momentum": True,
        "coefficients equal those of a CPU": True,
    }
    assert found["checks"]["simulated workers agree"]["participants"] == [8, 8, 8]
    assert tuple(found["updates"]) == UPDATES and tuple(found["train_steps"]) == TRAINED
    for figures in [*found["updates"].values(), *found["train_steps"].values()]:
        assert figures["ms"] > 0 and figures["compile_seconds"] > 0
        assert (figures["peak_bytes"] or figures["planned_bytes"]) > 12 * found["parameters"]
    assert found["updates"]["adamw"]["planned_bytes"] == pytest.approx(
        16 * found["parameters"], rel=0.01
    )
    assert all(0 < figures["loss"] < 10 for figures in found["train_steps"].values())
    assert run.stdout.count("\n| ") == 2 + 7 + len(UPDATES) + len(TRAINED)
    assert f"| {found['device']}, JAX {jax.__version__}, {found['date']} |" in run.stdout


def test_nothing_of_ours_imports_another_package(bare):
    shown = bare("-c", LOADED)
    assert shown.returncode == 0, shown.stderr
    files = [path for path in map(pathlib.Path, shown.stdout.split()) if ROOT in path.parents]
    assert ROOT / "examples" / "lm" / "model.py" in files and len(files) > 50
    imported = {name for file in files for name in imports_of(file)}
    assert imported - sys.stdlib_module_names - OWN <= MODULES


def imports_of(file):
    """The top-level names of what a file imports, but for relative imports."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name.split(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield str(node.module).split(".")[0]


@pytest.mark.parametrize(
    ("passed", "status", "shown"),
    [(True, 0, "passed"), (False, 1, "**failed**"), (None, 1, "**not run**")],
)
def test_the_exit_status_and_the_table_tell_a_check_that_did_not_pass(
    passed, status, shown, tmp_path, capsys
):
    run = report.Run(tmp_path / "found.json", report.seconds() + 60, ABOUT, ["one", "other"])
    run.record("checks", "one", passed=True)
    run.record("checks", "other", passed=passed)
    assert run.finish() == status
    assert f"\n| other | {shown} |" in capsys.readouterr().out
    assert json.loads((tmp_path / "found.json").read_text())["checks"]["other"]["passed"] is passed


def test_a_part_that_raises_or_that_does_not_fit_is_told(tmp_path, capsys):
    def broken():
        raise MemoryError("too large")

    run = report.Run(tmp_path / "found.json", report.seconds() + 60, ABOUT, [])
    assert run.part("sum", 50, sum, [1, 2]) == 3
    assert run.part("long", 70, sum, [1, 2]) is None and run.finish() == 0
    assert run.part("broken", 50, broken) is None and run.finish() == 1
    out = capsys.readouterr().out
    assert "left out: long" in out and "failed: broken: MemoryError: too large" in out


def test_the_end_comes_in_the_middle_of_a_part(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", ENDLESS, str(tmp_path / "found.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 1 and "left out: the rest, when the time was up" in run.stdout
    assert json.loads((tmp_path / "found.json").read_text())["checks"]["one"]["passed"] is None


class Sent(NamedTuple):
    packet: jax.Array


class Drifting(NamedTuple):
    """An optimizer whose updates differ between workers by a multiple of ``error``."""

    error: float

    def init(self, params):
        return init_metrics()._replace(participants=jnp.int32(8))

    def send(self, gradient, state, params, *, worker):
        return Sent(jnp.zeros(4, jnp.uint32)), state

    def apply(self, packets, outbox, state, params, *, worker):
        return jax.tree.map(lambda x: x * (1 + self.error * (worker == 5)), params), state


@pytest.mark.parametrize(("error", "equal"), [(0.0, True), (2.0**-20, False)])
def test_replicas_that_differ_in_last_bits_are_found(error, equal):
    assert checks.equal_replicas(Drifting(error), SHAPES)["passed"] is equal


def test_a_packet_unlike_that_of_a_cpu_is_found(monkeypatch):
    made: list[Any] = []

    def packet_of(compression, device):
        made.append(device)
        return np.full(4, len(made) == 4, np.uint32) + np.uint32(1)

    monkeypatch.setattr(checks, "packet_of", packet_of)
    found = checks.packets_of_a_cpu()
    assert list(found["equal"].values()) == [True, False, True] and not found["passed"]


def test_what_a_momentum_loses_is_found():
    rng = np.random.default_rng(0)
    gradient, sent = rng.normal(size=(2, 128, 64))
    before = rng.normal(size=(2, 1, 4096))
    after = 0.9 * before + 0.3 * checks.dct_blocks(gradient) - checks.dct_blocks(sent)
    assert checks.lost(gradient, sent, before, after) < 1e-12
    assert checks.lost(gradient, 1.01 * sent, before, after) > checks.ROUNDING


def test_sums_of_squares_of_the_recorded_momentum_are_exact():
    momentum = checks.recorded_momentum().reshape(6, -1)
    assert [len({*np.abs(block[block != 0])}) for block in momentum] == [64] * 6
    assert np.count_nonzero(momentum.reshape(6, -1, 32), axis=1).tolist() == [[2] * 32] * 6
    units = np.square(momentum.astype(np.float64) * 8)  # half of it, and its smallest factor 1/4
    assert (units == np.round(units)).all() and units.sum() < 2**24


@pytest.mark.parametrize(("peak", "needed"), [(900, None), (1000, None), (1250, 790)])
def test_memory_is_measured_where_there_is_a_new_peak(peak, needed):
    before = {"bytes_in_use": 500, "peak_bytes_in_use": 1000}
    after = {"bytes_in_use": 800, "peak_bytes_in_use": peak}
    assert steps.bytes_needed(before, after, shared=40) == needed
    assert steps.bytes_needed({}, {}, shared=40) is None


@pytest.mark.parametrize("needed", [100, 400, 700])
def test_a_step_sets_a_new_peak_on_top_of_the_filler(needed):
    filled = 500 + steps.filler_bytes({"bytes_in_use": 500, "peak_bytes_in_use": 1000}, needed)
    assert filled <= 1000 < filled + needed
    assert steps.filler_bytes({}, needed) == 0

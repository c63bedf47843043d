"""Processes that were not started alike end before the first step, and say in what they differ."""

import dataclasses
import os
import pathlib
import subprocess
import sys
from importlib import metadata

import jax
import pytest

from lm import agreement, swarm
from lm.config import Config
from tests.ports import free_port
from tests.sweeps import slow

ROOT = pathlib.Path(__file__).parents[1]
TRAINER = [sys.executable, str(ROOT / "examples" / "train_lm.py")]
NANO = ["--preset", "nano", "--workers", "2", "--batch-size", "12", "--steps", "4"]
OF_ONE_PROCESS = {"config", "coordinator", "distributed", "log_dir", "process_id", "text"}


def another(value):
    """A value of a setting that is not this one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return ("another",) if isinstance(value, tuple) else f"{value} another"


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Config)])
def test_every_setting_that_differs_is_named(name):
    config = Config()
    changed = dataclasses.replace(config, **{name: another(getattr(config, name))})
    held = {0: agreement.facts(config), 1: agreement.facts(changed)}
    found = agreement.differences(held)
    if name in OF_ONE_PROCESS:
        assert found == []
    else:
        flag, old, new = "--" + name.replace("_", "-"), getattr(config, name), changed
        assert found == [f"{flag} is {old} on process 0, {getattr(new, name)} on process 1"]


@pytest.mark.parametrize("package", ["jax", "jaxlib", "demo_optax", "optax", "flax", "grain"])
def test_every_version_that_differs_is_named(package, monkeypatch):
    own, version = agreement.facts(Config()), metadata.version
    monkeypatch.setattr(metadata, "version", lambda n: "9.9" if n == package else version(n))
    found = agreement.differences({0: own, 1: agreement.facts(Config())})
    assert found == [f"{package} is {version(package)} on process 0, 9.9 on process 1"]


def test_a_setting_of_jax_that_differs_is_named():
    own = agreement.facts(Config())
    with jax.threefry_partitionable(False):
        found = agreement.differences({0: own, 1: agreement.facts(Config())})
    assert found == ["jax_threefry_partitionable is True on process 0, False on process 1"]


def test_who_holds_what_among_many():
    alike, other = {"--steps": "1", "--topk": "32"}, {"--steps": "2", "--topk": "32"}
    held = dict.fromkeys(range(9), alike) | {3: other, 7: {"--topk": "8"}}
    assert agreement.differences(dict.fromkeys(range(9), alike)) == []
    assert agreement.differences(held) == [
        "--steps is 1 on processes 0, 1, 2, 4 and 3 more, 2 on process 3, unknown on process 7",
        "--topk is 32 on processes 0, 1, 2, 3 and 4 more, 8 on process 7",
    ]


def test_one_process_agrees_with_itself():
    assert not jax.distributed.is_initialized()
    agreement.require_same({"--steps": "1"}, timeout=1)


def ends(folder, second, **environment):
    """Status and last lines of two processes, of which the second is started otherwise."""
    common = [*TRAINER, *NANO, "--coordinator", f"127.0.0.1:{free_port()}"]
    written = ["--checkpoint-dir", folder / "saved", "--log-dir", folder / "log"]
    own = [
        ["--process-id", 0, "--num-processes", 2, "--text", ROOT / "demo_optax"],
        ["--process-id", 1, "--num-processes", 2, "--text", ROOT / "demo_optax", *second],
    ]
    processes = [
        subprocess.Popen(
            [str(word) for word in [*common, *written, *words]],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        for words, environment in zip(own, ({}, environment), strict=True)
    ]
    outputs = [process.communicate(timeout=200) for process in processes]
    lines = [errors.splitlines() for _, errors in outputs]
    return [process.returncode for process in processes], lines


@pytest.mark.parametrize(
    "second, environment, told",
    [
        (
            ["--topk", 8, "--workers", 4, "--sequence-length", 16, "--checkpoint-dir", "other"],
            {},
            [
                "--workers is 2 on process 0, 4 on process 1",
                "--sequence-length is 64 on process 0, 16 on process 1",
                "--topk is None on process 0, 8 on process 1",
                "saved on process 0, other on process 1",
            ],
        ),
        slow(["--text", ROOT / "tests"], {}, ["the text, or its tokens"]),
        slow([], {"JAX_DEFAULT_MATMUL_PRECISION": "float32"}, ["the step, before"]),
        slow([], {"JAX_DEFAULT_PRNG_IMPL": "rbg"}, ["jax_default_prng_impl is threefry2x32 on"]),
    ],
    ids=["settings", "text", "program", "settings-of-jax"],
)
def test_two_processes_that_differ_write_nothing(second, environment, told, tmp_path):
    statuses, lines = ends(tmp_path, second, **environment)
    assert statuses == [2, 2], lines
    for errors in lines:
        (line,) = [line for line in errors if "[Gloo]" not in line]
        assert line.startswith("error: the processes differ: ")
        for expected in told:
            assert expected in line
    assert list(tmp_path.iterdir()) == []


def test_workers_of_a_swarm_compare_a_tokenizer_by_its_content(tmp_path):
    places = [tmp_path / name for name in ("one.json", "two.json", "other.json")]
    for place, content in zip(places, ["{}", "{}", "{ }"], strict=True):
        place.write_text(content)
    one, two, other = (swarm.facts_of(Config(tokenizer=str(place))) for place in places)
    assert one == two
    assert [name for name in one if one[name] != other[name]] == ["--tokenizer"]

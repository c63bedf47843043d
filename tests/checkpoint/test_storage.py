"""Checkpoints that cannot be written: an error in a line, and the run goes on."""

import os
import pathlib
import random
import shutil
import subprocess
import sys
from decimal import Decimal
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from orbax.checkpoint import v1 as orbax

import demo_optax
from demo_optax import checkpoint
from demo_optax.checkpoint import Checkpointer
from tests import model, workers
from tests.saved_runs import EXTRA, RUNS, TX, is_run, restored, saves
from tests.sweeps import sweep

ROOT = pathlib.Path(__file__).parents[2]


def test_a_save_that_fails_is_an_error_in_a_line_and_the_next_one_is_tried(tmp_path, monkeypatch):
    with Checkpointer(tmp_path / "run", TX, workers.mesh_of(2)) as checkpointer:
        saves(checkpointer, 1, wait=True)
        with monkeypatch.context() as broken:
            broken.setattr(os, "mkdir", refuse)
            with pytest.raises(OSError, match=r"step 2 could not be saved in .*: .*full") as error:
                saves(checkpointer, 2, wait=True)
            assert "\n" not in str(error.value) and checkpointer.latest == 1
            with pytest.raises(OSError, match="step 3 could not be saved"):
                saves(checkpointer, 3)
                checkpointer.close()
        saves(checkpointer, 3, wait=True)
        assert checkpointer.latest == 3
    assert is_run(restored(tmp_path / "run", step=3), 2)


def test_a_save_that_is_interrupted_can_be_tried_again(tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with Checkpointer(tmp_path / "run", TX, workers.mesh_of(2)) as checkpointer:
        saves(checkpointer, 1, wait=True)
        with monkeypatch.context() as interrupted:
            save = "save_checkpointables_async"
            interrupted.setattr(orbax.training.Checkpointer, save, interrupt)
            with pytest.raises(KeyboardInterrupt):
                saves(checkpointer, 2)
        assert checkpointer.latest == 1
        saves(checkpointer, 2, wait=True)
        assert checkpointer.latest == 2
    assert is_run(restored(tmp_path / "run", step=2), 2)


def test_a_guard_of_transfers_leaves_checkpoints_alone(tmp_path):
    """It stands around a training loop, to find transfers that nobody meant."""
    like = jax.eval_shape(model.init)
    with jax.transfer_guard("disallow"):
        with Checkpointer(tmp_path / "run", TX, workers.mesh_of(2)) as checkpointer:
            saves(checkpointer, 1, wait=True)
            found = checkpointer.restore(like, EXTRA)
        with Checkpointer(tmp_path / "run", TX, workers.mesh_of(4)) as checkpointer:
            on_others = checkpointer.restore(like, EXTRA)
        read = checkpoint.load_params(tmp_path / "run", like)
    assert is_run(found, 2)
    for params in (on_others.params, read):
        jax.tree.map(np.testing.assert_array_equal, params, found.params)


def refuse(path, *_, **__):
    raise OSError(28, "the disk is full", path)


def test_a_folder_that_is_deleted_while_the_run_goes_on_is_made_again(tmp_path):
    with Checkpointer(tmp_path / "run", TX, workers.mesh_of(2)) as checkpointer:
        saves(checkpointer, 1, wait=True)
        shutil.rmtree(tmp_path / "run")
        saves(checkpointer, 2, wait=True)
        assert checkpointer.latest == 2
    assert is_run(restored(tmp_path / "run"), 2)


@pytest.mark.parametrize("path", ["file", "file/below", "/proc/none/below"])
def test_a_folder_that_cannot_be(path, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        OSError, match=f"{tmp_path}/file" if path != "/proc/none/below" else "/proc"
    ):
        Checkpointer(tmp_path / path, TX, workers.mesh_of(2))


@pytest.mark.parametrize("host", ["", "localhost"])
def test_a_file_url_is_the_folder_that_it_names(host, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "a #1 run"
    url = folder.as_uri().replace("file://", f"file://{host}")
    with Checkpointer(url, TX, workers.mesh_of(2)) as checkpointer:
        saves(checkpointer, 1, wait=True)
    assert (folder / "1").is_dir() and os.listdir() == ["a #1 run"]
    assert checkpoint.load_params(url).keys() == checkpoint.load_params(folder.as_uri()).keys()


@pytest.mark.usefixtures("annotations_unchecked")
def test_a_step_is_a_number_of_updates(tmp_path):
    wrong = [3.0, -1, None, "3", np.float32(3)]
    with Checkpointer(tmp_path / "run", TX, workers.mesh_of(2)) as checkpointer:
        for step in wrong:
            with pytest.raises((TypeError, ValueError), match=r"integer|step must be at least 0"):
                saves(checkpointer, step)
        for number in (np.int64(3), jnp.int32(4)):
            saves(checkpointer, number, wait=True)
            assert checkpointer.latest == int(number)
            assert is_run(restored(tmp_path / "run", step=number), 2)
        for step in filter(None, wrong):
            with pytest.raises((TypeError, FileNotFoundError), match=r"integer|step -1"):
                checkpointer.restore(model.init(), step=step)
            with pytest.raises((TypeError, FileNotFoundError), match=r"integer|step -1"):
                checkpoint.load_params(tmp_path / "run", step=step)


class Position(NamedTuple):
    """Where a run is in its data."""

    epoch: int
    buffer: bytes


class Celsius(float):
    """A number of a type of the user's own."""


ANY_EXTRA = {
    "PCG64": np.random.PCG64(0).state,
    "MT19937": np.random.MT19937(1).state,
    "Philox": np.random.Philox(2).state,
    "SFC64": np.random.SFC64(3).state,
    "random": random.Random(4).getstate()[1][:3],
    "integers": [0, -1, 2**31, 2**63 - 1, -(2**63), 2**63, 2**64 - 1, 2**64, -(2**200), 3**999],
    "bytes": [b"", b"\x00\xff", bytes(range(256))],
    "text": ["", "a\n\x00", "é∀"],
    "numbers": [1j, -0.0, 1e308, float("inf"), Celsius(0.1), True, False, None],
    "position": Position(3, b"ab"),
    "scalars": [np.float32(0.1), np.int8(-3), np.bool_(True), np.complex64(1j), np.uint64(2**63)],
    "arrays": [np.zeros((0, 3)), np.array(2.5), np.arange(3, dtype=np.uint16), jnp.bfloat16(0.1)],
}


def bare(x):
    return type(x), getattr(x, "dtype", None), np.shape(x), x if np.ndim(x) == 0 else x.tolist()


def test_an_extra_of_any_kind_comes_back_as_it_was(tmp_path):
    like = jax.tree.map(lambda x: x if np.ndim(x) else type(x)(), ANY_EXTRA | {"arrays": None})
    like |= {"arrays": ANY_EXTRA["arrays"]}
    with Checkpointer(tmp_path / "run", TX, workers.mesh_of(2)) as checkpointer:
        checkpointer.save(1, *RUNS[2][0], ANY_EXTRA, wait=True)
        found = checkpointer.restore(model.init(), like).extra
    assert jax.tree.structure(found) == jax.tree.structure(ANY_EXTRA)
    for name, extra in ANY_EXTRA.items():
        both = [list(map(bare, jax.tree.leaves(x))) for x in (found[name], extra)]
        assert both[0] == both[1], name


NOT_STORED = [object(), print, Decimal(1), {1}, np.array(["a"]), np.array([None])]
NOT_STORED += [np.ones(2, jnp.uint4), jnp.ones(2, "float8_e4m3")]


def test_what_cannot_be_stored_is_named_before_anything_is_written(tmp_path):
    with Checkpointer(tmp_path / "run", TX, workers.mesh_of(2)) as checkpointer:
        for leaf in NOT_STORED:
            with pytest.raises(TypeError, match=r"extra\['data'\]\[1\] is .*cannot be stored"):
                checkpointer.save(1, *RUNS[2][0], {"data": [3, leaf]})
        saves(checkpointer, 1, wait=True)
    assert is_run(restored(tmp_path / "run"), 2)


def test_a_random_key_comes_back_as_one_of_its_generator_or_not_at_all(tmp_path):
    keys = {impl: jax.random.key(7, impl=impl) for impl in ("rbg", "unsafe_rbg", "threefry2x32")}
    for impl, key in keys.items():
        with Checkpointer(tmp_path / impl, TX, workers.mesh_of(2)) as checkpointer:
            checkpointer.save(1, *RUNS[2][0], {"key": jnp.stack([key, key])}, wait=True)
            for other in keys:
                wanted = {"key": jnp.stack([keys[other]] * 2)}
                if other == impl:
                    found = checkpointer.restore(model.init(), wanted).extra["key"]
                    assert jax.random.key_impl(found) == impl and (found == key).all()
                else:
                    with pytest.raises(ValueError, match=rf"lacks.*{other}.*holds.*{impl}"):
                        checkpointer.restore(model.init(), wanted)
            with pytest.raises(ValueError, match=rf"lacks.*holds.*{impl}"):
                checkpointer.restore(model.init(), {"key": jax.random.key_data(wanted["key"])})


def test_a_random_key_of_the_optimizer_is_one_of_its_generator(tmp_path):
    def noisy():
        mean = demo_optax.mean_over_workers("data")
        return optax.chain(mean, optax.add_noise(0.1, 0.5, key=jax.random.key(0)))

    tx = noisy()
    with Checkpointer(tmp_path, tx, workers.mesh_of(2)) as checkpointer:
        checkpointer.save(1, *workers.initial(tx, workers.mesh_of(2)), wait=True)
        checkpointer.restore(model.init())
    with (
        jax.default_prng_impl("rbg"),
        Checkpointer(tmp_path, noisy(), workers.mesh_of(2)) as checkpointer,
        pytest.raises(ValueError, match=r"opt_state.*rng_key \(rbg\)"),
    ):
        checkpointer.restore(model.init())


CONTEXTS = {
    "own": lambda: workers.mesh_of(2),
    "Auto": lambda: workers.mesh_of(2, kind=AxisType.Auto),
    "larger": lambda: workers.mesh_of(8),
    "other devices": lambda: jax.sharding.Mesh(jax.devices()[4:6], ("x",)),
}


@sweep("own", "other devices", context=CONTEXTS)
def test_the_mesh_of_the_context_does_not_matter(context, tmp_path):
    with jax.set_mesh(CONTEXTS[context]()):
        with Checkpointer(tmp_path, TX, workers.mesh_of(2)) as checkpointer:
            saves(checkpointer, 1)
            saves(checkpointer, 2, wait=True)
            assert checkpointer.latest == 2
            assert is_run(checkpointer.restore(model.init(), EXTRA), 2)
        with Checkpointer(tmp_path, TX, workers.mesh_of(4)) as checkpointer:
            assert checkpointer.restore(model.init(), EXTRA).step == 2
        for wanted in None, model.init(), jax.eval_shape(model.init):
            found = checkpoint.load_params(tmp_path, wanted)
            expected = jax.tree.leaves(RUNS[2][0][0])
            for x, y in zip(jax.tree.leaves(found), expected, strict=True):
                np.testing.assert_array_equal(x, y)


UNCHANGED = """
import logging, sys
def hooks():
    loggers = [logging.getLogger(), *map(logging.getLogger, logging.root.manager.loggerDict)]
    return sys.unraisablehook, [logger.filters for logger in loggers if logger.filters]
import absl.logging, asyncio, jax
from orbax.checkpoint import v1
before = hooks()
import demo_optax.checkpoint
assert hooks() == before, hooks()
{}
assert hooks() == before, hooks()
"""
SAVED = """
from tests import conftest, saved_runs as runs, workers
with runs.Checkpointer(sys.argv[1], runs.TX, workers.mesh_of(2)) as checkpointer:
    runs.saves(checkpointer, 1)
    assert hooks() == before, hooks()
    runs.saves(checkpointer, 2, wait=True)
runs.restored(sys.argv[1])
"""
FULL = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with runs.Checkpointer(sys.argv[1] + "/full", runs.TX, workers.mesh_of(2)) as checkpointer:
    runs.saves(checkpointer, 1, wait=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
    for step in (2, 3):
        try:
            runs.saves(checkpointer, step, wait=True)
        except OSError as error:
            print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    runs.saves(checkpointer, 4, wait=True)
    print("latest", checkpointer.latest)
"""


def lines_of(program, folder):
    """What a process of its own prints."""
    run = subprocess.run(
        [sys.executable, "-c", program, folder],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def test_calls_that_succeed_change_nothing_and_a_full_disk_says_a_line_for_each_save(tmp_path):
    """By a limit of the size of files, behind which writing fails as on a full disk."""
    lines = lines_of(UNCHANGED.format(SAVED) + FULL, tmp_path / "run")
    for step, line in zip((2, 3), lines, strict=False):
        assert line.startswith(f"step {step} could not be saved in")
    assert lines[2:] == ["latest 4"]

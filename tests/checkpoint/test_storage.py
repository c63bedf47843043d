"""Checkpoints that cannot be written: an error in a line, and the run goes on."""

import errno
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from demo_optax.checkpoint import Checkpointer
from tests import workers
from tests.saved_runs import TX, is_run, restored, saves
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


def test_a_failed_save_that_still_removes_its_files_stops_no_other(tmp_path, monkeypatch):
    """TensorStore's writes go on after Orbax gave up, and take their lock files away."""
    (tmp_path / "run" / "2.orbax-checkpoint-tmp").mkdir(parents=True)
    remaining = [errno.ENOENT, errno.ENOTEMPTY]
    remove = shutil.rmtree

    def disturbed(path, *args, **kwargs):
        if remaining:
            raise OSError(remaining.pop(), "disturbed", "manifest.ocdbt.__lock")
        remove(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", disturbed)
    with Checkpointer(tmp_path / "run", TX, workers.mesh_of(2)) as checkpointer:
        saves(checkpointer, 3, wait=True)
    assert not remaining and {path.name for path in (tmp_path / "run").iterdir()} == {"3"}
    assert is_run(restored(tmp_path / "run"), 2)


def refuse(path, *_, **__):
    raise OSError(28, "the disk is full", path)


def test_a_folder_that_is_deleted_while_the_run_goes_on_is_made_again(tmp_path):
    with Checkpointer(tmp_path / "run", TX, workers.mesh_of(2)) as checkpointer:
        saves(checkpointer, 1, wait=True)
        shutil.rmtree(tmp_path / "run")
        saves(checkpointer, 2, wait=True)
        assert checkpointer.latest == 2
    assert is_run(restored(tmp_path / "run"), 2)


def test_a_folder_that_becomes_a_file(tmp_path):
    with Checkpointer(tmp_path / "run", TX, workers.mesh_of(2)) as checkpointer:
        saves(checkpointer, 1, wait=True)
        shutil.rmtree(tmp_path / "run")
        (tmp_path / "run").write_text("")
        with pytest.raises(OSError, match=r"step 2 could not be saved in .*: ") as error:
            saves(checkpointer, 2, wait=True)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("path", ["file", "file/below", "/proc/none/below"])
def test_a_folder_that_cannot_be(path, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="checkpoints cannot be kept in") as error:
        Checkpointer(tmp_path / path, TX, workers.mesh_of(2))
    assert "\n" not in str(error.value)


FULL = """
import resource, signal, sys
from tests import conftest, saved_runs as runs, workers
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with runs.Checkpointer(sys.argv[1], runs.TX, workers.mesh_of(2)) as checkpointer:
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


def test_a_full_disk_says_a_line_for_each_save(tmp_path):
    """By a limit of the size of files, behind which writing fails as on a full disk."""
    run = subprocess.run(
        [sys.executable, "-c", FULL, tmp_path / "run"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = run.stdout.splitlines()
    assert run.returncode == 0, run.stderr
    assert [line[:27] for line in lines[:2]] == [
        f"step {i} could not be saved in"[:27] for i in (2, 3)
    ]
    assert lines[2:] == ["latest 4"]


IMPORTED = """
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


@sweep("save and restore", use=["import", "save and restore"])
def test_nothing_of_the_process_is_changed(use, tmp_path):
    """Neither by the import nor by calls that succeed."""
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            IMPORTED.format({"import": "", "save and restore": SAVED}[use]),
            tmp_path / "run",
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr

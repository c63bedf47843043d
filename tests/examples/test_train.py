"""The trainer of one file: it learns, continues to the same bits, and refuses with one line."""

import dataclasses
import inspect
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tyro

import demo_optax
import train
from demo_optax.checkpoint import load_params
from tests.nano import first_of

ROOT = pathlib.Path(__file__).parents[2]
LAUNCH = [sys.executable, str(ROOT / "examples" / "launch_local.py")]
TRAIN = str(ROOT / "examples" / "train.py")


COMPILED_ONCE = {
    name: first_of(getattr(demo_optax, name))
    for name in ("demo_muon", "make_train_step", "packet_bytes")
}


@pytest.fixture
def compiled_once(monkeypatch):
    """The same programs in all tests of this file that ask for it."""
    for name, first in COMPILED_ONCE.items():
        monkeypatch.setattr(demo_optax, name, first)


@pytest.fixture
def settings(tmp_path):
    """A model of one layer, and a text that it can learn."""
    (tmp_path / "text").write_text("All work and no play makes Jack a dull boy.\n" * 300)
    return train.Settings(
        text=str(tmp_path / "text"),
        layers=1,
        width=64,
        heads=1,
        sequence_length=16,
        batch_size=16,
        steps=12,
        optimizer="demo_muon",
        learning_rate=2e-2,
        evaluate_every=12,
        checkpoint_every=6,
    )


def saved_by(folder):
    return [np.asarray(x) for x in jax.tree.leaves(load_params(folder))]


def words_of(settings):
    given = dataclasses.asdict(settings).items()
    pairs = [(f"--{k.replace('_', '-')}", str(v)) for k, v in given if v not in (None, False)]
    return [word for pair in pairs for word in pair]


def test_a_run_that_was_stopped_continues_to_the_same_bits(
    settings, compiled_once, tmp_path, monkeypatch, capsys
):
    whole = dataclasses.replace(settings, checkpoint_dir=str(tmp_path / "whole"))
    loss = train.train(whole)
    assert loss < 2.5  # a uniform guess has 5.5
    assert "continues" not in capsys.readouterr().out

    cut = dataclasses.replace(settings, checkpoint_dir=str(tmp_path / "cut"))
    to_devices, calls = train.to_devices, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return to_devices(*arguments)

    monkeypatch.setattr(train, "to_devices", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train.train(cut)
    assert train.train(cut) == loss
    assert "continues after step 6" in capsys.readouterr().out
    for ours, theirs in zip(saved_by(tmp_path / "cut"), saved_by(tmp_path / "whole"), strict=True):
        np.testing.assert_array_equal(ours, theirs)

    assert train.train(cut) == loss  # there is nothing left to do
    with pytest.raises(SystemExit, match=r"^error: --checkpoint-dir: .*parameters"):
        train.train(dataclasses.replace(cut, layers=2))
    with pytest.raises(SystemExit, match=r"reads 16 x 16, seed 0, text .*, not 16 x 16, seed 1"):
        train.train(dataclasses.replace(cut, seed=1))


def test_two_processes_read_what_one_reads(settings, monkeypatch):
    def read(number, processes):
        monkeypatch.setattr(jax, "process_index", lambda: number)
        monkeypatch.setattr(jax, "process_count", lambda: processes)
        batches = train.read_batches(np.arange(999), settings)
        return np.stack([next(batches) for _ in range(9)])  # more than one pass over the text

    halves = read(0, 2), read(1, 2)
    np.testing.assert_array_equal(np.concatenate(halves, axis=1), read(0, 1))


@pytest.mark.slow
def test_two_processes_train_as_one_does(settings, tmp_path):
    arguments = words_of(dataclasses.replace(settings, optimizer="demo_scaled"))
    for processes in (1, 2):
        launch = [*LAUNCH, "-n", str(processes), "--", TRAIN, *arguments]
        own = ["--cpu-devices", str(2 // processes), "--checkpoint-dir", tmp_path / f"{processes}"]
        run = subprocess.run([*launch, *own], capture_output=True, text=True, timeout=900)
        assert run.returncode == 0, run.stdout + run.stderr
        assert run.stdout.count("in the end") == 1, run.stdout
        assert "2 workers" in run.stdout
    one, two = saved_by(tmp_path / "1"), saved_by(tmp_path / "2")
    for ours, theirs in zip(one, two, strict=True):
        # A sign may turn where an update is within rounding of zero.
        assert np.isclose(ours, theirs, rtol=1e-4, atol=1e-6).mean() > 0.99


@pytest.mark.parametrize(
    "change, told",
    [
        (dict(text="missing.txt"), "--text: .*missing.txt"),
        (dict(text="s3://bucket/text"), "--text: .*s3://bucket/text"),
        (dict(text=""), "--text: "),
        (dict(text=str(ROOT)), "--text: .*directory"),
        (dict(sequence_length=1000), "--sequence-length 1000 is too long for this text"),
        (dict(evaluate_every=0), "--steps and all other numbers must be at least 1"),
        (dict(heads=0), "--steps and all other numbers must be at least 1"),
        (dict(heads=3), "--width 64 is no multiple of twice the --heads"),
        (dict(batch_size=12), "--batch-size 12 must be a multiple of the 8 workers"),
        (dict(checkpoint_dir=__file__), "--checkpoint-dir: "),
        (dict(checkpoint_dir="s3:/bucket/run"), "--checkpoint-dir: .*begins with 's3://'"),
    ],
)
def test_one_line_for_a_mistake(change, told, settings):
    with pytest.raises(SystemExit, match=f"^error: {told}") as ended:
        train.train(dataclasses.replace(settings, **change))
    assert "\n" not in str(ended.value)


def test_a_loss_that_is_not_finite_ends_the_run(settings, monkeypatch):
    metrics = SimpleNamespace(exchange=None, loss=np.array([np.nan]))
    step = lambda params, opt_state, batch: (params, opt_state, metrics)  # noqa: E731
    monkeypatch.setattr(train.demo_optax, "make_train_step", lambda *_, **__: step)
    with pytest.raises(SystemExit, match=r"^error: the loss is nan at step 10: "):
        train.train(settings)


def test_urls_reach_the_program_as_they_are():
    words = ["--text", "s3://bucket/text", "--checkpoint-dir", "gs://bucket/run"]
    settings = tyro.cli(train.Settings, args=words)
    assert [settings.text, settings.checkpoint_dir] == words[1::2]


def test_a_run_whose_last_save_fails_says_so_at_its_end(
    settings, compiled_once, tmp_path, monkeypatch, capsys
):
    saving = dataclasses.replace(settings, checkpoint_dir=str(tmp_path / "[/x]"))

    def fails(self, step, *rest, **options):
        raise OSError(28, f"no room for [/{step}]")

    with monkeypatch.context() as full, pytest.raises(SystemExit, match=r"^error: .* last step"):
        full.setattr(train.Checkpointer, "save", fails)
        train.train(saving)
    shown = capsys.readouterr().out
    assert "no room for [/6]" in shown and "in the end: " in shown
    loss = train.train(saving)  # which saves
    assert train.train(dataclasses.replace(saving, steps=6)) == loss  # is over already


def test_the_file_is_short_and_stands_alone():
    source = inspect.getsource(train)
    assert len(source.splitlines()) <= 250
    assert "import lm" not in source and "from lm" not in source

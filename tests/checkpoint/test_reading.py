"""Checkpoints that were damaged on disk: found, and said."""

import random
import re
import shutil
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from demo_optax import checkpoint
from demo_optax._src.checkpoint import reading
from demo_optax._src.checkpoint.reading import digests
from demo_optax.checkpoint import Checkpointer, DamagedCheckpoint
from tests import model, workers
from tests.saved_runs import EXTRA, RUNS, TX, is_run, restored, saves
from tests.sweeps import sweep


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    with Checkpointer(folder, TX, workers.mesh_of(2)) as checkpointer:
        for step, (run, extra) in RUNS.items():
            checkpointer.save(step, *run, extra)
    return folder


def mixed(words):
    """MurmurHash3's mixer, summed, in NumPy and in the order of memory."""
    x = words.reshape(-1).astype(np.uint64)
    x = (x + np.arange(x.size, dtype=np.uint64) * 0x9E3779B9) % 2**32
    x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
    x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
    return int(np.sum(x ^ (x >> 16)) % 2**32)


@sweep(
    ("float32", "Explicit"),
    ("bfloat16", "Auto"),
    ("int4", "Explicit"),
    dtype=["float32", "bfloat16", "int8", "bool", "complex64", "int4"],
    kind=["Explicit", "Auto"],
)
def test_a_digest_is_of_the_whole_whatever_the_sharding(dtype, kind):
    mesh = workers.mesh_of(4, 2, kind=jax.sharding.AxisType[kind])
    x = np.asarray(jnp.asarray(np.random.default_rng(0).normal(size=(8, 6, 500)) * 5).astype(dtype))
    expected = digests(x)
    if dtype == "float32":
        assert expected[0]["checksum"] == mixed(x.view(np.uint32))
    for spec in (P(), P("data"), P("data", "fsdp"), P(None, "fsdp", "data"), P(("data", "fsdp"))):
        assert digests(jax.device_put(x, jax.NamedSharding(mesh, spec))) == 8 * expected


def test_every_copy_is_checked():
    everywhere = jax.NamedSharding(workers.mesh_of(4), P())
    x = np.arange(8, dtype=np.float32)
    copies = [jax.device_put(x, device) for device in jax.devices()[:4]]
    copies[2] += 1
    wrong = jax.make_array_from_single_device_arrays(x.shape, everywhere, copies)
    assert [digest == digests(x)[0] for digest in digests(wrong)] == [True, True, False, True]


def test_what_was_saved_beside_a_run_is_loaded_alone(saved):
    for step, (_, extra) in RUNS.items():
        found = checkpoint.load_extra(saved, extra, step=step)
        assert jax.tree.structure(found) == jax.tree.structure(extra)
        assert list(map(str, jax.tree.leaves(found))) == list(map(str, jax.tree.leaves(extra)))
    with pytest.raises(ValueError, match="the checkpoint's extra are not those"):
        checkpoint.load_extra(saved, {"other": 1})


def files_of(step):
    return sorted(path for path in step.rglob("*") if path.is_file())


def flip(data, place):
    data[place // 8] ^= 1 << place % 8


def zero(data, place):
    start = min(place // 8, max(len(data) - 64, 0))
    data[start : start + 64] = bytes(len(data[start : start + 64]))


def truncate(data, place):
    del data[place // 8 :]


def damages(folder, count, seed):
    """File, what was done to it and where; every file at least once where the count allows it."""
    draws = random.Random(seed)
    files = [p.relative_to(folder / "2") for p in files_of(folder / "2")]
    draws.shuffle(files)
    for i in range(count):
        name = files[i % len(files)]
        size = (folder / "2" / name).stat().st_size
        yield name, (flip, zero, flip, truncate)[i // len(files) % 4], draws.randrange(8 * size)


def survives(saved, folder, read, name, damage, place):
    """Damages a copy; what was read then, or None after an error that names the step."""
    shutil.copytree(saved, folder)
    path = folder / "2" / name
    data = bytearray(path.read_bytes())
    damage(data, place)
    path.write_bytes(data)
    try:
        return read(folder)
    except DamagedCheckpoint as error:
        assert re.match(r"the .*checkpoint .*\b2\b.*give an older step=[^\n]*$", str(error))
        assert is_run(restored(folder, step=1), 1)
    finally:
        shutil.rmtree(folder)


LEAST = {4: 1, 60: 16, 600: 151}
"""Places damaged at random, and how many of them a restore has to notice at least."""


@sweep(4, count=LEAST)
def test_no_damage_is_restored_silently(count, saved, tmp_path):
    noticed = 0
    for name, damage, place in damages(saved, count, seed=count):
        found = survives(saved, tmp_path / "run", restored, name, damage, place)
        assert found is None or is_run(found, 2), (name, damage.__name__, place)
        noticed += found is None
    assert noticed >= LEAST[count]


def on_other_workers(folder):
    with Checkpointer(folder, TX, workers.mesh_of(4)) as checkpointer:
        return checkpointer.restore(model.init(), EXTRA)[1:3]


READERS = {
    "on other workers": on_other_workers,
    "by path": checkpoint.load_params,
    "like": lambda folder: checkpoint.load_params(folder, model.init()),
}


@sweep("by path", reader=READERS)
def test_whatever_is_read_is_verified(reader, saved, tmp_path):
    read, noticed = READERS[reader], 0
    expected = read(saved)
    parts = ["params"] + ["opt_state"] * (reader == "on other workers")
    for path in [path for part in parts for path in files_of(saved / "2" / part)]:
        for damage in (flip, zero):
            name, place = path.relative_to(saved / "2"), 4 * path.stat().st_size
            found = survives(saved, tmp_path / "run", read, name, damage, place)
            if found is None:
                noticed += 1
            else:
                jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert noticed


@pytest.mark.slow
def test_files_that_are_missing(saved, tmp_path):
    noticed = 0
    for path in files_of(saved / "2"):
        shutil.copytree(saved, tmp_path / "run")
        (tmp_path / "run" / path.relative_to(saved)).unlink()
        try:
            assert is_run(restored(tmp_path / "run"), 2)
        except DamagedCheckpoint:
            noticed += 1
        shutil.rmtree(tmp_path / "run")
    assert noticed > 5


def test_a_damaged_checkpoint_is_moved_away_and_the_run_goes_on(saved, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    for path in files_of(folder / "2"):
        path.write_bytes(path.read_bytes()[:20])
    for read in (restored, checkpoint.load_params):
        with pytest.raises(DamagedCheckpoint, match=r"move the folder 2 away") as error:
            read(folder)
        assert "\n" not in str(error.value)
        read(folder, step=1)
    (folder / "2").rename(folder / "damaged")
    with Checkpointer(folder, TX, workers.mesh_of(2)) as checkpointer:
        assert checkpointer.restore(model.init(), EXTRA).step == 1
        saves(checkpointer, 2, wait=True)
    assert is_run(restored(folder), 2)


def test_want_of_memory_is_said(saved, monkeypatch):
    monkeypatch.setattr(reading, "_load", mock.Mock(side_effect=MemoryError("not today")))
    with pytest.raises(DamagedCheckpoint, match="could not be read: not today"):
        restored(saved)


def test_junk_in_the_folder_is_ignored(saved, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    for name in ("9", "notes.txt", "07"):
        (folder / name).write_text("junk")
    for name in ("10.old", "logs", "-3"):
        (folder / name).mkdir()
    assert is_run(restored(folder), 2)
    np.testing.assert_array_equal(checkpoint.load_params(folder)["['out']"], RUNS[2][0][0]["out"])
    with Checkpointer(folder, TX, workers.mesh_of(2), keep=1) as checkpointer:
        checkpointer.save(20, *RUNS[2][0])
        checkpointer.save(21, *RUNS[2][0])
    assert (folder / "9").read_text() == "junk" and not (folder / "2").exists()


def test_a_second_process_takes_the_list_of_the_first(saved, monkeypatch):
    monkeypatch.setattr(reading, "by_lead", lambda fn: [1, 2, 3])  # not yet seen here
    assert reading.step_to_read(str(saved), None) == 3
    with pytest.raises(
        DamagedCheckpoint, match=r"the checkpoint of step 3 in .* could not be read"
    ):
        restored(saved)


def test_another_format_is_refused_in_words(tmp_path, monkeypatch):
    with monkeypatch.context() as older:
        older.setattr(reading.description, "FORMAT", 5)
        with Checkpointer(tmp_path, TX, workers.mesh_of(2)) as checkpointer:
            saves(checkpointer, 1, wait=True)
    for read in (restored, checkpoint.load_params):
        with pytest.raises(
            DamagedCheckpoint, match=r"must be of format \d+, .* the format 5 of another"
        ):
            read(tmp_path)

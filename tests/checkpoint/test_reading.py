"""Checkpoints that were damaged on disk: found, and said."""

import pickle
import random
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P

from demo_optax import checkpoint
from demo_optax._src.checkpoint import reading
from demo_optax._src.checkpoint.digests import digests
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


def test_any_single_bit_is_seen():
    x = np.random.default_rng(0).normal(size=(40, 1024)).astype(np.float32)
    before = digests(x)
    for place in random.Random(0).sample(range(8 * x.nbytes), 50):
        data = bytearray(x.tobytes())
        flip(data, place)
        assert digests(np.frombuffer(data, np.float32).reshape(x.shape)) != before


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
    with pytest.raises(ValueError, match="the checkpoint's extra are not those that are expected"):
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
    """Damages a copy; whether what was read then is the older one with a warning, or unharmed."""
    shutil.copytree(saved, folder)
    path = folder / "2" / name
    data = bytearray(path.read_bytes())
    damage(data, place)
    path.write_bytes(data)
    found, messages = warnings_of(read, folder)
    shutil.rmtree(folder)
    if messages:
        (message,) = messages
        assert "\n" not in message and "took the checkpoint of step 1" in message, message
        assert "step 2: " in message
    return found, bool(messages)


def warnings_of(read, folder):
    """What was read, and what the library warned of; Orbax's threads leave other warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = read(folder)
    return found, [str(x.message) for x in caught if x.category is UserWarning]


LEAST = {4: 1, 60: 16, 600: 151}
"""Places damaged at random, and how many of them a restore has to notice at least."""


@sweep(4, count=LEAST)
def test_no_damage_is_restored_silently(count, saved, tmp_path):
    fell_back = 0
    for name, damage, place in damages(saved, count, seed=count):
        found, warned = survives(saved, tmp_path / "run", restored, name, damage, place)
        assert is_run(found, 1 if warned else 2), (name, damage.__name__, place)
        fell_back += warned
    assert fell_back >= LEAST[count]


@pytest.mark.slow
def test_no_damage_is_restored_silently_on_other_workers(saved, tmp_path):
    def read(folder):
        with Checkpointer(folder, TX, workers.mesh_of(4)) as checkpointer:
            return checkpointer.restore(model.init(), EXTRA)

    expected = {2: read(saved)}
    shutil.copytree(saved / "1", tmp_path / "older" / "1")
    expected[1] = read(tmp_path / "older")
    data = [name for name in files_of(saved / "2") if "d" in name.parent.name]
    for path in data:
        name = path.relative_to(saved / "2")
        for damage, place in ((flip, 8 * path.stat().st_size // 2), (zero, 8)):
            found, warned = survives(saved, tmp_path / "run", read, name, damage, place)
            jax.tree.map(
                np.testing.assert_array_equal,
                (found.params, found.opt_state),
                (expected[1 if warned else 2].params, expected[1 if warned else 2].opt_state),
            )


@sweep("by path", like=["by path", "like"])
def test_parameters_alone_are_verified_too(like, saved, tmp_path):
    def read(folder):
        return checkpoint.load_params(folder, model.init() if like == "like" else None)

    expected = {step: RUNS[step][0][0] for step in RUNS}
    fell_back = 0
    for path in files_of(saved / "2" / "params"):
        for damage in (flip, zero):
            place = 4 * path.stat().st_size
            name = path.relative_to(saved / "2")
            found, warned = survives(saved, tmp_path / "run", read, name, damage, place)
            for a, b in zip(found.values(), expected[1 if warned else 2].values(), strict=True):
                np.testing.assert_array_equal(a, b)
            fell_back += warned
    assert fell_back


@pytest.mark.slow
def test_files_that_are_missing(saved, tmp_path):
    fell_back = 0
    for path in files_of(saved / "2"):
        shutil.copytree(saved, tmp_path / "run")
        (tmp_path / "run" / path.relative_to(saved)).unlink()
        found, messages = warnings_of(restored, tmp_path / "run")
        assert is_run(found, 1 if messages else 2)
        fell_back += bool(messages)
        shutil.rmtree(tmp_path / "run")
    assert fell_back > 5


def destroyed(saved, folder, *steps):
    shutil.copytree(saved, folder)
    for step in steps:
        destroy(folder / str(step))
    return folder


def destroy(folder):
    for path in files_of(folder):
        path.write_bytes(path.read_bytes()[:20])


def test_none_that_is_intact_is_one_error(saved, tmp_path):
    folder = destroyed(saved, tmp_path / "run", 1, 2)
    for read in (restored, checkpoint.load_params):
        with pytest.raises(
            DamagedCheckpoint, match=r"no checkpoint of \[1, 2\].*step 2: .*step 1: "
        ) as error:
            read(folder)
        assert "\n" not in str(error.value)


def test_the_step_that_was_asked_for_or_none(saved, tmp_path):
    folder = destroyed(saved, tmp_path / "run", 2)
    for read in (restored, checkpoint.load_params):
        with pytest.raises(DamagedCheckpoint, match="step 2: "):
            read(folder, step=2)
        read(folder, step=1)


def test_a_run_that_goes_back_after_saving_replaces_the_damaged_step(tmp_path):
    with Checkpointer(tmp_path, TX, workers.mesh_of(2)) as checkpointer:
        for step in (1, 2):
            saves(checkpointer, step, wait=True)
        destroy(tmp_path / "2")
        with pytest.warns(UserWarning, match="newer ones are damaged: step 2: "):
            assert checkpointer.restore(model.init(), EXTRA).step == 1
        assert checkpointer.latest == 1
        saves(checkpointer, 2, wait=True)
    assert is_run(restored(tmp_path), 2)


def test_a_damaged_step_takes_the_place_of_no_other(saved, tmp_path):
    folder = destroyed(saved, tmp_path / "run", 2)
    (folder / "2").rename(folder / "5")
    with Checkpointer(folder, TX, workers.mesh_of(2), keep=1) as checkpointer:
        with pytest.warns(UserWarning, match="newer ones are damaged: step 5: "):
            assert checkpointer.restore(model.init(), EXTRA).step == 1
        for step in (3, 4):
            saves(checkpointer, step, wait=True)
            assert checkpointer.latest == step
    assert {path.name for path in folder.iterdir()} == {"4"}
    assert is_run(restored(folder), 2)


def test_want_of_memory_is_no_damage(saved, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)

    def refuse_memory(*_):
        raise MemoryError("not today")

    with Checkpointer(folder, TX, workers.mesh_of(2)) as checkpointer:
        with monkeypatch.context() as broken:
            broken.setattr(reading, "_load", refuse_memory)
            with pytest.raises(OSError, match="step 2 could not be read: not today") as error:
                checkpointer.restore(model.init(), EXTRA)
            assert "\n" not in str(error.value)
        assert is_run(checkpointer.restore(model.init(), EXTRA), 2)
        saves(checkpointer, 3, wait=True)
    assert {path.name for path in folder.iterdir()} == {"1", "2", "3"}


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


class Told:
    """The second of two processes, which the first one tells something."""

    def __init__(self, monkeypatch, told):
        data = np.frombuffer(pickle.dumps(told), np.uint8)
        self.answers = [np.array([0, data.size], np.uint32), np.pad(data, (0, 1024 - data.size))]
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(jax, "process_index", lambda: 1)
        monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", self.broadcast)

    def broadcast(self, own):
        answer = self.answers.pop(0)
        assert own.shape == answer.shape and own.dtype == answer.dtype
        return answer


def test_a_second_process_takes_the_list_of_the_first(tmp_path, monkeypatch):
    (tmp_path / "1").mkdir()
    Told(monkeypatch, ([1, 2], None))
    found = reading.newest_intact(str(tmp_path), None, lambda step: f"step {step}")
    assert found == ("step 2", set())


def test_a_second_process_raises_what_the_first_one_met(tmp_path, monkeypatch):
    Told(monkeypatch, (None, OSError("not today")))
    with pytest.raises(OSError, match="not today"):
        reading.newest_intact(str(tmp_path), None, lambda step: step)


def test_a_step_that_a_process_does_not_see_is_passed_over_with_a_warning(saved, monkeypatch):
    monkeypatch.setattr(reading, "listed_steps", lambda directory: [1, 2, 3])
    with pytest.warns(UserWarning, match="took the checkpoint of step 2.* step 3: "):
        assert is_run(restored(saved), 2)


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

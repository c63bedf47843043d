"""Whole runs of the trainer, and of the examples beside it."""

import dataclasses
import errno
import itertools
import json
import pathlib
import re
import struct
import sys
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from jax.sharding import PartitionSpec as P
from tensorboardX.proto import event_pb2

import compare
import demo_optax
import evaluate
import linen_trainstate
import vision_flax
from demo_optax.swarm import ObjectStore
from lm import data, logs, report, swarm, train, utilization
from lm.recipes import RECIPES, make
from lm.setup import batches_of, make_evaluation, prepare
from lm.signals import Signals
from tests.nano import NANO, ROOT, first_of, words_of
from tests.sweeps import sweep

THREE = dataclasses.replace(NANO, workers=3, batch_size=6)
FIRST = {}


def prepared(config):
    """A run with the step of the first one that had the same program, which is compiled once."""
    run = prepare(config)
    program = dataclasses.replace(
        config,
        seed=0,
        evaluate_every=1,
        log_dir=None,
        sample_length=0,
        checkpoint_dir=None,
        checkpoint_every=1,
    )
    first = FIRST.setdefault(program, run)
    return run._replace(tx=first.tx, train_step=first.train_step)


def steps_of(folder):
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def events_of(folder):
    """Tag and step of everything in a folder's TensorBoard file."""
    (path,) = folder.glob("events.out.tfevents.*")
    content, found = path.read_bytes(), set()
    while content:
        (size,) = struct.unpack("<Q", content[:8])
        event = event_pb2.Event.FromString(content[12 : 12 + size])
        found |= {(value.tag, event.step) for value in event.summary.value}
        content = content[16 + size :]
    return found


@pytest.mark.parametrize(
    ("given", "merge"),
    [
        ({}, None),
        ({"fragments": 2}, None),
        ({"merge": 0.25}, 0.25),
        ({"swarm": "never/opened", "worker": "paris", "workers": None}, 0.5),
    ],
    ids=str,
)
def test_a_worker_mixes_where_it_is_told_to_or_in_a_swarm(given, merge):
    found = []

    def recorded(name, settings, local_steps):
        found.append(settings.merge)
        return make(name, settings, local_steps)

    config = dataclasses.replace(NANO, optimizer="diloco", local_steps=2, **given)
    prepare(config, make_optimizer=recorded)
    assert found == [merge]


def test_a_run_logs_samples_and_is_evaluated(tmp_path, capsys, monkeypatch):
    config = dataclasses.replace(
        THREE,
        log_dir=str(tmp_path / "log"),
        sample_length=5,
        checkpoint_dir=str(tmp_path / "saved"),
    )
    monkeypatch.setattr(train, "PROMPTS", ["a", "b"])  # of one length, for one program
    trained = train.train(prepared(config))
    shown = capsys.readouterr().out
    assert shown.count("the model writes") == 2
    assert "parameters on 3 devices: bit-identical" in shown

    lines = steps_of(tmp_path / "log")
    assert [line["number"] for line in lines] == [*range(1, 7)]
    assert lines[3]["gradient_norms"].keys() == {"0", "1", "2"}
    assert lines[3]["exchange"]["participants"] == 3
    assert lines[3]["packet_bytes"] > 0
    events = events_of(tmp_path / "log")
    for tag in (
        "loss/train",
        "speed/tokens_per_second",
        "exchange/packet_bytes",
        "exchange/sent_share",
        "exchange/residual_norm",
        "gradient_norm/worker_2",
    ):
        assert (tag, 6) in events
    assert ("loss/held_out", 3) in events

    monkeypatch.setattr(sys, "argv", ["evaluate.py", *words_of(config)])
    evaluate.main()
    shown = capsys.readouterr().out
    (loss,) = re.findall(r"loss on held-out text: ([\d.]+)", shown)
    assert float(loss) == pytest.approx(trained.loss, abs=2e-3)  # another program, printed digits
    assert shown.count("the model writes") == 2


def changed(run, change):
    """A run in which each step's parameters and metrics are those that ``change`` returns."""
    numbers = itertools.count(1)

    def step(params, opt_state, batch):
        params, opt_state, metrics = run.train_step(params, opt_state, batch)
        params, metrics = change(next(numbers), params, metrics)
        return params, opt_state, metrics

    return run._replace(train_step=step)


@sweep(3, workers=[2, 3])
def test_no_checkpoint_of_replicas_that_differ(workers, tmp_path):
    """Two workers differ behind the third step; of three the majority is saved at the fourth."""
    config = dataclasses.replace(
        THREE,
        workers=workers,
        checkpoint_dir=str(tmp_path / "saved"),
        checkpoint_every=2,
        evaluate_every=100,
    )

    def damage(number, params, metrics):
        return damaged(params) if number == 3 else params, metrics

    run = changed(prepared(config), damage)
    if workers == 2:
        with pytest.raises(SystemExit, match="no copy is held by more than half"):
            train.train(run)
    else:
        train.train(run)
    saved = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert saved == (["2"] if workers == 2 else ["2", "4", "6"])


@pytest.mark.parametrize("what", ["loss", "parameters"])
def test_no_checkpoint_of_a_run_that_has_diverged(what, tmp_path, capsys):
    saved = tmp_path / "saved"
    run = prepared(
        dataclasses.replace(THREE, checkpoint_dir=str(saved), checkpoint_every=2, evaluate_every=99)
    )

    def diverge(number, params, metrics):
        if number <= 2:
            return params, metrics
        if what == "loss":
            return params, metrics._replace(loss=metrics.loss * np.nan)
        return jax.tree.map(lambda x: x * jnp.inf, params), metrics

    with pytest.raises(SystemExit) as ended:
        train.train(changed(run, diverge))
    assert ended.value.code == 1 and [path.name for path in saved.iterdir()] == ["2"]
    assert "after step 4, which is not saved. Lower --learning-rate." in capsys.readouterr().out


@pytest.mark.parametrize("what", ["mkdir", "write_text", "open"])
def test_a_disk_that_is_full_at_the_start_ends_no_training(what, tmp_path, capsys, monkeypatch):
    def refuse(*_, **__):
        raise OSError(number, "refused")

    monkeypatch.setattr(pathlib.Path, what, refuse)
    number = errno.ENOSPC
    files = logs.Files(tmp_path, 0, NANO)
    files.step(logs.Step(1, 2.0, 0.1, 10.0, None, 4, {0: 1.0}, {}))
    files.close()
    assert capsys.readouterr().err.count("the log ends before the first step: ") == 1
    number = errno.EACCES
    with pytest.raises(PermissionError):
        logs.Files(tmp_path, 0, NANO)


def test_a_board_that_cannot_be_written_does_not_end_the_training(tmp_path, capsys, monkeypatch):
    """More events than a queue would hold, behind which the training would wait."""
    files = logs.Files(tmp_path, 0)
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "no space"))
    monkeypatch.setattr(files.board, "flush", full)
    files.held_out_loss(1, 2.0)
    for number in range(2, 1002):
        files.step(logs.Step(number, 2.0, 0.1, 10.0, None, 4, dict.fromkeys(range(20), 1.0), {}))
    files.close()
    assert capsys.readouterr().err.count("warning: the log ends") == 1


def test_replicas_are_mended_behind_a_step_on_which_workers_disagree(capsys):
    """The third step damages one of three copies, the fourth tells that packets were not the same.

    What the packets tell is `tests/exchange/test_untrusted_workers.py`'s.
    """
    run = prepared(dataclasses.replace(THREE, evaluate_every=100))
    mended = []

    def disagree(number, params, metrics):
        if number == 3:
            params = damaged(params)
        mended.append(not demo_optax.check_replicas(params, run.mesh))
        exchange = metrics.exchange._replace(agreed=jnp.array(number != 4))
        return params, metrics._replace(exchange=exchange)

    train.train(changed(run, disagree))
    assert mended == [True] * 2 + [False] * 3 + [True]
    assert "differs on worker 1" in capsys.readouterr().out


def damaged(params):
    """The parameters, of which the second device holds a zero too much."""
    leaves, structure = jax.tree.flatten(params)
    copies = [np.array(shard.data) for shard in leaves[0].addressable_shards]
    copies[1].flat[0] = 0.0
    placed = [
        jax.device_put(copy, shard.device)
        for copy, shard in zip(copies, leaves[0].addressable_shards, strict=True)
    ]
    leaves[0] = jax.make_array_from_single_device_arrays(
        leaves[0].shape, leaves[0].sharding, placed
    )
    return jax.tree.unflatten(structure, leaves)


def test_a_batch_is_the_same_however_devices_share_it():
    one, four = (
        next(batches_of(prepare(dataclasses.replace(NANO, workers=w, fsdp=f)), 8))
        for w, f in ((1, 1), (2, 2))
    )
    np.testing.assert_array_equal(one, four)


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="needs a full device")
def test_a_worker_of_a_swarm_gets_its_result_again_whatever_its_name_and_its_disk(tmp_path, capsys):
    config = dataclasses.replace(
        NANO,
        swarm=str(tmp_path / "place"),
        worker="[/gpu] :fire:",
        workers=None,
        steps=2,
        checkpoint_dir=str(tmp_path / "saved"),
        log_dir=str(tmp_path / "log"),
    )
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "steps.jsonl").symlink_to("/dev/full")
    run, results = prepare(config), []
    for _ in range(2):
        swarm.train(run, ObjectStore(config.swarm), Signals(""), 0.0)
        shown = capsys.readouterr()
        assert shown.err.count("warning: the log ends at step ") == 1
        assert "worker [/gpu] :fire: has slot 0" in shown.out
        results += re.findall(r"held-out text: .*; parameters \w+\n", shown.out)
    assert len(results) == 2 and results[0] == results[1]
    with pytest.raises(SystemExit, match=r"^error: the parameters are not saved: .* holds other"):
        swarm.save(run, jax.tree.map(jnp.zeros_like, run.params))


def test_a_worker_that_comes_back_does_not_read_its_batches_again():
    config = dataclasses.replace(NANO, swarm="never/opened", worker="paris", workers=None)
    run = prepare(config)

    def read(incarnation, number, every):
        member = types.SimpleNamespace(worker="paris", me=(0, incarnation))
        batches = swarm.own_batches(run, member, number, every)
        return [np.asarray(batch).tobytes() for batch in itertools.islice(batches, 9)]

    # It took nine steps in a round that counts as two, and is started again after it.
    assert not set(read(1, 0, every=2)) & set(read(2, 1, every=2))
    assert read(1, 0, every=1)[4:] == read(2, 4, every=1)[:5]


@pytest.mark.slow
def test_text_begins_anew_where_it_is_another(tmp_path, capsys):
    saving = dataclasses.replace(NANO, checkpoint_dir=str(tmp_path / "saved"), steps=2)
    train.train(prepare(saving))
    more = dataclasses.replace(saving, steps=3, batch_size=8)
    assert train.train(prepare(more)).log.start == 2
    assert "begins anew" not in capsys.readouterr().out
    with train.open_checkpoints(prepare(more)) as checkpointer:
        run = prepare(more)
        assert train.begin(run, checkpointer)[:2] == (3, 2 * 4 + 8)
        another = prepare(dataclasses.replace(more, text=(str(ROOT / "tests"),)))
        assert train.begin(another, checkpointer)[:2] == (3, 0)
    assert "begins anew" in capsys.readouterr().out


def test_evaluation_is_the_same_however_devices_share_it():
    results = []
    for workers, fsdp in ((1, 1), (3, 1), (2, 2)):
        config = dataclasses.replace(NANO, workers=workers, fsdp=fsdp, batch_size=12)
        run = prepare(config)
        results.append(make_evaluation(run, lambda: None)(run.params, 3000))
    np.testing.assert_allclose(results, results[0], rtol=1e-6)
    windows = data.even_windows(run.corpus.held_out, 16, 3000)
    assert windows.shape == (3000 // 16, 17)
    expected = run.loss_fn(run.params, jnp.asarray(windows))
    assert results[0] == pytest.approx(float(expected), rel=1e-5)


@sweep("demo-scaled", optimizer=[name for name in RECIPES if name != "demo-muon"])
def test_every_recipe_that_the_trainer_shards_trains(optimizer):
    every = 2 if RECIPES[optimizer].outer else None
    run = prepare(
        dataclasses.replace(NANO, optimizer=optimizer, fsdp=2, warmup_steps=1, local_steps=every)
    )
    sharded = dict(param_specs=run.param_specs)
    step = demo_optax.make_train_step(run.loss_fn, run.tx, run.mesh, clip_norm=1.0, **sharded)
    params, opt_state = (
        run.params,
        demo_optax.init_opt_state(run.tx, run.params, run.mesh, **sharded),
    )
    batch, losses = next(batches_of(run, 0)), []
    for _ in range(4):
        params, opt_state, metrics = jax.block_until_ready(step(params, opt_state, batch))
        losses.append(float(metrics.loss.mean()))
    assert losses[-1] < losses[0]
    assert not demo_optax.check_replicas((params, opt_state), run.mesh)


def test_with_local_steps_a_round_sends_one_packet(tmp_path):
    local = dataclasses.replace(
        NANO, optimizer="sparseloco", local_steps=3, workers=None, simulate=2
    )
    whole = train.train(prepare(dataclasses.replace(local, log_dir=str(tmp_path / "whole"))))
    sent = [step["packet_bytes"] for step in steps_of(tmp_path / "whole")]
    assert sent[2] > 0 and sent == [0, 0, sent[2]] * 2
    assert whole.log.megabytes == pytest.approx(2 * sent[2] / 1e6)
    assert whole.log.bytes_per_step == pytest.approx(sent[2] / 3)
    assert len(whole.log.sent_shares) == 2 and all(whole.log.sent_shares)


@pytest.mark.parametrize(
    "steps, local_steps, refused", [(12, 4, False), (12, 3, True), (3, 1, True)]
)
def test_rounds_may_be_longer_after_a_restart(steps, local_steps, refused, tmp_path, capsys):
    """The round that was begun ends after step 4, as it would have."""
    config = dataclasses.replace(
        NANO,
        optimizer="diloco",
        local_steps=2,
        workers=None,
        simulate=1,
        checkpoint_dir=str(tmp_path),
    )
    run = prepare(config)
    state = demo_optax.init_opt_state(run.tx, run.params, run.mesh)
    state = state._replace(first_step=jnp.int32(2), last_step=jnp.int32(3), mini_step=jnp.int32(0))
    with train.open_checkpoints(run) as checkpointer:
        checkpointer.save(2, run.params, state, train.order(run, 0))
    other = prepare(dataclasses.replace(config, steps=steps, local_steps=local_steps))
    with train.open_checkpoints(other) as checkpointer:
        if not refused:
            assert train.begin(other, checkpointer)[0] == 2
            return
        with pytest.raises(SystemExit):
            train.begin(other, checkpointer)
        assert "the next exchange is after step 4" in capsys.readouterr().err


def test_layers_that_are_stacked_are_not_divided():
    run = prepare(dataclasses.replace(NANO, scan_layers=True, fsdp=2))
    specs = {str(spec) for spec in jax.tree.leaves(run.param_specs)}
    assert specs == {str(P("fsdp")), str(P(None, "fsdp"))}


def test_utilization_is_shown_where_the_peak_is_known():
    class Device:
        device_kind = "TPU v4"

    devices = np.array([Device(), Device()])
    assert utilization.utilization(275e12, devices) == pytest.approx(0.5)
    assert utilization.utilization(1e12, np.array(jax.devices())) is None


def test_the_comparison_makes_a_table_and_a_picture(tmp_path, capsys, monkeypatch):
    config = dataclasses.replace(THREE, log_dir=str(tmp_path))
    monkeypatch.setattr(train, "prepare", prepared)
    monkeypatch.setattr(train, "make_evaluation", first_of(make_evaluation))
    monkeypatch.setattr(sys, "argv", ["compare.py", *words_of(config), "--seeds", "2"])
    compare.main()
    shown = capsys.readouterr().out
    assert "over each link of a ring of 3" in shown
    state = re.search(r"optimizer state of a worker.* ([\d.]+) .* ([\d.]+) ", shown)
    assert state and 6 <= float(state[1]) < 9 and 8 <= float(state[2]) < 8.1  # and not of all three
    losses = re.search(r"loss on held-out.*?([\d.]+) ± ([\d.]+)", shown)
    assert losses and float(losses[2]) > 0
    seeds = [
        yaml.safe_load((tmp_path / "demo-scaled" / folder / "config.yaml").read_text())["seed"]
        for folder in (".", "seed-1")
    ]
    assert seeds == [0, 1]
    assert (tmp_path / "loss_against_bytes.png").read_bytes().startswith(b"\x89PNG")
    for name in ("demo-scaled", "adamw"):
        assert yaml.safe_load((tmp_path / name / "config.yaml").read_text())["optimizer"] == name


def test_the_comparison_counts_simulated_workers_of_several_optimizers(
    tmp_path, capsys, monkeypatch
):
    config = dataclasses.replace(NANO, log_dir=str(tmp_path), workers=None, simulate=4)
    names = ["demo-muon", "demo-scaled"]
    monkeypatch.setattr(sys, "argv", ["compare.py", *words_of(config), "--optimizer", *names])
    log = types.SimpleNamespace(
        bytes_per_step=1e6,
        megabytes=6.0,
        done=6,
        steps_per_second=2.0,
        evaluations=[report.Point(6, 6.0, 2.0)],
        devices=np.array(jax.devices()[:1]),
    )
    monkeypatch.setattr(
        compare, "run_or_exit", lambda config: train.Trained(log, float(config.simulate), 6.04)
    )
    compare.main()
    shown = capsys.readouterr().out
    assert re.search(r"demo-muon .* demo-scaled .* adamw ", shown)
    assert re.search(r"over each link of a ring of 4.* 3 .* 3 .* 1.5 ", shown)
    assert re.search(r"loss on held-out.* 4.000 .* 4.000 .* 4.000 ", shown)


@pytest.mark.parametrize("names", [["adamw"], ["demo", "demo"], ["demo", "adamw"]])
def test_the_comparison_refuses_its_baseline_and_repetitions(names, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["compare.py", "--optimizer", *names])
    with pytest.raises(SystemExit, match="2"):
        compare.main()
    assert "name optimizers other than adamw, each once" in capsys.readouterr().err


def test_a_comparison_without_its_picture_still_has_its_table(tmp_path, capsys, monkeypatch):
    config = dataclasses.replace(NANO, log_dir=str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["compare.py", *words_of(config)])
    monkeypatch.setattr(compare, "run_or_exit", lambda config: None)
    monkeypatch.setattr(compare, "table", lambda *_: "the table")
    monkeypatch.setattr(compare, "draw", mock.Mock(side_effect=OSError(errno.ENOSPC, "full")))
    with pytest.raises(SystemExit, match=r"^error: the picture could not be written: .*full"):
        compare.main()
    assert "the table" in capsys.readouterr().out


EXAMPLES = {"vision_flax": vision_flax, "linen_trainstate": linen_trainstate}


@sweep("vision_flax", name=EXAMPLES)
def test_small_examples_learn(name):
    example = EXAMPLES[name]
    assert example.main(example.Config(workers=2, steps=50)) > 0.7
    source = pathlib.Path(example.__file__).read_text()
    assert len(source.splitlines()) < 100

"""The trainer and its parts; text, tokens and sizes are small."""

import ast
import dataclasses
import inspect
import itertools
import json
import pathlib
import re
import struct
import sys

import datasets
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from array_record.python import array_record_module
from flax import nnx
from jax.sharding import PartitionSpec as P
from tensorboardX.proto import event_pb2

import compare
import demo_optax
import evaluate
import linen_trainstate
import vision_flax
from lm import config as configuration
from lm import data, model, sampling, tokens, train, utilization, validation
from lm.config import Config
from lm.recipes import RECIPES
from lm.setup import batches_of, make_evaluation, prepare

ROOT = pathlib.Path(__file__).parents[1]
NANO = Config(
    preset="nano",
    text=(ROOT / "demo_optax",),
    workers=2,
    batch_size=4,
    sequence_length=16,
    steps=6,
    warmup_steps=2,
    evaluate_every=3,
    check_replicas_every=3,
)
TEXTS = [f"document {i}: it has änd 日本 and ends\n" * (i % 9 + 1) for i in range(150)]


@pytest.fixture(autouse=True)
def _process():
    """All devices are there before the trainer asks for its own."""
    jax.devices()


def words_of(config):
    """A configuration as the words of a command line, by way of its file."""
    path = pathlib.Path(config.log_dir) / "given.yaml"
    config.write(path)
    return ["--config", str(path)]


# Configuration


def test_a_configuration_written_and_read_is_the_same(tmp_path):
    changed = dataclasses.replace(
        NANO,
        tokenizer=tmp_path / "tokenizer.json",
        dtype="bfloat16",
        remat=True,
        learning_rate=1.25e-3,
        prompts=("", "a b: c"),
        checkpoint_dir="gs://bucket/run",
    )
    path = tmp_path / "config.yaml"
    changed.write(path)
    found = configuration.from_command_line("", ["--config", str(path)])
    assert dataclasses.replace(found, config=None) == changed
    found = configuration.from_command_line(
        "", ["--steps", "9", "--no-remat", "--config", str(path)]
    )
    assert (found.steps, found.remat, found.batch_size) == (9, False, 4)


def test_the_papers_run_is_a_file():
    path = ROOT / "examples" / "paper_300m.yaml"
    config = configuration.from_command_line("", ["--config", str(path), "--workers", "64"])
    validation.require_sensible(config)
    validation.require_divisible(config, 64)
    assert config.steps * config.batch_size * config.sequence_length == pytest.approx(
        1e11, rel=1e-3
    )
    assert (config.optimizer, config.preset, config.topk) == ("demo-paper", "300m", 32)


def test_every_flag_is_explained(capsys):
    with pytest.raises(SystemExit):
        configuration.from_command_line("", ["--help"])
    shown = " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    body = ast.parse(inspect.getsource(Config)).body[0].body
    explained = {}
    for setting, text in itertools.pairwise(body):
        if isinstance(setting, ast.AnnAssign):
            explained[setting.target.id] = " ".join(ast.literal_eval(text.value).split())
    assert explained.keys() == {field.name for field in dataclasses.fields(Config)}
    for name, text in explained.items():
        assert f"--{name.replace('_', '-')}" in shown
        assert text[:40] in shown, name


# Text and tokens


def test_a_dataset_of_several_splits_is_refused(tmp_path):
    split = datasets.Dataset.from_dict({"text": TEXTS})
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(ValueError, match=r"several splits.*both/test"):
        data.read([tmp_path / "both"])


def saved(kind, folder):
    if kind == "files":
        for i, text in enumerate(TEXTS):
            (folder / f"{i:03}.txt").write_text(text)
        (folder / "picture.png").write_bytes(b"\x89PNG\xff\0")
        return folder
    if kind == "dataset":
        datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(folder / "set"))
        return folder / "set"
    path = folder / "texts.arrayrecord"
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for text in TEXTS:
        writer.write(text.encode())
    writer.close()
    return path


@pytest.mark.parametrize("kind", ["files", "dataset", "arrayrecord"])
def test_text_comes_from_files_datasets_and_records(kind, tmp_path):
    text = data.read([saved(kind, tmp_path)])
    assert sorted(text.train + text.held_out) == sorted(TEXTS)
    assert 0 < len(text.held_out) < 20
    assert text == data.read([tmp_path / "set" if kind == "dataset" else saved(kind, tmp_path)])


def test_of_a_single_file_the_end_is_held_out(tmp_path):
    (tmp_path / "one.txt").write_text("".join(TEXTS))
    text = data.read([tmp_path / "one.txt"])
    assert text.train[0] + text.held_out[0] == "".join(TEXTS)


@pytest.mark.parametrize("kind", ["bytes", "pairs"])
def test_tokens_give_back_their_text(kind, tmp_path):
    coding = tokens.Bytes()
    if kind == "pairs":
        tokens.train(TEXTS, 300, tmp_path / "tokenizer.json")
        coding = tokens.load(tmp_path / "tokenizer.json")
    encoded = coding.encode(TEXTS)
    assert coding.decode(encoded) == "".join(text + tokens.END for text in TEXTS)
    assert np.sum(encoded == 0) == len(TEXTS)
    assert encoded.max() < coding.vocabulary == (256 if kind == "bytes" else 300)
    corpus = data.encode(data.Text(TEXTS[:99], TEXTS[99:]), coding, 8)
    size = sum(len(text.encode()) + 1 for text in TEXTS[99:])
    assert corpus.bytes_per_token == pytest.approx(size / corpus.held_out.size)


@pytest.mark.parametrize("content, message", [("{}", "no file of"), ("", "no file of")])
def test_a_file_that_is_no_tokenizer(content, message, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        tokens.load(path)


def test_the_order_of_the_text_is_exact_wherever_it_is_taken_up():
    text = np.arange(1000) % 251
    shape = 4, 10

    def read(start, rows=slice(None), count=30, seed=1):
        found = data.batches(text, shape, seed, start, rows)
        return np.stack(list(itertools.islice(found, count)))

    whole = read(0)
    assert whole.shape == (30, 4, 11)
    np.testing.assert_array_equal(read(4 * 7, count=23), whole[7:])
    np.testing.assert_array_equal(read(0, slice(1, 3)), whole[:, 1:3])
    assert (read(0, seed=2) != whole).any()
    once = whole.reshape(-1, 11)[: 990 // 10]  # a pass over the text, no window twice
    assert len(np.unique(once, axis=0)) == 99


# The model


def losses(preset, params, batch):
    definition, _ = model.build(preset)
    return model.cross_entropy(nnx.merge(definition, params)(batch[:, :-1]), batch[:, 1:])


@pytest.mark.parametrize("change", [dict(remat=True), dict(scan=True), dict(scan=True, remat=True)])
def test_scan_and_remat_change_no_number(change):
    preset = model.PRESETS["nano"]._replace(layers=3)
    _, params = model.build(preset)
    batch = jax.random.randint(jax.random.key(0), (2, 17), 0, 256)
    expected = jax.value_and_grad(losses, argnums=1)(preset, params, batch)
    if change.get("scan"):
        stack = lambda layers: jax.tree.map(lambda *x: jnp.stack(x), *layers.values())  # noqa: E731
        blocks = {name: nnx.to_pure_dict(p) for name, p in params["blocks"].items()}
        _, stacked = model.build(preset._replace(**change))
        nnx.replace_by_pure_dict(
            stacked,
            {"blocks": stack(blocks)} | {"embedding": nnx.to_pure_dict(params["embedding"])},
        )
        params = stacked
        expected_gradient = nnx.to_pure_dict(expected[1])
        blocks = stack(expected_gradient["blocks"])
        expected = expected[0], {"blocks": blocks, "embedding": expected_gradient["embedding"]}
    loss, gradient = jax.value_and_grad(losses, argnums=1)(preset._replace(**change), params, batch)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_bfloat16_computes_in_it_and_keeps_float32_parameters():
    preset = model.PRESETS["nano"]
    narrow = preset._replace(dtype=jnp.bfloat16)
    definition, params = model.build(narrow)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    batch = jax.random.randint(jax.random.key(0), (2, 17), 0, 256)
    wide, short = losses(preset, params, batch), losses(narrow, params, batch)
    assert 0 < abs(float(wide - short)) < 0.05
    assert "bf16" in jax.jit(nnx.merge(definition, params)).lower(batch).as_text()


def test_flops_are_about_what_xla_counts():
    """With as many tokens as make attention a third of the work, and no small terms."""
    preset = model.PRESETS["nano"]._replace(layers=2, width=256, heads=2)
    _, params = model.build(preset)
    length = 1024
    batch = jnp.zeros((1, length + 1), jnp.int32)
    program = jax.jit(jax.grad(lambda p, b: losses(preset, p, b))).lower(params, batch).compile()
    counted = program.cost_analysis()["flops"] / length
    assert utilization.flops_per_token(params, preset, length) == pytest.approx(counted, rel=0.06)


def test_samples_are_drawn_token_by_token():
    definition, params = model.build(model.PRESETS["nano"])

    def logits(params, tokens_BxT):
        return nnx.merge(definition, params)(tokens_BxT)

    coding = tokens.Bytes()
    for prompt in ("", "a prompt that is longer than the context"):
        (found,) = sampling.samples(logits, params, coding, 8, [prompt], 3, temperature=0)
        expected = [0, *prompt.encode()]
        for _ in range(3):
            expected.append(int(jnp.argmax(logits(params, jnp.array([expected[-8:]]))[0, -1])))
        assert found == coding.decode(np.array(expected[1:]))
    drawn = [sampling.samples(logits, params, coding, 8, ["x"], 9, seed=s) for s in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


# Whole runs


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


def test_a_run_that_was_cut_goes_on_to_the_same_bits(tmp_path):
    """With everything that can be asked for: tokens of pairs, mixed precision, scan and remat."""
    full = dataclasses.replace(
        NANO,
        tokenizer=tmp_path / "tokenizer.json",
        vocabulary=300,
        dtype="bfloat16",
        remat=True,
        scan_layers=True,
    )
    whole = train.train(prepare(dataclasses.replace(full, log_dir=tmp_path / "whole")))
    folder = tmp_path / "cut"
    saving = dataclasses.replace(full, log_dir=folder, checkpoint_dir=str(tmp_path / "saved"))
    schedule = {"checkpoint_every": 2}
    with pytest.raises(RuntimeError, match="out of text"):
        train.train(cut_short(dataclasses.replace(saving, **schedule), at=4))
    again = train.train(prepare(dataclasses.replace(saving, **schedule)))
    assert again.log.start == 4
    assert again.loss == whole.loss
    expected = [(line["number"], line["loss"]) for line in steps_of(tmp_path / "whole")]
    assert [(line["number"], line["loss"]) for line in steps_of(folder)] == expected
    assert len(expected) == full.steps
    found = configuration.from_command_line("", ["--config", str(folder / "config.yaml")])
    assert dataclasses.replace(found, config=None) == dataclasses.replace(saving, **schedule)


def cut_short(config, at):
    """A run whose text ends after so many steps."""

    class Ending(np.ndarray):
        reads = 0

        def __getitem__(self, index):
            if isinstance(index, np.ndarray):
                Ending.reads += 1
                if Ending.reads > at:
                    raise RuntimeError("out of text")
            return np.asarray(self).__getitem__(index)

    run = prepare(config)
    return run._replace(corpus=run.corpus._replace(train=run.corpus.train.view(Ending)))


def test_a_run_logs_profiles_samples_and_is_evaluated(tmp_path, capsys, monkeypatch):
    config = dataclasses.replace(
        NANO,
        steps=14,
        evaluate_every=7,
        log_dir=tmp_path / "log",
        profile_steps=2,
        sample_length=5,
        checkpoint_dir=str(tmp_path / "saved"),
    )
    trained = train.train(prepare(config))
    shown = capsys.readouterr().out
    assert shown.count("the model writes") == 2
    assert "parameters on 2 devices: bit-identical" in shown

    lines = steps_of(tmp_path / "log")
    assert [line["number"] for line in lines] == [*range(1, 15)]
    assert lines[3]["gradient_norms"].keys() == {"0", "1"}
    assert lines[3]["exchange"]["participants"] == 2
    assert lines[3]["packet_bytes"] > 0
    events = events_of(tmp_path / "log")
    for tag in (
        "loss/train",
        "speed/tokens_per_second",
        "exchange/packet_bytes",
        "exchange/sent_share",
        "exchange/residual_norm",
        "gradient_norm/worker_1",
    ):
        assert (tag, 14) in events
    assert ("loss/held_out", 7) in events
    assert list((tmp_path / "log").rglob("*.xplane.pb"))

    monkeypatch.setattr(sys, "argv", ["evaluate.py", *words_of(config)])
    evaluate.main()
    shown = capsys.readouterr().out
    assert f"loss on held-out text: {trained.loss:.3f}" in shown
    assert shown.count("the model writes") == 2


@pytest.mark.parametrize("workers", [2, 3])
def test_no_checkpoint_of_replicas_that_differ(workers, tmp_path):
    """Two workers differ behind the third step; of three the majority is saved at the fourth."""
    config = dataclasses.replace(
        NANO,
        workers=workers,
        batch_size=6,
        checkpoint_dir=str(tmp_path / "saved"),
        checkpoint_every=2,
        check_replicas_every=100,
    )
    run, steps = prepare(config), itertools.count(1)

    def damaging_step(params, opt_state, batch):
        params, opt_state, metrics = run.train_step(params, opt_state, batch)
        return damaged(params) if next(steps) == 3 else params, opt_state, metrics

    if workers == 2:
        with pytest.raises(SystemExit, match="no copy is held by more than half"):
            train.train(run._replace(train_step=damaging_step))
    else:
        train.train(run._replace(train_step=damaging_step))
    saved = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert saved == (["2"] if workers == 2 else ["2", "4", "6"])


def test_replicas_are_mended_behind_a_step_on_which_workers_disagree(capsys):
    """The third step damages one of three copies, the fourth tells that packets were not the same.

    What the packets tell is `tests/test_untrusted_workers.py`'s.
    """
    config = dataclasses.replace(
        NANO, workers=3, batch_size=6, steps=8, check_replicas_every=100, evaluate_every=100
    )
    run, steps, mended = prepare(config), itertools.count(1), []

    def step(params, opt_state, batch):
        number = next(steps)
        mended.append(number == 1 or not demo_optax.check_replicas(params, run.mesh))
        params, opt_state, metrics = run.train_step(params, opt_state, batch)
        exchange = metrics.exchange._replace(agreed=jnp.array(number != 4))
        return (
            damaged(params) if number == 3 else params,
            opt_state,
            metrics._replace(exchange=exchange),
        )

    train.train(run._replace(train_step=step))
    assert mended == [True] * 3 + [False] * 2 + [True] * 3
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


def test_text_begins_anew_where_it_is_another(tmp_path, capsys):
    saving = dataclasses.replace(NANO, checkpoint_dir=str(tmp_path / "saved"), steps=2)
    train.train(prepare(saving))
    more = dataclasses.replace(saving, steps=3, batch_size=8)
    assert train.train(prepare(more)).log.start == 2
    assert "begins anew" not in capsys.readouterr().out
    with train.open_checkpoints(prepare(more)) as checkpointer:
        run = prepare(more)
        assert train.begin(run, checkpointer)[:2] == (3, 2 * 4 + 8)
        another = prepare(dataclasses.replace(more, text=(ROOT / "tests",)))
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


@pytest.mark.parametrize("optimizer", RECIPES)
def test_every_recipe_trains_with_sharded_parameters(optimizer):
    run = prepare(dataclasses.replace(NANO, optimizer=optimizer, fsdp=2, warmup_steps=1))
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
    config = dataclasses.replace(NANO, log_dir=tmp_path)
    monkeypatch.setattr(sys, "argv", ["compare.py", *words_of(config)])
    compare.main()
    shown = capsys.readouterr().out
    assert "over each link of a ring of 2" in shown
    assert (tmp_path / "loss_against_bytes.png").read_bytes().startswith(b"\x89PNG")
    for name in ("demo", "adamw"):
        assert yaml.safe_load((tmp_path / name / "config.yaml").read_text())["optimizer"] == name


@pytest.mark.parametrize("example", [vision_flax, linen_trainstate])
def test_small_examples_learn(example):
    assert example.main(example.Config(workers=2, steps=50)) > 0.7
    source = pathlib.Path(example.__file__).read_text()
    assert len(source.splitlines()) < 100

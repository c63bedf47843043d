"""The parts of the trainer; text, tokens and sizes are small."""

import ast
import dataclasses
import errno
import functools
import inspect
import io
import itertools
import re
from unittest import mock

import datasets
import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from array_record.python import array_record_module
from flax import nnx

from lm import config as configuration
from lm import data, model, output, sampling, setup, stores, tokens, utilization, validation
from lm.config import Config
from tests.nano import NANO, ROOT
from tests.sweeps import slow

TEXTS = [f"document {i}: it has änd 日本 and ends\n" * (i % 9 + 1) for i in range(150)]


# Configuration


def test_virtual_devices_wait_long_for_each_other_unless_the_user_says():
    longer = setup.with_long_waits("--xla_dump_to=x", virtual_devices=4)
    assert longer == f"--xla_dump_to=x {setup.VIRTUAL_WAIT}=600"
    assert setup.with_long_waits(longer, virtual_devices=4) == longer
    assert setup.with_long_waits("", virtual_devices=1) == ""


def test_a_configuration_written_and_read_is_the_same(tmp_path):
    changed = dataclasses.replace(
        NANO,
        text=("gs://bucket/text", str(tmp_path), "a b: c"),
        tokenizer="gs://bucket/tokenizer.json",
        dtype="bfloat16",
        remat=True,
        norm_limit=None,
        learning_rate=1.25e-3,
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


@pytest.mark.parametrize("optimizer", ["demo-scaled", "adamw"])
def test_the_default_learning_rate_falls_as_the_width_grows(optimizer):
    config = Config(optimizer=optimizer)
    assert setup.peak_rate(config, 128) == pytest.approx(3e-3)
    assert setup.peak_rate(config, 1024) == pytest.approx(3e-3 * 128 / 1024)
    given = dataclasses.replace(config, learning_rate=7e-4)
    assert setup.peak_rate(given, 1024) == 7e-4


def test_the_papers_run_is_a_file():
    path = ROOT / "examples" / "paper_300m.yaml"
    config = configuration.from_command_line("", ["--config", str(path), "--workers", "64"])
    validation.require_sensible(config)
    validation.require_divisible(config, 64)
    assert config.steps * config.batch_size * config.sequence_length == pytest.approx(
        1e11, rel=1e-3
    )
    assert (config.optimizer, config.preset, config.topk) == ("demo", "300m", 32)


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


def test_what_is_printed_ends_no_training():
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "no space")

    assert output.Printed(Full()).write("step 1") == 6
    shown = io.BytesIO()
    stream = output.Printed(io.TextIOWrapper(shown, "ascii"))
    print("zürich took part", file=stream, flush=True)
    assert shown.getvalue() == rb"z\xfcrich took part" + b"\n"
    with pytest.raises(BrokenPipeError):
        output.Printed(mock.Mock(write=mock.Mock(side_effect=BrokenPipeError))).write("step 1")


# Text and tokens


def test_a_dataset_of_several_splits_is_refused(tmp_path):
    split = datasets.Dataset.from_dict({"text": TEXTS})
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(ValueError, match=r"several splits.*both/test"):
        data.read([str(tmp_path / "both")])


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
    path = saved(kind, tmp_path)
    text = data.read([str(path)])
    assert sorted(text.train + text.held_out) == sorted(TEXTS)
    assert 0 < len(text.held_out) < 20
    assert text == data.read([str(path)])
    assert text == data.read([path.as_uri()])
    url = f"memory://{tmp_path.name}/{path.name}"
    store, inside = fsspec.url_to_fs(url)
    store.put(str(path), inside, recursive=True)
    assert text == data.read([url])


def test_a_store_without_the_text():
    with pytest.raises(ValueError, match="--text memory://nothing/here cannot be read"):
        data.read(["memory://nothing/here"])
    with pytest.raises(ValueError, match=r"--text s4://bucket cannot be read.*s4"):
        data.read(["s4://bucket"])


def test_files_that_are_no_text_are_told(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("some text\n" * 100)
    (tmp_path / "b.bin").write_bytes(b"\xff" * 1234)
    text = data.read([str(tmp_path)])
    assert set("".join(text.train + text.held_out)) == set("some text\n")
    assert "1 files of 1,234 bytes are no UTF-8 text" in capsys.readouterr().err


def test_a_large_file_is_not_held_out_whole(tmp_path):
    held_out = next(name for name in map("{}.txt".format, range(999)) if data._hash(name) < 0.05)
    kept = next(name for name in map("{}.txt".format, range(999)) if data._hash(name) > 0.05)
    (tmp_path / held_out).write_text("much of it" * 900)
    (tmp_path / kept).write_text("little" * 10)
    sizes = [sum(map(len, part)) for part in data.read([str(tmp_path)])]
    assert sizes[1] / sum(sizes) == pytest.approx(0.05, abs=0.01)


def test_of_a_single_file_the_end_is_held_out(tmp_path):
    (tmp_path / "one.txt").write_text("".join(TEXTS))
    text = data.read([str(tmp_path / "one.txt")])
    assert text.train[0] + text.held_out[0] == "".join(TEXTS)


@pytest.mark.parametrize("kind", ["bytes", "pairs", "pairs in a store"])
def test_tokens_give_back_their_text(kind, tmp_path):
    coding = tokens.Bytes()
    if kind != "bytes":
        root = f"memory://{tmp_path.name}" if kind == "pairs in a store" else str(tmp_path)
        place = f"{root}/new/tokenizer.json"
        assert not stores.exists(place)
        tokens.train(TEXTS, 300, place)
        store, path = fsspec.url_to_fs(place)
        assert store.find(path.removesuffix("/tokenizer.json")) == [path]
        coding = tokens.load(place)
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
        tokens.load(str(path))


def test_the_order_of_the_text_is_exact_wherever_it_is_taken_up():
    text = np.arange(1000) % 251
    shape = 4, 10

    def read(start, process=(0, 1), count=30, seed=1):
        found = data.batches(text, shape, seed, start, *process)
        return np.stack(list(itertools.islice(found, count)))

    whole = read(0)
    assert whole.shape == (30, 4, 11)
    np.testing.assert_array_equal(read(4 * 7, count=23), whole[7:])
    np.testing.assert_array_equal(read(0, process=(1, 2)), whole[:, 2:])
    assert (read(0, seed=2) != whole).any()
    once = whole.reshape(-1, 11)[: 990 // 10]  # a pass over the text, no window twice
    assert len(np.unique(once, axis=0)) == 99


# The model


BATCH = np.random.default_rng(0).integers(0, 256, (2, 17), np.int32)


@functools.partial(jax.jit, static_argnums=0)
def losses(preset, params, batch):
    definition, _ = model.build(preset)
    return model.cross_entropy(nnx.merge(definition, params)(batch[:, :-1]), batch[:, 1:])


losses_and_gradients = jax.jit(jax.value_and_grad(losses, argnums=1), static_argnums=0)


@pytest.mark.parametrize(
    "change", [dict(remat=True), slow(dict(scan=True)), dict(scan=True, remat=True)]
)
def test_scan_and_remat_change_no_number(change):
    preset = model.PRESETS["nano"]._replace(layers=2)
    _, params = model.build(preset)
    expected = losses_and_gradients(preset, params, BATCH)
    if change.get("scan"):
        stack = lambda layers: jax.tree.map(lambda *x: np.stack(x), *layers.values())  # noqa: E731
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
    loss, gradient = losses_and_gradients(preset._replace(**change), params, BATCH)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_bfloat16_computes_in_it_and_keeps_float32_parameters():
    preset = model.PRESETS["nano"]
    narrow = preset._replace(dtype=jnp.bfloat16)
    definition, params = model.build(narrow)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    wide, short = losses(preset, params, BATCH), losses(narrow, params, BATCH)
    assert 0 < abs(float(wide - short)) < 0.05
    assert "bf16" in jax.jit(nnx.merge(definition, params)).lower(BATCH).as_text()


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

    @jax.jit
    def logits(params, tokens_BxT):
        return nnx.merge(definition, params)(tokens_BxT)

    coding = tokens.Bytes()
    for prompt in ("", "a prompt that is longer than the context"):
        (found,) = sampling.samples(logits, params, coding, 8, [prompt], 3, temperature=0)
        expected = [0, *prompt.encode()]
        for _ in range(3):
            seen = expected[-8:]
            padded = np.pad([seen], ((0, 0), (0, 8 - len(seen))))
            expected.append(int(np.argmax(logits(params, padded)[0, len(seen) - 1])))
        assert found == coding.decode(np.array(expected[1:]))
    drawn = [sampling.samples(logits, params, coding, 8, ["x"], 9, seed=s) for s in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]

"""The studies: what is trained next, their levers, and how results become tables and pictures."""

import dataclasses
import inspect
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import demo_optax
from benchmarks.quality import __main__ as main
from benchmarks.quality import levers, pictures, study, tables
from lm import recipes, setup
from lm.config import Config
from lm.recipes import RECIPES, Settings
from lm.validation import require_sensible
from tests import model, workers
from tests.nano import NANO
from tests.sweeps import sweep

ROOT = Path(__file__).parents[1]
STUDIES = study.read()
METHODS = [(each, method) for each in STUDIES.values() for method in each.methods.values()]


def result(job, loss):
    common = job._asdict()
    del common["study"]
    return study.Result(
        **common, loss=loss, bytes_per_step=1.0, evaluations=[], seconds=1.0,
        versions={},
    )  # fmt: skip


def small(settings=None, **methods):
    body = {
        "settings": {"preset": "nano", "steps": 4} | (settings or {}),
        "seeds": [3, 4],
        "methods": methods,
    }
    return study._study("small", body)


def test_results_of_other_settings_do_not_count():
    each = small(a={"learning_rate": 1.0})
    method = each.methods["a"]
    results = {job.key: result(job, 1.0) for job in (each.job(method, seed) for seed in each.seeds)}
    assert set(each.of_method(method, results)) == {3, 4}
    changed = dataclasses.replace(method, settings={"steps": 5})
    assert each.of_method(changed, results) == {}


def test_a_method_has_the_rate_of_its_study_where_it_gives_none():
    each = small(a={"topk": 2}, b={"learning_rate": 2.0}, settings={"learning_rate": 1.0})
    assert [method.learning_rate for method in each.methods.values()] == [1.0, 2.0]
    assert each.methods["a"].settings == {"preset": "nano", "steps": 4, "topk": 2}
    with pytest.raises(ValueError, match="a has no learning_rate"):
        small(a={})


def test_differences_are_paired_by_seed(monkeypatch):
    each = small(AdamW={"learning_rate": 1.0}, b={"learning_rate": 2.0})
    losses = {("AdamW", 3): 1.0, ("AdamW", 4): 2.0, ("b", 3): 1.5, ("b", 4): 2.1}
    jobs = [each.job(method, seed) for method in each.methods.values() for seed in (3, 4)]
    results = {job.key: result(job, losses[job.method, job.seed]) for job in jobs}
    monkeypatch.setattr(study.Study, "results", lambda self: results)
    other = tables.rows(each)[1]
    assert other.loss.value == pytest.approx(1.8) and other.loss.error == pytest.approx(0.3)
    assert other.difference.value == pytest.approx(0.3)
    assert other.difference.error == pytest.approx(0.2)
    # Student's t for 95% and two values is 12.706.
    line = (
        "| b | 1 | 327,680 | 2 | 1.800 ± 0.300 | +0.300 ± 0.200 | -2.241 to +2.841 | 2 | +0.500 |"
    )
    assert line in tables.of_study(each)


@pytest.mark.slow
def test_runs_beside_each_other_are_kept_and_not_repeated(monkeypatch, tmp_path):
    monkeypatch.setattr(study, "FOLDER", tmp_path)
    body = {
        "settings": {"preset": "nano", "steps": 4, "evaluate_every": 2, "learning_rate": 0.01},
        "seeds": [0],
        "methods": {
            "AdamW": {"optimizer": "adamw"},
            "DeMo": {"topk": 4},
            "Muon": {"optimizer": "adamw", "lever": {"name": "muon"}},
        },
    }
    each = study._study("nano", body)
    main.train([each], jobs=2)
    found = each.results_path.read_text()
    results = {result.method: result for result in each.results().values()}
    assert set(results) == {"AdamW", "DeMo", "Muon"} and len(found.splitlines()) == 3
    assert len({result.loss for result in results.values()}) == 3
    assert results["AdamW"].residuals is None
    assert [at for at, _ in results["DeMo"].residuals] == [2, 4]
    assert all(0 < share < 1 for _, share in results["DeMo"].sent_shares)
    main.train([each])
    assert each.results_path.read_text() == found


def test_the_picture_shows_the_methods_of_at_most_seven_curves(monkeypatch, tmp_path):
    drawn = {}
    monkeypatch.setattr(pictures.plt, "close", lambda figure: drawn.update({len(drawn): figure}))
    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    pictures.draw(STUDIES)
    by_bytes, local, *_ = drawn.values()
    curves, unseen = by_bytes.axes
    found = [row.method.curve for row in tables.rows(STUDIES["tiny"]) if row.method.curve]
    shown = sum(len(bars[0].get_xdata()) for bars in curves.containers)
    assert shown == len(found) > 10
    labels = curves.get_legend_handles_labels()[1]
    assert set(labels) == set(found) and len(labels) == len(set(found)) <= 7
    final = tables.rows(STUDIES["final"])
    assert {text.get_text() for text in unseen.texts} == {row.method.name for row in final}
    bars = [len(bars[2]) for bars in unseen.containers]
    assert bars == [int(row.difference is not None and len(row.seeds) > 1) for row in final]
    names = [text.get_window_extent() for text in unseen.texts]
    assert len(names) > 6
    assert not any(a.overlaps(b) for a, b in itertools.combinations(names, 2))
    assert all(unseen.figure.bbox.extents[3] > name.y1 > name.y0 > 0 for name in names)
    (rounds,) = local.axes
    labels = rounds.get_legend_handles_labels()[1]
    assert set(labels) == {m.curve for m in STUDIES["local"].methods.values() if m.curve}
    assert {path.suffix for path in tmp_path.iterdir()} == {".png"}


@given(st.lists(st.floats(-1, 1), max_size=8), st.floats(0.01, 0.5))
def test_names_stand_apart_and_move_no_more_than_they_must(heights, least):
    placed = sorted(zip(heights, pictures._spread(heights, least), strict=True))
    assert all(after >= before for before, after in placed)
    assert all(after == before for before, after in placed[:1])
    for (_, lower), (before, upper) in itertools.pairwise(placed):
        assert upper == max(before, lower + least)


@pytest.mark.parametrize("each, method", METHODS, ids=[f"{s.name}: {m.name}" for s, m in METHODS])
def test_the_trainer_takes_every_method(each, method):
    require_sensible(Config(**method.settings, learning_rate=0.1))


def start():
    return {"w": np.full((12, 3), 0.1, np.float32)}


def loss(params, batch):
    return jnp.mean(jnp.square(batch["x"] @ params["w"] - batch["y"]))


def trained(make, exchange=demo_optax.AllGather("data"), steps=11):
    settings = Settings(
        optax.linear_schedule(0.05, 0.01, 11),
        0.9,
        0.0,
        demo_optax.Compression(4, 8),
        exchange,
        b2=0.95,
    )
    tx = make("demo-scaled", settings, None)
    return workers.train(tx, range(steps), params=start, loss=loss)[0]["w"]


@pytest.fixture(scope="module")
def params_of_demo():
    return trained(recipes.make)


LEVERS = {str(dict(m.lever)): m for _, m in METHODS if m.lever}


@sweep("{'name': 'muon'}", "{'name': 'owners', 'residual_decay': 1.0}", name=LEVERS)
def test_levers_are_optimizers_that_differ_from_demo(name, params_of_demo):
    lever, settings = dict(LEVERS[name].lever), LEVERS[name].settings
    exchange = setup.exchange(Config(**settings))
    rounds = 1 + ("fragments" in lever)  # whose results come late
    steps = rounds * lever.get("every", 10) + 1
    params = trained(levers.maker(**lever), exchange, steps)
    before, after = (
        sum(loss(each, model.batch(i)) for i in range(steps)) for each in (start(), {"w": params})
    )
    assert after < before
    assert np.abs(params_of_demo - params).max() > 1e-6


def test_methods_do_not_lean_on_defaults_that_may_change():
    for study_of, method in METHODS:
        recipe = RECIPES[method.settings["optimizer"]]
        sends = recipe.compression is not None and not recipe.reduces
        stated = {"selection", "topk", "value_coding", "decay"} if sends else set()
        if RECIPES[method.settings["optimizer"]].b2 is not None:
            stated |= {"b2"}
        assert stated <= set(method.settings), (study_of.name, method.name)


@pytest.mark.parametrize("name", ["demo-scaled", "demo-muon"])
def test_the_trainer_trains_what_the_library_recommends(name):
    given = inspect.signature(getattr(demo_optax, name.replace("-", "_"))).parameters
    recipe = RECIPES[name]
    assert recipe.compression == given["compression"].default
    assert (recipe.decay, recipe.weight_decay) == (given["decay"].default, 0.0)
    assert recipe.b2 == given["b2"].default


WITH_SECOND_MOMENT = [name for name, recipe in RECIPES.items() if recipe.b2 is not None]


@pytest.mark.parametrize("given, expected", [(0.5, 0.5), (None, 0.99)])
def test_the_trainer_hands_b2_over(given, expected):
    seen = []

    def make(name, settings, local_steps):
        seen.append(settings.b2)
        return optax.sgd(1.0)

    setup.prepare(dataclasses.replace(NANO, b2=given), make)
    assert seen == [expected]


@pytest.mark.parametrize("name", WITH_SECOND_MOMENT)
def test_b2_reaches_the_optimizer(name):
    gradients = np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32)
    exchange, sent = demo_optax.AllGather("data"), demo_optax.Compression(4, 8)

    @jax.jit
    def updates(b2):
        settings = Settings(lambda step: 0.1, 0.9, 0.0, sent, exchange, b2=b2)
        tx, params = RECIPES[name].make(settings), np.ones((8, 8), np.float32)

        def step(state, gradient):
            update, state = tx.update(gradient, state, params)
            return state, update

        def of_a_worker(gradients):
            return jax.lax.scan(step, tx.init(params), gradients)[1]

        return jax.vmap(of_a_worker, axis_name="data")(gradients)

    one, other = (np.asarray(updates(b2))[:, -1] for b2 in (0.5, 0.99))
    assert np.abs(one - other).max() > 1e-3


def test_every_result_is_of_a_method_of_its_study():
    for each in STUDIES.values():
        methods = [(dict(m.settings), dict(m.lever)) for m in each.methods.values()]
        for found in each.results().values():
            assert (found.settings, found.lever) in methods, found.method

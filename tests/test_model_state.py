"""Models with a state of their own: dropout that differs, statistics that accumulate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import demo_optax
from tests import model

pytestmark = pytest.mark.sweep

MODES = {
    "manual": {},
    "the workers alone": dict(axis_names=("data",)),
    "mapped": dict(axis_names=()),
}
WORKERS, INNER = 4, 2
TX = demo_optax.demo(1e-3, demo_optax.Compression(4, 8), decay=0.9, axis_name="data")


class Model(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(12, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x):
        hidden = self.norm(self.hidden(x))
        return self.out(self.dropout(jnp.ones_like(hidden)) * hidden)


GRAPH, PARAMS, STATE = nnx.split(Model(nnx.Rngs(0)), nnx.Param, ...)


def loss(params, state, batch):
    module = nnx.merge(GRAPH, params, state, copy=True)
    mask = module.dropout(jnp.ones((16,)))
    error = module(batch["x"]) - batch["y"]
    return jnp.mean(jnp.square(error)), (nnx.state(module, nnx.Not(nnx.Param)), mask)


def train(steps=3, mode="manual", inner=INNER, batch_of=model.batch, **options):
    mesh = jax.make_mesh(
        (WORKERS, inner),
        ("data", "fsdp"),
        (AxisType.Auto,) * 2,
        devices=jax.devices()[: WORKERS * inner],
    )
    params = jax.tree.map(jnp.copy, PARAMS)
    opt_state = demo_optax.init_opt_state(TX, params, mesh)
    state = demo_optax.init_model_state(STATE, mesh)
    step = demo_optax.make_train_step(loss, TX, mesh, stateful=True, **MODES[mode], **options)
    masks, states = [], []
    for i in range(steps):
        params, opt_state, state, metrics = step(params, opt_state, state, batch_of(i))
        masks.append(np.asarray(metrics.aux).reshape(-1, 16))
        states.append(jax.tree.map(np.asarray, nnx.as_pure(nnx.filter_state(state, nnx.BatchStat))))
    return masks, states, metrics


@pytest.mark.parametrize("mode", MODES)
def test_masks_differ_between_workers_and_steps(mode):
    masks, _, _ = train(mode=mode, inner=1)
    assert len(np.unique(np.concatenate(masks), axis=0)) == 3 * WORKERS


@pytest.mark.slow
def test_statistics_accumulate_alike_in_every_mode():
    runs = {mode: train(mode=mode, inner=1)[1] for mode in MODES}
    means = runs["manual"][-1]["norm"]["mean"]
    assert means.shape == (WORKERS, 16)
    assert np.ptp(means, axis=0).max() > 0.01
    assert np.abs(means - runs["manual"][0]["norm"]["mean"]).max() > 0.01
    for run in runs.values():
        for ours, theirs in zip(run, runs["manual"], strict=True):
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ours, theirs
            )


@pytest.mark.parametrize("mode", MODES)
def test_statistics_are_those_of_the_workers_own_batch(mode):
    """One step from the first parameters: mean of the hidden layer, weighted by the momentum."""
    _, (first,), _ = train(steps=1, mode=mode)
    x = model.batch(0)["x"].reshape(WORKERS, -1, 12)
    hidden = nnx.merge(GRAPH, PARAMS, STATE, copy=True).hidden
    expected = 0.5 * np.stack([np.asarray(hidden(rows)).mean(axis=0) for rows in x])
    np.testing.assert_allclose(first["norm"]["mean"], expected, rtol=1e-4, atol=1e-5)


def test_a_state_goes_through_the_microbatches():
    once = train(steps=1, inner=1, batch_of=lambda i: model.batch(i, rows=16))[1][0]["norm"]["mean"]
    twice = train(steps=1, inner=1, microbatches=2, batch_of=lambda i: model.batch(i, rows=16))[1][
        0
    ]["norm"]["mean"]
    x = model.batch(0, rows=16)["x"].reshape(WORKERS, 2, 2, 12)
    hidden = nnx.merge(GRAPH, PARAMS, STATE, copy=True).hidden
    parts = np.stack([[np.asarray(hidden(rows)).mean(axis=0) for rows in worker] for worker in x])
    np.testing.assert_allclose(once, 0.5 * parts.mean(axis=1), rtol=1e-4, atol=1e-5)
    expected = 0.25 * parts[:, 0] + 0.5 * parts[:, 1]
    np.testing.assert_allclose(twice, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["manual", "mapped"])
def test_a_worker_whose_gradient_is_not_finite_keeps_its_state(mode):
    def broken(i):
        batch = model.batch(i)
        batch["x"][:2] = np.inf
        return batch

    _, (state,), metrics = train(steps=1, mode=mode, inner=1, batch_of=broken)
    assert metrics.exchange.participants < WORKERS
    np.testing.assert_array_equal(state["norm"]["mean"][0], 0)
    assert (state["norm"]["mean"][1:] != 0).any(axis=1).all()


def test_a_state_without_workers_is_refused():
    mesh = jax.make_mesh((WORKERS,), ("data",), devices=jax.devices()[:WORKERS])
    step = demo_optax.make_train_step(loss, TX, mesh, stateful=True)
    opt_state = demo_optax.init_opt_state(TX, PARAMS, mesh)
    with pytest.raises(ValueError, match=r"make them with demo_optax.init_model_state"):
        step(PARAMS, opt_state, STATE, model.batch(0))

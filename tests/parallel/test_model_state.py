"""Models with a state of their own: dropout that differs, statistics that accumulate."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT, Fp8DirectDotGeneralOp
from flax.training.train_state import TrainState
from jax.sharding import AxisType

import demo_optax
from tests import model, workers
from tests.sweeps import sweep

MODES = {"manual": {}, "mapped": dict(sharding="auto")}
WORKERS, INNER = 4, 2
TX = demo_optax.demo(1e-3, demo_optax.Compression(4, 6), decay=0.9, axis_name="data")


class Model(nnx.Module):
    def __init__(self, rngs):
        self.out = nnx.Linear(12, 3, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(3, momentum=0.5, use_scale=False, use_bias=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        out = self.norm(self.out(x))
        return self.dropout(jnp.ones_like(out)) * out


GRAPH, PARAMS, STATE = nnx.split(Model(nnx.Rngs(0)), nnx.Param, ...)
KERNEL = np.asarray(PARAMS["out"]["kernel"][...])


def loss(params, state, batch):
    module = nnx.merge(GRAPH, params, state, copy=True)
    mask = module.dropout(jnp.ones((16,)))
    error = module(batch["x"]) - batch["y"]
    return jnp.mean(jnp.square(error)), (nnx.state(module, nnx.Not(nnx.Param)), mask)


def params():
    return jax.tree.map(jnp.copy, PARAMS)


def trained(steps=3, mode="manual", inner=INNER, batch_of=model.batch, **options):
    """The masks and the statistics of each step, and the last metrics."""
    mesh = workers.mesh_of(WORKERS, inner, kind=AxisType.Auto)
    carry = *workers.initial(TX, mesh, params), demo_optax.init_model_state(STATE, mesh)
    options = dict(mesh=mesh, loss=loss, batch=batch_of, stateful=True, **MODES[mode], **options)
    masks, states = [], []
    for i in range(steps):
        *carry, [metrics] = workers.train(TX, [i], start=carry, **options)
        masks.append(np.asarray(metrics.aux).reshape(-1, 16))
        statistics = nnx.filter_state(carry[2], nnx.BatchStat)
        states.append(jax.tree.map(np.asarray, nnx.as_pure(statistics)))
    return masks, states, metrics


@sweep("mapped", mode=MODES)
def test_masks_differ_between_workers_and_steps(mode):
    masks, _, _ = trained(mode=mode, inner=1)
    assert len(np.unique(np.concatenate(masks), axis=0)) == 3 * WORKERS


@pytest.mark.slow
def test_statistics_accumulate_alike_in_every_mode():
    runs = {mode: trained(mode=mode, inner=1)[1] for mode in MODES}
    means = runs["manual"][-1]["norm"]["mean"]
    assert means.shape == (WORKERS, 3)
    assert np.ptp(means, axis=0).max() > 0.01
    assert np.abs(means - runs["manual"][0]["norm"]["mean"]).max() > 0.01
    for run in runs.values():
        for ours, theirs in zip(run, runs["manual"], strict=True):
            chex.assert_trees_all_close(ours, theirs, rtol=1e-4, atol=1e-5)


@sweep("manual", mode=MODES)
def test_statistics_are_those_of_the_workers_own_batch(mode):
    """One step from the first parameters: mean of the layer, weighted by the momentum."""
    _, (first,), _ = trained(steps=1, mode=mode)
    x = model.batch(0)["x"].reshape(WORKERS, -1, 12)
    expected = 0.5 * (x @ KERNEL).mean(axis=1)
    np.testing.assert_allclose(first["norm"]["mean"], expected, rtol=1e-4, atol=1e-5)


def test_a_state_goes_through_the_microbatches():
    _, (state,), _ = trained(1, inner=1, microbatches=2)
    x = model.batch(0)["x"].reshape(WORKERS, 2, 2, 12)
    parts = (x @ KERNEL).mean(axis=2)
    expected = 0.25 * parts[:, 0] + 0.5 * parts[:, 1]
    np.testing.assert_allclose(state["norm"]["mean"], expected, rtol=1e-4, atol=1e-5)


@sweep("mapped", mode=["manual", "mapped"])
def test_a_worker_whose_gradient_is_not_finite_keeps_its_state(mode):
    def broken(i):
        batch = model.batch(i)
        batch["x"][:2] = np.inf
        return batch

    _, (state,), metrics = trained(steps=1, mode=mode, inner=1, batch_of=broken)
    assert metrics.exchange.participants < WORKERS
    np.testing.assert_array_equal(state["norm"]["mean"][0], 0)
    assert (state["norm"]["mean"][1:] != 0).any(axis=1).all()


@nnx.split_rngs(splits=3)
@nnx.vmap
def stacked_layers(rngs):
    return Model(rngs)


@sweep(("manual", 2), mode=MODES, microbatches=[1, 2])
def test_keys_of_stacked_layers_differ_between_workers_and_layers(mode, microbatches):
    graph, params, state = nnx.split(stacked_layers(nnx.Rngs(0)), nnx.Param, ...)
    mesh = workers.mesh_of(WORKERS, INNER, kind=AxisType.Auto)

    def loss(params, state, batch):
        layers = nnx.merge(graph, params, state, copy=True)
        masks = nnx.vmap(lambda layer: layer.dropout(jnp.ones(16)))(layers)
        loss = sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(nnx.state(layers, nnx.Param)))
        return loss * batch["x"].mean(), (nnx.state(layers, nnx.Not(nnx.Param)), masks)

    options = dict(stateful=True, donate=False, microbatches=microbatches, **MODES[mode])
    step = demo_optax.make_train_step(loss, TX, mesh, **options)
    opt_state = demo_optax.init_opt_state(TX, params, mesh)
    given = demo_optax.init_model_state(state, mesh)
    assert given["dropout"]["rngs"]["key"].shape == (WORKERS, 3)
    *_, metrics = step(params, opt_state, given, model.batch(0, rows=32))
    masks = np.unique(np.asarray(metrics.aux).reshape(-1, 16), axis=0)
    assert len(masks) == WORKERS * 3 * microbatches


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys_of_any_shape_differ(shape, impl):
    keys = jax.random.split(jax.random.key(0, impl=impl), shape)
    given = demo_optax.init_model_state({"key": keys}, workers.mesh_of(WORKERS))["key"]
    assert given.shape == (WORKERS, *shape)
    assert jax.random.key_impl(given) == impl
    numbers = np.asarray(jax.random.key_data(given)).reshape(given.size, -1)
    assert len(np.unique(numbers, axis=0)) == given.size


def test_fp8_scales_as_a_model_state_are_those_of_flax():
    layer = linen.Dense(3, dot_general_cls=Fp8DirectDotGeneralOp)
    x, mesh = (
        jax.random.normal(jax.random.key(0), (4, 16)),
        jax.sharding.AbstractMesh((1,), ("data",)),
    )
    variables = layer.init(jax.random.key(1), x)
    tx = optax.sgd(0.1)
    expected = TrainState.create(apply_fn=layer.apply, params=variables, tx=tx)

    def loss_at(variables, x):
        return jnp.mean(jnp.square(layer.apply(variables, x) - 1))

    def loss_with_scales(params, scales, x):
        at = {"params": jax.lax.stop_gradient(params), OVERWRITE_WITH_GRADIENT: scales}
        loss, gradient = jax.value_and_grad(loss_at)(at, x)
        difference = optax.tree.sub(params, at["params"])
        linear = optax.tree.vdot(gradient["params"], difference)
        return loss + linear, (gradient[OVERWRITE_WITH_GRADIENT], None)

    tx = optax.chain(demo_optax.mean_over_workers("data"), tx)
    step = demo_optax.make_train_step(loss_with_scales, tx, mesh, stateful=True)
    params = variables["params"]
    opt_state = demo_optax.init_opt_state(tx, params, mesh)
    scales = demo_optax.init_model_state(variables[OVERWRITE_WITH_GRADIENT], mesh)
    for batch in (x, 2 * x):
        params, opt_state, scales, metrics = step(params, opt_state, scales, batch)
        loss, gradient = jax.value_and_grad(loss_at)(expected.params, batch)
        expected = expected.apply_gradients(grads=gradient)
        np.testing.assert_allclose(metrics.loss, [loss], 1e-6)
    chex.assert_trees_all_close(params, expected.params["params"], rtol=1e-6)
    scales = jax.tree.map(lambda x: x[0], scales)
    chex.assert_trees_all_close(scales, expected.params[OVERWRITE_WITH_GRADIENT], rtol=1e-6)

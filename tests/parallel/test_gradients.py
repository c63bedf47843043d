"""Gradients stay with their worker, however the workers are run."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import demo_optax
from tests import model, workers


def gradients_of_all(grad, mode):
    return workers.spread(grad, (P(), P("data")), P("data"), model.WORKERS, mode)


@pytest.mark.parametrize("mode", workers.MODES)
def test_value_and_gradient_are_those_of_the_workers_own_data(mode):
    params, batch = model.init(), model.batch(0)
    value_and_grad = demo_optax.local_value_and_grad(model.loss, "data")
    losses, gradients = gradients_of_all(value_and_grad, mode)(params, model.stacked(batch))
    for worker in range(model.WORKERS):
        loss, gradient = jax.value_and_grad(model.loss)(params, model.part(batch, worker))
        np.testing.assert_allclose(losses[worker], loss, rtol=1e-5)
        for n in params:
            np.testing.assert_allclose(gradients[n][worker], gradient[n], rtol=1e-4, atol=1e-6)


def test_options_of_value_and_grad_are_passed_on():
    def loss_and_aux(params, batch):
        return model.loss(params, batch), batch["x"].sum()

    params, batch = model.init(), model.batch(0)
    value_and_grad = demo_optax.local_value_and_grad(loss_and_aux, "data", has_aux=True)
    (_, sums), _ = gradients_of_all(value_and_grad, "shard_map")(params, model.stacked(batch))
    expected = [model.part(batch, worker)["x"].sum() for worker in range(model.WORKERS)]
    np.testing.assert_allclose(sums, expected, rtol=1e-4, atol=1e-4)


SENT = demo_optax.Compression(2, 8, transform="identity")
MEAN = optax.chain(demo_optax.mean_over_workers("data"), optax.sgd(1.0))
OWN_POINTS = {
    "look_ahead": demo_optax.demo_scaled(0.1, SENT, look_ahead=1.0, axis_name="data"),
    "local_steps": demo_optax.local_steps(optax.sgd(0.1), MEAN, 2, axis_name="data"),
}


@pytest.mark.parametrize("name", OWN_POINTS)
def test_an_nnx_optimizer_has_the_losses_of_a_train_step(name):
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    linear = nnx.Linear(8, 4, use_bias=False, rngs=nnx.Rngs(0))
    graph, params = nnx.split(linear, nnx.Param)
    params, tx = jax.tree.map(jnp.copy, params), OWN_POINTS[name]
    step = demo_optax.make_train_step(
        lambda params, x: (nnx.merge(graph, params)(x) ** 2).mean(), tx, mesh, donate=False
    )
    opt_state = demo_optax.init_opt_state(tx, params, mesh)
    replicated = jax.NamedSharding(mesh, P())
    nnx.update(linear, jax.device_put(nnx.state(linear), replicated))
    optimizer = nnx.Optimizer(linear, demo_optax.stack_workers(tx, mesh), wrt=nnx.Param)
    optimizer.step[...] = jax.device_put(optimizer.step[...], replicated)
    gradients = demo_optax.worker_gradients(lambda model, x: (model(x) ** 2).mean(), mesh)

    @nnx.jit
    def nnx_step(model, optimizer, x):
        found = gradients(model, x, opt_state=nnx.state(optimizer))
        optimizer.update(model, found.gradients)
        return found.loss

    for x in np.random.default_rng(0).normal(size=(4, 4, 8)).astype(np.float32):
        params, opt_state, metrics = step(params, opt_state, x)
        np.testing.assert_allclose(nnx_step(linear, optimizer, x), metrics.loss, rtol=1e-5)

"""Gradients stay with their worker, however the workers are run."""

import jax
import numpy as np
import pytest
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


def test_plain_gradients_are_summed_by_shard_map():
    """Why there is a function for it."""
    params, batch = model.init(), model.batch(0)
    gradients = gradients_of_all(jax.grad(model.loss), "shard_map")(params, model.stacked(batch))
    parts = [jax.grad(model.loss)(params, model.part(batch, i)) for i in range(model.WORKERS)]
    for n in params:
        total = sum(part[n] for part in parts)
        for of_worker in gradients[n]:
            np.testing.assert_allclose(of_worker, total, rtol=1e-4, atol=1e-5)


def test_options_of_value_and_grad_are_passed_on():
    def loss_and_aux(params, batch):
        return model.loss(params, batch), batch["x"].sum()

    params, batch = model.init(), model.batch(0)
    value_and_grad = demo_optax.local_value_and_grad(loss_and_aux, "data", has_aux=True)
    (_, sums), _ = gradients_of_all(value_and_grad, "shard_map")(params, model.stacked(batch))
    expected = [model.part(batch, worker)["x"].sum() for worker in range(model.WORKERS)]
    np.testing.assert_allclose(sums, expected, rtol=1e-4, atol=1e-4)

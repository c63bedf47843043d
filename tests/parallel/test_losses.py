"""What is said of a loss that cannot be called, and of parameters that have no gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import demo_optax
from tests import model, workers

MESH = workers.mesh_of(2, kind=AxisType.Auto)
DEMO = demo_optax.demo(5e-3, demo_optax.Compression(4, 8), axis_name="data")
BATCH = model.batch(0)


def over_its_batch(params):
    return model.loss(params, BATCH)


def with_a_key(params, batch, key):
    return model.loss(params, batch) + 0 * jax.random.normal(key)


def with_a_state(params, state, batch):
    return model.loss(params, batch), (state, None)


@pytest.mark.parametrize(
    "loss, message",
    [
        (over_its_batch, r"must take \(params, batch\), but takes \(params\).*not by a closure"),
        (with_a_key, r"\(params, batch\), but takes \(params, batch, key\).*random_key=True"),
        (with_a_state, r"\(params, batch\), but takes \(params, state, batch\).*stateful=True"),
    ],
)
def test_a_loss_that_takes_other_arguments(loss, message):
    with pytest.raises(TypeError, match=message):
        jax.jit(demo_optax.worker_gradients(loss, MESH))(model.init(), BATCH)
    params, state = workers.initial(DEMO, MESH)
    with pytest.raises(TypeError, match=message):
        demo_optax.make_train_step(loss, DEMO, MESH)(params, state, BATCH)


def test_a_loss_may_take_its_arguments_by_any_signature():
    def loss(*args, scale=1.0):
        return scale * model.loss(*args)

    for fn in (loss, functools.partial(loss, scale=1.0), jax.jit(loss)):
        found = jax.jit(demo_optax.worker_gradients(fn, MESH))(model.init(), BATCH).loss
        np.testing.assert_allclose(found.mean(), model.loss(model.init(), BATCH), rtol=1e-5)


def test_gradients_without_a_batch():
    with pytest.raises(TypeError, match=r"take \(params, batch\).*1 arguments were given"):
        demo_optax.worker_gradients(over_its_batch, MESH)(model.init())


class Model(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(12, 3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.hidden(x))


def test_a_whole_model_with_dropout_is_refused_and_its_parts_are_taken():
    module = Model(nnx.Rngs(0))
    whole = demo_optax.worker_gradients(lambda model, batch: jnp.sum(model(batch["x"])), MESH)
    with pytest.raises(TypeError, match=r"params\.dropout.*has no gradient.*nnx\.split.*stateful"):
        nnx.jit(whole)(module, BATCH)

    graph, params, rest = nnx.split(module, nnx.Param, ...)

    def loss(params, rest, batch):
        model = nnx.merge(graph, params, rest, copy=True)
        return jnp.sum(model(batch["x"])), (nnx.state(model, nnx.Not(nnx.Param)), None)

    gradients = jax.jit(demo_optax.worker_gradients(loss, MESH, stateful=True))
    with pytest.raises(ValueError, match=r"model state of 2 workers.*init_model_state"):
        gradients(params, rest, BATCH)
    found = gradients(params, demo_optax.init_model_state(rest, MESH), BATCH)
    assert found.loss.shape == (2,) and np.isfinite(found.gradient_norm).all()

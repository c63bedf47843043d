"""What is said of a loss that cannot be called, and of parameters that have no gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

import demo_optax
from tests import model, workers
from tests.model import linear_loss
from tests.sweeps import sweep

MESH = workers.mesh_of(2, kind=AxisType.Auto)
DEMO = demo_optax.demo(5e-3, demo_optax.Compression(4, 6), axis_name="data")
BATCH = model.batch(0)
START = model.one_matrix()


def initial():
    return workers.initial(DEMO, MESH, model.one_matrix)


@pytest.mark.parametrize(
    "loss, said",
    [
        (lambda params: linear_loss(params, BATCH), "each worker's own part of the batch"),
        (lambda params, batch, key: linear_loss(params, batch), "random_key=True"),
        (lambda params, state, batch: (linear_loss(params, batch), (state, None)), "stateful=True"),
    ],
    ids=["over its batch", "with a key", "with a state"],
)
def test_a_loss_that_takes_other_arguments(loss, said):
    params, state = initial()
    step = demo_optax.make_train_step(loss, DEMO, MESH)
    gradients_of = jax.jit(demo_optax.worker_gradients(loss, MESH))
    of_start = functools.partial(gradients_of, opt_state=())
    for fn, args in (step, (params, state, BATCH)), (of_start, (START, BATCH)):
        with pytest.raises(TypeError, match="positional argument") as refused:
            fn(*args)
        assert said in "".join(refused.value.__notes__)


def test_an_error_inside_of_a_loss_is_left_alone():
    def loss(params, batch):
        return len(1) + linear_loss(params, batch)

    params, state = initial()
    with pytest.raises(TypeError, match="has no len") as raised:
        demo_optax.make_train_step(loss, DEMO, MESH)(params, state, BATCH)
    for note in getattr(raised.value, "__notes__", []):
        assert "random_key" not in note and "check_vma" not in note


def test_a_loss_may_take_its_arguments_by_any_signature():
    def loss(*args, scale=1.0):
        return scale * linear_loss(*args)

    for fn in (loss, functools.partial(loss, scale=1.0), jax.jit(loss)):
        found = jax.jit(demo_optax.worker_gradients(fn, MESH))(START, BATCH, opt_state=()).loss
        np.testing.assert_allclose(found.mean(), linear_loss(START, BATCH), rtol=1e-5)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(12, 3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.hidden(x))


def test_a_whole_model_with_dropout_is_refused_and_its_parts_are_taken():
    module = Model(nnx.Rngs(0))
    whole = demo_optax.worker_gradients(lambda model, batch: jnp.sum(model(batch["x"])), MESH)
    with pytest.raises(TypeError, match=r"parameter\.dropout.*nnx\.split.*stateful"):
        nnx.jit(whole)(module, BATCH, opt_state=())

    graph, params, rest = nnx.split(module, nnx.Param, ...)

    def loss(params, rest, batch):
        model = nnx.merge(graph, params, rest, copy=True)
        return jnp.sum(model(batch["x"])), (nnx.state(model, nnx.Not(nnx.Param)), None)

    gradients = jax.jit(demo_optax.worker_gradients(loss, MESH, stateful=True))
    with pytest.raises(ValueError, match=r"model state of 2 workers.*init_model_state"):
        gradients(params, rest, BATCH, opt_state=())
    stacked = demo_optax.init_model_state(rest, MESH)
    found = gradients(params, stacked, BATCH, opt_state=())
    assert found.loss.shape == (2,) and np.isfinite(found.gradient_norm).all()


@jax.custom_vjp
def with_a_derivative(params):
    return params["out"].sum()


def zero_derivative(_, gradient):
    return (jax.tree.map(jnp.zeros_like, START),)


with_a_derivative.defvjp(lambda params: (with_a_derivative(params), None), zero_derivative)
OF_TYPES = {
    "scan": lambda x: jax.lax.scan(lambda c, x: (c + x.sum(), None), 0.0, x)[0],
    "fori_loop": lambda x: jax.lax.fori_loop(0, 2, lambda i, c: c + x.sum(), 0.0),
    "while_loop": lambda x: jax.lax.while_loop(lambda c: c < 1, lambda c: c + x.sum() ** 2, 0.0),
    "cond": lambda x: jax.lax.cond(x.sum() > 0, lambda: x.sum(), lambda: 0.0),
}


@sweep("scan", "custom_vjp", name=[*OF_TYPES, "custom_vjp"])
def test_values_that_vary_may_meet_others_unless_a_worker_has_several_devices(name):
    def loss(params, batch):
        other = OF_TYPES[name](batch["x"]) if name in OF_TYPES else with_a_derivative(params)
        return linear_loss(params, batch) + 0 * other

    def gradients(params, batch):
        return demo_optax.local_value_and_grad(loss, "data")(params, batch)[0][None]

    def train(mesh=MESH, **options):
        step = demo_optax.make_train_step(loss, DEMO, mesh, **options)
        state = workers.initial(DEMO, mesh, model.one_matrix)
        return np.asarray(step(*state, BATCH)[2].loss)

    expected, several = train(), workers.mesh_of(2, 2, kind=AxisType.Auto)
    on_devices = jax.shard_map(
        gradients, mesh=MESH, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P("data")
    )
    for fails in (lambda: train(several, microbatches=2), lambda: on_devices(START, BATCH)):
        with pytest.raises((TypeError, ValueError)) as error:
            fails()
        (note,) = [note for note in error.value.__notes__ if "differ between devices" in note]
        assert "check_vma=False" in note and "sharding='auto'" in note and "troubleshoot" in note
    np.testing.assert_allclose(train(microbatches=2), expected, rtol=1e-5)
    np.testing.assert_allclose(train(several, sharding="auto"), expected, rtol=1e-5)


def test_a_mean_over_workers_in_the_loss_is_refused_in_our_own_words():
    def loss(params, batch):
        return jax.lax.pmean(linear_loss(params, batch), "data")

    simulated, (params, state) = AbstractMesh((2,), ("data",)), initial()
    in_steps = [
        (demo_optax.make_train_step(loss, DEMO, MESH, sharding="auto"), state),
        (
            demo_optax.make_train_step(loss, DEMO, simulated),
            demo_optax.init_opt_state(DEMO, params, simulated),
        ),
    ]
    for fn, state in in_steps:
        with pytest.raises(NameError) as refused:
            fn(params, state, BATCH)
        assert "leave out pmean and psum" in "".join(refused.value.__notes__)
    for mesh in MESH, simulated:
        with pytest.raises(NameError) as refused:
            demo_optax.worker_gradients(loss, mesh)(START, BATCH, opt_state=())
        assert "leave out pmean and psum" in "".join(refused.value.__notes__)

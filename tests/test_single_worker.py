"""A loop that trains one worker on several devices is told so, unless it asked for that."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import demo_optax
from tests import model, workers

SETTINGS = demo_optax.Compression(4, 8)
MEANT = demo_optax.demo_scaled(3e-3, SETTINGS, exchange=demo_optax.AllGather(None))
WARNED = r"the {} lie on 4 devices.*axis_name.*make_train_step.*stack_workers.*worker_gradients"
KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])


def placed(kind, *trees):
    mesh = workers.mesh_of(4, kind=kind)
    return jax.device_put(trees, (NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))))


def run(tx, params, state, batch):
    gradient = jax.grad(model.loss)(params, batch)
    updates, state = tx.update(gradient, state, params)
    return optax.apply_updates(params, updates), state


@pytest.fixture
def tx():
    """A new one each time, since each warns once."""
    return demo_optax.demo_scaled(3e-3, SETTINGS)


@KINDS
def test_a_state_for_parameters_on_several_devices(tx, kind):
    params, _ = placed(kind, model.init(), model.batch(0))
    with pytest.warns(UserWarning, match=WARNED.format("parameters")):
        tx.init(params)


@KINDS
def test_an_nnx_optimizer_for_parameters_on_several_devices(tx, kind):
    params, _ = placed(kind, model.init(), model.batch(0))
    with pytest.warns(UserWarning, match=WARNED.format("parameters")):
        nnx.Optimizer(nnx.Dict(jax.tree.map(nnx.Param, params)), tx, wrt=nnx.Param)


def test_gradients_on_several_devices(tx):
    state = tx.init(model.init())
    params, batch = placed(AxisType.Auto, model.init(), model.batch(0))
    with pytest.warns(UserWarning, match=WARNED.format("gradients")):
        run(tx, params, state, batch)


def test_types_tell_it_inside_a_plain_jit(tx):
    state = tx.init(model.init())
    params, batch = placed(AxisType.Explicit, model.init(), model.batch(0))
    with pytest.warns(UserWarning, match=WARNED.format("gradients")):
        jax.jit(lambda *args: run(tx, *args))(params, state, batch)


@KINDS
def test_one_worker_on_several_devices_may_be_meant(tx, kind):
    params, batch = placed(kind, model.init(), model.batch(0))
    updated, _ = jax.jit(lambda *args: run(MEANT, *args))(params, MEANT.init(params), batch)
    expected, _ = run(tx, model.init(), tx.init(model.init()), model.batch(0))
    for name, x in expected.items():
        np.testing.assert_allclose(updated[name], x, rtol=1e-3, atol=1e-5)


def test_an_optimizer_warns_once(tx):
    params, _ = placed(AxisType.Auto, model.init(), model.batch(0))
    with pytest.warns(UserWarning) as caught:
        state = tx.init(params)
        for _ in range(2):
            _, state = tx.update(params, state, params)
    assert len(caught) == 1


@KINDS
def test_nobody_is_warned_who_has_workers_or_a_single_device(tx, kind):
    """Warnings are errors here."""
    mesh = workers.mesh_of(4, kind=kind)
    params, batch = placed(kind, model.init(), model.batch(0))
    of_workers = demo_optax.demo_scaled(3e-3, SETTINGS, axis_name="data")
    state = demo_optax.init_opt_state(of_workers, params, mesh)
    demo_optax.make_train_step(model.loss, of_workers, mesh)(params, state, batch)
    one = workers.mesh_of(1, kind=kind)
    with jax.set_mesh(one):
        there = jax.device_put(model.init(), NamedSharding(one, P()))
        jax.jit(tx.update)(there, jax.jit(tx.init)(there), there)

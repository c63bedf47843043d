"""What a step is told of its batch, and on which mesh it lies."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import demo_optax
from tests import model, workers
from tests.sweeps import sweep

WORKERS, INNER = 4, 2
SMALL = demo_optax.Compression(4, 6)
TX = demo_optax.demo_sgd(0.1, SMALL, decay=0.9, axis_name="data")
MODES = {"manual": "manual", "mapped": "auto"}


MESH = workers.mesh_of(WORKERS, INNER, kind=AxisType.Auto)
train = functools.partial(
    workers.train, TX, mesh=MESH, params=model.one_matrix, loss=model.linear_loss
)


def assert_same(found, expected):
    losses = ([metrics.loss for metrics in run[2]] for run in (found, expected))
    chex.assert_trees_all_close(*losses, rtol=1e-5)
    chex.assert_trees_all_close(found[0], expected[0], rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def plain():
    return train(range(3))


@sweep(("manual", 1), ("mapped", 2), mode=MODES, microbatches=[1, 2])
def test_shared_leaves_reach_every_worker_whole(mode, microbatches, plain):
    weights = np.linspace(0.5, 1.5, 3, dtype=np.float32)

    def loss(params, batch):
        rows, weights, scale = batch
        assert weights.shape == (3,) and scale.shape == ()
        return scale * model.linear_loss(params, rows) + 0 * weights.sum()

    found = train(
        range(3),
        loss=loss,
        batch=lambda i: (model.batch(i), weights, 1.0),
        batch_specs=(P(("data", "fsdp")), P(), P()),
        sharding=MODES[mode],
        microbatches=microbatches,
    )
    assert_same(found, plain)


@sweep(("mapped", 2), mode=MODES, microbatches=[1, 2])
def test_rows_may_stand_behind_another_dimension(mode, microbatches, plain):
    def loss(params, batch):
        return model.linear_loss(params, jax.tree.map(jnp.transpose, batch))

    found = train(
        range(3),
        loss=loss,
        batch=lambda i: jax.tree.map(np.transpose, model.batch(i)),
        batch_specs=P(None, ("data", "fsdp")),
        sharding=MODES[mode],
        microbatches=microbatches,
    )
    assert_same(found, plain)


@sweep("mapped", mode=MODES)
def test_devices_of_a_worker_may_share_a_batch_smaller_than_their_number(mode):
    def rows(i):
        return jax.tree.map(lambda x: x[:WORKERS], model.batch(i))

    alone = workers.mesh_of(WORKERS, 1, kind=AxisType.Auto)
    expected = train(range(3), batch=rows, mesh=alone)
    found = train(range(3), batch=rows, batch_specs=P("data"), sharding=MODES[mode])
    assert_same(found, expected)
    with pytest.raises(ValueError, match="cannot be divided among 8 devices"):
        train(range(1), batch=rows, sharding=MODES[mode])


@sweep("sharded", specs=["whole", "sharded"])
def test_meshes_whose_axes_are_of_two_kinds_train_alike(specs, plain):
    specs = {"whole": P(), "sharded": {"out": P("fsdp")}}[specs]
    auto, explicit = AxisType.Auto, AxisType.Explicit
    for kinds in ((auto, explicit), (explicit, auto)):
        mesh = jax.make_mesh((WORKERS, INNER), ("data", "fsdp"), kinds)
        assert_same(train(range(3), mesh=mesh, param_specs=specs), plain)


ALONG_TWO_AXES = demo_optax.demo_sgd(0.1, SMALL, axis_name=("a", "b"))


@pytest.mark.parametrize("spec", [P("a"), P(("b", "a")), P(("c", "a", "b")), P("a", "b")])
def test_a_batch_that_modes_would_divide_otherwise_is_refused(spec):
    mesh = workers.mesh_of(2, 2, 2, names=("a", "b", "c"), kind=AxisType.Auto)
    state = demo_optax.init_opt_state(ALONG_TWO_AXES, model.one_matrix(), mesh, ("a", "b"))
    for sharding in ("manual", "auto"):
        step = demo_optax.make_train_step(
            model.linear_loss, ALONG_TWO_AXES, mesh, ("a", "b"), batch_specs=spec, sharding=sharding
        )
        with pytest.raises(ValueError, match="in this order and before any other"):
            step(model.one_matrix(), state, model.batch(0))


@sweep(((2, 2), np.asarray), sizes=[(4,), (2, 2)], kind=[np.asarray, jnp.asarray])
def test_a_batch_of_no_mesh_is_put_on_an_explicit_one(sizes, kind):
    def loss(params, batch):
        rows, weights = batch
        return jnp.mean(weights) * model.linear_loss(params, rows)

    params = model.one_matrix()
    batch = jax.tree.map(kind, (model.batch(0), np.linspace(0.5, 1.5, 3, dtype=np.float32)))

    def found(axis_type):
        mesh = workers.mesh_of(*sizes, kind=axis_type)
        gradients = demo_optax.worker_gradients(loss, mesh, batch_specs=(P("data"), P()))
        return jax.tree.map(np.asarray, jax.jit(gradients)(params, batch, opt_state=()))

    chex.assert_trees_all_close(found(AxisType.Explicit), found(AxisType.Auto), rtol=1e-5)


def rows_on(shape, names, kind):
    mesh = workers.mesh_of(*shape, names=names, kind=kind)
    return jax.device_put(np.arange(16, dtype=np.float32), jax.NamedSharding(mesh, P(names[0])))


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize(
    "shape, names, other",
    [((4,), ("rows",), AxisType.Explicit), ((2, 2), ("rows", "data"), AxisType.Auto)],
)
def test_a_batch_on_another_mesh_is_put_on_the_workers(shape, names, other, kind):
    mesh, batch = workers.mesh_of(4, kind=kind), rows_on(shape, names, other)
    found = jax.jit(demo_optax.worker_gradients(lambda w, x: w * x.sum(), mesh))(
        1.0, batch, opt_state=()
    )
    np.testing.assert_array_equal(found.gradients, np.arange(16.0).reshape(4, 4).sum(axis=1))

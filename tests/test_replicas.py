"""Parameters stay bit-identical on all workers, while every worker has its own momentum."""

import functools

import chex
import jax
import numpy as np
import optax
import pytest

import demo_optax
from tests import model, workers
from tests.sweeps import slow, sweep

SMALL = demo_optax.Compression(2, 4)
OPTIMIZERS = {
    "demo": demo_optax.demo(
        5e-3, decay=0.95, weight_decay=0.01, compression=SMALL, axis_name="data"
    ),
    "adamw": demo_optax.demo_adamw(
        5e-3,
        demo_optax.Compression(4, 8, value_coding="bfloat16", transform="random"),
        axis_name="data",
    ),
    "shared positions": demo_optax.demo(
        5e-3,
        decay=0.95,
        weight_decay=0.01,
        compression=demo_optax.Compression(
            16, 8, "sign", transform="randomized-dct", selection="random-slicing"
        ),
        axis_name="data",
    ),
    "preconditioned": demo_optax.demo(
        5e-3,
        decay=0.95,
        precondition=optax.scale_by_rms(0.95, bias_correction=True),
        compression=SMALL,
        axis_name="data",
    ),
}


train = functools.partial(workers.train, params=model.one_matrix, loss=model.linear_loss)


def copies(x):
    """The bytes of an array on each device."""
    return [np.asarray(shard.data).tobytes() for shard in x.addressable_shards]


@sweep("adamw", name=OPTIMIZERS)
def test_replicas_are_bit_identical_after_200_steps(name):
    tx = OPTIMIZERS[name]
    before = model.linear_loss(model.one_matrix(), model.batch(1000))
    params, state, metrics = train(tx, range(200))
    for leaf in jax.tree.leaves(params):
        assert len(copies(leaf)) == model.WORKERS
        assert len(set(copies(leaf))) == 1
    for leaf in jax.tree.leaves(state[0].momentum):
        assert len(set(copies(leaf))) == model.WORKERS
    for leaf in jax.tree.leaves(state[1:]):
        assert len(set(copies(leaf))) == 1
    assert metrics[-1].exchange.participants == model.WORKERS
    assert model.linear_loss(jax.device_get(params), model.batch(1000)) < 0.5 * before


@functools.cache
def trained(steps):
    params, state, _ = train(OPTIMIZERS["demo"], range(steps))
    return params, state[0].momentum


def test_replicas_along_two_axes_are_those_along_one():
    both = ("outer", "inner")
    tx = demo_optax.demo(5e-3, decay=0.95, weight_decay=0.01, compression=SMALL, axis_name=both)
    mesh = workers.mesh_of(2, 4, names=both)
    params, state, _ = train(tx, range(5), mesh=mesh, axis_name=both)
    ours = params, state[0].momentum
    chex.assert_trees_all_equal(ours, trained(5))


@pytest.mark.parametrize("kind, placed", [("Explicit", True), ("Auto", False), slow("Auto", True)])
def test_replicas_are_the_same_on_every_type_of_mesh(kind, placed):
    mesh = workers.mesh_of(8, kind=jax.sharding.AxisType[kind])

    def params():
        everywhere = jax.NamedSharding(mesh, jax.P())
        params = model.one_matrix()
        return jax.device_put(params, everywhere) if placed else params

    params, state, _ = train(OPTIMIZERS["demo"], range(5), mesh=mesh, params=params)
    ours = params, state[0].momentum
    chex.assert_trees_all_equal(ours, trained(5))

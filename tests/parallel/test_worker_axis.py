"""Which state belongs to a worker, in whatever chain or holder the optimizer stands."""

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax._src.parallel import shards
from tests import model, workers
from tests.sweeps import sweep

SMALL = demo_optax.Compression(4, 6)
DEMO = demo_optax.demo(1e-3, SMALL, axis_name="data")
MOMENTUM = demo_optax.decoupled_momentum(0.9, SMALL, axis_name="data")
LOCAL, SHARED = P("data"), P()
GRADIENTS = {
    n: np.random.default_rng(1).normal(size=(4, *x.shape)).astype(np.float32)
    for n, x in model.affine().items()
}


def specs_of(tx):
    return demo_optax.state_specs(tx, model.one_matrix(), workers.mesh_of(8))


def same(specs, spec):
    leaves = jax.tree.leaves(specs)
    return len(leaves) > 0 and all(leaf == spec for leaf in leaves)


def scaled(tree, factor):
    return jax.tree.map(lambda x: x * np.float32(factor), tree)


def run(tx, steps=3, mode="shard_map", count=4, gradients=GRADIENTS):
    """Updates of each step, for gradients that are scaled differently on each."""
    params = {n: x for n, x in model.affine().items() if n in gradients}
    update, state = workers.started(tx, params, count, mode)
    all_updates = []
    for step in range(steps):
        updates, state = update(scaled(gradients, 1 + step), state, params)
        all_updates.append(updates)
    return all_updates, state


assert_close = functools.partial(chex.assert_trees_all_close, rtol=1e-5, atol=1e-7)


def test_state_in_front_of_the_exchange_is_local_and_behind_it_shared():
    tx = optax.chain(optax.scale_by_adam(), MOMENTUM, optax.scale_by_adam(), optax.scale(-1e-2))
    before, momentum, behind, _ = specs_of(tx)
    assert same((before.mu, before.nu), LOCAL)
    assert before.count == LOCAL
    assert same(momentum.momentum, LOCAL)
    assert momentum.count == SHARED
    assert same(momentum.metrics, SHARED)
    assert same(behind, SHARED)

    params, state, _ = workers.train(tx, range(3), params=model.one_matrix, loss=model.linear_loss)
    for local in jax.tree.leaves((state[0].mu, state[0].nu, state[1].momentum)):
        entries = np.asarray(local)
        assert len(entries) == model.WORKERS
        assert len({entry.tobytes() for entry in entries}) == model.WORKERS
    shapes = jax.tree.map(jnp.shape, params)
    assert jax.tree.map(jnp.shape, state[2].nu) == shapes
    for leaf in jax.tree.leaves((params, state[2])):
        assert len({np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}) == 1


def test_state_grows_a_worker_axis_where_its_specs_say_so():
    tx, mesh = demo_optax.demo_adamw(1e-3, SMALL, axis_name="data"), workers.mesh_of(8)
    params = model.one_matrix()
    state = demo_optax.init_opt_state(tx, params, mesh)
    jax.tree.map(
        lambda x, one, spec: (
            np.testing.assert_equal(x.shape, (8, *one.shape) if spec == LOCAL else one.shape),
            np.testing.assert_equal(x.sharding.spec == spec, True),
        ),
        state,
        tx.init(params),
        specs_of(tx),
    )
    for shapes in params, jax.eval_shape(lambda: params):
        shardings = demo_optax.stack_workers(tx, mesh).state_shardings(shapes)
        same = jax.tree.map(lambda x, s: x.sharding == s, state, shardings)
        assert all(jax.tree.leaves(same))


def in_rounds(**options):
    outer = demo_optax.decoupled(optax.sgd(1.0), SMALL, axis_name="data")
    return demo_optax.local_steps(optax.adamw(1e-3), outer, 4, axis_name="data", **options)


HELD = {"w": True, "b": False}
MAPPED = {
    "mask": lambda: demo_optax.demo_scaled(1e-2, weight_decay=0.1, mask=HELD, axis_name="data"),
    "masked": lambda: optax.chain(
        optax.masked(MOMENTUM, HELD), optax.masked(optax.set_to_zero(), {"w": False, "b": True})
    ),
    "partition": lambda: optax.partition(
        {True: MOMENTUM, False: demo_optax.demo_scaled(1e-2, axis_name="data")}, HELD
    ),
    "two phases": lambda: demo_optax.demo(1e-2, SMALL, exchange=demo_optax.TwoPhase("data")),
    "rounds": in_rounds,
    "fragments": lambda: in_rounds(fragments=2),
}


@pytest.mark.parametrize("name", MAPPED)
def test_map_params_maps_whatever_is_stacked(name):
    tx = demo_optax.stack_workers(MAPPED[name](), workers.mesh_of(2))
    state = jax.eval_shape(tx.init, {"w": jnp.ones((6, 6)), "b": jnp.ones(6)})
    found = optax.tree.map_params(tx, lambda _: "parameter", state)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    nodes = jax.tree.leaves(found, is_leaf=shards.is_momentum)
    momenta = [node.momentum for node in filter(shards.is_momentum, nodes)]
    assert set(jax.tree.leaves(momenta)) == {"parameter"}


@sweep("shard_map", mode=["vmap", "shard_map"])
def test_partition_leaves_each_part_its_own_optimizer(mode):
    dense = optax.chain(demo_optax.mean_over_workers("data"), optax.adam(0.1))
    labels = {"out": "demo", "bias": "dense"}
    tx = optax.partition({"demo": optax.chain(MOMENTUM, optax.scale(-1.0)), "dense": dense}, labels)
    ours, _ = run(tx, mode=mode)

    matrices = {"out": GRADIENTS["out"]}
    theirs, _ = run(optax.chain(MOMENTUM, optax.scale(-1.0)), gradients=matrices)
    bias, adam = {"bias": GRADIENTS["bias"].mean(0)}, optax.adam(0.1)
    state, adam_update = adam.init(bias), jax.jit(adam.update)
    for step, updates in enumerate(ours):
        assert_close({n: updates[n] for n in matrices}, theirs[step])
        expected, state = adam_update(scaled(bias, 1 + step), state)
        assert_close({"bias": updates["bias"]}, expected)


OWN = {
    "demo_scaled": demo_optax.demo_scaled(1e-3, SMALL, axis_name="data"),
    "owners, delayed": demo_optax.demo(
        1e-3, SMALL, exchange=demo_optax.Delayed(demo_optax.TwoPhase("data"))
    ),
    "local steps": demo_optax.local_steps(
        optax.adam(1e-2), demo_optax.demo_sgd(1.0, SMALL, axis_name="data"), 2, axis_name="data"
    ),
}


@sweep("owners, delayed", name=OWN)
def test_a_state_begins_with_the_types_that_updates_give(name):
    tx, mesh = OWN[name], workers.mesh_of(model.WORKERS)

    def train(batch):
        def step(carry, _):
            params, state = carry
            own = demo_optax.local_parameters(params, state)
            gradient = demo_optax.local_value_and_grad(model.linear_loss, "data")(own, batch)[1]
            updates, state = tx.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), None

        params = model.one_matrix()
        return jax.lax.scan(step, (params, tx.init(params)), length=4)[0][0]

    batch = jax.device_put(model.batch(0), jax.NamedSharding(mesh, P("data")))
    sharded = jax.shard_map(train, mesh=mesh, in_specs=P("data"), out_specs=P())
    trained = jax.jit(sharded)(batch)
    before, after = (
        model.linear_loss(params, model.batch(0)) for params in (model.one_matrix(), trained)
    )
    assert after < before


def test_a_preconditioner_is_not_called_replicated():
    tx, mesh = OWN["demo_scaled"], workers.mesh_of(model.WORKERS)
    init = jax.shard_map(
        lambda: tx.init(model.one_matrix())[0].precondition, mesh=mesh, in_specs=(), out_specs=P()
    )
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(init)()


class Pair(NamedTuple):
    w: Any
    b: Any


@pytest.mark.parametrize("kind", [tuple, Pair._make, list, lambda x: {"pair": tuple(x)}])
def test_parameters_may_be_tuples(kind):
    mesh = workers.mesh_of(2, 2)
    params = kind([np.ones((8, 8), np.float32), np.ones(8, np.float32)])
    specs = kind([P("fsdp"), P()])
    state = demo_optax.state_specs(DEMO, params, mesh, param_specs=specs)[0].momentum
    assert jax.tree.leaves(state) == [P("data", "fsdp"), P("data")]
    assert jax.tree.structure(state) == jax.tree.structure(params)

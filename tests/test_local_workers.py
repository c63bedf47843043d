"""Workers that go a way of their own: what breaks, what is sharded, what is saved."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import demo_optax
from tests import model, workers
from tests.local_methods import BOTH, MESH, OUTER, dense, layer, local, loss_of_layer, sparse, train
from tests.saved_runs import carried_over
from tests.sweeps import sweep

FLAT = optax.adamw(1e-2, b2=0.95)  # rates that do not fall


def of_worker(tree, worker):
    return jax.tree.map(lambda x: np.asarray(x)[worker], tree)


def replaced(tx, state, worker, **damage):
    """A state in which one worker's leaves of a field hold what they should not."""
    shardings = demo_optax.state_shardings(tx, model.init(), MESH)

    def broken(value):
        def leaf(x):
            x = np.array(x)
            if x.dtype.kind == "f":
                x[worker] = value
            return x

        return lambda tree: jax.tree.map(leaf, tree)

    fields = {name: broken(value)(getattr(state, name)) for name, value in damage.items()}
    return jax.device_put(state._replace(**fields), shardings)


@sweep("diloco", name=BOTH)
def test_a_gradient_that_is_not_finite_costs_its_worker_that_step(name):
    tx = BOTH[name]
    params, state, _ = train(tx, range(1))
    before, inner = (jax.tree.map(np.asarray, x) for x in (state.displacement, state.inner))
    batch = model.batch(1)
    batch["x"][8:12] = np.nan  # the third worker's rows
    step = workers.step_of(tx, MESH)
    params, state, metrics = step(params, state, batch)
    assert np.isfinite(np.asarray(metrics.gradient_norm)).tolist() == [True, True, False, True]
    chex.assert_trees_all_equal(
        of_worker((state.displacement, state.inner), 2), of_worker((before, inner), 2)
    )
    assert (np.asarray(state.displacement["out"])[1] != before["out"][1]).any()
    params, state, metrics = step(params, state, model.batch(2))
    assert bool(metrics.exchanged) and all(np.isfinite(x).all() for x in jax.tree.leaves(params))
    if metrics.exchange:
        assert metrics.exchange.participants == 4


@sweep("sparseloco", name=BOTH)
def test_own_parameters_that_are_not_finite_are_not_sent_and_begin_again(name):
    tx, rest = BOTH[name], [0, 1, 3]
    params, state, _ = train(tx, range(5))
    state = replaced(tx, state, 2, displacement=np.inf)
    specs = workers.specs_of(state)
    params, state = jax.tree.map(np.asarray, (params, state))
    alone = jax.tree.map(lambda s, x: x[rest] if s == P("data") else x, specs, state)
    batch = model.batch(5)
    batch_of_rest = {n: np.concatenate(x[rest]) for n, x in model.stacked(batch, 4).items()}

    step, step_alone = (workers.step_of(tx, workers.mesh_of(count)) for count in (4, 3))
    expected = step_alone(params, alone, batch_of_rest)[0]
    params, state, metrics = step(params, state, batch)
    chex.assert_trees_all_close(params, expected, rtol=1e-6, atol=1e-7)
    chex.assert_trees_all_equal(state.displacement, jax.tree.map(np.zeros_like, state.displacement))
    if metrics.exchange:
        assert metrics.exchange.participants == 3
    params, state, seen = train(tx, range(6, 9), start=(params, state))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((params, state)))
    if seen[-1].exchange:
        assert seen[-1].exchange.participants == 4


def put_into(x, worker, value):
    """An array, of which one worker's entries hold a value."""
    entries = np.array(x)
    entries[worker] = value
    return jax.device_put(entries, x.sharding)


def test_a_link_of_outer_gets_zeros_where_own_parameters_are_not_finite():
    sparse = demo_optax.decoupled(optax.sgd(1.0), demo_optax.Compression(4, 8), axis_name="data")
    outer = optax.chain(optax.ema(0.5, debias=False), sparse)
    tx = demo_optax.local_steps(optax.sgd(0.1), outer, 2, axis_name="data")
    ends = []
    for mesh in (workers.mesh_of(2), jax.sharding.AbstractMesh((2,), ("data",))):
        params, state = workers.initial(tx, mesh, layer)
        step = workers.step_of(tx, mesh, loss_of_layer)
        averages, participants = [], []
        for i in range(6):
            params, state, metrics = step(params, state, model.batch(i))
            if i == 2:
                displacement = {n: put_into(d, 1, np.inf) for n, d in state.displacement.items()}
                state = state._replace(displacement=displacement)
            if metrics.exchanged:
                averages.append(np.asarray(state.outer[0].ema["hidden"])[1])
                participants.append(int(metrics.exchange.participants))
        assert participants == [2, 1, 2]
        np.testing.assert_allclose(averages[1], averages[0] / 2)
        state = optax.tree.set(state, received=0)  # a checksum of bits that are rounded otherwise
        ends.append(jax.tree.map(np.asarray, (params, state)))
    chex.assert_trees_all_close(*ends, rtol=1e-6, atol=1e-7)


def test_an_inner_state_that_is_infinite_at_first_goes_on_from_round_to_round():
    inner = optax.chain(optax.scale_by_adam(), optax.contrib.reduce_on_plateau())
    tx = demo_optax.local_steps(inner, optax.sgd(1.0), 2)
    params, update = np.ones(4, np.float32), jax.jit(tx.update)
    state = jax.jit(tx.init)(params)
    for _ in range(6):
        _, state = update(params, state, params, value=1.0)
    assert state.inner[0].count == 6


def test_an_inner_state_that_is_not_finite_begins_again_with_the_round():
    tx = BOTH["diloco"]
    params, state, _ = train(tx, range(4))
    state = replaced(tx, state, 1, inner=np.nan)
    params, state, _ = train(tx, range(4, 6), start=(params, state))
    adam = optax.tree.get(state.inner, "ScaleByAdamState")
    chex.assert_trees_all_equal(of_worker(adam.mu, 1), jax.tree.map(np.zeros_like, model.init()))
    assert adam.count.tolist() == [6, 0, 6, 6]
    assert np.isfinite(np.asarray(adam.nu["out"])).all() and np.asarray(adam.nu["out"])[0].any()
    params, state, _ = train(tx, range(6, 9), start=(params, state))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((params, state)))


@sweep("diloco", name=BOTH)
def test_own_parameters_keep_their_mean_on_other_workers(name, tmp_path):
    tx, means = BOTH[name], []
    start = train(tx, range(4))[:2]
    for i, (before, after) in enumerate([(4, 2), (2, 4)]):
        means.append(jax.tree.map(lambda x: np.mean(x, axis=0), start[1].displacement))
        meshes = map(workers.mesh_of, (before, after))
        start = carried_over(tmp_path / str(i), start, tx, *meshes)[1:3]
        assert start[1].displacement["out"].shape == (after, 16, 3)
        assert int(start[1].mini_step) == 1
    means.append(jax.tree.map(lambda x: np.mean(x, axis=0), start[1].displacement))
    for other in means[1:]:
        chex.assert_trees_all_close(other, means[0], rtol=1e-5, atol=1e-7)
    _, _, seen = train(tx, range(4, 8), start=start)
    assert np.asarray(seen[-1].loss).mean() < np.asarray(seen[0].loss).mean()


ONE_AXIS = {"hidden": P(None, "fsdp"), "bias": P(), "out": P("fsdp")}
TWO_AXES = {"hidden": P("tensor", "fsdp"), "bias": P("tensor"), "out": P("fsdp")}
SHARDED = {
    "4 x 2": ((4, 2), ONE_AXIS, {}),
    "4 x 2, mapped": ((4, 2), ONE_AXIS, dict(sharding="auto")),
    "2 x 2 x 2": ((2, 2, 2), TWO_AXES, {}),
}


@sweep(("sparseloco", "4 x 2, mapped"), name=BOTH, layout=SHARDED)
def test_sharded_workers_follow_whole_ones(name, layout):
    shape, specs, way = SHARDED[layout]
    # All of each block is sent, since blocks end where shards end.
    outer = {"diloco": dense(), "sparseloco": sparse("float32", topk=64)}[name]
    tx = local(outer, inner=FLAT)
    mesh = workers.mesh_of(*shape, kind=AxisType.Auto)
    ours = train(tx, range(7), mesh=mesh, param_specs=specs, clip_norm=0.5, **way)
    theirs = train(tx, range(7), mesh=workers.mesh_of(shape[0]), clip_norm=0.5)
    chex.assert_trees_all_close(ours[0], theirs[0], rtol=2e-4, atol=1e-5)
    chex.assert_trees_all_close(ours[1].displacement, theirs[1].displacement, rtol=2e-3, atol=2e-5)
    assert demo_optax.check_replicas(ours[:2], mesh) == ()
    if name == "sparseloco":
        told = [metrics.exchange for metrics in ours[2]]
        chex.assert_trees_all_equal(
            told[4], told[2]
        )  # what a round told stays until the next has ended
        assert told[5].received != told[2].received
        assert told[5].participants == shape[0] and bool(told[5].agreed)


@sweep("sparseloco", name=BOTH)
def test_one_plain_step_a_round_is_the_outer_optimizer(name):
    tx = local(OUTER[name], every=1, inner=optax.sgd(1.0))
    ours, theirs = (
        train(each, range(6), params=layer, loss=loss_of_layer) for each in (tx, OUTER[name])
    )
    chex.assert_trees_all_close(ours[0], theirs[0], rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(ours[1].outer, theirs[1], rtol=1e-5, atol=1e-6)
    assert all(bool(metrics.exchanged) for metrics in ours[2] + theirs[2])


@sweep("diloco", name=BOTH)
def test_a_loop_of_ones_own_under_vmap_follows(name):
    tx, params = BOTH[name], model.init()
    states = jax.jit(jax.vmap(lambda _: tx.init(params)))(np.arange(4))

    @jax.jit
    def step(params, states, batch):
        def worker(state, batch):
            gradient = jax.grad(model.loss)(demo_optax.local_parameters(params, state), batch)
            return tx.update(gradient, state, params)

        updates, states = jax.vmap(worker, axis_name="data")(states, batch)
        return optax.apply_updates(params, jax.tree.map(lambda u: u[0], updates)), states

    for i in range(7):
        params, states = step(params, states, model.stacked(model.batch(i), 4))
    ours, theirs = (params, states), train(tx, range(7))
    chex.assert_trees_all_close(ours[0], theirs[0], rtol=1e-4, atol=1e-6)
    chex.assert_trees_all_close(ours[1].displacement, theirs[1].displacement, rtol=1e-3, atol=1e-6)


def test_steps_too_small_for_16_bits_add_up():
    tx = local(dense(), every=20, inner=optax.sgd(1e-3))
    params = {"w": jnp.ones(8, jnp.bfloat16)}
    mesh = workers.mesh_of(2)
    state = demo_optax.init_opt_state(tx, params, mesh)
    step = demo_optax.make_train_step(lambda p, b: jnp.sum(p["w"] * b[0]), tx, mesh)
    for _ in range(19):
        params, state, _ = step(params, state, np.ones((2, 8), np.float32))
    assert state.displacement["w"].dtype == jnp.float32
    np.testing.assert_allclose(state.displacement["w"], -0.019, rtol=1e-2)
    params, state, _ = step(params, state, np.ones((2, 8), np.float32))
    np.testing.assert_allclose(np.asarray(params["w"], np.float32), 1 - 0.7 * 1.9 * 0.02, atol=4e-3)


def test_microbatches_keys_and_model_states_stay_with_their_worker():
    def loss(params, state, batch, key):
        noise = 1e-6 * jax.random.normal(key, batch["y"].shape)
        seen = state["rows"] + len(batch["x"])
        return model.loss(params, batch | {"y": batch["y"] + noise}), ({"rows": seen}, key)

    tx = BOTH["sparseloco"]
    step = demo_optax.make_train_step(
        loss, tx, MESH, microbatches=2, random_key=True, stateful=True, donate=False
    )
    params, state = model.init(), demo_optax.init_opt_state(tx, model.init(), MESH)
    rows = demo_optax.init_model_state({"rows": jnp.zeros(())}, MESH)
    for i in range(4):
        key = jax.random.key(i)
        params, state, rows, metrics = step(params, state, rows, model.batch(i), key)
    assert rows["rows"].tolist() == [16.0] * 4
    assert len(np.unique(jax.random.key_data(metrics.aux), axis=1).reshape(-1, 2)) == 8
    chex.assert_trees_all_close(params, train(tx, range(4))[0], atol=1e-3)

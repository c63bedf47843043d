"""A worker whose gradient is not finite is left out; the others go on as if it were not there."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import demo_optax
from tests import model, workers
from tests.sweeps import sweep

MATRIX = np.ones((8, 8), np.float32)
SMALL = demo_optax.Compression(2, 4)
DEMO = demo_optax.demo(
    5e-3,
    decay=0.95,
    weight_decay=0.1,
    precondition=optax.scale_by_rms(0.9, bias_correction=True),
    compression=SMALL,
    axis_name="data",
)


def broken_batch(step, broken):
    """A batch in which the losses of some workers are not finite: ``{worker: nan or inf}``."""
    batch = model.stacked(model.batch(step))
    for worker, value in broken.items():
        batch["x"][worker, 0, 0] = value
    return {n: np.concatenate(x) for n, x in batch.items()}


def placed(tx, count=model.WORKERS):
    """A step from and to NumPy arrays, and the specs of its state."""
    mesh = workers.mesh_of(count)
    shardings = jax.tree.map(lambda x: x.sharding, workers.initial(tx, mesh)[1])
    step = workers.step_of(tx, mesh)

    def placed_step(params, state, batch):
        params = jax.tree.map(np.copy, params)
        return jax.tree.map(np.asarray, step(params, jax.device_put(state, shardings), batch))

    return placed_step, jax.tree.map(lambda sharding: sharding.spec, shardings)


def after_two_steps(tx, step):
    params, state = jax.tree.map(np.asarray, workers.initial(tx, workers.mesh_of(model.WORKERS)))
    for i in range(2):
        params, state, _ = step(params, state, model.batch(i))
    return params, state


def without_digest(state):
    """Digests of packets tell one worker from another."""
    momentum = state[0]._replace(metrics=state[0].metrics._replace(received=0))
    return momentum, *state[1:]


def test_others_go_on_as_if_broken_workers_were_not_there():
    step, specs = placed(DEMO)
    before, state_before = after_two_steps(DEMO, step)
    broken, rest = {3: np.nan, 5: np.inf}, [0, 1, 2, 4, 6, 7]
    batch = broken_batch(2, broken)
    params, state, metrics = step(before, state_before, batch)

    assert metrics.exchange.participants == 6
    assert np.isfinite(metrics.gradient_norm).tolist() == [i in rest for i in range(8)]
    for worker in broken:
        for kept in ("momentum", "precondition"):
            ours, theirs = (getattr(s[0], kept) for s in (state, state_before))
            chex.assert_trees_all_equal(
                *jax.tree.map(lambda x, w=worker: x[w] if x.ndim else x, (ours, theirs))
            )

    def of_rest(spec, x):
        return x[rest] if spec == jax.P("data") else x

    step_of_rest, _ = placed(DEMO, len(rest))
    batch_of_rest = {n: np.concatenate(x[rest]) for n, x in model.stacked(batch).items()}
    state_of_rest = jax.tree.map(of_rest, specs, state_before)
    params_alone, state_alone, metrics_alone = step_of_rest(before, state_of_rest, batch_of_rest)
    chex.assert_trees_all_equal(params, params_alone)
    state, state_alone = map(without_digest, (jax.tree.map(of_rest, specs, state), state_alone))
    chex.assert_trees_all_equal(state, state_alone)
    seen, alone = (m.exchange._replace(received=0) for m in (metrics, metrics_alone))
    chex.assert_trees_all_equal(seen, alone)


def masks(x, y):
    """Two optimizers, one for each part of the parameters."""
    parts = {"a": True, "b": False}, {"a": False, "b": True}
    return optax.chain(*map(optax.masked, (x, y), parts))


def partition(x, y):
    return optax.partition({"x": x, "y": y}, {"a": "x", "b": "y"})


PARTS = {"a": MATRIX, "b": MATRIX[0]}
AGED = optax.add_decayed_weights(-0.1)
DENSE = optax.chain(demo_optax.mean_over_workers("data"), optax.adam(0.1))
LATE = demo_optax.demo(0.1, SMALL, exchange=demo_optax.Delayed(demo_optax.AllGather("data")))
OWNED = demo_optax.demo(0.1, SMALL, exchange=demo_optax.TwoPhase("data"))
FOLLOWED = {  # how many steps of nobody come before the parameters rest, and the optimizer
    "two momenta": (0, partition(DEMO, OWNED)),
    "momentum and mean": (0, partition(DEMO, DENSE)),
    "masks": (0, masks(DENSE, DEMO)),
    "late": (1, partition(LATE, LATE)),
    "mean": (0, DENSE),
    "flat": (0, optax.flatten(DEMO)),
    "flat part": (0, masks(optax.flatten(DEMO), DENSE)),
    "local steps": (0, demo_optax.local_steps(optax.sgd(0.1), DEMO, 2, axis_name="data")),
    "local steps, mean": (0, demo_optax.local_steps(optax.sgd(0.1), DENSE, 2, axis_name="data")),
    "multi_steps": (0, demo_optax.multi_steps(partition(DEMO, DENSE), 2, axis_name="data")),
    "part of several steps": (
        0,
        partition(demo_optax.multi_steps(DEMO, 2, axis_name="data"), DENSE),
    ),
}


@sweep("two momenta", "multi_steps", "flat part", name=FOLLOWED)
def test_what_follows_moves_no_parameter_that_nobody_takes_part_in(name):
    mesh = jax.sharding.AbstractMesh((2,), ("data",))
    before, tx = FOLLOWED[name]
    tx, params = demo_optax.stack_workers(optax.chain(tx, AGED), mesh), PARTS
    gradient = jax.tree.map(lambda x: np.stack([x, 2 * x]), params)
    broken = jax.tree.map(lambda x: x * np.float32(np.nan), gradient)
    update, state = jax.jit(tx.update), tx.init(params)
    for given in [gradient] * 2 + [broken] * before:
        _, state = update(given, state, params)
    for _ in range(2):
        updates, state = update(broken, state, params)
        chex.assert_trees_all_equal(updates, jax.tree.map(np.zeros_like, params))
    for _ in range(2 + before):
        updates, state = update(gradient, state, params)
    assert all(np.all(np.isfinite(x) & (x != 0)) for x in jax.tree.leaves(updates))


def test_only_the_part_that_nobody_takes_part_in_rests():
    mesh = jax.sharding.AbstractMesh((2,), ("data",))
    tx = demo_optax.stack_workers(optax.chain(partition(LATE, DENSE), AGED), mesh)
    gradient = jax.tree.map(lambda x: np.stack([x, 2 * x]), PARTS)
    updates, _ = jax.jit(tx.update)(gradient, tx.init(PARTS), PARTS)
    assert np.all(updates["a"] == 0) and np.all(updates["b"] != 0)


def test_the_dense_mean_is_that_of_the_others():
    tx = optax.chain(demo_optax.mean_over_workers("data"), optax.sgd(1.0))
    step, _ = placed(tx)
    batch, rest = broken_batch(2, {3: np.nan, 5: np.inf}), [0, 1, 2, 4, 6, 7]
    parts = model.stacked(batch)
    gradient_of = jax.jit(jax.grad(model.loss))
    gradients = [
        gradient_of(model.init(), {n: x[worker] for n, x in parts.items()}) for worker in rest
    ]
    _, state = workers.initial(tx, workers.mesh_of(model.WORKERS))
    params, _, _ = step(model.init(), state, batch)
    for n, x in model.init().items():
        expected = x - np.mean([gradient[n] for gradient in gradients], axis=0)
        np.testing.assert_allclose(params[n], expected, rtol=1e-5, atol=1e-6)
    alone = broken_batch(3, dict.fromkeys(range(8), np.nan))
    _, state = workers.initial(tx, workers.mesh_of(model.WORKERS))
    after, _, _ = step(params, state, alone)
    chex.assert_trees_all_equal(after, params)


def test_a_setting_that_is_not_finite_for_a_step_costs_that_step_alone():
    weights, decays = [1.0, np.nan, 1.0, 1e38, 1.0, 1.0, 1.0], [0.9] * 5 + [np.nan, 0.9]

    def at(step, numbers):
        return jnp.asarray(np.float32(numbers))[step]

    tx = optax.inject_hyperparams(
        lambda decay: demo_optax.decoupled_momentum(
            decay,
            demo_optax.Compression(4, 8),
            gradient_weight=functools.partial(at, numbers=weights),
        )
    )(decay=functools.partial(at, numbers=decays))
    gradient = np.linspace(1.0, 2.0, 64, dtype=np.float32).reshape(8, 8)
    update, state, took_part = jax.jit(tx.update), tx.init(gradient), []
    for _ in weights:
        _, state = update(gradient * 10, state)
        took_part.append(int(state.inner_state.metrics.participants))
        assert np.isfinite(state.inner_state.momentum).all()
    assert took_part == [1, 0, 1, 0, 1, 0, 1]


def test_a_gradient_that_is_huge_on_one_shard_keeps_the_whole_worker_out():
    mesh = workers.mesh_of(2, 2, kind=jax.sharding.AxisType.Auto)
    tx = demo_optax.demo_sgd(1.0, demo_optax.Compression(64, 8), axis_name="data")
    specs, params = jax.P("fsdp"), np.zeros((16, 8), np.float32)
    step = demo_optax.make_train_step(
        lambda params, batch: jnp.sum(params * batch[0]), tx, mesh, param_specs=specs
    )
    state = demo_optax.init_opt_state(tx, params, mesh, param_specs=specs)
    batch = np.ones((4, 16, 8), np.float32)
    batch[:2, 0, 0] = 3e19  # finite, but its square is not; the first worker's upper shard
    after, state, metrics = step(params, state, batch)
    assert metrics.exchange.participants == 1
    np.testing.assert_allclose(np.asarray(after), np.asarray(after)[0, 0] * np.ones((16, 8)))
    assert np.asarray(after)[0, 0] != 0
    np.testing.assert_array_equal(np.asarray(state[0].momentum)[0], 0.0)


@pytest.mark.parametrize("damage", [3e38, np.inf, np.nan])
@pytest.mark.parametrize("damaged", ["momentum", "preconditioner"])
def test_what_was_damaged_starts_again_and_its_worker_takes_part(damaged, damage):
    step, _ = placed(DEMO)
    params, state = after_two_steps(DEMO, step)
    held = state[0].momentum if damaged == "momentum" else state[0].precondition.nu
    held["hidden"] = held["hidden"].copy()
    held["hidden"][3].flat[5] = damage
    for i in range(2, 5):
        params, state, metrics = step(params, state, model.batch(i))
        assert metrics.exchange.participants == model.WORKERS
        if damaged == "momentum":
            assert metrics.exchange.restarted == (i == 2)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves((params, state)))


@functools.cache
def after_300_steps():
    tx = demo_optax.demo_scaled(0.1, demo_optax.Compression(64))
    gradient = jnp.asarray(np.random.default_rng(0).normal(size=64), jnp.float32)
    update, state = jax.jit(lambda state: tx.update(gradient, state)[1]), tx.init(gradient)
    for _ in range(300):
        state = update(state)
    return update, state


@pytest.mark.parametrize("damage, first", [(np.nan, 1), (-1.0, 0)])
def test_a_preconditioner_that_starts_again_corrects_its_bias_anew(damage, first):
    """With its old count a gradient would be ten times as large as before. -1 has a NaN as root."""
    update, state = after_300_steps()
    scaled = state[0].precondition
    nu = np.array(scaled.nu)
    nu[5] = damage
    state = state[0]._replace(precondition=scaled._replace(nu=nu)), *state[1:]
    for count in (first, first + 1):
        state = update(state)
        assert state[0].metrics.participants == 1
        assert state[0].precondition.count == count


WARMING_UP = demo_optax.demo_sgd(
    1.0,
    demo_optax.Compression(64),
    precondition=optax.chain(
        optax.inject_hyperparams(optax.scale_by_rms)(decay=0.9),
        optax.scale_by_schedule(optax.linear_schedule(0.0, 1.0, 10)),
    ),
)
update_warming_up = jax.jit(WARMING_UP.update)


@pytest.mark.parametrize("given, kept", [(0.999, 0.999), (np.nan, 0.9)])
def test_schedules_and_hyperparameters_of_a_preconditioner_that_starts_again_stay(given, kept):
    params = MATRIX.ravel()
    state = WARMING_UP.init(params)
    rms, warm = state[0].precondition
    nu = np.zeros(64, np.float32)
    nu[0] = np.nan
    rms.hyperparams["decay"] = jnp.float32(given)
    rms = rms._replace(inner_state=rms.inner_state._replace(nu=nu))
    warm = warm._replace(count=jnp.int32(7))
    state = state[0]._replace(precondition=(rms, warm)), *state[1:]
    _, state = update_warming_up(params, state, params)
    rms, warm = state[0].precondition
    assert state[0].metrics.participants == 1 and state[0].metrics.restarted == 1
    assert rms.hyperparams["decay"] == np.float32(kept) and warm.count == 8
    np.testing.assert_allclose(rms.inner_state.nu, 1 - kept, rtol=1e-4)


def test_a_state_that_is_infinite_at_first_hides_no_damage_of_another():
    plateau = optax.contrib.reduce_on_plateau()
    precondition = optax.chain(optax.scale_by_rms(0.9), plateau)
    tx = demo_optax.demo_sgd(1.0, demo_optax.Compression(64), precondition=precondition)
    params = MATRIX.ravel()
    state = tx.init(params)
    assert state[0].precondition[1].best_value == np.inf
    rms, rest = state[0].precondition
    nu = np.zeros(64, np.float32)
    nu[0] = np.inf
    rms = rms._replace(nu=nu)
    state = state[0]._replace(precondition=(rms, rest)), *state[1:]
    _, state = jax.jit(functools.partial(tx.update, value=1.0))(params, state, params)
    np.testing.assert_allclose(state[0].precondition[0].nu, 0.1, rtol=1e-6)


@pytest.mark.parametrize("damage", [np.nan, -1.0])
def test_all_shards_of_a_preconditioner_start_again_together(damage):
    mesh, specs = workers.mesh_of(2, 2, kind=jax.sharding.AxisType.Auto), P("fsdp")
    tx = demo_optax.demo_scaled(0.1, SMALL, axis_name="data")
    tx = demo_optax.stack_workers(tx, mesh, param_specs=specs)
    params = jax.device_put(np.zeros((16, 8), np.float32), jax.NamedSharding(mesh, specs))
    state = tx.init(params)
    scaled = state[0].precondition
    nu = np.ones((2, 16, 8), np.float32)
    nu[0, 0, 0] = damage  # the first worker's upper shard
    scaled = scaled._replace(
        nu=jax.device_put(nu, scaled.nu.sharding),
        count=jax.device_put(np.full(2, 20, np.int32), scaled.count.sharding),
    )
    state = state[0]._replace(precondition=scaled), *state[1:]
    gradient = np.random.default_rng(0).normal(size=(2, 16, 8)).astype(np.float32)
    _, state = jax.block_until_ready(jax.jit(tx.update)(gradient, state, params))
    first = 1 if np.isnan(damage) else 0
    shards = state[0].precondition.count.addressable_shards
    assert [int(shard.data[0]) for shard in shards] == [first, first, 21, 21]


ALL_OF_IT = demo_optax.demo_sgd(1.0, demo_optax.Compression(64, 8), axis_name="data")


WAYS = [{}, {"sharding": "auto"}]


@sweep(*[(way, 1.0) for way in WAYS], ({}, None), options=WAYS, clip_norm=[None, 1.0])
def test_a_worker_is_kept_out_whatever_the_path_of_its_gradient(options, clip_norm):
    """Its gradient is finite, but its squares are not; clipped, it would be zeros."""
    mesh = workers.mesh_of(2, kind=jax.sharding.AxisType.Auto)
    step = demo_optax.make_train_step(
        lambda params, batch: jnp.sum(params * batch[0]),
        ALL_OF_IT,
        mesh,
        clip_norm=clip_norm,
        **options,
    )
    batch = np.ones((2, 8, 8), np.float32)
    batch[1] = 1e20
    state = demo_optax.init_opt_state(ALL_OF_IT, MATRIX, mesh)
    _, _, metrics = step(MATRIX, state, batch)
    assert metrics.exchange.participants == 1


def test_schedules_in_front_of_the_exchange_go_on_for_who_skips_a_step():
    mesh = workers.mesh_of(2)
    tx = optax.chain(
        optax.scale_by_schedule(lambda count: 1.0 + count),
        optax.inject_hyperparams(optax.scale)(step_size=lambda count: 1.0 + count),
        demo_optax.demo_sgd(0.1, demo_optax.Compression(4, 8), axis_name="data"),
    )
    params = np.ones((8, 8), np.float32)
    step = demo_optax.make_train_step(lambda w, x: jnp.sum(w * x[0]), tx, mesh, donate=False)
    state = demo_optax.init_opt_state(tx, params, mesh)
    for bad in (False, True, False):
        batch = np.ones((2, 8, 8), np.float32)
        batch[0] *= np.nan if bad else 1.0
        params, state, _ = step(params, state, batch)
    assert state[0].count.tolist() == state[1].count.tolist() == [3, 3]
    assert len({*state[1].hyperparams["step_size"].tolist()}) == 1

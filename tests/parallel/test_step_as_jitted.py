"""The train step behaves like a jitted function."""

import json
import pickle
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import demo_optax
from benchmarks import hlo
from tests import model, workers

TX = demo_optax.demo_adamw(5e-3, demo_optax.Compression(4, 6), decay=0.9, axis_name="data")
WITH_PLATEAU = optax.chain(
    TX, optax.contrib.reduce_on_plateau(factor=0.5, patience=1, accumulation_size=1)
)
DENSE = optax.chain(demo_optax.mean_over_workers("data"), optax.sgd(1e-3))
EVERYTHING = demo_optax.demo_sgd(1.0, demo_optax.Compression(4096), axis_name="data")
WORKERS = 4

MESH = workers.mesh_of(WORKERS)


def initial(tx=TX, mesh=MESH):
    return workers.initial(tx, mesh, model.one_matrix)


def prepared(tx=TX, **options):
    return workers.step_of(tx, MESH, model.linear_loss, **options), *initial(tx)


def batches(steps):
    return [model.batch(i) for i in range(steps)]


@pytest.fixture(scope="module")
def expected():
    """Parameters after three steps, one call each."""
    options = dict(params=model.one_matrix, loss=model.linear_loss)
    return workers.train(TX, range(3), mesh=MESH, **options)[0]


def test_under_an_outer_jit(expected):
    step, params, state = prepared()
    outer = jax.jit(lambda *args: step(*args)[:2])
    for batch in batches(3):
        params, state = outer(params, state, batch)
    chex.assert_trees_all_equal(params, expected)


def test_under_scan(expected):
    step, params, state = prepared()
    stacked = jax.tree.map(lambda *x: np.stack(x), *batches(3))

    @jax.jit
    def run(params, state, stacked):
        def body(carry, batch):
            *carry, metrics = step(*carry, batch)
            return tuple(carry), metrics.loss

        return jax.lax.scan(body, (params, state), stacked)

    (params, _), losses = run(params, state, stacked)
    assert losses.shape == (3, WORKERS)
    chex.assert_trees_all_equal(params, expected)


@pytest.mark.parametrize("tx", [DENSE, EVERYTHING], ids=["dense", "every coefficient"])
def test_more_bytes_than_an_int32_holds(tx):
    """Of shapes alone: 2**32 bytes and more."""
    params = jax.ShapeDtypeStruct((2**15, 2**15), np.float32)
    mesh = workers.mesh_of(1)
    state = jax.eval_shape(demo_optax.stack_workers(tx, mesh).init, params)
    step = demo_optax.make_train_step(lambda params, x: params.sum() * x.mean(), tx, mesh)
    batch, stacked = (jax.ShapeDtypeStruct(shape, np.float32) for shape in [(4,), (3, 4)])

    def body(carry, x):
        *carry, metrics = step(*carry, x)
        return tuple(carry), metrics

    def run(carry, xs):
        return jax.lax.scan(body, carry, xs)

    expected = demo_optax.packet_bytes(tx, params)
    assert expected >= 2**32
    in_jit = jax.eval_shape(jax.jit(step), params, state, batch)[2]
    in_scan = jax.eval_shape(run, (params, state), stacked)[1]
    lowered = step.lower(params, state, batch).out_info[2]
    assert {x.packet_bytes for x in (in_jit, in_scan, lowered)} == {expected}
    assert json.loads(json.dumps(in_jit.packet_bytes)) == expected


def test_compiled_ahead_of_time_from_shapes_it_is_called_alike(expected):
    step, params, state = prepared()
    shapes = jax.eval_shape(lambda *args: args, params, state, model.batch(0))
    compiled = step.lower(*shapes).compile()
    (gather,) = hlo.collectives(compiled.as_text())
    for batch in batches(3):
        rows = jax.NamedSharding(MESH, jax.sharding.PartitionSpec("data"))
        whole = jax.NamedSharding(MESH, jax.sharding.PartitionSpec())
        params, state, metrics = compiled(
            jax.device_put(params, whole), state, jax.device_put(batch, rows)
        )
    assert gather.operand_bytes == metrics.packet_bytes > 0
    chex.assert_trees_all_equal(params, expected)


def test_exported_with_several_processes_tracers_are_not_asked_where_they_are(monkeypatch):
    step, params, state = prepared()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    exported = jax.export.export(jax.jit(lambda *args: step(*args)[0]))
    shapes = jax.eval_shape(lambda *args: args, params, state, model.batch(0))
    assert exported(*shapes).nr_devices == WORKERS


def test_without_donation_what_was_given_stays():
    step, params, state = prepared(donate=False)
    params = jax.device_put(params, jax.NamedSharding(MESH, jax.sharding.PartitionSpec()))
    before = jax.tree.map(np.asarray, (params, state))
    step(params, state, model.batch(0))
    chex.assert_trees_all_equal((params, state), before)


@pytest.mark.parametrize("carry", ["device_get", "pickle"])
def test_a_state_from_elsewhere_is_placed_without_compiling_again(carry, expected, compiled):
    step, params, state = prepared()
    there = {
        "device_get": jax.device_get,
        "pickle": lambda x: pickle.loads(pickle.dumps(jax.device_get(x))),
    }
    batch, *rest = batches(3)
    params, state, _ = step(params, state, batch)
    params, state = there[carry]((params, state))
    compiled()
    for batch in rest:
        params, state, _ = jax.block_until_ready(step(params, state, batch))
    assert not [name for name in compiled() if "placed_step" in name]
    chex.assert_trees_all_equal(params, expected)


def test_a_state_may_hold_numbers():
    tx = optax.chain(TX, optax.scale_by_schedule(lambda count: 1.0))
    step, params, state = prepared(tx)
    state = (state[0], state[1]._replace(count=0))
    step(params, state, model.batch(0))


def test_a_wrong_state_is_refused_on_every_call():
    step, params, state = prepared()
    params, state, _ = step(params, state, model.batch(0))
    for _ in range(2):
        with pytest.raises(ValueError, match="Make it with demo_optax"):
            step(params, TX.init(model.one_matrix()), model.batch(0))
    step(params, state, model.batch(0))


def test_a_random_key_is_placed():
    def noisy(params, batch, key):
        return model.linear_loss(params, batch) + jax.random.normal(key)

    step = workers.step_of(TX, MESH, noisy, random_key=True)
    key = jax.device_put(jax.random.key(0), jax.devices()[7])
    losses = step(*initial(), model.batch(0), key)[2].loss
    assert len(np.unique(losses)) == WORKERS


def many_leaves(params, batch):
    return jnp.mean(batch) * sum(map(jnp.sum, params.values()))


def calls_of_a_step(leaves):
    """Calls in Python of the third step, with this number of parameters."""
    params = {f"w{i}": np.zeros((6, 6), np.float32) for i in range(leaves)}
    step = demo_optax.make_train_step(many_leaves, TX, MESH)
    carry = params, demo_optax.init_opt_state(TX, params, MESH)
    batch = jax.device_put(np.ones(8), jax.NamedSharding(MESH, jax.P("data")))
    for _ in range(2):
        *carry, _ = step(*carry, batch)
    calls = []
    sys.setprofile(lambda frame, event, arg: calls.append(event in ("call", "c_call")))
    try:
        step(*carry, batch)
    finally:
        sys.setprofile(None)
    return sum(calls)


def test_a_step_makes_few_calls_in_python_for_each_parameter():
    assert calls_of_a_step(6) - calls_of_a_step(1) <= 5 * 5


def test_what_was_given_away_is_refused_after_any_number_of_steps():
    step, *carry = prepared()
    for batch in batches(3):
        before, (*carry, _) = carry, step(*carry, batch)
    with pytest.raises(RuntimeError, match="was given away to an earlier step"):
        step(before[0], carry[1], model.batch(0))
    params, state = carry
    step({**params, "out": params["out"] + 0}, state, model.batch(0))


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("mesh", [MESH, jax.sharding.AbstractMesh((WORKERS,), ("data",))])
def test_a_batch_is_placed_without_a_copy(mesh, kind, monkeypatch):
    step, carry = workers.step_of(TX, mesh, model.linear_loss), initial(mesh=mesh)
    batch = jax.tree.map(kind, model.batch(0))
    *carry, _ = step(*carry, batch)
    calls = []
    monkeypatch.setattr(jnp, "copy", lambda x: calls.append("copy"))
    monkeypatch.setattr(jax, "make_mesh", lambda *args, **kwargs: calls.append("make_mesh"))
    step(*carry, batch)
    assert not calls
    assert not any(x.is_deleted() for x in jax.tree.leaves(batch) if isinstance(x, jax.Array))


def with_everything(params, state, batch, key):
    noise = 0 * jax.random.normal(key)
    return model.linear_loss(params, batch) + noise, (state + 1, None)


@pytest.mark.parametrize("mesh", [MESH, jax.sharding.AbstractMesh((WORKERS,), ("data",))])
def test_lowered_and_compiled_the_step_need_not_compile_again(mesh, compiled):
    options = dict(random_key=True, stateful=True)
    step = demo_optax.make_train_step(with_everything, WITH_PLATEAU, mesh, **options)

    def given():
        params, state = initial(WITH_PLATEAU, mesh)
        own = demo_optax.init_model_state(np.float32(0), mesh)
        return params, state, own, model.batch(0), jax.random.key(0)

    value = np.float32(1.0)
    program = step.lower(*given(), value=value).compile()
    compiled()
    expected = step(*given(), value=value)
    assert not [name for name in compiled() if "step" in name]
    placed = jax.tree.map(jax.device_put, (given(), dict(value=value)), *[program.input_shardings])
    found = program(*placed[0], **placed[1])
    chex.assert_trees_all_equal(found, expected)


def test_parameters_may_be_in_the_batch_too(expected):
    def loss(params, batch):
        rows, teacher = batch
        return model.linear_loss(params, rows) + 0 * teacher["out"].sum()

    step = workers.step_of(TX, MESH, loss, batch_specs=(jax.P("data"), jax.P()))
    params, state = initial()
    for batch in batches(3):
        params, state, _ = step(params, state, (batch, params))
    chex.assert_trees_all_close(params, expected)

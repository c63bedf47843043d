"""Gradients that a worker takes where its own momentum would lead."""

import functools
import itertools
import types

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization, traverse_util
from jax.sharding import AbstractMesh

import demo_optax
from demo_optax import AllGather, Compression, Delayed
from tests.sweeps import sweep

WORKERS, SIZE, K, DECAY, RATE, WEIGHT = 4, 16, 3, 0.8, 0.3, 0.7
COMPRESSION = Compression(K, SIZE, transform="identity")
SHARED = np.zeros(SIZE, np.float32)


def centres():
    return np.random.default_rng(0).normal(size=(WORKERS, SIZE)).astype(np.float32)


def largest(m):
    """The K largest elements of each row, the others zero."""
    at = np.argsort(-np.abs(m), axis=1, kind="stable")[:, :K]
    kept = np.zeros_like(m)
    np.put_along_axis(kept, at, np.take_along_axis(m, at, axis=1), axis=1)
    return kept


def expected(steps, look_ahead, delay):
    """Shared parameters by the equations, each worker on a parabola around its own centre."""
    x, m = np.zeros(SIZE), np.zeros((WORKERS, SIZE))
    sent = np.zeros((WORKERS, SIZE))
    for _ in range(steps):
        ahead = x - look_ahead * RATE * (m + delay * sent)
        m = DECAY * m + WEIGHT * (ahead - centres())
        before, sent = sent, largest(m)
        m = m - sent
        x = x - RATE * (before if delay else sent).mean(axis=0)
    return x


MESHES = {
    "devices": jax.make_mesh((WORKERS,), ("data",), devices=jax.devices()[:WORKERS]),
    "simulated": AbstractMesh((WORKERS,), ("data",)),
}


def loss_fn(x, centre):
    return 0.5 * jnp.sum(jnp.square(x - centre[0]))


@functools.cache
def step_and_state(look_ahead, delay, mesh):
    gather = AllGather("data")
    tx = demo_optax.decoupled(
        optax.sgd(RATE),
        COMPRESSION,
        decay=DECAY,
        gradient_weight=WEIGHT,
        mean="workers",
        look_ahead=look_ahead,
        exchange=Delayed(gather) if delay else gather,
    )
    step = demo_optax.make_train_step(loss_fn, tx, MESHES[mesh], donate=False)
    return step, demo_optax.init_opt_state(tx, SHARED, MESHES[mesh])


def trained(steps, look_ahead, delay, mesh):
    params, (step, state) = SHARED, step_and_state(look_ahead, delay, mesh)
    for _ in range(steps):
        params, state, _ = step(params, state, centres())
    return np.asarray(params), state


@sweep(
    (1.0, 0, "devices"),
    (1.5, 1, "devices"),
    (1.5, 0, "simulated"),
    look_ahead=[None, 1.0, 1.5],
    delay=[0, 1],
    mesh=MESHES,
)
def test_training_follows_the_equation(look_ahead, delay, mesh):
    params, _ = trained(7, look_ahead, delay, mesh)
    wanted = expected(7, look_ahead or 0.0, delay)
    np.testing.assert_allclose(params, wanted, rtol=1e-5, atol=1e-6)
    if look_ahead:
        assert np.abs(params - expected(7, 0.0, delay)).max() > 1e-2


def test_the_displacement_is_each_workers_own():
    params, state = trained(3, 1.0, 0, "devices")
    local = demo_optax.local_parameters(params, state)
    assert local.shape == (WORKERS, SIZE)
    assert state[2].displacement.sharding.spec[0] == "data"
    assert len(np.unique(np.asarray(local)[:, 0])) == WORKERS


def test_a_worker_that_skips_a_step_takes_its_next_gradient_at_the_shared_parameters():
    tx = demo_optax.demo_scaled(1e-2, COMPRESSION, look_ahead=1.0, axis_name="data")
    stacked = demo_optax.stack_workers(tx, MESHES["devices"])
    gradients, update = centres(), jax.jit(stacked.update)
    _, state = update(gradients, stacked.init(SHARED), SHARED)
    gradients[1] = np.nan
    _, after = update(gradients, state, SHARED)
    before, now = (np.asarray(x[2].displacement) for x in (state, after))
    assert not now[1].any() and before[1].any() and (now[0] != before[0]).any()
    before, now = (np.asarray(x[0].momentum) for x in (state, after))
    np.testing.assert_array_equal(now[1], before[1])


def test_parameters_of_other_optimizers_stay_where_they_are():
    mesh = MESHES["devices"]
    parts = {
        "near": demo_optax.demo_scaled(1e-2, COMPRESSION, look_ahead=1.0, axis_name="data"),
        "far": demo_optax.demo_scaled(1e-2, COMPRESSION, look_ahead=9.0, axis_name="data"),
        "frozen": optax.set_to_zero(),
    }
    names = {"x": "near", "y": "far", "z": "frozen"}
    tx = optax.partition(parts, names)
    params = {name: np.zeros(SIZE, np.float32) for name in names}
    state = demo_optax.init_opt_state(tx, params, mesh)

    def loss(params, centre):
        return sum(jnp.sum(jnp.square(x - centre[0])) for x in params.values())

    step = demo_optax.make_train_step(loss, tx, mesh)
    for _ in range(2):
        params, state, _ = step(params, state, centres())
    local = demo_optax.local_parameters(params, state)
    away = {
        name: np.abs(np.asarray(x) - np.asarray(params[name])[None]).max()
        for name, x in local.items()
    }
    assert all(x.shape == (WORKERS, SIZE) for x in local.values())
    assert 0 < away["x"] < away["y"] and away["z"] == 0


def test_stacked_gradients_are_taken_ahead_as_well():
    params, state = trained(3, 1.5, 1, "devices")
    gradients = demo_optax.worker_gradients(loss_fn, MESHES["devices"])
    taken = jax.jit(lambda *args, state: gradients(*args, opt_state=state))
    found = taken(params, centres(), state=state).gradients
    local = np.asarray(demo_optax.local_parameters(params, state))
    np.testing.assert_allclose(found, local - centres(), rtol=1e-6)


def test_a_worker_comes_back_from_where_its_loss_has_no_gradient():
    tx = demo_optax.demo_scaled(0.05, COMPRESSION, look_ahead=1.0)
    params, steps = SHARED, []
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(6):
        is_shared = np.all(demo_optax.local_parameters(params, state) == params)
        gradient = np.where(is_shared, params - centres()[0], np.float32(np.nan))
        updates, state = update(gradient, state, params)
        params = params + np.asarray(updates)
        steps.append(int(state[0].metrics.participants))
    assert steps == [1, 0, 1, 0, 1, 0]


def test_a_worker_comes_back_from_a_gradient_that_its_preconditioner_makes_nan():
    def to_nan(updates, _):
        return jax.tree.map(lambda g: jnp.where(jnp.abs(g) > 20, jnp.nan, g), updates)

    base = optax.sgd(9.0)
    options = dict(gradient_weight=1.0, precondition=optax.stateless(to_nan), look_ahead=1.0)
    tx = demo_optax.decoupled(base, COMPRESSION, decay=0.5, **options)
    state, update, steps = tx.init(SHARED), jax.jit(tx.update), []
    for _ in range(8):
        gradient = np.asarray(demo_optax.local_parameters(SHARED, state)) + centres()[0]
        _, state = update(gradient, state, SHARED)
        steps.append(int(state[0].metrics.restarted) > 0)
        assert state[0].metrics.participants == 1
    assert any(steps) and (True, True) not in itertools.pairwise(steps)


def test_a_worker_comes_back_from_a_displacement_that_overflows():
    tx = demo_optax.decoupled(optax.sgd(1.0), COMPRESSION, gradient_weight=1e5, look_ahead=1.0)
    params = SHARED.astype(np.float16)
    state, update = tx.init(params), jax.jit(tx.update)
    _, state = update(centres()[0].astype(np.float16), state, params)
    assert not np.isfinite(state[2].displacement).all()
    _, state = update(np.full_like(params, np.nan), state, params)
    assert not np.asarray(state[2].displacement).any()


class Holder(nnx.Module):
    def __init__(self, opt_state):
        self.opt_state = nnx.data(nnx.training.optimizer.to_opt_state(opt_state))


def restored(state, directory):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(directory / "state", jax.tree.map(np.asarray, state))
        return checkpointer.restore(directory / "state")


READABLE = {
    "nnx.State": lambda state, _: nnx.state(Holder(state)),
    "nnx.Module": lambda state, _: Holder(state),
    "pure": lambda state, _: nnx.as_pure(nnx.state(Holder(state))),
    "serialized": lambda state, _: serialization.to_state_dict(state),
    "frozen": lambda state, _: flax.core.freeze({"opt_state": serialization.to_state_dict(state)}),
    "restored": restored,
}
# More than ten entries, which a dict with names of numbers sorts in another order.
NESTED = {"z": [np.full(2, i, np.float32) for i in range(11)], "displacement": np.ones(3, "f")}
AHEAD = demo_optax.demo_scaled(0.1, Compression(1), look_ahead=1.0)
OWN_POINTS = {
    "look_ahead": optax.chain(optax.clip(99.0), AHEAD),
    "local_steps": demo_optax.local_steps(optax.adam(0.1), optax.sgd(1.0), 2),
}


@functools.cache
def state_with_points(name):
    tx, state = OWN_POINTS[name], OWN_POINTS[name].init(NESTED)
    gradient = jax.tree.map(lambda x: x + 1 + np.arange(x.size, dtype="f"), NESTED)
    for _ in range(3):
        _, state = jax.jit(tx.update)(gradient, state, NESTED)
    return state


@pytest.mark.parametrize("container", READABLE)
@pytest.mark.parametrize("name", OWN_POINTS)
def test_points_are_the_same_from_any_container_with_names(name, container, tmp_path):
    state = state_with_points(name)
    expected = demo_optax.local_parameters(NESTED, state)
    assert np.abs(expected["z"][10] - NESTED["z"][10]).max() > 1e-3
    found = demo_optax.local_parameters(NESTED, READABLE[container](state, tmp_path))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("container", READABLE)
def test_a_parameter_may_have_the_name_of_the_field(container, tmp_path):
    state = READABLE[container](optax.adam(0.1).init(NESTED), tmp_path)
    assert demo_optax.local_parameters(NESTED, state) is NESTED


@pytest.mark.parametrize(
    "tx",
    [
        optax.named_chain(("displacement", optax.adam(0.1))),
        optax.partition({"displacement": optax.adam(0.1)}, lambda params: "displacement"),
    ],
    ids=["named_chain", "partition"],
)
def test_a_label_may_have_the_name_of_the_field(tx):
    params = {"w": np.ones(3, np.float32)}
    assert demo_optax.local_parameters(params, tx.init(params)) is params


UNREADABLE = {
    "flat": lambda state: traverse_util.flatten_dict(serialization.to_state_dict(state)),
    "joined": lambda state: traverse_util.flatten_dict(serialization.to_state_dict(state), sep="."),
    "nnx.FlatState": lambda state: nnx.to_flat_state(nnx.state(Holder(state))),
    "leaves": jax.tree.leaves,
    "part": lambda state: jax.tree.leaves(state, is_leaf=is_look_ahead)[-1],
    "object": lambda state: types.SimpleNamespace(opt_state=state),
}


def is_look_ahead(x):
    return isinstance(x, demo_optax.LookAheadState)


@pytest.mark.parametrize("container", UNREADABLE)
@pytest.mark.parametrize("params", [NESTED, {"w": np.ones(3, np.float32)}], ids=["named", "plain"])
def test_a_displacement_that_cannot_be_read_is_refused(params, container):
    state = UNREADABLE[container](AHEAD.init(params))
    with pytest.raises((ValueError, TypeError), match=r"displacement.*: pass the"):
        demo_optax.local_parameters(params, state)


def test_paths_that_read_the_same_are_not_the_same():
    tx = demo_optax.demo_scaled(0.1, demo_optax.Compression(1), look_ahead=1.0)
    gradient = {"a/b": np.float32([4, 1, 0, 0]), "a": {"b": np.float32([0, 0, -4, 1])}}
    params = jax.tree.map(np.zeros_like, gradient)
    _, state = jax.jit(tx.update)(gradient, tx.init(params), params)
    own = demo_optax.local_parameters(params, state)
    jax.tree.map(np.testing.assert_array_equal, own, state[2].displacement)
    assert not np.array_equal(own["a/b"], own["a"]["b"])


@pytest.mark.parametrize(
    "tx",
    [
        optax.masked(demo_optax.demo_scaled(0.1, look_ahead=1.0), {"w": False}),
        demo_optax.multi_steps(optax.sgd(0.1), 2),
    ],
    ids=["masked", "multi_steps"],
)
def test_without_displaced_parameters_they_are_the_shared_ones(tx):
    params = {"w": jnp.ones(3)}
    assert demo_optax.local_parameters(params, tx.init(params)) is params


def test_it_may_be_a_hyperparameter():
    tx = optax.inject_hyperparams(demo_optax.demo_scaled, static_args=("compression", "exchange"))
    tx = tx(1e-2, COMPRESSION, look_ahead=2.0)
    state, update = tx.init(SHARED), jax.jit(tx.update)
    _, far = update(centres()[0], state, SHARED)
    state.hyperparams["look_ahead"] = jnp.float32(1.0)
    _, near = update(centres()[0], state, SHARED)
    far, near = (x.inner_state[2].displacement for x in (far, near))
    assert np.abs(near).max() > 1e-3
    np.testing.assert_allclose(far, 2 * near, rtol=1e-6)

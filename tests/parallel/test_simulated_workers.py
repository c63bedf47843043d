"""Workers simulated on one device train as workers on a device each do."""

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType

import demo_optax
from demo_optax import Compression
from demo_optax.checkpoint import Checkpointer
from tests import workers
from tests.saved_runs import carried_over
from tests.sweeps import sweep

SIMULATED = AbstractMesh((8,), ("data",))
ONES = np.ones(8, np.float32)
OPTIMIZERS = {
    "demo": demo_optax.demo(1e-2, Compression(8, value_coding="int4"), axis_name="data"),
    "two phases, delayed": demo_optax.demo_sgd(
        1e-2, Compression(8), exchange=demo_optax.Delayed(demo_optax.TwoPhase("data"))
    ),
    "local steps": demo_optax.local_steps(
        optax.adamw(1e-2),
        demo_optax.decoupled(optax.sgd(1.0), Compression(8), axis_name="data"),
        every=2,
        axis_name="data",
    ),
    "adamw": optax.chain(demo_optax.mean_over_workers("data"), optax.adamw(1e-2)),
}


def loss_fn(params, state, batch, key):
    """The loss of a model with a state and random numbers of its own."""
    hidden = jax.nn.relu(batch @ params["w"])
    dropped = jnp.where(jax.random.bernoulli(key, 0.9, hidden.shape), hidden, 0.0)
    loss = jnp.mean((jnp.sum(dropped, 1) - jnp.sum(batch, 1)) ** 2)
    return loss, (state + jnp.mean(hidden), jnp.max(hidden))


def normal(seed, shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def as_numpy(tree):
    return jax.tree.map(np.asarray, tree)


def trained(tx, mesh, *, microbatches=1):
    """Losses, aux and model states of five steps; parameters and exchange after them."""
    params = {"w": 0.1 * normal(5, (24, 40))}
    opt_state = demo_optax.init_opt_state(tx, params, mesh)
    state = demo_optax.init_model_state(np.float32(0), mesh)
    step = demo_optax.make_train_step(
        loss_fn, tx, mesh, microbatches=microbatches, clip_norm=1.0, random_key=True, stateful=True
    )
    told = []
    for number in range(5):
        batch = normal(number, (32, 24))
        if number == 3:  # worker 0 skips the step
            batch[:4] = np.nan
        key = jax.random.key(number)
        params, opt_state, state, metrics = step(params, opt_state, state, batch, key)
        told.append(as_numpy((metrics.loss, metrics.aux, state)))
    return (told, *as_numpy((params, metrics.exchange))), metrics.packet_bytes


@sweep("two phases, delayed", "adamw", name=OPTIMIZERS)
def test_simulated_workers_train_as_workers_on_devices(name):
    devices = jax.make_mesh((8,), ("data",), (AxisType.Auto,), devices=jax.devices()[:8])
    tx, microbatches = OPTIMIZERS[name], 2 if "delayed" in name else 1
    expected, sent = trained(tx, devices, microbatches=microbatches)
    got, simulated = trained(tx, SIMULATED, microbatches=microbatches)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 2e-5, 2e-5), got[:2], expected[:2])
    assert simulated == sent
    if expected[2] is not None:
        assert got[2].participants == expected[2].participants
        assert not got[2].identical and got[2].agreed


def test_a_run_goes_on_from_simulated_workers_to_devices_and_back(tmp_path):
    tx, params = OPTIMIZERS["demo"], {"w": normal(0, (24, 40))}
    gradient = normal(1, (8, 24, 40))
    saved = SIMULATED
    opt_state = demo_optax.init_opt_state(tx, params, saved)
    update = jax.jit(demo_optax.stack_workers(tx, SIMULATED).update)
    _, opt_state = update({"w": gradient}, opt_state, params)
    momentum = np.asarray(opt_state[0].momentum["w"])
    assert momentum.any()
    for step, mesh in enumerate([workers.mesh_of(8), SIMULATED]):
        found = carried_over(tmp_path / str(step), (params, opt_state), tx, saved, mesh)
        np.testing.assert_array_equal(found.opt_state[0].momentum["w"], momentum)
        params, opt_state, saved = found.params, found.opt_state, mesh


def test_replicas_of_simulated_workers_cannot_differ():
    carried = ONES, demo_optax.init_opt_state(OPTIMIZERS["demo"], ONES, SIMULATED)
    assert demo_optax.check_replicas(carried, SIMULATED) == ()
    assert demo_optax.repair_replicas(carried, SIMULATED)[0] is ONES


STACKED = demo_optax.stack_workers(OPTIMIZERS["demo"], SIMULATED)


def squares(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


STEP = demo_optax.make_train_step(squares, OPTIMIZERS["demo"], SIMULATED)
GRADIENTS = demo_optax.worker_gradients(squares, SIMULATED)


def stacked_step(params, opt_state, batch):
    found = GRADIENTS(params, batch, opt_state=opt_state)
    updates, opt_state = STACKED.update(found.gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def after_a_step(params):
    params, opt_state, _ = STEP(params, STACKED.init(params), normal(0, (8, 24)))
    return params, opt_state


def restored(params):
    with (
        tempfile.TemporaryDirectory() as folder,
        Checkpointer(folder, OPTIMIZERS["demo"], SIMULATED) as checkpointer,
    ):
        checkpointer.save(0, params, STACKED.init(params))
        found = checkpointer.restore(params)
    return found.params, found.opt_state


def whole_step(*args):
    return STEP(*args)[:2]


def from_init(params):
    return params, STACKED.init(params)


@sweep(
    (from_init, whole_step, "anywhere"),
    (from_init, stacked_step, "on a device"),
    (after_a_step, whole_step, "on a device"),
    (restored, stacked_step, "anywhere"),
    begin=[from_init, after_a_step, restored],
    take_step=[whole_step, stacked_step],
    place=["anywhere", "on a device"],
)
def test_a_jitted_loop_around_simulated_workers_compiles_once(begin, take_step, place):
    loop = jax.jit(lambda *args: take_step(*args))
    device = jax.local_devices()[0] if place == "on a device" else None
    carried = begin(jax.device_put({"w": jnp.ones((24, 40))}, device))
    for number in range(3):
        carried = loop(*carried, normal(number, (8, 24)))
    assert loop._cache_size() == 1


def test_the_first_step_of_simulated_workers_copies_the_parameters_and_takes_the_state():
    params = {"w": jnp.ones((24, 40))}
    opt_state = demo_optax.init_opt_state(OPTIMIZERS["demo"], params, SIMULATED)
    STEP(params, opt_state, normal(0, (8, 24)))
    assert opt_state[0].momentum["w"].is_deleted() and not params["w"].is_deleted()


def test_a_batch_that_cannot_be_divided_among_simulated_workers_names_them():
    tx, params = OPTIMIZERS["demo"], {"w": np.zeros((24, 40), np.float32)}
    step = demo_optax.make_train_step(lambda p, x: jnp.sum(x @ p["w"]), tx, SIMULATED)
    with pytest.raises(ValueError, match=r"among 8 workers: .*choose a batch size"):
        step(params, demo_optax.init_opt_state(tx, params, SIMULATED), np.ones((12, 24)))


def test_simulated_workers_lie_on_the_default_device():
    last = jax.local_devices()[-1]
    with jax.default_device(last):
        state = demo_optax.init_opt_state(OPTIMIZERS["demo"], ONES, SIMULATED)
    assert state[0].momentum.devices() == {last}

"""optax's combinators around decoupled momentum: each trains, or is refused with advice."""

import chex
import jax
import numpy as np
import optax
import pytest

import demo_optax
from tests import model, workers
from tests.sweeps import slow, sweep

WORKERS = 4
MESH = workers.mesh_of(WORKERS)
SMALL = demo_optax.Compression(2, 4)
DEMO = demo_optax.demo(5e-3, SMALL, decay=0.9, axis_name="data")
MATRICES = {"hidden": True, "bias": False, "out": True}
BIASES = {n: not is_matrix for n, is_matrix in MATRICES.items()}
loss_of = jax.jit(model.loss)

TRAIN = {
    "inject_hyperparams": optax.inject_hyperparams(demo_optax.demo)(
        learning_rate=optax.cosine_decay_schedule(5e-3, 20),
        compression=SMALL,
        decay=0.9,
        axis_name="data",
    ),
    "partition, the rest frozen": optax.partition(
        {True: DEMO, False: optax.set_to_zero()}, MATRICES
    ),
    "multi_transform, the rest dense": optax.multi_transform(
        {True: DEMO, False: optax.chain(demo_optax.mean_over_workers("data"), optax.adam(5e-3))},
        MATRICES,
    ),
    "masked, the rest masked too": optax.chain(
        optax.masked(DEMO, MATRICES),
        optax.masked(optax.chain(demo_optax.mean_over_workers("data"), optax.sgd(0.1)), BIASES),
    ),
    "demo_optax.multi_steps": demo_optax.multi_steps(DEMO, 2, axis_name="data"),
    "schedule_free": optax.contrib.schedule_free(
        demo_optax.demo_sgd(1.0, SMALL, decay=0.5, axis_name="data"), 1.0, b1=0.9
    ),
    "reduce_on_plateau": optax.chain(DEMO, optax.contrib.reduce_on_plateau(patience=3)),
    "flatten": optax.flatten(DEMO),
    "flatten demo_scaled": optax.flatten(demo_optax.demo_scaled(1e-2, SMALL, axis_name="data")),
    "named_chain": optax.named_chain(("clip", optax.clip(1.0)), ("demo", DEMO)),
    "ema": optax.chain(DEMO, optax.ema(0.5)),
    "ema in front": optax.chain(optax.ema(0.5), DEMO),
    "a base of optax": demo_optax.decoupled(
        optax.adamw(5e-3, b1=0.0), SMALL, decay=0.9, axis_name="data"
    ),
    "bfloat16 momentum": demo_optax.decoupled(
        optax.lion(5e-3, b1=0.0), SMALL, decay=0.9, momentum_dtype="bfloat16", axis_name="data"
    ),
    "muon": demo_optax.demo_muon(2e-2, SMALL, decay=0.9, axis_name="data"),
    "apply_if_finite behind": optax.chain(DEMO, optax.apply_if_finite(optax.identity(), 3)),
}
REFUSED = {
    "MultiSteps": (optax.MultiSteps(DEMO, 2), "microbatches"),
    "apply_if_finite": (optax.apply_if_finite(DEMO, 3), "microbatches"),
    "masked, the rest untouched": (optax.masked(DEMO, MATRICES), "mean_over_workers"),
    "stack_workers": (demo_optax.stack_workers(DEMO, MESH), "pass the optimizer that was wrapped"),
}


def stacked(state, number):
    return jax.tree.map(lambda x: np.stack([x] * number), state)


@sweep("demo_optax.multi_steps", "schedule_free", name=TRAIN)
def test_it_trains_and_replicas_stay_alike(name):
    mesh, tx = MESH, TRAIN[name]
    extra = {"value": 1.0} if name == "reduce_on_plateau" else {}
    params, state = workers.initial(tx, mesh)
    step = workers.step_of(tx, mesh)
    batch = model.batch(0)
    first = loss_of(params, batch)
    for _ in range(16):
        params, state, _ = step(params, state, batch, **extra)
    assert loss_of(params, batch) < 0.9 * first
    assert demo_optax.check_replicas((params, state), mesh) == ()


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_advice(name, annotations_unchecked):
    tx, advice = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=advice):
        params, state = workers.initial(tx, MESH)
        workers.step_of(tx, MESH)(params, state, model.batch(0))


@pytest.mark.parametrize("shape", [slow((6, 8)), (MESH.size, 8)])
def test_optax_multi_steps_around_stacked_workers_are_refused_with_advice(shape):
    stacked = demo_optax.stack_workers(DEMO, MESH)
    around = optax.MultiSteps(stacked, 2)
    gradients = np.ones((MESH.size, *shape), np.float32)
    params = gradients[0]
    with jax.numpy_rank_promotion("allow"), pytest.raises(ValueError, match="multi_steps"):
        jax.jit(around.update)(gradients, around.init(params), params)
    inside = demo_optax.stack_workers(TRAIN["demo_optax.multi_steps"], MESH)  # as is advised
    updates, _ = jax.jit(inside.update)(gradients, inside.init(params), params)
    np.testing.assert_array_equal(updates, 0)


@pytest.mark.parametrize(
    "around",
    [
        lambda tx: demo_optax.multi_steps(tx, 2, axis_name="data"),
        lambda tx: demo_optax.local_steps(optax.sgd(0.1), tx, 2, axis_name="data"),
        lambda tx: demo_optax.local_steps(tx, DEMO, 2, axis_name="data"),
        demo_optax.decoupled,
    ],
    ids=["multi_steps", "outer", "inner", "base"],
)
def test_stacked_workers_inside_another_optimizer_are_refused(around):
    with pytest.raises(TypeError, match="must be the outermost transformation"):
        around(demo_optax.stack_workers(DEMO, MESH))


def test_multi_steps_are_one_step_of_the_mean():
    mesh, tx = MESH, TRAIN["demo_optax.multi_steps"]
    params, state = workers.initial(tx, mesh)
    step = workers.step_of(tx, mesh)
    batches = [model.batch(i) for i in range(2)]
    for batch in batches:
        params, state, _ = step(params, state, batch)
        assert (state.mini_step == 0) == (batch is batches[1])
    rows = [np.stack([b["x"].reshape(WORKERS, -1, 12) for b in batches], 1).reshape(-1, 12)]
    rows.append(np.stack([b["y"].reshape(WORKERS, -1, 3) for b in batches], 1).reshape(-1, 3))
    once = demo_optax.make_train_step(model.loss, DEMO, mesh, microbatches=2)
    fresh = demo_optax.init_opt_state(DEMO, model.init(), mesh)
    expected, *_ = once(model.init(), fresh, dict(zip("xy", rows, strict=True)))
    chex.assert_trees_all_equal(params, expected)


@pytest.mark.parametrize("tokens", [(1, 1, 1), (1, 2, 4)], ids=["alike", "by weight"])
def test_a_gradient_that_is_not_finite_leaves_its_worker_the_mean_of_the_others(tokens):
    """All coefficients are sent, so that the update is the mean of the workers' own means."""
    options = dict(decay=0.0, gradient_weight=1.0, mean="workers", axis_name="data")
    every_element = demo_optax.Compression(64, 8, transform="identity")
    outer = demo_optax.decoupled(optax.sgd(1.0), every_element, **options)
    tx, params = demo_optax.multi_steps(outer, 3, axis_name="data"), np.zeros((8, 8), np.float32)
    update = jax.jit(
        jax.vmap(
            lambda g, state, n: tx.update(g, state, params, message_weight=n),
            in_axes=(0, 0, None),
            axis_name="data",
        )
    )
    gradients = np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32)
    broken = gradients.copy()
    broken[1, 1, 0, 0] = np.nan
    state = stacked(tx.init(params), 2)
    for call, weight in enumerate(tokens):
        updates, state = update(broken[:, call], state, np.float32(weight))
    weights = np.array([tokens, tokens], np.float32)
    weights[1, 1] = 0
    mean = np.einsum("wc,wcij->ij", weights, gradients) / weights.sum()
    np.testing.assert_allclose(updates, np.stack([-mean] * 2), rtol=1e-5, atol=1e-6)
    assert int(demo_optax.exchange_metrics(state).participants[0]) == 2


def test_a_worker_all_of_whose_calls_are_bad_keeps_its_links_in_front():
    inside = optax.chain(optax.trace(0.9), DEMO)
    tx = demo_optax.multi_steps(inside, 2, axis_name="data")
    stacked, params = demo_optax.stack_workers(tx, MESH), np.ones((4, 4), np.float32)
    update, state, traces = jax.jit(stacked.update), stacked.init(params), []
    for step in range(4):
        gradients = np.ones((MESH.size, 4, 4), np.float32)
        gradients[1] = np.nan if step > 1 else 1
        _, state = update(gradients, state, params)
        traces.append(np.asarray(state.outer[0].trace)[:, 0, 0])
    np.testing.assert_allclose(traces[1], 1.0)
    np.testing.assert_allclose(traces[3], [1.9, 1.0, *[1.9] * (MESH.size - 2)], rtol=1e-6)


def test_multi_steps_of_one_worker_are_those_of_optax():
    base = optax.adam(optax.linear_schedule(0.1, 0.01, 4))
    ours, theirs = demo_optax.multi_steps(base, 3), optax.MultiSteps(base, 3)
    params = model.affine()
    states = ours.init(params), theirs.init(params)
    update, expected = jax.jit(ours.update), jax.jit(theirs.update)
    random = np.random.default_rng(0)
    for _ in range(9):
        gradient = jax.tree.map(
            lambda x: random.normal(size=x.shape).astype(np.float32), dict(params)
        )
        (found, own), (wanted, other) = (
            each(gradient, state, params)
            for each, state in zip((update, expected), states, strict=True)
        )
        chex.assert_trees_all_close(found, wanted, rtol=1e-5, atol=1e-7)
        states = own, other
    assert int(optax.tree.get(states[0], "ScaleByScheduleState").count) == 3


TWO_CALLS = demo_optax.multi_steps(demo_optax.demo_sgd(1.0, demo_optax.Compression(64, 8)), 2)
update_of_two_calls = jax.jit(TWO_CALLS.update)


@pytest.mark.parametrize("excluded", [(0,), (1,), (0, 1)])
def test_a_call_that_the_caller_excludes_does_not_count(excluded):
    params = np.ones((8, 8), np.float32)
    state = TWO_CALLS.init(params)
    for call in range(4):
        updates, state = update_of_two_calls(
            params, state, params, participates=np.array(call not in excluded)
        )
        assert np.any(updates != 0) == (call == 3 or (call == 1 and excluded != (0, 1)))


LINKS = {"ema": optax.ema(0.5), "trace": optax.trace(0.5), "zero_nans": optax.zero_nans()}


@sweep("ema", "zero_nans", link=LINKS)
def test_a_call_that_a_loop_of_ones_own_excludes_does_no_harm_to_other_links(link):
    sparse = demo_optax.demo_sgd(1.0, demo_optax.Compression(64, 8), axis_name="data")
    tx = demo_optax.multi_steps(optax.chain(LINKS[link], sparse), 2, axis_name="data")
    params = np.ones((8, 8), np.float32)
    state = stacked(tx.init(params), 2)

    def update(gradient, state, participates):
        return tx.update(gradient, state, params, participates=participates)

    update = jax.jit(jax.vmap(update, axis_name="data"))
    participants = []
    for call in range(6):
        gradients = np.stack([params, 2 * params])
        _, state = update(gradients, state, np.array([True, call not in (2, 3)]))
        metrics = demo_optax.exchange_metrics(state)
        if call % 2:
            participants.append(int(metrics.participants.max()))
    assert participants == [2, 1, 2]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))


def test_multi_steps_of_optax_exchange_under_vmap():
    tx = optax.MultiSteps(DEMO, 2)
    params = np.ones((12, 8), np.float32)
    state = stacked(tx.init(params), WORKERS)
    update = jax.jit(jax.vmap(tx.update, in_axes=(0, 0, None), axis_name="data"))
    gradient = np.random.default_rng(0).normal(size=(WORKERS, 12, 8)).astype(np.float32)
    first, state = update(gradient, state, params)
    second = np.asarray(update(gradient, state, params)[0])
    assert not np.any(first) and np.any(second)
    np.testing.assert_array_equal(second, np.broadcast_to(second[:1], second.shape))

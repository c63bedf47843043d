"""Faults that readers of the code found: each failed before."""

import copy
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax import Compression
from demo_optax._src import axes
from demo_optax._src.compression import plan
from demo_optax._src.exchange.collectives import sum_over_shards
from tests import workers
from tests.saved_runs import carried_over
from tests.sweeps import sweep

SMALL = Compression(4, 8)


NORMALIZED = optax.stateless(lambda g, _: jax.tree.map(lambda x: x / jnp.linalg.norm(x), g))


@pytest.mark.parametrize(
    "behind",
    [
        optax.chain(NORMALIZED, demo_optax.mean_over_workers("data"), optax.sgd(0.1)),
        optax.chain(NORMALIZED, demo_optax.demo_sgd(0.1, SMALL, axis_name="data")),
    ],
    ids=["dense", "in front"],
)
def test_a_link_that_makes_nan_of_a_finite_gradient_keeps_its_worker_out(behind):
    step = demo_optax.make_train_step(
        lambda params, batch: jnp.sum(params * batch[0]), behind, workers.mesh_of(4)
    )
    params = np.ones((8, 8), np.float32)
    state = demo_optax.init_opt_state(behind, params, workers.mesh_of(4))
    batch = np.random.default_rng(0).normal(size=(4, 8, 8)).astype(np.float32)
    for i in range(3):
        batch[0] *= i == 0  # zeros: 0 / 0
        params, state, metrics = step(params, state, batch)
        assert np.isfinite(params).all()
    if metrics.exchange is not None:
        assert metrics.exchange.participants == 3 and metrics.exchange.restarted == 0
        (momentum,) = [x for x in jax.tree.leaves(state) if x.shape == (4, 1, 1, 64)]
        assert np.abs(np.asarray(momentum)[0]).max() > 0


def test_a_preconditioner_that_makes_nan_of_a_finite_gradient_loses_these_blocks_alone():
    def to_nan(gradient, _):
        return jax.tree.map(lambda x: jnp.where(x == 0, jnp.nan, x), gradient)

    options = dict(precondition=optax.stateless(to_nan), axis_name="data")
    tx = demo_optax.demo_sgd(0.1, SMALL, **options)
    step = demo_optax.make_train_step(
        lambda params, batch: jnp.sum(params * batch[0]), tx, workers.mesh_of(4)
    )
    params = np.ones((16, 8), np.float32)
    state = demo_optax.init_opt_state(tx, params, workers.mesh_of(4))
    batch = np.random.default_rng(0).normal(size=(4, 16, 8)).astype(np.float32)
    for i in range(3):
        batch[0, 0, 0] *= i == 0
        params, state, metrics = step(params, state, batch)
        assert np.isfinite(params).all()
    assert metrics.exchange.participants == 4 and metrics.exchange.restarted == 1
    (momentum,) = [x for x in jax.tree.leaves(state) if x.shape == (4, 2, 1, 64)]
    blocks = np.abs(np.asarray(momentum)[:, :, 0]).max(axis=-1)
    assert blocks[0, 0] == 0 and (blocks.ravel()[1:] > 0).all()


def test_empty_leaves_may_lie_in_any_part():
    shapes = {"a": (0, 5), "b": (1024, 1024), "c": (1024, 1100)}
    params = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    tx = demo_optax.demo_sgd(1.0, Compression(4))
    updates, _ = jax.jit(tx.update)(params, tx.init(params))
    assert updates["a"].shape == (0, 5) and np.isfinite(updates["c"]).all()


@sweep(demo_optax.demo_muon, make=[demo_optax.demo_scaled, demo_optax.demo_muon])
def test_accumulation_in_sharded_workers_types_nothing_as_sharded_that_is_whole(make):
    mesh = workers.mesh_of(2, 2, kind=jax.sharding.AxisType.Auto)
    params = {"w": np.ones((16, 8), np.float32), "u": np.ones((8, 8), np.float32)}
    specs = {"w": jax.P("fsdp"), "u": jax.P()}
    tx = make(0.1, SMALL, axis_name="data", look_ahead=None)
    tx = demo_optax.multi_steps(tx, 2, axis_name="data")
    nu = optax.tree.get(demo_optax.state_specs(tx, params, mesh, "data", specs), "nu")
    by_output = make is demo_optax.demo_muon  # with one number for each column
    assert nu == {"w": P("data") if by_output else P("data", "fsdp"), "u": P("data")}
    after, *_ = workers.train(
        tx,
        range(2),
        mesh=mesh,
        params=lambda: params,
        loss=lambda p, x: jnp.mean(((x @ p["w"]) @ p["u"]) ** 2),
        batch=lambda _: np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32),
        param_specs=specs,
    )
    assert all((np.asarray(after[name]) != params[name]).any() for name in params)


@sweep(demo_optax.demo_scaled, make=[demo_optax.demo_sgd, demo_optax.demo_scaled])
def test_labels_of_whole_subtrees_divide_sharded_parameters(make):
    shapes = {"body": {"w": (16, 8), "v": (8,)}, "head": {"w": (16, 4)}}
    params = jax.tree.map(
        lambda shape: np.ones(shape, np.float32), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )
    dense = optax.chain(demo_optax.mean_over_workers("data"), optax.sgd(0.1))
    by_label = {"d": make(0.1, SMALL, axis_name="data"), "r": dense}
    after, *_ = workers.train(
        optax.partition(by_label, {"body": "d", "head": "r"}),
        range(1),
        mesh=workers.mesh_of(2, 2, kind=jax.sharding.AxisType.Auto),
        params=lambda: params,
        loss=lambda p, x: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(p)) * jnp.mean(x),
        batch=lambda _: np.ones((4, 1), np.float32),
        param_specs={"body": {"w": jax.P("fsdp"), "v": jax.P()}, "head": {"w": jax.P("fsdp")}},
    )
    assert all((np.asarray(x) < 1).any() for x in jax.tree.leaves(after))


def mean_product(params, batch):
    return jnp.mean(batch @ params)


EIGHT = np.ones(8, np.float32)
ROWS = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)


TWO_OF_FOUR = demo_optax.demo(0.1, Compression(2, 4), axis_name="data")


def test_the_caller_may_exclude_all_workers():
    mesh = workers.mesh_of(2)
    step = demo_optax.make_train_step(mean_product, TWO_OF_FOUR, mesh)
    state = demo_optax.init_opt_state(TWO_OF_FOUR, EIGHT, mesh)
    _, _, metrics = step(EIGHT, state, ROWS, participates=False)
    assert metrics.exchange.participants == 0


def test_a_state_without_arrays_can_be_saved(tmp_path):
    mesh, params = workers.mesh_of(2), {"w": jnp.arange(4.0)}
    tx = optax.chain(demo_optax.mean_over_workers("data"), optax.sgd(0.1))
    params = jax.device_put(params, jax.NamedSharding(mesh, jax.P()))
    state = demo_optax.init_opt_state(tx, params, mesh)
    found = carried_over(tmp_path, (params, state), tx, mesh)
    assert found.params["w"].tolist() == [0, 1, 2, 3]


class CountOfNumbers(NamedTuple):
    """Statistics, which only have the name of a schedule's count."""

    count: jax.Array


def test_statistics_named_count_are_no_schedule():
    def update(updates, state, params=None):
        del params
        count = 0.9 * state.count + jnp.sum(jnp.square(updates["w"]))
        return {"w": updates["w"] / (1 + count)}, CountOfNumbers(count)

    scale = optax.GradientTransformation(lambda _: CountOfNumbers(jnp.zeros(())), update)
    tx = demo_optax.demo_sgd(0.1, SMALL, precondition=scale)
    params = {"w": np.ones((8, 8), np.float32)}
    state = tx.init(params)
    broken = state[0]._replace(precondition=CountOfNumbers(jnp.asarray(jnp.nan)))
    _, state = jax.jit(tx.update)(params, (broken, *state[1:]), params)
    assert int(demo_optax.exchange_metrics(state).participants) == 1


class Mutable:
    """An optimizer with methods, whose rate changes."""

    rate = 1.0

    def init(self, params):
        return optax.sgd(1.0).init(params)

    def update(self, updates, state, params=None, **extra_args):
        del extra_args
        mean, _ = demo_optax.mean_over_workers("data").update(
            updates, demo_optax.mean_over_workers("data").init(params), params
        )
        return jax.tree.map(lambda u: -self.rate * u, mean), state


def test_an_optimizer_that_changes_is_traced_again(annotations_unchecked):
    mesh, tx, params = workers.mesh_of(2), Mutable(), {"w": jnp.ones(4)}

    def step_once():
        step = demo_optax.make_train_step(lambda p, x: jnp.sum(p["w"]) * x[0], tx, mesh)
        state = demo_optax.init_opt_state(tx, params, mesh)
        return float(step(dict(params), state, jnp.ones(2))[0]["w"][0])

    assert step_once() == 0.0
    tx.rate = 2.0
    assert step_once() == -1.0


REDRAWN = Compression(4, 8, transform="random")


def test_what_apply_ignores_leaves_a_momentum_in_its_basis():
    outer = demo_optax.decoupled(optax.sgd(1.0), REDRAWN, decay=0.9)
    tx = demo_optax.local_steps(optax.sgd(0.1), outer, every=3)
    params, state = jnp.ones((8, 8)), None
    state = tx.init(params)
    send, apply = jax.jit(tx.send), jax.jit(tx.apply)
    gradient = jnp.arange(64.0).reshape(8, 8)
    for step in range(5):
        outbox, state = send(gradient, state, params)
        before = state.outer[0].momentum
        updates, state = apply(outbox.packets, outbox, state, params)
        if step in (3, 4):
            assert np.any(before)
            np.testing.assert_array_equal(state.outer[0].momentum, before)
            assert not np.any(updates)


def test_a_worker_that_follows_over_an_axis_changes_its_basis():
    tx = demo_optax.decoupled_momentum(0.9, REDRAWN, gradient_weight=1.0, axis_name="data")
    params, gradient = jnp.ones((8, 8)), jnp.arange(64.0).reshape(8, 8)

    def mapped(fn, **axes):
        return jax.jit(jax.vmap(fn, axis_name="data", axis_size=1, **axes))

    init = mapped(tx.init, in_axes=None)(params)
    _, state = mapped(tx.update)(gradient[None], init)
    followed = mapped(lambda state: tx.apply(None, tx.empty_outbox(params), state, params)[1])(
        state
    )
    assert int(followed.count[0]) == 2
    assert np.abs(followed.momentum - state.momentum).max() > 0.1
    norms = [np.linalg.norm(x.momentum) for x in (state, followed)]
    np.testing.assert_allclose(*norms, rtol=1e-5)


def test_a_look_ahead_without_weight_decay_needs_no_parameters():
    tx, params = demo_optax.demo_muon(0.1), {"w": jnp.ones((8, 8))}
    gradient = {"w": jnp.eye(8)}
    without, with_them = (
        jax.jit(tx.update)(gradient, tx.init(params), *args)[0] for args in ((), (params,))
    )
    np.testing.assert_array_equal(without["w"], with_them["w"])


def test_an_update_is_traced_alike_however_many_coefficients_it_sends():
    def equations(topk):
        tx = demo_optax.demo(0.1, Compression(topk))
        params = jnp.ones((64, 64))
        return len(str(jax.make_jaxpr(tx.update)(params, tx.init(params), params)).splitlines())

    assert equations(1024) < 1.2 * equations(64)


def test_sums_over_shards_take_wider_numbers():
    mesh = jax.make_mesh((2,), ("fsdp",), (jax.sharding.AxisType.Auto,))
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        x = jnp.asarray(np.arange(6.0).reshape(2, 3))

        def total(x):
            wide, narrow = sum_over_shards([x[0], x[0].astype("float32")], [("fsdp",)] * 2)
            return wide, narrow.astype(wide.dtype)

        sums = jax.shard_map(total, mesh=mesh, in_specs=P("fsdp"), out_specs=P())(x)
    for one in sums:
        assert one.dtype == np.float64
        np.testing.assert_array_equal(one, [3.0, 5.0, 7.0])


@pytest.mark.parametrize("value", [-np.inf, np.inf, np.nan, -1.0, 0.0])
def test_what_a_part_waits_for_changes_nothing_whatever_is_in_it(value):
    tree = {"a": jnp.arange(3.0), "n": jnp.arange(3)}
    waited = [jnp.full(1, value), jnp.zeros((0, 2)), jnp.full((2, 2), value, jnp.bfloat16)]
    for after in waited, waited[:1]:
        for name, x in axes.after(after, tree).items():
            np.testing.assert_array_equal(x, tree[name])


def test_an_exchange_of_ones_own_may_keep_a_state_beside_an_all_gather():
    class Counted(demo_optax.AllGather):
        def init(self, plan):
            return jnp.int32(0)

        def exchange(self, plan, outbox, state, previous_metrics, mean):
            return super().exchange(plan, outbox, state + 1, previous_metrics, mean)

    tx, params = demo_optax.demo(0.1, SMALL, exchange=Counted()), jnp.ones((16, 16))
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(2):
        _, state = update(params, state, params)
    assert state[0].exchange == 2


def test_tensors_of_unlike_dtypes_may_lie_in_different_parts(monkeypatch):
    monkeypatch.setattr(plan, "_SMALLEST_PART", 1)
    plan.make_plan.cache_clear()
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        params = {"a": jnp.ones((16, 16), jnp.float32), "b": jnp.ones((16, 16), jnp.float64)}
        tx = demo_optax.demo_scaled(0.1, Compression(2, 8))
        updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
        assert jax.tree.map(lambda x: x.dtype, updates) == jax.tree.map(lambda x: x.dtype, params)
    plan.make_plan.cache_clear()


def test_all_numbers_of_workers_are_no_flag_of_one():
    tx, params = demo_optax.demo(0.1, SMALL), jnp.ones((16, 16))
    with pytest.raises(ValueError, match="broadcast"):
        tx.update(params, tx.init(params), params, participates=jnp.array([True]))


def loss_fn(params, batch):
    return jnp.sum(params["w"] * batch[0])


def trained(tx, params, batch, mesh, steps=1, **options):
    step = demo_optax.make_train_step(loss_fn, tx, mesh, donate=False, **options)
    run = params, demo_optax.init_opt_state(tx, params, mesh)
    for _ in range(steps):
        *run, metrics = step(*run, batch)
    return *run, metrics


BATCH = np.random.default_rng(0).normal(size=(4, 8, 8)).astype(np.float32)
WEIGHTS = {"w": np.ones((8, 8), np.float32)}


@pytest.mark.parametrize("mesh", [workers.mesh_of(4), jax.sharding.AbstractMesh((4,), ("data",))])
def test_updates_that_follow_from_no_gradient_are_what_they_are(mesh):
    class State(NamedTuple):
        steps: jax.Array

    def anneal(updates, state, params=None):
        change = 0.25 * (state.steps + 1)
        return jax.tree.map(lambda g: jnp.full_like(g, -change), updates), State(state.steps + 1)

    anneals = optax.GradientTransformation(lambda _: State(jnp.zeros((), jnp.int32)), anneal)
    trains = demo_optax.demo(0.1, SMALL, axis_name="data")
    tx = optax.partition({"a": trains, "b": anneals}, {"w": "a", "temperature": "b"})
    params = WEIGHTS | {"temperature": np.float32(1)}
    params, *_ = trained(tx, params, BATCH, mesh, steps=2)
    assert params["temperature"] == 0.25


@pytest.mark.parametrize(
    "wrap",
    [lambda tx: tx, lambda tx: demo_optax.multi_steps(tx, 2, axis_name="data")],
    ids=["alone", "accumulated"],
)
@pytest.mark.parametrize("transform", ["dct", "random"])
def test_an_empty_leaf_keeps_the_dtype_of_its_momentum(wrap, transform):
    compression = Compression(4, 8, transform=transform)
    tx = wrap(demo_optax.demo_scaled(0.1, compression, axis_name="data"))
    params = WEIGHTS | {"empty": np.zeros((0, 8), np.float32)}
    begun = demo_optax.init_opt_state(tx, params, workers.mesh_of(4))
    _, state, _ = trained(tx, params, BATCH, workers.mesh_of(4))
    assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, begun)


def test_a_mean_under_way_merges_by_the_weights_of_the_workers(tmp_path):
    """One of two workers has had nothing but a gradient that is not finite."""
    tx = demo_optax.multi_steps(
        demo_optax.demo_sgd(1.0, Compression(64, 8), decay=0.0, axis_name="data"),
        2,
        axis_name="data",
    )
    batch = np.stack([np.full((8, 8), 4, np.float32), np.full((8, 8), np.nan, np.float32)])
    *run, _ = trained(tx, WEIGHTS, batch, workers.mesh_of(2))
    restored = carried_over(tmp_path, run, tx, workers.mesh_of(2), workers.mesh_of(1))
    step = demo_optax.make_train_step(loss_fn, tx, workers.mesh_of(1))
    params, *_ = step(restored.params, restored.opt_state, np.full((1, 8, 8), 4, np.float32))
    np.testing.assert_allclose(params["w"], WEIGHTS["w"] - 4, rtol=1e-5)


@pytest.mark.parametrize("place", ["in front", "precondition"])
def test_each_worker_draws_noise_of_its_own(place):
    noise, options = optax.add_noise(1.0, 0.0, jax.random.key(0)), dict(decay=0.0, axis_name="data")
    if place == "precondition":
        tx = demo_optax.demo_sgd(1.0, Compression(64, 8), precondition=noise, **options)
    else:
        tx = optax.chain(noise, demo_optax.demo_sgd(1.0, Compression(64, 8), **options))
    params, *_ = trained(tx, WEIGHTS, BATCH, workers.mesh_of(4))
    drawn = np.std(WEIGHTS["w"] - np.asarray(params["w"]) - BATCH.mean(0))
    assert 0.4 < drawn < 0.6  # of one worker: 1


@pytest.mark.parametrize("number", [2, 3, 4, 8])
def test_workers_that_a_restore_makes_draw_noise_of_their_own(tmp_path, number):
    tx = optax.chain(
        optax.add_noise(1.0, 0.0, jax.random.key(0)),
        demo_optax.demo_sgd(1.0, SMALL, axis_name="data"),
    )
    mesh, other = workers.mesh_of(4), workers.mesh_of(number)
    begun = WEIGHTS, demo_optax.init_opt_state(tx, WEIGHTS, mesh)
    restored = carried_over(tmp_path, begun, tx, mesh, other).opt_state
    keys = [jax.random.key_data(x[0].rng_key) for x in (begun[1], restored)]
    assert len(np.unique(keys[1], axis=0)) == number
    assert np.array_equal(*keys) == (number == 4)


def test_numbers_of_python_in_front_of_an_exchange_become_arrays_of_all_workers():
    counts = optax.GradientTransformation(lambda _: {"n": 0.5}, lambda u, s, p=None: (u, s))
    tx = optax.chain(counts, demo_optax.demo(0.1, SMALL, axis_name="data"))
    state = demo_optax.init_opt_state(tx, WEIGHTS, workers.mesh_of(4))
    np.testing.assert_array_equal(state[0]["n"], np.full(4, 0.5))


def test_updates_that_tell_workers_apart_are_refused():
    def permuted(updates, state, params=None):
        ones = jax.tree.map(jnp.ones_like, updates)
        return jax.tree.map(lambda x: jax.lax.ppermute(x, "data", [(0, 1)]), ones), state

    tx = optax.partition(
        {
            "a": demo_optax.demo(0.1, SMALL, axis_name="data"),
            "b": optax.GradientTransformation(lambda _: optax.EmptyState(), permuted),
        },
        {"w": "a", "other": "b"},
    )
    with pytest.raises(ValueError, match="may differ between the workers"):
        trained(tx, WEIGHTS | {"other": np.ones(2, np.float32)}, BATCH, workers.mesh_of(4))


@pytest.mark.parametrize("fragments", [None, 2])
def test_no_round_ends_while_the_caller_says_so(fragments):
    outer = demo_optax.demo_sgd(1.0, SMALL, axis_name="data")
    tx = demo_optax.local_steps(
        optax.sgd(0.1), outer, every=2, fragments=fragments, axis_name="data"
    )
    gradient = jnp.ones((4, 8, 8))
    params, state = (
        jnp.zeros((8, 8)),
        jax.vmap(tx.init, in_axes=None, axis_size=4)(jnp.zeros((8, 8))),
    )

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, 0), axis_name="data")
    def update(gradient, state):
        return tx.update(gradient, state, params, ends_round=False)

    for _ in range(4):
        updates, state = update(gradient, state)
        assert not np.any(updates)
    assert not np.any(state.round)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_clipped_and_dense_gradients_need_no_promotion(dtype):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        params = {"w": jnp.ones((8, 8), dtype)}
        for tx in (
            demo_optax.demo_sgd(1.0, SMALL, axis_name="data"),
            optax.chain(demo_optax.mean_over_workers("data"), optax.sgd(1.0)),
        ):
            found, *_ = trained(tx, params, BATCH.astype(dtype), workers.mesh_of(4), clip_norm=4.0)
            assert found["w"].dtype == dtype and np.any(found["w"] != params["w"])


def test_a_copy_of_an_optimizer_of_stacked_workers_is_that_optimizer():
    tx = demo_optax.stack_workers(demo_optax.demo(0.1, axis_name="data"), workers.mesh_of(4))
    assert copy.copy(tx) is tx and copy.deepcopy({"tx": tx})["tx"] is tx


@pytest.mark.parametrize("given", [2, 3, 1.0, True])
def test_a_worker_takes_part_for_any_number_but_zero(given):
    tx, params = demo_optax.demo_sgd(0.1, SMALL), jnp.ones((16, 16))
    updates, _ = tx.update(params, tx.init(params), params, participates=given)
    assert np.any(updates)

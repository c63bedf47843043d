"""Runs that stop and go on: on the same workers to the last bit, on others without loss."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax import checkpoint
from demo_optax.checkpoint import Checkpointer
from tests import model, workers
from tests.saved_runs import carried_over, with_other_numbers
from tests.sweeps import sweep

SMALL = demo_optax.Compression(2, 6)
SGD = demo_optax.demo_sgd(0.3, decay=0.9, compression=SMALL, axis_name="data")
OPTIMIZERS = {
    "preconditioned demo": demo_optax.demo(
        5e-3,
        decay=0.95,
        precondition=optax.scale_by_rms(0.9, bias_correction=True),
        compression=SMALL,
        axis_name="data",
    ),
    "adamw, redrawn transform": demo_optax.demo_adamw(
        5e-3, demo_optax.Compression(4, 6, transform="random"), axis_name="data"
    ),
    "a chain with a partition and random keys": optax.chain(
        optax.partition(
            {
                "demo": demo_optax.decoupled_momentum(0.9, SMALL, axis_name="data"),
                "dense": demo_optax.mean_over_workers("data"),
            },
            {"out": "demo", "bias": "dense"},
        ),
        optax.add_noise(1e-4, 0.5, key=jax.random.key(3)),
        optax.scale(-0.3),
    ),
}


train = functools.partial(
    workers.train,
    params=model.affine,
    loss=model.affine_loss,
    batch=functools.partial(model.batch, rows=24),
)


def initial(tx, mesh):
    return workers.initial(tx, mesh, model.affine)


def mean_losses(metrics):
    return [float(np.mean(one.loss)) for one in metrics]


def assert_same_bits(ours, theirs):
    def bits(x):
        x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        return [np.asarray(shard.data).tobytes() for shard in x.addressable_shards]

    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert bits(a) == bits(b)


@sweep("preconditioned demo", name=OPTIMIZERS)
def test_a_run_goes_on_to_the_last_bit(name, tmp_path):
    tx, mesh = OPTIMIZERS[name], workers.mesh_of(4)
    params, state, _ = train(tx, range(3), mesh=mesh)
    extra = {"key": jax.random.key(5), "position": 3, "note": "abc", "table": np.arange(3)}
    with Checkpointer(tmp_path, tx, mesh) as checkpointer:
        assert checkpointer.restore(model.affine()) is None
        checkpointer.save(3, params, state, extra)
        # What was saved is given away to the next steps while it is being written.
        expected = train(tx, range(3, 6), mesh=mesh, start=(params, state))

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model.affine())
    template = {"key": jax.random.key(0), "position": 0, "note": "", "table": np.zeros(3, int)}
    with Checkpointer(tmp_path, tx, mesh) as checkpointer:
        assert checkpointer.latest == 3
        found = checkpointer.restore(shapes, template)
    assert (found.step, found.extra["position"], found.extra["note"]) == (3, 3, "abc")
    assert jnp.array_equal(
        jax.random.key_data(found.extra["key"]), jax.random.key_data(extra["key"])
    )
    np.testing.assert_array_equal(found.extra["table"], extra["table"])
    went_on = train(tx, range(3, 6), mesh=mesh, start=(found.params, found.opt_state))
    assert_same_bits(went_on[:2], expected[:2])
    assert mean_losses(went_on[2]) == mean_losses(expected[2])


@sweep((4, 3), numbers=[(4, 2), (2, 4), (4, 3), (3, 1)])
def test_other_numbers_of_workers_keep_the_mean(numbers, tmp_path):
    before, after = numbers
    tx = OPTIMIZERS["preconditioned demo"]
    run = functools.partial(train, tx)
    params, state, losses = run(range(40), mesh=workers.mesh_of(before))
    losses = mean_losses(losses)
    mesh = workers.mesh_of(after)
    found = carried_over(tmp_path, (params, state), tx, workers.mesh_of(before), mesh)
    chex.assert_trees_all_equal(found.params, params)

    def local(state):
        return jax.tree.map(np.asarray, (state[0].momentum, state[0].precondition.nu))

    for old, new in zip(*map(jax.tree.leaves, (local(state), local(found.opt_state))), strict=True):
        assert len(new) == after and np.any(new)
        np.testing.assert_allclose(new.mean(0), old.mean(0), rtol=1e-5, atol=1e-7)
        if before % after == 0:
            merged = old.reshape(after, before // after, *old.shape[1:]).mean(1)
            np.testing.assert_allclose(new, merged, rtol=1e-6, atol=1e-8)
        elif after % before == 0:
            np.testing.assert_array_equal(new, np.repeat(old, after // before, axis=0))
        else:
            assert all((entry == new[0]).all() for entry in new)

    *_, went_on = run(range(40, 60), mesh=mesh, start=(found.params, found.opt_state))
    *_, alike = run(range(40, 60), mesh=workers.mesh_of(before), start=(params, state))
    went_on, alike = mean_losses(went_on), mean_losses(alike)
    assert np.mean(went_on) < 1.1 * np.mean(losses[20:])
    assert max(went_on[:5]) < 1.2 * max(alike[:5])


def everything_at_last(exchange, topk=48, **options):
    """Sends 48 of 64 coefficients, and the others later: momenta that never decay."""
    sent = demo_optax.Compression(topk, 8, "float32", transform="identity")
    options = dict(decay=1.0, gradient_weight=1.0, mean="workers", exchange=exchange) | options
    return demo_optax.decoupled(optax.sgd(1.0), sent, **options)


def rounds_of(exchange, fragments=None, topk=48, **options):
    outer = everything_at_last(exchange, topk, **options)
    return demo_optax.local_steps(
        optax.sgd(1.0), outer, every=4, fragments=fragments, axis_name="data"
    )


GATHER = demo_optax.AllGather("data")
OWNERS = demo_optax.TwoPhase("data", topk_back=32, value_coding_back="float32", residual_decay=1.0)
LATE, LATE_OWNERS = map(demo_optax.Delayed, (GATHER, OWNERS))
INEXACT = {  # the optimizer, the workers before and after, and the optimizer that goes on
    "all-gather": (everything_at_last(GATHER), 4, 3, None),
    "another topk": (everything_at_last(GATHER), 2, 2, everything_at_last(GATHER, 40)),
    "late": (everything_at_last(LATE), 2, 4, None),
    "late no more": (everything_at_last(LATE), 2, 2, everything_at_last(GATHER)),
    "late owners": (everything_at_last(LATE_OWNERS), 4, 2, None),
    "owners from now on": (everything_at_last(GATHER), 2, 2, everything_at_last(OWNERS)),
    "rounds": (rounds_of(GATHER), 4, 3, None),
    "late rounds": (rounds_of(LATE), 2, 4, None),
    "rounds of owners": (rounds_of(OWNERS), 2, 3, None),
    "fragments": (rounds_of(GATHER, 2), 4, 3, None),
    "fragments of another topk": (rounds_of(GATHER, 2), 2, 2, rounds_of(GATHER, 2, 40)),
    "a fragment on each step": (rounds_of(GATHER, 4), 2, 4, None),
    "one fragment": (rounds_of(GATHER, 1), 4, 2, None),
    "fragments of owners": (rounds_of(OWNERS, 4), 4, 2, None),
    "fragments, owners from now on": (rounds_of(GATHER, 2), 2, 2, rounds_of(OWNERS, 2)),
}


@sweep("late rounds", "fragments", "fragments of owners", name=INEXACT)
def test_what_was_under_way_is_delivered_once_after_every_restore(name, tmp_path):
    """Gradients are whole numbers until the restore, and zeros afterwards."""
    tx, before, after, goes_on = INEXACT[name]
    random = np.random.default_rng(0)
    params = {"w": jnp.zeros((16, 24)), "nothing": jnp.zeros((0, 3))}

    def loss(params, batch):
        return jnp.sum(params["w"] * batch[0])

    def run(tx, workers, params, state, batches):
        step = demo_optax.make_train_step(loss, tx, AbstractMesh((workers,), ("data",)))
        for batch in batches:
            params, state, _ = step(params, state, batch)
        return params, state

    batches = random.integers(-8, 9, (7, before, 16, 24)).astype(np.float32)
    mesh = AbstractMesh((before,), ("data",))
    state = demo_optax.init_opt_state(tx, params, mesh)
    saved = run(tx, before, params, state, batches)
    found = carried_over(tmp_path, saved, tx, mesh, AbstractMesh((after,), ("data",)), goes_on)
    nothing = np.zeros((24, after, 16, 24), np.float32)
    ended, _ = run(goes_on or tx, after, found.params, found.opt_state, nothing)
    np.testing.assert_allclose(ended["w"], -batches.mean(axis=1).sum(axis=0), atol=1e-4)


def test_random_keys_in_the_state_survive_another_number_of_workers(tmp_path):
    tx = OPTIMIZERS["a chain with a partition and random keys"]
    params, state = initial(tx, workers.mesh_of(4))
    key = jax.device_put(jax.random.key(17), state[1].rng_key.sharding)
    state = state[0], state[1]._replace(rng_key=key), state[2]
    found = carried_over(tmp_path, (params, state), tx, workers.mesh_of(4), workers.mesh_of(2))
    keys, expected = (jax.random.key_data(tree[1].rng_key) for tree in (found.opt_state, state))
    np.testing.assert_array_equal(keys, expected)
    start = found.params, found.opt_state
    train(tx, range(2, 3), mesh=workers.mesh_of(2), start=start)


def test_other_blocks_or_transforms_are_refused(tmp_path):
    mesh = workers.mesh_of(2)
    params, state = initial(SGD, mesh)
    with Checkpointer(tmp_path, SGD, mesh) as checkpointer:
        checkpointer.save(1, params, state)
    for side, transform in ((5, "dct"), (3, "dct"), (6, "identity"), (6, "random")):
        compression = demo_optax.Compression(2, side, transform=transform)
        other = demo_optax.demo_sgd(0.3, compression, decay=0.9, axis_name="data")
        with (
            Checkpointer(tmp_path, other, mesh) as checkpointer,
            pytest.raises(ValueError, match="restore it with the old transform, block_side"),
        ):
            checkpointer.restore(model.affine())


def test_larger_blocks_than_all_tensors_are_the_same_blocks(tmp_path):
    def small(block_side):
        compression = demo_optax.Compression(2, block_side)
        return demo_optax.demo_sgd(0.3, compression, decay=0.9, axis_name="data")

    two, one = workers.mesh_of(2), workers.mesh_of(1)
    run = initial(small(64), two)
    assert carried_over(tmp_path, run, small(64), two, one, small(128)).step == 1


def test_shards_that_end_in_other_blocks_are_refused(tmp_path):
    """Shards of 8 columns end in blocks of 2, where one of 16 has none there."""
    tx = demo_optax.demo_sgd(0.3, demo_optax.Compression(64, 6), decay=0.9, axis_name="replica")
    spec = P(None, "fsdp")
    settings = dict(axis_name="replica", param_specs=spec)
    one, mesh = (
        workers.mesh_of(2, size, names=("replica", "fsdp"), kind=AxisType.Auto) for size in (1, 2)
    )
    params = jax.device_put(np.ones((12, 16), np.float32), jax.NamedSharding(mesh, spec))
    run = with_other_numbers((params, demo_optax.init_opt_state(tx, params, mesh, **settings)), 0)
    with Checkpointer(tmp_path, tx, mesh, **settings) as checkpointer:
        checkpointer.save(1, *run)
        again = checkpointer.restore(params)
    assert_same_bits((again.params, again.opt_state), run)
    with (
        Checkpointer(tmp_path, tx, one, **settings) as checkpointer,
        pytest.raises(
            ValueError, match=r"'8 in blocks of 6'\], but the optimizer has .*'16 in blocks of 6'\]"
        ),
    ):
        checkpointer.restore(params)


def test_the_last_few_are_kept_and_any_of_them_can_be_restored(tmp_path):
    mesh = workers.mesh_of(2)
    params, state = initial(SGD, mesh)
    with Checkpointer(tmp_path, SGD, mesh, keep=2) as checkpointer:
        for step in (1, 2, 3):
            scaled = {name: np.asarray(x) * step for name, x in params.items()}
            checkpointer.save(step, scaled, state, wait=True)
        checkpointer.save(3, params, state)  # which is there
        found = checkpointer.restore(params, step=2)
        chex.assert_trees_all_equal(found.params, jax.tree.map(lambda x: 2 * np.asarray(x), params))
        with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 1; .* \[2, 3\]"):
            checkpointer.restore(params, step=1)
        for step in (1, 3):  # would lose to what is there when the run is started again
            with pytest.raises(ValueError, match="checkpoint of step 3 already"):
                checkpointer.save(step, params, state)
    loaded = checkpoint.load_params(tmp_path, params)
    chex.assert_trees_all_equal(loaded, jax.tree.map(lambda x: 3 * np.asarray(x), params))
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 7"):
        checkpoint.load_params(tmp_path, params, step=7)


def test_parameters_alone_of_a_flax_model(tmp_path):
    network = nnx.Linear(12, 3, rngs=nnx.Rngs(0))
    graph, params = nnx.split(network, nnx.Param)
    mesh = workers.mesh_of(2)
    with Checkpointer(tmp_path, SGD, mesh) as checkpointer:
        checkpointer.save(1, params, demo_optax.init_opt_state(SGD, params, mesh))
    shapes = nnx.state(nnx.eval_shape(lambda: nnx.Linear(12, 3, rngs=nnx.Rngs(1))), nnx.Param)
    restored = nnx.merge(graph, checkpoint.load_params(tmp_path, shapes))
    x = jnp.ones((3, 12))
    np.testing.assert_array_equal(restored(x), network(x))


def test_names_that_look_alike_and_leaves_without_elements_stay_apart(tmp_path):
    one, two, three = (np.full(8, i, np.float32) for i in (1, 2, 3))
    params = {"a/b": one, "a": {"b": two}, "a.b": three, "empty": np.zeros((0, 3), np.float32)}
    mesh = workers.mesh_of(2)
    with Checkpointer(tmp_path, SGD, mesh) as checkpointer:
        checkpointer.save(1, params, demo_optax.init_opt_state(SGD, params, mesh))
        found = checkpointer.restore(params)
    chex.assert_trees_all_equal(found.params, params)
    chex.assert_trees_all_equal(checkpoint.load_params(tmp_path, params), params)


def test_owners_of_no_blocks_restore_on_other_workers(tmp_path):
    by_owners = demo_optax.demo(0.1, SMALL, exchange=demo_optax.TwoPhase("data"))
    tx = optax.partition({"some": by_owners, "none": by_owners}, {"w": "some"})
    params = {"w": np.ones((6, 6), np.float32)}
    for number in (2, 4):
        with Checkpointer(tmp_path, tx, workers.mesh_of(number)) as checkpointer:
            if number == 2:
                state = demo_optax.init_opt_state(tx, params, workers.mesh_of(number))
                checkpointer.save(1, params, state)
            else:
                chex.assert_trees_all_equal(checkpointer.restore(params).params, params)


def test_who_only_reads_leaves_a_save_that_is_under_way_alone(tmp_path):
    mesh = workers.mesh_of(2)
    params, state = initial(SGD, mesh)
    with Checkpointer(tmp_path, SGD, mesh) as writer:
        writer.save(1, params, state, wait=True)
        writer.save(2, params, state)
        with Checkpointer(tmp_path, SGD, mesh) as reader:
            assert reader.restore(params).step in (1, 2)
    with Checkpointer(tmp_path, SGD, mesh) as reader:
        assert reader.latest == 2

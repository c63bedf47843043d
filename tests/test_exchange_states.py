"""What an exchange keeps beside the momenta: sharded, saved, and divided among other workers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax.checkpoint import Checkpointer

pytestmark = pytest.mark.sweep

SHAPES = {"v": (30,), "w": (32, 24)}
SPECS = {"v": P(), "w": P("fsdp")}
BOTH = [("two-phase", 0), ("all-gather", 1), ("two-phase", 1)]


def mesh_of(*sizes):
    names = ("data", "fsdp", "tensor")[: len(sizes)]
    return jax.make_mesh(sizes, names, devices=jax.devices()[: int(np.prod(sizes))])


def optimizer(exchange, delay, **settings):
    compression = demo_optax.Compression(
        topk=4, block_side=8, value_coding="int4", exchange=exchange, delay=delay, **settings
    )
    return demo_optax.demo_signum(1e-2, compression, decay=0.9, axis_name="data")


def loss(params, batch):
    return jnp.mean((batch @ params["w"] - 1) ** 2) + jnp.sum(params["v"] ** 2) * jnp.mean(batch)


def batch(step):
    return np.random.default_rng(step).normal(size=(48, 32)).astype(np.float32)


class Trained:
    def __init__(self, tx, *sizes):
        self.tx, self.mesh = tx, mesh_of(*sizes)
        self.specs = SPECS if len(sizes) > 1 else None
        self.params = {n: jnp.ones(shape) for n, shape in SHAPES.items()}
        self.state = demo_optax.init_opt_state(tx, self.params, self.mesh, param_specs=self.specs)
        self.step = demo_optax.make_train_step(loss, tx, self.mesh, param_specs=self.specs)

    def run(self, steps):
        for number in steps:
            self.params, self.state, self.metrics = self.step(
                self.params, self.state, batch(number)
            )
        return self

    def checkpointer(self, folder):
        return Checkpointer(folder, self.tx, self.mesh, param_specs=self.specs)

    def restored(self, folder):
        with self.checkpointer(folder) as checkpointer:
            found = checkpointer.restore(self.params)
        self.params, self.state = found.params, found.opt_state
        return self


def assert_same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("sizes", [(8,), (4, 2), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("exchange, delay", BOTH)
def test_replicas_stay_identical_and_learn_on_every_mesh(exchange, delay, sizes):
    trained = Trained(optimizer(exchange, delay), *sizes).run([0])
    first = float(trained.metrics.loss.mean())
    trained.run(range(1, 60))
    assert demo_optax.check_replicas(trained.params, trained.mesh) == ()
    assert int(trained.metrics.exchange.participants) == sizes[0]
    assert bool(trained.metrics.exchange.agreed)
    assert float(trained.metrics.loss.mean()) < first / 2


@pytest.mark.parametrize("every", [1, 3], ids="{} local steps".format)
@pytest.mark.parametrize("selection", ["topk", "random", "slicing"])
@pytest.mark.parametrize("exchange, delay", [("all-gather", 0), *BOTH])
def test_replicas_are_identical_after_200_steps_in_every_combination(
    exchange, delay, selection, every
):
    tx = optimizer(exchange, delay, selection=selection)
    if every > 1:
        tx = demo_optax.local_steps(optax.sgd(1e-2), tx, every, axis_name="data")
    trained = Trained(tx, 8)

    def body(carry, batch):
        params, state, _ = trained.step(*carry, batch)
        return (params, state), None

    def steps(params, state, batches):
        return jax.lax.scan(body, (params, state), batches)[0]

    batches = np.stack([batch(number) for number in range(200)])
    params, state = jax.jit(steps)(trained.params, trained.state, batches)
    assert demo_optax.check_replicas((params, state), trained.mesh) == ()
    assert loss(params, batch(0)) < 0.95 * loss(trained.params, batch(0))
    metrics = demo_optax.exchange_metrics(state)
    assert int(metrics.participants) == 8 and bool(metrics.agreed)


@pytest.mark.parametrize("sizes", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("exchange, delay", BOTH)
def test_a_saved_run_goes_on_to_the_same_bits(exchange, delay, sizes, tmp_path):
    tx = optimizer(exchange, delay)
    straight = Trained(tx, *sizes).run(range(5))
    with straight.checkpointer(tmp_path) as checkpointer:
        checkpointer.save(5, straight.params, straight.state, wait=True)
    restored = Trained(tx, *sizes).restored(tmp_path)
    assert_same(straight.state, restored.state)
    assert_same(straight.run(range(5, 8)).params, restored.run(range(5, 8)).params)


def owed(state, inner):
    """What all owners have yet to send, in the order of the blocks, of each device inside them."""
    return [
        np.swapaxes(np.asarray(x).reshape(len(x), inner, -1, x.shape[2]), 0, 1).reshape(
            inner, -1, x.shape[2]
        )
        for x in state[0].residual
    ]


@pytest.mark.parametrize("before, after", [((4,), (3,)), ((3,), (8,)), ((4, 2), (2, 2))], ids=str)
def test_other_workers_own_what_was_owed(before, after, tmp_path):
    tx = optimizer("two-phase", 1)
    trained = Trained(tx, *before).run(range(5))
    with trained.checkpointer(tmp_path) as checkpointer:
        checkpointer.save(5, trained.params, trained.state, wait=True)
    restored = Trained(tx, *after).restored(tmp_path)
    inner = before[1] if len(before) > 1 else 1
    for old, new in zip(owed(trained.state, inner), owed(restored.state, inner), strict=True):
        size = min(old.shape[1], new.shape[1])
        np.testing.assert_array_equal(old[:, :size], new[:, :size])
        assert not old[:, size:].any() and not new[:, size:].any()
    assert any(x.any() for x in owed(restored.state, inner))
    means = [s[0].momentum["w"].mean(0) for s in (trained.state, restored.state)]
    np.testing.assert_allclose(*means, rtol=1e-5, atol=1e-7)
    assert not np.any(restored.state[0].waiting)
    restored.run(range(5, 8))
    assert demo_optax.check_replicas(restored.params, restored.mesh) == ()


def test_devices_that_hold_the_same_owe_it_once(tmp_path):
    """Parameters are whole on both devices of each worker."""
    tx = optimizer("two-phase", 0)

    def on(workers):
        trained = Trained(tx, workers)
        trained.mesh, trained.specs = mesh_of(workers, 2), None
        trained.state = demo_optax.init_opt_state(tx, trained.params, trained.mesh)
        trained.step = demo_optax.make_train_step(loss, tx, trained.mesh)
        return trained

    trained = on(4).run(range(4))
    with trained.checkpointer(tmp_path) as checkpointer:
        checkpointer.save(4, trained.params, trained.state, wait=True)
    restored = on(2).restored(tmp_path)
    for old, new in zip(owed(trained.state, 1), owed(restored.state, 1), strict=True):
        size = min(old.shape[1], new.shape[1])
        np.testing.assert_array_equal(old[:, :size], new[:, :size])


class Net(NamedTuple):
    main: jax.Array
    waiting: jax.Array
    residual: list


def test_parameters_may_have_the_names_of_an_exchanges_state(tmp_path):
    params = Net(jnp.ones((16, 8)), jnp.ones((8, 8)), [jnp.ones((8, 8))])
    tx, four, two = optimizer("all-gather", 0), mesh_of(4), mesh_of(2)
    state = demo_optax.init_opt_state(tx, params, four)
    filled = jax.tree.map(jnp.ones_like, state[0].momentum)
    state = (state[0]._replace(momentum=filled), *state[1:])
    with Checkpointer(tmp_path, tx, four) as checkpointer:
        checkpointer.save(1, params, state, wait=True)
    with Checkpointer(tmp_path, tx, two) as checkpointer:
        found = checkpointer.restore(params)
    assert all(np.all(np.asarray(x) == 1) for x in jax.tree.leaves(found.opt_state[0].momentum))
    both, specs = mesh_of(2, 2), Net(P(None, "fsdp"), P(None, "fsdp"), [P(None, "fsdp")])
    found = demo_optax.state_specs(tx, params, both, param_specs=specs)[0].momentum
    assert set(jax.tree.leaves(found)) == {P("data", None, "fsdp")}


def test_what_is_owed_is_not_lost_silently(tmp_path):
    trained = Trained(optimizer("two-phase", 0), 4).run(range(3))
    with trained.checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, trained.params, trained.state, wait=True)
    with pytest.raises(ValueError, match="restore it with exchange='two-phase'"):
        Trained(optimizer("all-gather", 0), 4).restored(tmp_path)
    with pytest.raises(ValueError, match="restore it with the old"):
        Trained(optimizer("two-phase", 0, transform="identity"), 4).restored(tmp_path)


def on_eight(exchange, delay, names=("fsdp", "tensor"), cut=P("fsdp", "tensor")):
    """Two workers of four devices; what a device keeps lies in the order of the mesh's axes."""
    trained = Trained(optimizer(exchange, delay), 2)
    trained.mesh, trained.specs = jax.make_mesh((2, 2, 2), ("data", *names)), {"v": P(), "w": cut}
    options = {"param_specs": trained.specs}
    trained.state = demo_optax.init_opt_state(trained.tx, trained.params, trained.mesh, **options)
    trained.step = demo_optax.make_train_step(loss, trained.tx, trained.mesh, **options)
    return trained


@pytest.mark.parametrize(
    "others", [{"names": ("tensor", "fsdp")}, {"cut": P("tensor", "fsdp")}], ids=str
)
def test_what_devices_keep_is_not_given_to_others(others, tmp_path):
    for way in BOTH[:2]:
        trained = on_eight(*way).run(range(3))
        with trained.checkpointer(tmp_path / way[0]) as checkpointer:
            checkpointer.save(3, trained.params, trained.state, wait=True)
    with pytest.raises(ValueError, match="restore it with the old"):
        on_eight("two-phase", 0, **others).restored(tmp_path / "two-phase")
    restored = on_eight("all-gather", 1, **others).restored(tmp_path / "all-gather")
    assert_same(trained.state[0].momentum, restored.state[0].momentum)
    assert np.any(trained.state[0].waiting) and not np.any(restored.state[0].waiting)


@pytest.mark.parametrize(
    "others", [{"selection": "slicing"}, {"selection": "striding"}, {"seed": 1}, {}], ids=str
)
def test_a_waiting_packet_is_read_with_the_positions_that_it_was_sent_with(others, tmp_path):
    settings = {"selection": "random"}
    trained = Trained(optimizer("all-gather", 1, **settings), 4).run(range(3))
    with trained.checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, trained.params, trained.state, wait=True)
    restored = Trained(optimizer("all-gather", 1, **settings | others), 4).restored(tmp_path)
    assert np.any(restored.state[0].waiting)
    restored.run([3])
    assert int(restored.metrics.exchange.participants) == (0 if others else 4)


@pytest.mark.parametrize("transform", ["dct", "hadamard"])
def test_a_momentum_of_a_flat_vector_is_not_taken_for_another(transform, tmp_path):
    def flat(transform):
        compression = demo_optax.Compression(4, 8, transform=transform)
        link = demo_optax.decoupled_momentum(0.9, compression, axis_name="data")
        return optax.chain(optax.flatten(link), optax.scale(-1e-2))

    trained = Trained(flat("dct"), 4).run(range(3))
    with trained.checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, trained.params, trained.state, wait=True)
    other = Trained(flat(transform), 4)
    if transform == "dct":
        assert_same(other.restored(tmp_path).state, trained.state)
    else:
        with pytest.raises(ValueError, match="restore it with the old settings"):
            other.restored(tmp_path)


@pytest.mark.parametrize("exchange, delay", BOTH)
def test_a_run_of_one_gather_goes_on_in_another_way(exchange, delay, tmp_path):
    trained = Trained(optimizer("all-gather", 0), 4).run(range(3))
    with trained.checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, trained.params, trained.state, wait=True)
    restored = Trained(optimizer(exchange, delay), 4).restored(tmp_path)
    assert_same(trained.state[0].momentum, restored.state[0].momentum)
    restored.run(range(3, 6))
    assert int(restored.metrics.exchange.participants) == 4

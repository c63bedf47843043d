"""What an exchange keeps beside the momenta: sharded, saved and put back."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import demo_optax
from tests import workers
from tests.exchange_runs import (
    EXCHANGES,
    KEEPING,
    SHAPES,
    Trained,
    assert_close,
    assert_nothing_kept,
    batch,
    loss,
    ones,
    optimizer,
    settled,
)  # fmt: skip
from tests.saved_runs import carried_over
from tests.sweeps import sweep


@sweep(
    ("delayed two-phase", "random", 3, (8,)),
    ("two-phase", "topk", 1, (2, 2)),
    exchange=EXCHANGES,
    selection=["topk", "random", "slicing"],
    every=[1, 3],
    sizes=[(8,), (2, 2)],
)
def test_replicas_are_identical_after_200_steps_in_every_combination(
    exchange, selection, every, sizes
):
    tx = optimizer(exchange, selection=selection)
    if every > 1:
        tx = demo_optax.local_steps(optax.sgd(1e-2), tx, every, axis_name="data")
    trained = Trained(tx, *sizes)

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
    assert int(metrics.participants) == sizes[0] and bool(metrics.agreed)


def on(*sizes, **others):
    """A mesh of these sizes, and how parameters lie on it."""
    return sizes, others


def on_eight(*names, cut=P("fsdp", "tensor")):
    """Two workers of four devices; what a device keeps lies in the order of the mesh's axes."""
    return on(2, 2, 2, names=("data", *names), specs={"v": P(), "w": cut})


WHOLE = dict(specs=None)  # parameters, on both devices of each worker
USUAL = on_eight("fsdp", "tensor")
OWNED, LATE, BOTH = ({"exchange": name} for name in KEEPING)
REDRAWN = {**BOTH, "transform": "random"}
# Optimizer and mesh before, and after.
RESTORED = {
    "more workers": (BOTH, on(2, 2), BOTH, on(3, 2)),
    "fewer workers": (BOTH, on(4, 2), BOTH, on(2, 2)),
    "whole parameters": (OWNED, on(4, 2, **WHOLE), OWNED, on(2, 2, **WHOLE)),
    "other names": (OWNED, USUAL, OWNED, on_eight("tensor", "fsdp")),
    "another cut": (LATE, USUAL, LATE, on_eight("fsdp", "tensor", cut=P("tensor", "fsdp"))),
    "one gather": (OWNED, on(2, 2), {"exchange": "all-gather", "topk": 5}, on(2, 2)),
    "at once": (REDRAWN, on(2, 2), {**REDRAWN, "exchange": "two-phase"}, on(2, 2)),
    "more coefficients": (REDRAWN, on(2, 2), {**REDRAWN, "topk": 5}, on(2, 2)),
}


@sweep("whole parameters", "other names", "another cut", "at once", name=RESTORED)
def test_what_is_owed_and_under_way_goes_back_where_it_cannot_stay(name, tmp_path):
    """Into the momenta, in the mean over the workers."""
    before, (sizes, here), after, (others, there) = RESTORED[name]
    trained = Trained(optimizer(**before), *sizes, **here).run(range(2)).saved(tmp_path)
    kept = jax.tree.leaves((trained.state[0].exchange, trained.state[0].pending))
    assert any(map(np.any, kept))
    restored = Trained(optimizer(**after), *others, **there).restored(tmp_path)
    momenta = settled(trained, before["exchange"]), restored.state[0].momentum
    if sizes[0] == others[0]:
        assert_close(*momenta)
    assert_close(*(jax.tree.map(lambda x: np.mean(x, 0), m) for m in momenta))
    assert_nothing_kept(restored.state)


class Net(NamedTuple):
    main: jax.Array
    pending: jax.Array
    residual: list


def test_parameters_may_have_the_names_of_an_exchanges_state(tmp_path):
    matrix = np.ones((8, 8), np.float32)
    params = Net(matrix, matrix, [matrix])
    tx, four, two = optimizer("all-gather"), workers.mesh_of(4), workers.mesh_of(2)
    state = demo_optax.init_opt_state(tx, params, four)
    filled = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), state[0].momentum)
    filled = jax.device_put(filled, jax.tree.map(lambda x: x.sharding, state[0].momentum))
    state = (state[0]._replace(momentum=filled), *state[1:])
    found = carried_over(tmp_path, (params, state), tx, four, two)
    assert all(np.all(np.asarray(x) == 1) for x in jax.tree.leaves(found.opt_state[0].momentum))
    both, specs = workers.mesh_of(2, 2), Net(P(None, "fsdp"), P(None, "fsdp"), [P(None, "fsdp")])
    found = demo_optax.state_specs(tx, params, both, param_specs=specs)[0].momentum
    assert set(jax.tree.leaves(found)) == {P("data", None, "fsdp")}


CHANGES = {
    "exchange": dict(exchange="all-gather"),
    "topk": dict(topk=2),
    "value coding": dict(value_coding="bfloat16"),
    "seed": dict(seed=1),
    "slicing": dict(selection="slicing"),
    "striding": dict(selection="striding"),
}


@sweep(
    ("topk", "exchange", (2, 2, 2)),
    selection=["topk", "random"],
    change=CHANGES,
    sizes=[(4,), (2, 2), (2, 2, 2)],
)
def test_pending_messages_go_back_into_the_momentum(selection, change, sizes, tmp_path):
    factor = {"topk": 1.0, "random": 0.5}[selection]
    settings = dict(exchange="delayed", subtraction_factor=factor, selection=selection)
    trained = Trained(optimizer(**settings), *sizes).run(range(3)).saved(tmp_path)
    whole = settled(trained, "delayed")
    pending = jax.tree.map(np.subtract, whole, trained.state[0].momentum)
    assert all(map(np.any, jax.tree.leaves(pending)))
    same = Trained(optimizer(**settings), *sizes).restored(tmp_path)
    chex.assert_trees_all_equal(trained.state, same.state)
    assert int(same.run([3]).metrics.exchange.participants) == sizes[0]

    restored = Trained(optimizer(**settings | CHANGES[change]), *sizes).restored(tmp_path)
    assert_close(whole, restored.state[0].momentum)
    if change != "exchange":
        assert_nothing_kept(restored.state)
    restored.run(range(3, 5))
    assert int(restored.metrics.exchange.participants) == sizes[0]


def test_a_narrow_momentum_gets_its_message_back(tmp_path):
    """Everything is sent, so that nothing is left of the momentum but the packets."""

    def tx(exchange):
        link = demo_optax.decoupled_momentum(
            0.9,
            demo_optax.Compression(64, 8, "bfloat16"),
            exchange=exchange,
            momentum_dtype="bfloat16",
        )
        return optax.chain(link, optax.scale(-1e-2))

    trained = Trained(tx(EXCHANGES["delayed"]), 4).run([0]).saved(tmp_path)
    restored = Trained(tx(EXCHANGES["all-gather"]), 4).restored(tmp_path)
    of_workers = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))
    gradients = of_workers(ones(), np.stack(np.split(batch(0), 4)))
    assert trained.state[0].momentum["w"].dtype == jnp.bfloat16
    for name in SHAPES:
        energies = 0.01 * np.sum(np.square(gradients[name]).reshape(4, -1), 1)
        found = np.asarray(restored.state[0].momentum[name], np.float32).reshape(4, -1)
        np.testing.assert_allclose(np.sum(found**2, 1), energies, rtol=2e-2)


@sweep(
    ("delayed", "dct"),
    ("all-gather", "identity"),
    exchange=["all-gather", "delayed"],
    transform=["dct", "identity"],
)
def test_a_momentum_of_a_flat_vector_is_not_taken_for_another(exchange, transform, tmp_path):
    def flat(exchange, transform="dct"):
        compression = demo_optax.Compression(64, 8, transform=transform)
        link = demo_optax.decoupled_momentum(0.9, compression, exchange=EXCHANGES[exchange])
        return optax.chain(optax.flatten(link), optax.scale(-1e-2))

    trained = Trained(flat(exchange), 4).run([0]).saved(tmp_path)
    if transform != "dct":
        with pytest.raises(ValueError, match="restore it with the old transform"):
            Trained(flat(exchange, transform), 4).restored(tmp_path)
        return
    chex.assert_trees_all_equal(Trained(flat(exchange), 4).restored(tmp_path).state, trained.state)
    if exchange == "delayed":
        restored = Trained(flat("all-gather"), 4).restored(tmp_path)
        assert_close(settled(trained, exchange), restored.state[0].momentum)
        assert np.any(restored.state[0].momentum)


@sweep("delayed two-phase", exchange=KEEPING)
def test_a_run_of_one_gather_goes_on_in_another_way(exchange, tmp_path):
    trained = Trained(optimizer("all-gather"), 2, 2).run(range(3)).saved(tmp_path)
    restored = Trained(optimizer(exchange), 2, 2).restored(tmp_path)
    chex.assert_trees_all_equal(trained.state[0].momentum, restored.state[0].momentum)
    restored.run(range(3, 6))
    assert int(restored.metrics.exchange.participants) == 2

"""A state that was made for other settings is refused, and a compiled program ignores it."""

import operator
import pickle

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import demo_optax
from tests.sweeps import slow, sweep

MESH = jax.sharding.AbstractMesh((2,), ("data",))
DELAYED, TWO_PHASE = (
    lambda axis_name: demo_optax.Delayed(demo_optax.AllGather(axis_name)),
    demo_optax.TwoPhase,
)
SETTINGS = {
    "seed of a random basis": (demo_optax.AllGather, dict(transform="random"), dict(seed=1)),
    "basis of residuals": (TWO_PHASE, dict(transform="random"), dict(seed=1)),
    "transform": (demo_optax.AllGather, {}, dict(transform="identity")),
    "pending seed": (DELAYED, dict(selection="random"), dict(seed=1)),
    "pending selection": (DELAYED, dict(selection="random"), dict(selection="striding")),
    "pending count": (DELAYED, {}, dict(topk=3)),
    "pending coding": (DELAYED, dict(value_coding="int8"), dict(value_coding="sign")),
    "shape": (demo_optax.AllGather, {}, {}),
    "smaller last block": (demo_optax.AllGather, {}, {}),
}
COMPILED = "transform", "pending coding"  # each of one of the two words that stand for all settings
SHAPES = {"shape": ((8, 4), (4, 8)), "smaller last block": ((8, 8), (7, 8))}


def made(name, axis_name=None):
    """Two optimizers whose states have arrays of the same shapes, and parameters for each."""
    exchange, settings, change = SETTINGS[name]
    changes = settings, {**settings, **change}
    txs = [
        demo_optax.decoupled_momentum(
            0.9,
            demo_optax.Compression(**{"topk": 4, "block_side": 8, **settings}),
            exchange=exchange(axis_name),
        )
        for settings in changes
    ]
    params = [jnp.ones(shape, jnp.float32) for shape in SHAPES.get(name, [(8, 8)] * 2)]
    return *txs, *params


@sweep(
    *[(name, False) for name in SETTINGS],
    *[(name, True) for name in ("pending coding", "shape")],
    name=SETTINGS,
    stacked=[False, True],
)
def test_an_update_refuses_a_state_of_other_settings(name, stacked):
    tx, other, params, others = made(name, "data" if stacked else None)
    gradient = params
    if stacked:
        tx, other = (demo_optax.stack_workers(x, MESH) for x in (tx, other))
        gradient = jnp.stack([gradient, gradient])
    state = other.init(others)
    refused = pytest.raises(ValueError, match=r"(was made for|has shape) .* is needed")
    with refused:
        tx.update(gradient, state, params)
    shapes = (jax.tree.map(np.shape, x) for x in (state, tx.init(params)))
    if operator.ne(*shapes):
        with refused:
            jax.jit(tx.update)(gradient, state, params)
        return
    if name not in COMPILED:
        return
    # The numbers of a state are not known where it is compiled, so that nobody takes part.
    updates, new = jax.jit(tx.update)(gradient, state, params)
    assert demo_optax.exchange_metrics(new).participants == 0
    assert not np.any(updates)
    if not name.startswith("pending"):
        np.testing.assert_array_equal(new.momentum, state.momentum)


@pytest.mark.parametrize("exchange", [slow(demo_optax.AllGather()), DELAYED(None)], ids=str)
def test_a_state_is_mapped_with_what_map_params_makes_of_it(exchange):
    tx = demo_optax.demo(0.1, demo_optax.Compression(4, 8), exchange=exchange)
    params = {"w": jnp.ones((8, 8)), "b": jnp.ones(8)}
    state = tx.init(params)
    named = optax.tree.map_params(
        tx, lambda _, name: name, state, {"w": "w", "b": "b"}, transform_non_params=lambda _: "-"
    )
    for pair in ((state, named), (named, state)):
        assert jax.tree.leaves(jax.tree.map(lambda *x: None, *pair)) == []
    doubled = optax.tree.map_params(tx, lambda x: 2 * x, state)

    def body(state, _):
        updates, state = tx.update(params, state, params)
        return state, updates

    state, _ = jax.lax.scan(body, doubled, length=2)
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))
    assert np.isfinite(jax.tree.leaves(state)[1]).all()


@pytest.mark.parametrize(
    "tx",
    [
        demo_optax.demo_muon(1e-3),
        demo_optax.demo_scaled(1e-3, exchange=DELAYED(None)),
        demo_optax.demo(1e-3, exchange=TWO_PHASE(None)),
        demo_optax.local_steps(
            optax.sgd(0.1), demo_optax.decoupled(optax.sgd(0.7)), every=4, fragments=2
        ),
    ],
    ids=["demo_muon", "delayed", "two phases", "fragments"],
)
def test_a_state_holds_arrays_alone_so_that_other_tools_write_and_read_it(tx):
    params = {"w": jnp.ones((16, 8)), "b": jnp.ones(8)}
    leaves, structure = jax.tree.flatten(tx.init(params))
    state = structure.unflatten([jnp.full_like(x, i) for i, x in enumerate(leaves)])
    written = flax.serialization.to_bytes(state)
    read = flax.serialization.from_bytes(tx.init(params), written)
    for own, other in ((state, read), (state, pickle.loads(pickle.dumps(state)))):
        assert jax.tree.structure(own) == jax.tree.structure(other)
        jax.tree.map(np.testing.assert_array_equal, own, other)


def test_a_state_that_another_tool_has_read_is_compared_with_the_settings():
    """Orbax and others put the old numbers into a new state, whose structure is the same."""
    tx, other, params, others = made("transform")
    written = flax.serialization.to_bytes(other.init(others))
    state = flax.serialization.from_bytes(tx.init(params), written)
    with pytest.raises(ValueError, match=r"was made for .*identity.* is needed"):
        tx.update(params, state, params)

"""Outboxes, packets and states that `apply` takes, and those that it refuses."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import demo_optax
from demo_optax import Compression
from tests.by_hand import MAKE, SMALL, assert_bit_equal, gradient, initial, split


def stale(tx, state, params, found):
    outbox, state = tx.send(found, state, params)
    _, state = tx.apply(outbox.packets, outbox, state, params)
    return outbox, state


BASES = {
    "demo_scaled": optax.identity(),
    "weight decay": optax.adamw(1e-2, b1=0.0, weight_decay=0.1),
    "momentum": optax.sgd(1e-2, momentum=0.9),
}


@pytest.mark.parametrize("base", BASES)
def test_an_outbox_counts_once(base):
    tx, params = demo_optax.decoupled(BASES[base], SMALL, decay=0.9), initial()
    found = gradient(params, 0)
    outbox, state = stale(tx, tx.init(params), params, found)
    with pytest.raises(ValueError, match="the outbox is of step 0, but the state is at step 1"):
        tx.apply(outbox.packets, outbox, state, params)
    updates, after = jax.jit(tx.apply)(outbox.packets, outbox, state, params)
    assert_bit_equal(after, state)
    assert not any(map(np.any, jax.tree.leaves(updates)))


def test_a_message_under_way_needs_its_own_outbox():
    tx, params = split("demo"), initial()
    before = tx.init(params)
    outbox, state = tx.send(gradient(params, 0), before, params)
    for other, old in ((tx.empty_outbox(params), state), (outbox, before)):
        with pytest.raises(ValueError, match="but the state is at step 0"):
            tx.apply(outbox.packets, other, old, params)
        updates, after = jax.jit(tx.apply)(outbox.packets, other, old, params)
        assert_bit_equal(after, old)
        assert not any(map(np.any, jax.tree.leaves(updates)))
    with pytest.raises(ValueError, match=r"send\(\) was called in step 0 before"):
        tx.update(gradient(params, 0), state, params)


@pytest.mark.parametrize("transform", ["dct", "random"])
def test_a_worker_that_follows_keeps_its_momentum(transform):
    """As one whose gradient is not finite; also where the basis is redrawn on each step."""
    compression = dataclasses.replace(SMALL, transform=transform)
    tx, params = demo_optax.demo(1e-2, compression, decay=0.9), initial()
    other, _ = tx.send(gradient(params, 7), tx.init(params), params, worker=1)
    outbox, state = tx.send(gradient(params, 0), tx.init(params), params, worker=0)
    packets = jnp.stack([outbox.packet, other.packet])
    _, state = tx.apply(packets, outbox, state, params, worker=0)
    skipped, muted = tx.send(gradient(params, 1), state, params, worker=0, participates=False)
    packets = jnp.zeros((2, outbox.packet.size), jnp.uint32)
    expected = tx.apply(packets, skipped, muted, params, worker=0)[1][0].momentum
    empty = tx.empty_outbox(params)
    followed = tx.apply(packets, empty, state, params, worker=0)[1][0].momentum
    chex.assert_trees_all_close(followed, expected, atol=1e-6)


def test_packets_and_states_may_come_from_files():
    tx, params = split("demo_scaled"), initial()
    outbox, state = tx.send(gradient(params, 0), tx.init(params), params)
    expected = tx.apply(outbox.packets, outbox, state, params)
    read = jax.device_get((outbox, state))
    assert_bit_equal(tx.apply(read[0].packets, *read, params), expected)


def test_what_is_given_back_is_rounded_without_bias():
    tx = demo_optax.decoupled_momentum(
        0.0,
        Compression(1, 64, "int4"),
        gradient_weight=1.0,
        subtraction_factor=0.5,
        momentum_dtype="bfloat16",
    )
    params = jnp.zeros((64, 64))
    found = jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)), jnp.float32)
    send, apply = jax.jit(tx.send), jax.jit(tx.apply)
    state, differences = tx.init(params), []
    exact = demo_optax.decoupled_momentum(0.0, Compression(1, 64, "int4"), gradient_weight=1.0)
    _, whole = exact.update(found, exact.init(params))
    for step in range(400):
        outbox, state = send(found, state._replace(count=jnp.int32(step)), params)
        missing = jnp.zeros_like(outbox.packets)
        _, state = apply(missing, outbox, state, params, worker=0)
        (at,), (value,) = outbox.message.positions[0][0], outbox.message.values[0][0]
        everything = float(whole.momentum.ravel()[at] + value)
        stored = float(state.momentum.ravel()[at].astype(jnp.float32))
        differences.append((stored - everything) / (abs(everything) * 2.0**-7))
    error = np.std(differences) / np.sqrt(len(differences))
    assert abs(np.mean(differences)) < 4 * error + 1e-3, (np.mean(differences), error)


def test_a_second_send_in_a_step_loses_nothing():
    tx, params = split("demo_scaled"), initial()
    found = gradient(params, 0)
    outbox, state = tx.send(found, tx.init(params), params)
    with pytest.raises(ValueError, match=r"send\(\) was called in step 0 before"):
        tx.send(found, state, params)
    other, again = jax.jit(tx.send)(found, state, params)
    assert_bit_equal(again, state)
    with pytest.raises(ValueError, match=r"the outbox is of a second send\(\)"):
        tx.apply(other.packets, other, state, params)
    updates, after = jax.jit(tx.apply)(outbox.packets, other, state, params)
    assert_bit_equal(after, state)
    updates, _ = tx.apply(outbox.packets, outbox, again, params)
    assert all(map(np.any, jax.tree.leaves(updates)))


def test_a_row_that_holds_another_packet_does_not_deliver_this_one():
    tx, params = split("demo"), initial()
    outbox, state = tx.send(gradient(params, 0), tx.init(params), params)
    other, _ = tx.send(gradient(params, 1), tx.init(params), params)
    _, missed = tx.apply(jnp.zeros_like(outbox.packets), outbox, state, params, worker=-1)
    _, after = tx.apply(other.packets, outbox, state, params)
    assert int(demo_optax.exchange_metrics(after).participants) == 1
    assert_bit_equal(after[0].momentum, missed[0].momentum)


def test_a_copy_in_the_row_of_another_worker_does_not_bring_a_message_back():
    tx, params = split("demo"), initial()
    outbox, state = tx.send(gradient(params, 0), tx.init(params), params, worker=1)
    packet, none = outbox.packet, jnp.zeros_like(outbox.packet)
    honest, copied = (
        tx.apply(jnp.stack(rows), outbox, state, params, worker=1)
        for rows in [(none, packet), (packet, packet)]
    )
    assert_bit_equal(honest, copied)


def test_a_gradient_that_is_not_finite_sends_nothing():
    tx, params = split("demo"), initial()
    bad = jax.tree.map(lambda x: x * jnp.nan, gradient(params, 0))
    outbox, state = tx.send(bad, tx.init(params), params)
    updates, state = tx.apply(outbox.packets, outbox, state, params)
    assert int(demo_optax.exchange_metrics(state).participants) == 0
    assert not any(map(np.any, jax.tree.leaves((updates, state[0].momentum))))


@pytest.mark.parametrize(
    "packets",
    [jnp.zeros((2, 3), jnp.uint32), jnp.zeros((2, 128), jnp.int32), jnp.zeros(128, jnp.uint32)],
)
def test_packets_of_another_shape_or_dtype_are_refused(packets):
    tx, params = split("demo"), initial()
    outbox, state = tx.send(gradient(params, 0), tx.init(params), params)
    with pytest.raises(ValueError, match=r"packets must be uint32 \(workers, 128\)"):
        tx.apply(packets, outbox, state, params)


@pytest.mark.parametrize(
    "exchange", [demo_optax.TwoPhase(), demo_optax.Delayed(demo_optax.AllGather())]
)
def test_exchanges_without_halves_are_refused(exchange):
    tx, params = MAKE["demo"](exchange=exchange), initial()
    with pytest.raises(TypeError, match="has no halves"):
        tx.send(gradient(params, 0), tx.init(params), params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_narrow_momentum_is_rounded_only_where_something_goes_back(dtype):
    tx = demo_optax.decoupled_momentum(0.9, SMALL, momentum_dtype=dtype)
    params = initial()
    outbox, sent = tx.send(gradient(params, 0), tx.init(params), params)
    _, counted = tx.apply(outbox.packets, outbox, sent, params)
    assert_bit_equal(counted.momentum, sent.momentum)

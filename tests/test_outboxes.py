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
from tests.by_hand import (
    SMALL,
    assert_bit_equal,
    empty_outbox_of,
    gradient,
    halves_of,
    initial,
    rows,
    split,
)
from tests.sweeps import sweep


def sent(tx, seed=0, worker=0):
    """An outbox and the state after a first `send`."""
    params, (init, send, _) = initial(), halves_of(tx)
    return send(gradient(params, seed), init(params), params, worker=worker)


BASES = {
    "demo_scaled": optax.identity(),
    "weight decay": optax.adamw(1e-2, b1=0.0, weight_decay=0.1),
    "momentum": optax.sgd(1e-2, momentum=0.9),
}


@sweep("weight decay", "momentum", base=BASES)
def test_an_outbox_counts_once(base):
    tx, params = demo_optax.decoupled(BASES[base], SMALL, decay=0.9), initial()
    (outbox, state), apply = sent(tx), halves_of(tx)[2]
    packets = rows(outbox.packet)
    _, state = apply(packets, outbox, state, params, worker=0)
    with pytest.raises(ValueError, match="the outbox is of step 0, but the state is at step 1"):
        tx.apply(packets, outbox, state, params, worker=0)
    updates, after = apply(packets, outbox, state, params, worker=0)
    assert_bit_equal(after, state)
    assert not any(map(np.any, jax.tree.leaves(updates)))


def test_the_packets_of_several_outboxes_are_a_stack_and_those_of_shapes_are_shapes():
    tx, params = split("demo"), initial()
    one = jax.eval_shape(tx.empty_outbox, params)
    (words,) = one.packet.shape
    assert one.packet == jax.ShapeDtypeStruct((words,), jnp.uint32)
    each, _ = jax.vmap(lambda seed: sent(tx, seed, seed))(jnp.arange(3))
    assert each.packet.shape == (3, words)
    np.testing.assert_array_equal(each.packet[2], sent(tx, 2, 2)[0].packet)


def test_a_message_under_way_needs_its_own_outbox():
    tx, params = split("demo"), initial()
    init, _, apply = halves_of(tx)
    outbox, state = sent(tx)
    packets = rows(outbox.packet)
    for other, old in ((empty_outbox_of(tx), state), (outbox, init(params))):
        with pytest.raises(ValueError, match="but the state is at step 0"):
            tx.apply(packets, other, old, params, worker=0)
        updates, after = apply(packets, other, old, params, worker=0)
        assert_bit_equal(after, old)
        assert not any(map(np.any, jax.tree.leaves(updates)))
    with pytest.raises(ValueError, match=r"send\(\) was called in step 0 before"):
        tx.update(gradient(params, 0), state, params)


RANDOM = demo_optax.demo(1e-2, dataclasses.replace(SMALL, transform="random"), decay=0.9)


@pytest.mark.parametrize("tx", [split("demo"), RANDOM], ids=["dct", "random"])
def test_a_worker_that_follows_keeps_its_momentum(tx):
    """As one whose gradient is not finite; also where the basis is redrawn on each step."""
    params, (_, send, apply) = initial(), halves_of(tx)
    (other, _), (outbox, state) = sent(tx, 7, worker=1), sent(tx)
    packets = rows(outbox.packet, other.packet)
    _, state = apply(packets, outbox, state, params, worker=0)
    found = jax.tree.map(lambda x: np.full_like(x, np.nan), params)
    skipped, muted = send(found, state, params, worker=0)
    packets = np.zeros_like(packets)
    expected = apply(packets, skipped, muted, params, worker=0)[1][0].momentum
    followed = apply(packets, empty_outbox_of(tx), state, params, worker=0)[1][0].momentum
    chex.assert_trees_all_close(followed, expected, atol=1e-6)


def test_what_is_given_back_is_rounded_without_bias():
    options = dict(compression=Compression(1, 64, "int4"), gradient_weight=1.0)
    exact = demo_optax.decoupled_momentum(0.0, **options)
    tx = demo_optax.decoupled_momentum(
        0.0, **options, subtraction_factor=0.5, momentum_dtype="bfloat16"
    )
    params = jnp.zeros((64, 64))
    found = jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)), jnp.float32)

    @jax.jit
    def given_back(step):
        outbox, state = tx.send(found, tx.init(params)._replace(count=step), params)
        missing = jnp.zeros_like(outbox.packets)
        _, state = tx.apply(missing, outbox, state, params, worker=0)
        (at,), (value,) = outbox.message.positions[0][0], outbox.message.values[0][0]
        return at, value, state.momentum.ravel()[at].astype(jnp.float32)

    whole = jax.jit(exact.update)(found, exact.init(params))[1].momentum.ravel()
    places, values, stored = jax.lax.map(given_back, jnp.arange(400))
    everything = np.asarray(whole)[places] + values
    differences = (stored - everything) / (np.abs(everything) * 2.0**-7)
    error = np.std(differences) / np.sqrt(len(differences))
    assert abs(np.mean(differences)) < 4 * error + 1e-3, (np.mean(differences), error)


@pytest.mark.parametrize("tx", [split("demo_scaled"), RANDOM], ids=["dct", "random"])
def test_a_second_send_or_an_update_in_a_step_loses_nothing(tx):
    params = initial()
    _, send, apply = halves_of(tx)
    found, (outbox, state) = gradient(params, 0), sent(tx)
    with pytest.raises(ValueError, match=r"send\(\) was called in step 0 before"):
        tx.send(found, state, params)
    other, again = send(found, state, params, worker=0)
    assert_bit_equal(again, state)
    packets = rows(outbox.packet)
    with pytest.raises(ValueError, match=r"the outbox is of a second send\(\)"):
        tx.apply(packets, other, state, params, worker=0)
    updates, after = apply(packets, other, state, params, worker=0)
    assert_bit_equal(after, state)
    updates, updated = jax.jit(tx.update)(found, state, params)
    assert not any(map(np.any, jax.tree.leaves(updates)))
    for later in (again, updated):
        updates, _ = apply(packets, outbox, later, params, worker=0)
        assert all(map(np.any, jax.tree.leaves(updates)))


def test_a_row_that_holds_another_packet_does_not_deliver_this_one():
    tx, params = split("demo"), initial()
    (outbox, state), (other, _), apply = sent(tx), sent(tx, 1), halves_of(tx)[2]
    packets = rows(other.packet)
    _, missed = apply(np.zeros_like(packets), outbox, state, params, worker=-1)
    _, after = apply(packets, outbox, state, params, worker=0)
    assert int(demo_optax.exchange_metrics(after).participants) == 1
    assert_bit_equal(after[0].momentum, missed[0].momentum)


def test_a_copy_in_the_row_of_another_worker_does_not_bring_a_message_back():
    tx, params = split("demo"), initial()
    (outbox, state), apply = sent(tx, worker=1), halves_of(tx)[2]
    packet, none = outbox.packet, np.zeros_like(outbox.packet)
    honest, copied = (
        apply(rows(*each), outbox, state, params, worker=1)
        for each in [(none, packet), (packet, packet)]
    )
    assert_bit_equal(honest, copied)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_narrow_momentum_is_rounded_only_where_something_goes_back(dtype):
    tx = demo_optax.decoupled_momentum(0.9, SMALL, momentum_dtype=dtype)
    outbox, state = sent(tx, worker=None)  # whose packet is the only one
    _, counted = halves_of(tx)[2](outbox.packets, outbox, state, initial())
    assert int(counted.metrics.participants) == 1
    assert_bit_equal(counted.momentum, state.momentum)


def test_packets_and_states_may_come_from_files():
    tx, params = split("demo_scaled"), initial()
    outbox, state = sent(tx)
    packets = rows(outbox.packet)
    expected = halves_of(tx)[2](packets, outbox, state, params, worker=0)
    read = jax.device_get((outbox, state))  # no arguments of a program, which makes them JAX's
    found = jax.jit(lambda packets: tx.apply(packets, *read, params, worker=0))(packets)
    assert_bit_equal(found, expected)


def test_a_gradient_that_is_not_finite_sends_nothing():
    params, (init, send, apply) = initial(), halves_of(split("demo"))
    bad = jax.tree.map(lambda x: x * np.nan, gradient(params, 0))
    outbox, state = send(bad, init(params), params, worker=0)
    updates, state = apply(rows(outbox.packet), outbox, state, params, worker=0)
    assert int(demo_optax.exchange_metrics(state).participants) == 0
    assert not any(map(np.any, jax.tree.leaves((updates, state[0].momentum))))

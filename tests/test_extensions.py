"""Selections, codings, transforms and exchanges of a user's own train like those of the library."""

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import demo_optax
from benchmarks import hlo
from demo_optax import checkpoint
from tests import draws, extensions, model, workers
from tests.extensions import COMPRESSIONS, NAMES
from tests.saved_runs import carried_over
from tests.sweeps import sweep

EXCHANGES = {
    "all-gather": demo_optax.AllGather("data"),
    "ring": demo_optax.AllGather("data", gather=extensions.ring),
    "by sum": NAMES["BySum"]("data"),
    "two-phase": demo_optax.TwoPhase("data"),
    "delayed ring": demo_optax.Delayed(demo_optax.AllGather("data", gather=extensions.ring)),
}
CASES = [*[(name, "all-gather") for name in COMPRESSIONS], *[("all", name) for name in EXCHANGES]]


@functools.cache
def optimizer(compression, exchange):
    return demo_optax.demo_sgd(
        1.0, COMPRESSIONS[compression], decay=0.9, exchange=EXCHANGES[exchange]
    )


@functools.cache
def trained(compression, exchange):
    tx, mesh = optimizer(compression, exchange), workers.mesh_of(model.WORKERS)
    return workers.train(tx, range(3), mesh=mesh)


@sweep(("all", "ring"), ("threshold", "all-gather"), case=dict.fromkeys(CASES))
def test_replicas_are_equal_and_bytes_are_those_accounted(case):
    tx, mesh = optimizer(*case), workers.mesh_of(model.WORKERS)
    params, state, metrics = trained(*case)
    assert demo_optax.check_replicas((params, state), mesh) == ()
    for one in metrics[case[1].startswith("delayed") :]:
        assert (one.exchange.participants, one.exchange.agreed) == (model.WORKERS, True)
        assert one.packet_bytes == demo_optax.packet_bytes(tx, params, mesh=mesh)
    assert any((params[name] != x).any() for name, x in model.init().items())


@sweep("ring", exchange=["ring", "by sum"])
def test_other_collectives_bring_the_packets_of_an_all_gather(exchange):
    chex.assert_trees_all_equal(trained("all", exchange)[:2], trained("all", "all-gather")[:2])


def test_a_ring_hands_on_seven_packets_and_nothing_else():
    tx, mesh = optimizer("all", "ring"), workers.mesh_of(model.WORKERS)
    state, step = workers.initial(tx, mesh)[1], workers.step_of(tx, mesh)
    program = step.lower(model.init(), state, model.batch(0)).compile().as_text()
    sent = [one for one in hlo.collectives(program) if one.crosses(mesh, "data")]
    words = demo_optax.packet_bytes(tx.compression, model.init()) // 4
    assert len(sent) == model.WORKERS - 1
    assert 4 * words * len(sent) == demo_optax.packet_bytes(tx, model.init(), mesh=mesh)


def outbox_of(compression, shapes, seed=0):
    tx = demo_optax.decoupled_momentum(0.0, COMPRESSIONS[compression], gradient_weight=1.0)
    gradient = draws.gradients(seed, shapes)
    outbox, state = jax.jit(tx.send)(gradient, tx.init(gradient), gradient, worker=0)
    return outbox, [np.asarray(m) for m in state.momentum]


def test_tensors_of_one_block_shape_send_different_numbers():
    """Counted by hand: 6 of 64 positions take 6 · 3 and 13 bits, 2 of 8 positions take 2 · 3."""
    outbox, _ = outbox_of("k by tensor", [(56, 64), (80,), (8, 8), (120,)])
    assert [x.shape for x in outbox.message.values] == [(57, 6), (25, 2)]
    matrices = math.ceil(57 * 18 / 32) + math.ceil(57 * 13 / 32) + 57 * 6
    vectors = math.ceil(25 * 6 / 32) + 25 * 2
    assert outbox.packet.size == 128 * math.ceil((9 + matrices + vectors) / 128) == 512


def test_blocks_of_one_shape_may_be_of_tensors_with_different_numbers():
    compression = demo_optax.Compression(OfStacks(), 8)
    tx = demo_optax.decoupled_momentum(0.0, compression, gradient_weight=1.0)
    gradient = draws.gradients(0, [(8, 8), (2, 8, 8), (16, 8)])
    outbox, state = jax.jit(tx.send)(gradient, tx.init(gradient), gradient, worker=0)
    assert [x.shape for x in outbox.message.values] == [(3, 4), (2, 1)]
    updates, _ = jax.jit(tx.apply)(outbox.packets, outbox, state, gradient, worker=0)
    left = [float(jnp.sum(jnp.square(x))) for x in jax.tree.leaves((updates, state.momentum))]
    whole = [float(np.sum(np.square(g))) for g in gradient]  # a transform keeps the energy
    np.testing.assert_allclose(np.add(left[:3], left[3:]), whole, rtol=1e-5)


def test_below_its_threshold_nothing_is_sent():
    outbox, (kept,) = outbox_of("threshold", [(16, 8)])
    positions, values = (np.asarray(x[0]) for x in outbox.message)
    message = np.zeros((2, 64 + 6), np.float32)
    np.put_along_axis(message, positions, values, axis=1)
    np.testing.assert_array_equal(message[:, 64:], 0)
    coefficients = kept.reshape(2, 64) + message[:, :64]
    magnitudes = np.abs(coefficients)
    is_large = magnitudes >= 0.8 * magnitudes.max(axis=1, keepdims=True)
    is_large &= magnitudes >= np.sort(magnitudes, axis=1)[:, -6:-5]
    np.testing.assert_array_equal(message[:, :64], np.where(is_large, coefficients, 0))
    assert 2 < is_large.sum() < 2 * 6


@dataclasses.dataclass(frozen=True)
class OfStacks:
    def __call__(self, shape):
        return 1 if len(shape) == 3 else 4


@dataclasses.dataclass(frozen=True)
class Colliding:
    def __call__(self, coefficients, k):
        return jnp.zeros((len(coefficients), k), jnp.int32)


def test_colliding_positions_count_for_nobody_and_stay_in_the_momentum():
    compression = demo_optax.Compression(3, 8, selection=Colliding())
    tx = demo_optax.decoupled_momentum(0.0, compression, gradient_weight=1.0)
    gradient = np.eye(8, dtype=np.float32)
    updates, state = jax.jit(tx.update)(gradient, tx.init(gradient))
    assert int(state.metrics.participants) == 0
    np.testing.assert_array_equal(updates, 0)


@dataclasses.dataclass(frozen=True)
class Spilling(extensions.Ternary):
    """Returns fields of more bits than it has."""

    def encode(self, values):
        scales, fields = super().encode(values)
        return scales, fields + jnp.uint32(4)


def test_bits_beyond_a_field_are_cut_before_anybody_decodes_them():
    gradient = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    found = []
    for coding in (extensions.Ternary(), Spilling()):
        tx = demo_optax.demo_sgd(1.0, demo_optax.Compression(5, 8, coding))
        found.append(jax.jit(tx.update)(gradient, tx.init(gradient)))
    chex.assert_trees_all_equal(found[0][0], found[1][0])
    chex.assert_trees_all_equal(found[0][1][0].momentum, found[1][1][0].momentum)


def test_equal_settings_are_equal_and_others_are_not():
    own = functools.partial(demo_optax.Compression, 4, 8)
    assert own(selection=extensions.Threshold(0.5)) == own(selection=extensions.Threshold(0.5))
    assert own(selection=extensions.Threshold(0.5)) != own(selection=extensions.Threshold(0.4))
    gradient = np.eye(8, dtype=np.float32)
    state = demo_optax.demo(0.1, own(transform=extensions.Hartley())).init(gradient)
    with pytest.raises(ValueError, match=r"Hartley\(\).*go back to the old settings"):
        demo_optax.demo(0.1, own()).update(gradient, state)


@sweep(None, delay=[None, demo_optax.Delayed])
def test_a_run_with_own_settings_resumes_on_half_of_the_workers(delay, tmp_path):
    exchange = (delay or (lambda inner: inner))(EXCHANGES["ring"])
    tx = demo_optax.demo_sgd(1.0, COMPRESSIONS["all"], decay=0.9, exchange=exchange)
    whole, half = workers.mesh_of(8), workers.mesh_of(4)
    params, state, _ = workers.train(tx, range(2), mesh=whole)
    found = carried_over(tmp_path, (params, state), tx, whole, half)
    expected = {
        name: checkpoint.redistribute(np.asarray(m), 4) for name, m in state[0].momentum.items()
    }
    same = [np.array_equal(found.opt_state[0].momentum[n], m) for n, m in expected.items()]
    assert all(same) == (delay is None)  # a message under way went back
    start = found.params, found.opt_state
    *_, metrics = workers.train(tx, range(2, 4), mesh=half, start=start)
    assert metrics[-1].exchange.participants == 4

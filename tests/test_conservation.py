"""Nothing is lost: what leaves the momentum is what the others decode, rounding included."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import demo_optax
from tests import draws, extensions, oracles
from tests.sweeps import sweep

alphas = st.sampled_from([1.0, 0.5, 0.2])


INVERSES = {
    "dct": oracles.inverse_dct,
    "randomized-dct": oracles.inverse_randomized_dct,
    "identity": lambda block: block,
    extensions.Hartley(): extensions.inverse_hartley,
}


def by_oracle(momenta, shapes, compression):
    """Each worker's momentum as tensors."""
    inverse, rule = INVERSES[compression.transform], compression.block_rule
    return [
        np.stack([oracles.to_tensor(m, shape, sides, inverse) for m in np.asarray(stored)])
        for stored, shape in zip(momenta, shapes, strict=True)
        for sides in [oracles.block_sides(shape, compression.block_side, rule)]
    ]


def assert_conserved(shapes, compression, alpha, seed, workers):
    tx = demo_optax.decoupled_momentum(
        0.9,
        compression,
        gradient_weight=0.3,
        mean="workers",
        subtraction_factor=alpha,
        axis_name="data",
    )
    update, state = draws.start(tx, shapes, workers)
    for step in range(2):
        before = by_oracle(state.momentum, shapes, compression)
        gradients = draws.gradients(seed + step, shapes, workers)
        aggregate, state = update(gradients, state)
        after = by_oracle(state.momentum, shapes, compression)
        for m, g, kept, mean in zip(before, gradients, after, aggregate, strict=True):
            total = np.sum(0.9 * m + 0.3 * g, axis=0)
            sent = workers * np.asarray(mean, np.float64)[0]
            scale = max(np.abs(total).max(), 1.0)
            np.testing.assert_allclose(
                np.sum(kept, axis=0) + alpha * sent, total, rtol=0, atol=3e-6 * scale
            )


@draws.cases()
def test_momentum_before_is_momentum_after_and_what_was_sent(shapes, compression):
    assert_conserved(shapes, compression, alpha=0.5, seed=0, workers=3)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
@draws.examples(10)
@given(shapes=draws.trees, compression=draws.compressions, alpha=alphas, seed=draws.seeds)
def test_momenta_of_any_tree_are_conserved(workers, shapes, compression, alpha, seed):
    assert_conserved(shapes, compression, alpha, seed, workers)


@sweep("random", selection=["random", "random-slicing", "striding", "slicing"])
def test_nothing_is_lost_of_shared_positions(selection):
    compression = demo_optax.Compression(7, 8, "sign", "randomized-dct", selection=selection)
    assert_conserved([(16, 11), (5,)], compression, alpha=1.0, seed=0, workers=3)


@sweep("k by tensor", "threshold", "ternary", "transform", name=extensions.COMPRESSIONS)
def test_nothing_is_lost_of_settings_of_a_users_own(name):
    compression = extensions.COMPRESSIONS[name]
    assert_conserved([(16, 11), (5,)], compression, alpha=1.0, seed=0, workers=8)


def test_random_basis_is_carried_over_without_loss():
    """One gradient arrives whole, in many messages, each in another basis."""
    shape, steps = (11, 8), 40
    compression = demo_optax.Compression(20, 8, "bfloat16", "random")
    tx = demo_optax.decoupled_momentum(1 - 1e-7, compression, gradient_weight=1.0)
    update, state = draws.start(tx, [shape])
    [gradient] = draws.gradients(0, [shape])
    sent = np.zeros(shape)
    for step in range(steps):
        [aggregate], state = update([gradient * (step == 0)], state)
        sent += aggregate
    np.testing.assert_allclose(sent, gradient, rtol=0, atol=1e-4)


def assert_everything_is_sent(shapes, compression, seed=0):
    largest = compression.block_side**2
    compression = dataclasses.replace(compression, topk=largest, value_coding="float32")
    tx = demo_optax.decoupled_momentum(0.9, compression, gradient_weight=0.3)
    update, state = draws.start(tx, shapes)
    gradients = draws.gradients(seed, shapes)
    aggregate, state = update(gradients, state)
    for gradient, sent, momentum in zip(gradients, aggregate, state.momentum, strict=True):
        np.testing.assert_array_equal(momentum, 0.0)
        np.testing.assert_allclose(sent, 0.3 * gradient, rtol=1e-4, atol=1e-5)


@draws.cases("dct", "randomized-dct")
def test_sending_everything_empties_the_momentum(shapes, compression):
    assert_everything_is_sent(shapes, compression)


@pytest.mark.slow
@draws.examples(8)
@given(shapes=draws.trees, compression=draws.compressions, seed=draws.seeds)
def test_sending_everything_of_any_tree_empties_the_momentum(shapes, compression, seed):
    assert_everything_is_sent(shapes, compression, seed)


def assert_zeros_added_by_hand_change_nothing(shape, compression, seed=0):
    compression = dataclasses.replace(compression, block_rule="pad")
    sides = oracles.block_sides(shape, compression.block_side, "pad")
    whole = tuple(-(-dim // side) * side for dim, side in zip(shape, sides, strict=True))
    assert oracles.block_sides(whole, compression.block_side, "pad") == sides
    tx = demo_optax.decoupled_momentum(0.9, compression, gradient_weight=1.0)
    (update, state), (_, padded_state) = draws.start(tx, [shape]), draws.start(tx, [whole])
    for step in range(2):
        [gradient] = draws.gradients(seed + step, [shape])
        [aggregate], state = update([gradient], state)
        by_hand = np.zeros(whole, gradient.dtype)
        by_hand[tuple(map(slice, shape))] = gradient
        [padded], padded_state = update([by_hand], padded_state)
        np.testing.assert_array_equal(aggregate, padded[tuple(map(slice, shape))])
        np.testing.assert_array_equal(state.momentum[0], padded_state.momentum[0])


@pytest.mark.parametrize(
    "shape, compression",
    [
        ((9, 7), demo_optax.Compression(7, 4, transform="dct")),
        ((13,), demo_optax.Compression(3, 8, transform="randomized-dct", selection="bins")),
        ((10, 3, 1, 4), demo_optax.Compression(4, 3, transform="identity", selection="bins")),
    ],
    ids=["dct", "randomized-dct", "identity"],
)
def test_edges_are_padded_with_zeros(shape, compression):
    assert_zeros_added_by_hand_change_nothing(shape, compression)


@pytest.mark.slow
@draws.examples(16)
@given(shape=draws.shapes, compression=draws.compressions, seed=draws.seeds)
def test_edges_of_any_shape_are_padded_with_zeros(shape, compression, seed):
    assert_zeros_added_by_hand_change_nothing(shape, compression, seed)

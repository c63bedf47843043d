"""Trees of every kind: what is no parameter passes through."""

import functools

import jax
import numpy as np
import optax
import pytest

import demo_optax

SMALL = demo_optax.Compression(4, 8)
MATRIX = np.ones((8, 10), np.float32)


def step(params, tx=None):
    tx = tx or demo_optax.decoupled_momentum(0.9, SMALL, gradient_weight=1.0)
    return jax.jit(tx.update)(params, tx.init(params), params)


@functools.cache
def alone():
    return step({"w": MATRIX})[0]["w"]


def test_empty_leaves_pass_through():
    shapes = [(0,), (0, 5), (5, 0), (3, 0, 4), (0, 1)]
    params = {"empty": [np.zeros(shape, np.float32) for shape in shapes], "w": MATRIX}
    updates, state = step(params)
    assert [x.shape for x in updates["empty"]] == shapes
    assert [x.size for x in state.momentum["empty"]] == [0] * len(shapes)
    np.testing.assert_array_equal(updates["w"], alone())
    assert state.metrics.participants == 1


def test_missing_leaves_pass_through():
    masked = optax.MaskedNode()
    params = {"absent": None, "masked": masked, "w": MATRIX, "nested": [None, (masked,)]}
    updates, state = step(params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert jax.tree.structure(state.momentum) == jax.tree.structure(params)
    np.testing.assert_array_equal(updates["w"], alone())


@pytest.mark.parametrize("params", [{}, [], None, {"empty": np.zeros((0, 3), np.float32)}])
def test_a_tree_without_numbers_is_no_error(params):
    updates, state = step(params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert state.metrics.participants == 1
    assert state.metrics.sent_share == 0

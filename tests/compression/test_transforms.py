"""Blocks and their transforms against SciPy and NumPy in float64."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import demo_optax
from demo_optax._src.compression.transforms import random_basis
from tests import draws, oracles
from tests.sweeps import sweep

TRANSFORMS = {
    "dct": oracles.dct,
    "randomized-dct": oracles.randomized_dct,
    "identity": lambda block: block,
}


def all_coefficients(shapes, compression, gradients):
    """What the momentum holds of gradients, and what comes back when all of it is sent."""
    compression = dataclasses.replace(compression, topk=10**4, value_coding="float32")
    tx = demo_optax.decoupled_momentum(
        0.0, compression, gradient_weight=1.0, subtraction_factor=1e-30
    )
    update, state = draws.start(tx, shapes)
    restored, state = update(gradients, state)
    return state.momentum, restored


def assert_coefficients(shapes, compression, seed=0, dtype="float32"):
    rtol = {"float32": 1e-4, "bfloat16": 1e-2}[dtype]
    gradients = draws.gradients(seed, shapes, dtype=dtype)
    results = all_coefficients(shapes, compression, gradients)
    for shape, gradient, *found in zip(shapes, gradients, *results, strict=True):
        exact, (stored, restored) = np.float64(gradient), map(np.asarray, found)
        np.testing.assert_allclose(np.float64(restored), exact, rtol=rtol, atol=1e-5)
        sides = oracles.block_sides(shape, compression.block_side, compression.block_rule)
        np.testing.assert_allclose(np.sum(stored**2), np.sum(exact**2), rtol=1e-4)
        if compression.transform in TRANSFORMS:
            expected = oracles.to_coefficients(exact, sides, TRANSFORMS[compression.transform])
            np.testing.assert_allclose(stored, expected, rtol=1e-4, atol=1e-5)


@draws.cases()
def test_coefficients_are_the_oracles_and_go_back(shapes, compression):
    assert_coefficients(shapes, compression)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@draws.examples(16)
@given(shape=draws.shapes, compression=draws.compressions, seed=draws.seeds)
def test_coefficients_of_any_shape_are_the_oracles(dtype, shape, compression, seed):
    assert_coefficients([shape], compression, seed, dtype)


@pytest.mark.parametrize("rule", ["pad", "divisor"])
def test_random_transform_is_orthonormal(rule):
    compression = demo_optax.Compression(1, 4, transform="random", block_rule=rule)
    assert_coefficients([(6, 4)], compression)


@pytest.mark.slow
@draws.examples(3)
@given(shape=draws.shapes, chunk=draws.chunks, rule=draws.rules, seed=draws.seeds)
def test_random_transform_of_any_shape_is_orthonormal(shape, chunk, rule, seed):
    compression = demo_optax.Compression(1, chunk, transform="random", block_rule=rule)
    assert_coefficients([shape], compression, seed)


@draws.examples(60)
@given(
    shape=st.lists(st.integers(1, 200), max_size=4).map(tuple),
    chunk=st.integers(1, 80),
    rule=draws.rules,
)
def test_blocks_follow_the_documented_rule(shape, chunk, rule):
    compression = demo_optax.Compression(1, chunk, block_rule=rule)
    sides = oracles.block_sides(shape, chunk, rule)
    assert np.prod(sides) <= chunk**2
    grid = tuple(-(-dim // side) for dim, side in zip(shape, sides, strict=True))
    stored = (*grid, np.prod(sides, dtype=int))
    assert compression.momentum_format.geometry(shape).stored_shape == stored


@sweep(
    ("dct", 4, (2, 3)),
    ("identity", 3, (2,)),
    transform=["dct", "identity"],
    chunk=[1, 3, 4, 8],
    grid=[(1,), (2,), (2, 3), (3, 1)],
)
def test_rules_agree_where_the_chunk_divides(transform, chunk, grid):
    shape = tuple(chunk * n for n in grid)
    [gradient] = draws.gradients(0, [shape])
    results = []
    for rule in ("pad", "divisor"):
        compression = demo_optax.Compression(3, chunk, transform=transform, block_rule=rule)
        update, state = draws.start(demo_optax.decoupled_momentum(0.9, compression), [shape])
        [aggregate], state = update([gradient], state)
        results.append((np.asarray(aggregate), np.asarray(state.momentum[0])))
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_random_basis_is_another_on_each_step_and_loses_nothing():
    compression = demo_optax.Compression(64, 8, transform="random")
    tx = demo_optax.decoupled_momentum(
        0.5, compression, gradient_weight=1.0, subtraction_factor=1e-30
    )
    [gradient] = draws.gradients(0, [(11, 8)])
    update, state = draws.start(tx, [(11, 8)])
    stored, total = [], 0.0
    for _ in range(3):
        [aggregate], state = update([gradient], state)
        total = 0.5 * total + gradient
        np.testing.assert_allclose(aggregate, total, rtol=1e-4, atol=1e-5)
        stored.append(np.asarray(state.momentum[0]) / np.linalg.norm(total))
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert np.abs(stored[one] - stored[other]).max() > 0.05


def test_bases_of_workers_under_vmap_are_made_one_after_another():
    keys, basis_of = jax.random.split(jax.random.key(0), 3), functools.partial(random_basis, n=8)
    program = jax.make_jaxpr(jax.vmap(basis_of))(keys)
    assert set(re.findall(r":f32\[([\d,]+)\] = qr\[", str(program))) == {"8,8"}
    for key, basis in zip(keys, jax.vmap(basis_of)(keys), strict=True):
        np.testing.assert_array_equal(basis, basis_of(key))

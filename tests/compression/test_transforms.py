"""Blocks and their transforms against SciPy and NumPy in float64."""

import dataclasses
import functools
import re

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import demo_optax
from demo_optax._src.compression.transforms import random_basis
from tests import draws, oracles

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


@draws.cases(
    {
        **{name: dict(case, seed=0, dtype="float32") for name, case in draws.CASES.items()},
        "random": dict(
            shapes=[(6, 4)],
            compression=demo_optax.Compression(1, 4, transform="random"),
            seed=0,
            dtype="float32",
        ),
    },
    number=30,
    shapes=st.tuples(draws.shapes),
    compression=st.one_of(
        draws.compressions,
        st.builds(
            demo_optax.Compression,
            topk=st.just(1),
            block_side=draws.chunks,
            transform=st.just("random"),
            block_rule=draws.rules,
        ),
    ),
    seed=draws.seeds,
    dtype=draws.values,
)
def test_coefficients_are_the_oracles_and_go_back(shapes, compression, seed, dtype):
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

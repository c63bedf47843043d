"""A momentum stored in 16 bits decays and waits like one stored in 32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import demo_optax
from demo_optax._src.compression.bits import hashed, round_stochastically

STEPS, DECAY = 1000, 0.999
NOTHING_SENT = 1e-30  # of what is selected leaves the momentum


@jax.jit
def momenta_after(gradient, start):
    """One large block's stored coefficients after equal gradients, hardly anything taken out."""
    tx = demo_optax.decoupled_momentum(
        DECAY,
        demo_optax.Compression(1, transform="identity"),
        gradient_weight=1.0,
        subtraction_factor=NOTHING_SENT,
        momentum_dtype="bfloat16",
    )
    state = tx.init(gradient)
    state = state._replace(momentum=jnp.full_like(state.momentum, start))

    def update(state, _):
        return tx.update(gradient, state)[1], None

    state, _ = jax.lax.scan(update, state, length=STEPS)
    return state.momentum.astype(jnp.float32)


@pytest.mark.parametrize(
    "gradient, start, expected",
    [(0.0, 1.0, DECAY**STEPS), (0.001, 0.0, 0.001 * (1 - DECAY**STEPS) / (1 - DECAY))],
    ids=["what is there decays", "what waits grows"],
)
def test_a_momentum_changes_on_average_as_in_float32(gradient, start, expected):
    found = momenta_after(np.full((64, 64), gradient, np.float32), start)
    np.testing.assert_allclose(found.mean(), expected, rtol=0.02)
    assert (found > 0).all() and (found < 1).all()


def test_rounding_takes_a_neighbour_and_keeps_the_mean():
    values = np.float32([0.3, -0.3, 1.0, 1e-3, -7.77, 1e5, 3e38, 0.0, -3.4e38])
    x, seed = jnp.asarray(np.tile(values, (20000, 1))), jnp.uint32(7)
    bits = hashed(seed, jnp.arange(x.size, dtype=jnp.uint32).reshape(x.shape))
    rounded = np.asarray(round_stochastically(x, bits, "bfloat16"), np.float64)
    largest = float(jnp.finfo(jnp.bfloat16).max)
    wanted = np.clip(values.astype(np.float64), -largest, largest)
    step = float(jnp.finfo(jnp.bfloat16).eps) * np.abs(wanted)
    assert (np.abs(rounded - wanted) <= step).all()
    assert all(len(np.unique(column)) <= 2 for column in rounded.T)
    deviation = rounded.std(axis=0) / np.sqrt(len(rounded))
    assert (np.abs(rounded.mean(axis=0) - wanted) <= 3 * deviation).all()


def test_rounding_changes_no_number_that_needs_none_and_keeps_nan():
    exact = jnp.arange(2**16, dtype=jnp.uint16).view(jnp.bfloat16)
    exact = jnp.where(jnp.abs(exact) < jnp.finfo(jnp.bfloat16).tiny, 0, exact)  # as CPUs may do
    bits = hashed(jnp.uint32(3), jnp.arange(exact.size, dtype=jnp.uint32).reshape(exact.shape))
    rounded = round_stochastically(exact.astype(jnp.float32), bits, "bfloat16")
    finite = np.isfinite(np.asarray(exact, np.float32))
    np.testing.assert_array_equal(rounded.view(jnp.uint16)[finite], exact.view(jnp.uint16)[finite])
    np.testing.assert_array_equal(np.isnan(rounded), np.isnan(exact))


@pytest.mark.parametrize(
    ("make", "matrix", "others"),
    [(demo_optax.demo_muon, 6.1, 8.1), (demo_optax.demo_scaled, 6.1, 6.1)],
)
def test_a_state_takes_as_many_bytes_as_the_readme_says(make, matrix, others):
    for shape, limit in (((512, 512), matrix), ((2**18,), others)):
        state = jax.eval_shape(make(1e-3).init, {"w": jnp.zeros(shape)})
        held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
        assert limit - 0.1 <= held / 2**18 < limit


def test_no_two_workers_round_alike():
    tx = demo_optax.decoupled_momentum(
        0.9, demo_optax.Compression(1), axis_name="data", momentum_dtype="bfloat16"
    )
    gradient = jnp.full((2, 64, 64), 1 / 3).at[:].multiply(jnp.linspace(1, 2, 64))
    state = jax.tree.map(lambda x: np.stack([x, x]), tx.init(gradient[0]))
    update = jax.jit(jax.vmap(tx.update, axis_name="data"))
    first, second = np.asarray(update(gradient, state)[1].momentum, np.float32)
    assert 0.1 < np.mean(first != second) < 0.9

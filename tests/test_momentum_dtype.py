"""A momentum stored in 16 bits decays and waits like one stored in 32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import demo_optax
from demo_optax._src.arrays import round_stochastically

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


def test_a_momentum_of_ones_decays_on_average_as_in_float32():
    found = momenta_after(np.zeros((64, 64), np.float32), 1.0)
    np.testing.assert_allclose(found.mean(), DECAY**STEPS, rtol=0.02)


def test_what_waits_grows_on_average_as_in_float32():
    gradient = 0.001
    found = momenta_after(np.full((64, 64), gradient, np.float32), 0.0)
    expected = gradient * (1 - DECAY**STEPS) / (1 - DECAY)
    np.testing.assert_allclose(found.mean(), expected, rtol=0.02)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_takes_a_neighbour_and_keeps_the_mean(dtype):
    values = np.float32([0.3, -0.3, 1.0, 1e-3, -7.77, 1e5, 3e38, 0.0])
    x = jnp.asarray(np.tile(values, (20000, 1)))
    rounded = np.asarray(round_stochastically(x, dtype, jax.random.key(0)), np.float64)
    largest = float(jnp.finfo(dtype).max)
    wanted = np.clip(values, -largest, largest)
    step = float(jnp.finfo(dtype).eps) * np.abs(wanted) + float(jnp.finfo(dtype).tiny)
    assert (np.abs(rounded - wanted) <= step).all()
    assert all(len(np.unique(column)) <= 2 for column in rounded.T)
    np.testing.assert_allclose(rounded.mean(axis=0), wanted, rtol=1e-4)


def test_no_two_workers_round_alike():
    tx = demo_optax.decoupled_momentum(
        0.9, demo_optax.Compression(1), axis_name="data", momentum_dtype="bfloat16"
    )
    gradient = jnp.full((2, 64, 64), 1 / 3).at[:].multiply(jnp.linspace(1, 2, 64))
    state = jax.tree.map(lambda x: np.stack([x, x]), tx.init(gradient[0]))
    update = jax.jit(jax.vmap(tx.update, axis_name="data"))
    first, second = np.asarray(update(gradient, state)[1].momentum, np.float32)
    assert 0.1 < np.mean(first != second) < 0.9

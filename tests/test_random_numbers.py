"""What workers draw follows from the seed and the step, whatever JAX's settings say."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import demo_optax
from demo_optax._src.compression.known_positions import SharedSet, SharedSlice
from demo_optax._src.swarm import agreement

RANDOM_NUMBERS = {
    "jax_default_prng_impl": "rbg",
    "jax_enable_x64": True,
    "jax_random_seed_offset": 7,
    "jax_threefry_partitionable": False,
}
OTHER_SETTINGS = RANDOM_NUMBERS | {"jax_default_matmul_precision": "BF16_BF16_F32"}
SEED = 2**32 + 3  # of more bits than an array of integers keeps without jax_enable_x64


@contextlib.contextmanager
def settings_of_jax(settings):
    usual = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in usual.items():
            jax.config.update(name, value)


def two_steps(compression):
    """Updates and rounded momenta of two workers."""
    tx = demo_optax.decoupled_momentum(
        0.9, compression, axis_name="data", momentum_dtype="bfloat16"
    )
    gradient = np.random.default_rng(0).normal(size=(2, 8, 12)).astype(np.float32)
    state = jax.jit(jax.vmap(tx.init))(gradient)
    update = jax.jit(jax.vmap(lambda g, s: tx.update(g, s), axis_name="data"))
    _, state = update(gradient, state)
    updates, state = update(gradient, state)
    return np.asarray(updates), np.asarray(state.momentum, np.float32)


@pytest.mark.parametrize("drawn", [{"selection": "random-slicing"}, {"transform": "random"}])
def test_no_setting_of_jax_changes_a_step(drawn):
    compression = demo_optax.Compression(4, 4, **{"selection": "random"} | drawn, seed=SEED)
    usual = two_steps(compression)
    with settings_of_jax(OTHER_SETTINGS):
        found = two_steps(compression)
    np.testing.assert_array_equal(*found[0])  # both workers' updates
    np.testing.assert_array_equal(found[0], usual[0])
    np.testing.assert_array_equal(found[1], usual[1])


@pytest.mark.parametrize("name", OTHER_SETTINGS)
def test_no_setting_of_jax_changes_positions(name):
    step = jnp.int32(5)
    with settings_of_jax({name: OTHER_SETTINGS[name]}):
        chosen = SharedSet(12, 5, "random", 0, 0).positions(2, step)
        starts = SharedSlice(12, 5, "random-slicing", 0, 0).positions(1, step)
    assert chosen.tolist() == [[10, 4, 11, 2, 8], [7, 1, 8, 11, 5]]  # of recorded runs
    assert starts.tolist() == [[8]]


def test_seeds_of_more_than_32_bits_differ():
    one, other = (
        SharedSet(64, 16, "random", seed, 0).positions(1, jnp.int32(0)) for seed in (3, SEED)
    )
    assert (one != other).any()


@pytest.mark.parametrize("name", RANDOM_NUMBERS)
def test_a_setting_of_jax_that_changes_random_numbers_is_compared(name):
    usual = agreement.jax_settings()
    with settings_of_jax({name: RANDOM_NUMBERS[name]}):
        found = agreement.jax_settings()
    assert {x for x in usual if usual[x] != found[x]} == {name}

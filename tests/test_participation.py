"""Who takes part, and what stays where nobody does: states of bases, dtypes, schedules."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import demo_optax
from demo_optax import Compression
from tests import workers
from tests.sweeps import sweep

BASES = {
    "adamw": lambda rate: demo_optax.demo_adamw(rate, Compression(4), decay=0.0, weight_decay=0.1),
    "muon": lambda rate: demo_optax.demo_muon(rate, Compression(4), decay=0.0, weight_decay=0.1),
    "momentum": lambda rate: demo_optax.decoupled(
        optax.sgd(rate, momentum=0.9), Compression(4), decay=0.0
    ),
    "injected": lambda rate: demo_optax.decoupled(
        optax.inject_hyperparams(optax.adamw)(learning_rate=rate), Compression(4), decay=0.0
    ),
}


def steps(tx, gradients, params):
    # `jax.jit` finds the program again where the same optimizer comes with the same shapes.
    update, state, found = jax.jit(tx.update), tx.init(params), []
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        found.append(updates)
    return found, state


@pytest.mark.parametrize("name", BASES)
def test_a_base_stays_where_it_is_on_a_step_of_nobody(name):
    tx, params = BASES[name](0.1), np.linspace(0.5, 1.5, 12, dtype=np.float32).reshape(3, 4)
    gradients = [params, params * np.float32(np.nan), params * 2]
    found, state = steps(tx, gradients, params)
    expected, without = steps(tx, [gradients[0], gradients[2]], params)
    np.testing.assert_array_equal(found[1], 0.0)
    np.testing.assert_allclose(found[2], expected[1], rtol=1e-6)
    held = [x for x in jax.tree.leaves(state[1]) if x.ndim]
    for x, y in zip(held, [x for x in jax.tree.leaves(without[1]) if x.ndim], strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "injected"])
def test_schedules_count_every_step(name):
    params = np.ones((3, 4), np.float32)
    rate = optax.piecewise_constant_schedule(0.1, {2: 10.0})
    found, state = steps(BASES[name](rate), [params, params * np.float32(np.nan), params], params)
    assert np.abs(found[2]).max() > 5 * np.abs(found[0]).max()
    assert state[0].count == 3


def test_both_learning_rates_of_the_first_version_see_the_same_step():
    """The rate inside the momentum and the one of the step, at one count after a step of nobody."""
    rates = [0.1, 0.2, 0.3]
    tx = demo_optax.demo(lambda step: jnp.array(rates)[step], Compression(4), decay=0.0)
    ones = jnp.ones(1)
    found, state = steps(tx, [ones, ones * jnp.nan, ones], ones)
    np.testing.assert_allclose(np.ravel(found), [-0.1, 0.0, -0.3], rtol=1e-6)
    np.testing.assert_allclose(state[0].metrics.sent_share, 1.0)


@sweep(
    ("demo_scaled", jnp.bfloat16),
    ("demo_adamw", jnp.bfloat16),
    ("demo_muon", jnp.float16),
    name=["demo_scaled", "demo_adamw", "demo_muon"],
    dtype=[jnp.bfloat16, jnp.float16],
)
def test_second_moments_are_float32(name, dtype):
    params = jnp.ones(64, dtype)
    tx = getattr(demo_optax, name)(1e-3, Compression(4), b2=0.999)

    def step(state, scale):
        updates, state = tx.update(params * scale, state, params)
        return state, updates

    scales = np.array([1.0] * 60 + [0.01] * 300, dtype)
    state, updates = jax.jit(lambda state: jax.lax.scan(step, state, scales))(tx.init(params))
    assert updates.dtype == dtype and np.isfinite(np.asarray(updates, np.float32)).all()
    (nu,) = [x for _, x in optax.tree.get_all_with_path(state, "nu") if getattr(x, "ndim", 0) == 1]
    assert nu.dtype == jnp.float32


def test_metrics_are_found_in_the_state_of_flax():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, demo_optax.demo(1e-3), wrt=nnx.Param)
    for tree in (optimizer.opt_state, nnx.state(optimizer)):
        metrics = demo_optax.exchange_metrics(tree)
        assert metrics.participants.shape == () and metrics.agreed
        demo_optax.check_metrics(metrics)


def test_a_conditional_link_says_what_to_do():
    tx = optax.conditionally_transform(
        demo_optax.demo(1e-3, axis_name="data"), should_transform_fn=lambda step: step > 2
    )
    mesh = workers.mesh_of(2)
    with pytest.raises(ValueError, match="conditionally_transform"):
        demo_optax.init_opt_state(tx, jnp.ones((4, 4)), mesh)

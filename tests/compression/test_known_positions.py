"""Positions that all workers know: how often each is taken, and what programs make of them."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import demo_optax
from demo_optax._src.compression import make_plan
from demo_optax._src.compression.known_positions import SharedSlice
from demo_optax._src.compression.plan import shared_positions
from tests import model, workers
from tests.sweeps import sweep

SLOW = re.compile(r"\b(?:stablehlo\.)?(sort|scatter|top_?k)\b(?=\"?\()", re.IGNORECASE)


@pytest.mark.parametrize("n, k", [(12, 5), (12, 1), (7, 6), (9, 9)])
def test_a_run_goes_on_at_the_front(n, k):
    rng = np.random.default_rng(0)
    blocks, values = (rng.normal(size=(3, size)).astype(np.float32) for size in (n, k))
    run = SharedSlice(n, k, "slicing", 0, 0)
    take, add = jax.jit(run.take), jax.jit(run.add)
    for start in range(n if k < n else 1):
        places, starts = (start + np.arange(k)) % n, np.full((3, 1), start, np.int32)
        taken = take(blocks, starts)
        np.testing.assert_array_equal(taken, blocks[:, places])
        added = blocks.copy()
        added[:, places] += values
        ours = add(blocks, starts, values)
        np.testing.assert_array_equal(ours, added)


def visits(name, n, k, steps):
    """How often a block's coefficients are taken in so many steps."""
    compression = demo_optax.Compression(k, n, transform="identity", selection=name)
    plan = make_plan(compression, ((n,),))

    def taken(step):
        (known,) = shared_positions(plan.sections, step)
        return plan.sections[0].selector.take(jnp.arange(n)[None], known)[0]

    return np.bincount(np.ravel(jax.jit(jax.vmap(taken))(jnp.arange(steps))), minlength=n)


@pytest.mark.parametrize("name", ["striding", "slicing"])
def test_regular_draws_visit_every_coefficient_equally_often_in_a_period(name):
    n, k = 30, 4
    period = n // math.gcd(n, k if name == "slicing" else 1)
    np.testing.assert_array_equal(visits(name, n, k, period), k * period // n)


@pytest.mark.parametrize("name", ["random", "random-slicing"])
def test_random_draws_visit_every_coefficient_about_equally_often(name):
    n, k, steps = 30, 4, 3000
    expected = steps * k / n
    assert np.abs(visits(name, n, k, steps) - expected).max() < 5 * math.sqrt(expected)


EXCHANGES = {"gather": demo_optax.AllGather("data"), "two-phase": demo_optax.TwoPhase("data")}


def program(exchange, **settings):
    """The programs of a step of eight workers, as XLA takes it and as it optimises it for CPUs.

    Without the medians of a number for each worker, which need sorts.
    """
    compression = demo_optax.Compression(6, 4, "sign", **settings)
    tx = demo_optax.demo(1e-3, compression, decay=0.9, exchange=EXCHANGES[exchange])
    mesh, params = workers.mesh_of(model.WORKERS), np.ones((12, 4), np.float32)
    state = demo_optax.init_opt_state(tx, params, mesh)
    step = demo_optax.make_train_step(lambda w, batch: jnp.mean(batch["x"] @ w), tx, mesh)
    lowered = jax.jit(step).lower(params, state, model.batch(0))
    small = rf'@sort\(|"stablehlo.sort"\(%\w+\) <{{dimension = 0|f32\[{model.WORKERS}\]\S+ sort\('
    return re.sub(small, "", lowered.as_text() + lowered.compile().as_text())


@sweep("gather", exchange=EXCHANGES)
def test_runs_need_no_sort_and_no_scatter(exchange):
    shared = dict(transform="randomized-dct", exchange=exchange)
    assert not SLOW.findall(program(selection="random-slicing", **shared))
    assert set(SLOW.findall(program(selection="random", **shared))) == {"sort", "scatter"}

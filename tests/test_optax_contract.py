"""optax's own contract suite for contributed optimizers, with ours in the place of its own."""

import functools
import importlib.util
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import parameterized

import demo_optax
from tests import workers

# One bit makes a sign of what is zero but for rounding, and the suite compares two programs.
FOUR_BITS = demo_optax.Compression(32, value_coding="int4", selection="bins")
SCALED = ("demo_scaled", {"learning_rate": 1e-3, "compression": FOUR_BITS})
MUON = ("demo_muon", {"learning_rate": 1e-3, "compression": FOUR_BITS})
DEMO, SIGNUM = ((name, {"learning_rate": 1e-3}) for name in ("demo", "demo_signum"))
SGD, ADAMW = ("demo_sgd", {"learning_rate": 1e-1}), ("demo_adamw", {"learning_rate": 1e-2})

# Steps of fixed size cannot follow Rosenbrock's valley.
ALL_BUT_ROSENBROCK = ("_setup_parabola", "_setup_matrix_parabola", "_setup_mixed_tensor_target")
TARGETS = (*ALL_BUT_ROSENBROCK, "_setup_rosenbrock")


def compiled_factory(name):
    """Our optimizer; its update is compiled also where the suite calls it without ``jax.jit``."""
    ours = getattr(demo_optax, name)

    @functools.wraps(ours)
    def made(*args, **options):
        tx = ours(*args, **options)
        return optax.GradientTransformationExtraArgs(tx.init, jax.jit(tx.update))

    return made


def contract(*optimizers, targets=TARGETS, targets_alone=False):
    """A fresh copy of the suite's module, made for these optimizers alone.

    The suite hands its lists of optimizers to ``parameterized.product`` while its class is made:
    that is where ours take their place, and where the targets that are not named are left out.
    With ``targets_alone`` no other tests are left.
    """
    entries = tuple(
        dict(opt_name=name, opt_kwargs=kwargs, wrapper_name=None, wrapper_kwargs=None)
        for name, kwargs in optimizers
    )
    product = parameterized.product

    def product_for_ours(*lists, **grid):
        if targets_alone and "target" not in grid:
            return lambda test: None
        if "target" in grid:
            grid["target"] = tuple(t for t in grid["target"] if t.__name__ in targets)
        if "wrap" in grid:
            grid["wrap"] = (False,)  # ours have no wrapper
        return product(*[entries for _ in lists], **grid)

    spec = importlib.util.find_spec("optax.contrib._common_test")
    suite = importlib.util.module_from_spec(spec)
    with mock.patch.object(parameterized, "product", product_for_ours):
        spec.loader.exec_module(suite)
    suite._get_opt_factory = compiled_factory
    return suite.ContribTest


class NothingSkipped:
    """Makes the suite's own skips, as for optimizers that take no schedule, failures."""

    def skipTest(self, reason):
        self.fail(reason)


class TestAll(NothingSkipped, contract(ADAMW)):
    pass


@pytest.mark.filterwarnings("ignore:demo_muon takes parameter")  # of three dimensions
class TestAllButRosenbrock(NothingSkipped, contract(MUON, targets=ALL_BUT_ROSENBROCK)):
    pass


class TestOneTarget(
    NothingSkipped,
    contract(
        DEMO, SCALED, SGD, SIGNUM, targets=("_setup_mixed_tensor_target",), targets_alone=True
    ),
):
    """Whatever these share with the two above is tested there."""


@pytest.mark.slow
class TestAllOfOthers(NothingSkipped, contract(SGD)):
    pass


@pytest.mark.slow
class TestAllButRosenbrockOfOthers(
    NothingSkipped, contract(DEMO, SCALED, SIGNUM, targets=ALL_BUT_ROSENBROCK)
):
    pass


def test_injected_learning_rate_acts_in_and_behind_the_momentum_of_many_workers(compiled):
    decay, rates = 0.5, np.array([0.1, 0.02, 0.3, 0.05])
    gradient = np.array([4.0, -3.0, 2.0, 1.0])
    tx = optax.inject_hyperparams(demo_optax.demo)(
        learning_rate=lambda step: jnp.array(rates, jnp.float32)[step],
        compression=demo_optax.Compression(topk=1, transform="identity"),
        decay=decay,
        axis_name="data",
    )
    mesh = workers.mesh_of(8)
    params = {"w": jnp.zeros(4)}
    state = demo_optax.init_opt_state(tx, params, mesh)
    step = demo_optax.make_train_step(lambda params, batch: jnp.sum(batch @ params["w"]), tx, mesh)
    batch = np.tile(gradient, (8, 1)).astype(np.float32)

    momentum, expected = np.zeros(4), np.zeros(4)
    for i, rate in enumerate(rates):
        compiled()
        params, state, _ = jax.block_until_ready(step(params, state, batch))
        assert len(compiled()) == 0 or i == 0
        momentum = decay * momentum + rate * gradient
        largest = np.argmax(np.abs(momentum))
        expected[largest] -= rate * np.sign(momentum[largest])
        momentum[largest] = 0
        np.testing.assert_allclose(params["w"], expected, rtol=1e-6)
        stored = np.asarray(state.inner_state[0].momentum["w"]).reshape(8, 4)
        np.testing.assert_allclose(stored, np.tile(momentum, (8, 1)), rtol=1e-6)
        np.testing.assert_allclose(state.hyperparams["learning_rate"], rate, rtol=1e-6)

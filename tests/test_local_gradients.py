"""Gradients must be local: those that were summed are found, and no others are accused."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import demo_optax
from tests import model, workers
from tests.sweeps import sweep

pytestmark = pytest.mark.usefixtures("annotations_unchecked")

DEMO = demo_optax.demo(1e-3, demo_optax.Compression(2, 4), axis_name="data")


def summed_gradients(tx, mode):
    """An update with the gradients that ``jax.grad`` gives inside ``shard_map`` by itself."""
    params, state = workers.initial(DEMO, workers.mesh_of(8))
    specs = workers.specs_of(state)

    def step(params, state, batch):
        gradient = jax.grad(model.loss)(params, batch)
        if mode != "shard_map":
            gradient = jax.lax.psum(gradient, "data")
        return tx.update(gradient, state, params)

    run = workers.spread(step, (P(), specs, P("data")), (P(), specs), 8, mode)
    return run(params, jax.device_get(state), model.stacked(model.batch(0)))


def test_summed_gradients_are_refused_by_the_dense_mean_too():
    mean = demo_optax.mean_over_workers("data")
    run = workers.spread(lambda g: mean.update(g, mean.init(g))[0], (P(),), P(), 8, "shard_map")
    with pytest.raises(ValueError, match=r"is not local.*local_value_and_grad"):
        run(model.init())


@sweep("shard_map unchecked", mode=["vmap", "pmap", "shard_map unchecked"])
def test_summed_gradients_are_found_out_by_their_packets(mode):
    _, state = summed_gradients(DEMO, mode)
    with pytest.raises(ValueError, match=r"all 8 workers have the very same gradient.*not local"):
        demo_optax.check_metrics(demo_optax.exchange_metrics(state))


@sweep(1e-3, clip_norm=[1e-3, None])
def test_local_gradients_are_not_accused_even_where_clipping_makes_their_norms_equal(clip_norm):
    """A large batch of steps, since equal norms are a matter of the last bits."""
    step = demo_optax.make_train_step(
        model.loss, DEMO, workers.mesh_of(2), "data", clip_norm=clip_norm
    )
    params, state = workers.initial(DEMO, workers.mesh_of(2))
    for i in range(50):
        params, state, metrics = jax.block_until_ready(step(params, state, model.batch(i)))
        demo_optax.check_metrics(metrics.exchange)


@pytest.mark.parametrize("reduce", [jax.lax.pmean, jax.lax.psum])
@pytest.mark.parametrize("has_aux", [False, True])
def test_a_loss_that_all_workers_share_is_refused_in_a_loop_of_ones_own(reduce, has_aux):
    def loss(x):
        mean = reduce(x.mean(), "data")
        return (mean, x) if has_aux else mean

    gradient = demo_optax.local_value_and_grad(loss, "data", has_aux=has_aux)
    run = jax.shard_map(gradient, mesh=workers.mesh_of(2), in_specs=P(), out_specs=P("data"))
    with pytest.raises(ValueError, match=r"same on all workers of 'data'.*Leave out pmean"):
        jax.eval_shape(run, np.ones(3, np.float32))


@jax.jit
def found_identical(gradients):
    """Whether four workers are told that all of them have the same gradient, ``(4, 16, 16)``.

    What they have is said of gradients as they come: behind the preconditioner all are signs.
    """
    tx = demo_optax.demo(1e-3, axis_name="data", precondition=optax.scale_by_sign())

    def worker(gradient):
        return tx.update(gradient, tx.init(gradient), gradient)[1][0].metrics.identical

    return jax.vmap(worker, axis_name="data")(gradients)


OWN = np.arange(4)
OF_A_TABLE = np.full((4, 16, 16), 1e-3)  # with a weight decay, and first rows that are equal
OF_A_TABLE[OWN, 1 + OWN] += 1.0 + OWN[:, None]
OF_WORDS = np.zeros((4, 256))  # each worker has others, and all gradients have one norm
OF_WORDS[OWN, 8 + OWN], OF_WORDS[OWN, 16 + OWN] = 0.5, -0.5
ONE = np.zeros((16, 16))
ONE[3, 7], ONE[5, 9] = 0.5, -0.25
AVERAGED = np.zeros((4, 16, 16))  # with first rows of zeros
AVERAGED[:, 3] = 0.5
GRADIENTS = {
    "signs behind the preconditioner": np.abs(np.random.default_rng(0).normal(size=(4, 16, 16))),
    "of a table": OF_A_TABLE,
    "of words": OF_WORDS.reshape(4, 16, 16),
    "transposed": np.stack([ONE, ONE.T, ONE, ONE.T]),
    "averaged": AVERAGED,
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_only_gradients_that_were_averaged_are_found_identical(name):
    found = found_identical(GRADIENTS[name].astype(np.float32))
    np.testing.assert_array_equal(found, name == "averaged")

"""A swarm's workers against the same optimizer over ``shard_map``, and against each other."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax.swarm import ObjectStore
from tests import swarms

WORKERS = 4

OPTIMIZERS = {
    "demo_scaled": lambda exchange: demo_optax.demo_scaled(1e-2, exchange=exchange),
    "demo": lambda exchange: demo_optax.demo(
        1e-3, demo_optax.Compression(topk=8, value_coding="int4"), exchange=exchange
    ),
    "demo_adamw": lambda exchange: demo_optax.demo_adamw(
        1e-3, demo_optax.Compression(topk=8), exchange=exchange
    ),
}


def over_shard_map(make_optimizer, exchange, steps: int):
    """Parameters after each step, of the same workers along the axis of one mesh."""
    mesh = jax.make_mesh((WORKERS,), ("data",), devices=jax.devices()[:WORKERS])
    tx = make_optimizer(exchange)
    params = swarms.initial_params()
    opt_state = demo_optax.init_opt_state(tx, params, mesh)
    step = demo_optax.make_train_step(swarms.loss_fn, tx, mesh)
    found = []
    for number in range(steps):
        each = [swarms.batch_of(worker, number) for worker in range(WORKERS)]
        batch = jax.tree.map(lambda *x: np.concatenate(x), *each)
        batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
        params, opt_state, _ = step(params, opt_state, batch)
        found.append(swarms.digest(params))
    return found


def in_a_swarm(store, make_optimizer, steps: int, **settings):
    """Parameters of each worker after each step, nobody missing."""
    workers = [
        swarms.make_worker(make_optimizer, store, n, min_workers=WORKERS, **settings)
        for n in range(WORKERS)
    ]

    def run(number):
        worker, found = workers[number], []
        params, opt_state = swarms.begin(worker)
        while worker.number < steps:
            batch = swarms.batch_of(number, worker.number)
            params, opt_state, metrics = worker.step(params, opt_state, batch)
            found.append(swarms.digest(params))
        worker.close()
        return found

    return swarms.together([functools.partial(run, number) for number in range(WORKERS)])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_are_those_of_shard_map_to_the_last_bit(name, tmp_path):
    steps = 50
    expected = over_shard_map(OPTIMIZERS[name], demo_optax.AllGather("data"), steps)
    for found in in_a_swarm(ObjectStore(str(tmp_path)), OPTIMIZERS[name], steps):
        assert found == expected


def test_a_delay_is_that_of_shard_map_to_the_last_bit(tmp_path):
    make, steps = OPTIMIZERS["demo_scaled"], 30
    exchange = demo_optax.Delayed(demo_optax.AllGather("data"))
    expected = over_shard_map(make, exchange, steps)
    for found in in_a_swarm(ObjectStore(str(tmp_path)), make, steps, delay=1):
        assert found == expected

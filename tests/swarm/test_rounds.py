"""Rounds of local steps in a swarm, beside the same rounds over ``shard_map``."""

import functools

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax.swarm import ObjectStore
from tests import swarms

WORKERS, EVERY = 4, 3

SPARSE = demo_optax.Compression(8, 8, value_coding="int2", transform="identity")
DENSE = demo_optax.Compression(64, 8, value_coding="int8", transform="identity")
OPTIONS = dict(gradient_weight=1.0, mean="workers")
OUTER = {
    "sparseloco": lambda **options: demo_optax.decoupled(
        optax.sgd(1.0), SPARSE, decay=0.95, **OPTIONS, **options
    ),
    "diloco": lambda **options: demo_optax.decoupled(
        optax.sgd(0.7, momentum=0.9, nesterov=True), DENSE, decay=1.0, **OPTIONS, **options
    ),
    "demo_scaled": lambda **options: demo_optax.demo_scaled(1e-2, **options),
}


def rounds(name, axis_name=None, **options):
    inner = optax.adamw(optax.linear_schedule(1e-2, 1e-3, 12), b2=0.95)
    outer = OUTER[name](axis_name=axis_name)
    return demo_optax.local_steps(inner, outer, EVERY, axis_name=axis_name, **options)


def over_shard_map(name, steps):
    """Shared parameters after each round, of the same workers along the axis of one mesh."""
    types = (AxisType.Auto,)
    mesh = jax.make_mesh((WORKERS,), ("data",), types, devices=jax.devices()[:WORKERS])
    tx = rounds(name, "data")
    params = jax.device_put(swarms.initial_params(), NamedSharding(mesh, P()))
    opt_state = demo_optax.init_opt_state(tx, params, mesh)
    step = demo_optax.make_train_step(swarms.loss_fn, tx, mesh)
    digests = []
    for number in range(steps):
        each = [swarms.batch_of(worker, number) for worker in range(WORKERS)]
        batch = jax.tree.map(lambda *x: np.concatenate(x), *each)
        batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
        params, opt_state, metrics = step(params, opt_state, batch)
        if metrics.exchanged:
            digests.append(swarms.digest(params))
    return digests


def in_a_swarm(tx, store, until, **settings):
    """Each worker's digests by round, and its metrics."""
    workers = [
        swarms.make_worker(tx, store, n, min_workers=WORKERS, **settings) for n in range(WORKERS)
    ]

    def run(worker):
        with worker:
            return swarms.take_steps(worker, until)[1:]

    return swarms.together([functools.partial(run, worker) for worker in workers])


@pytest.mark.parametrize("name", OUTER)
def test_parameters_after_each_round_are_those_of_shard_map_to_the_last_bit(name, tmp_path):
    expected = over_shard_map(name, 12 * EVERY)
    for digests, seen in in_a_swarm(rounds(name), ObjectStore(str(tmp_path)), 12):
        assert [digests[n + 1] for n in range(12)] == expected
        assert [metrics.round_steps for metrics in seen] == 12 * [0, 0, EVERY]


@pytest.mark.parametrize("merge", [None, 0.5])
def test_workers_go_on_while_packets_travel_and_stay_equal(merge, tmp_path):
    tx = rounds("sparseloco", merge=merge)
    results = in_a_swarm(tx, ObjectStore(str(tmp_path)), 12, delay=1)
    first, *others = [digests for digests, _ in results]
    for digests in others:
        common = first.keys() & digests.keys()
        assert len(common) > 8 and all(digests[n] == first[n] for n in common)
    for _, seen in results:
        assert seen[-1].loss < seen[0].loss
        assert all(metrics.round_steps in (0, *range(EVERY, 100)) for metrics in seen)

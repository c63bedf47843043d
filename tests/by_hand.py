"""Workers that exchange by hand, through `send` and `apply`."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import demo_optax
from demo_optax import Compression
from tests import workers

ROWS = 8  # of the packets of all workers, also where there are fewer: one program takes them all
SHAPES = {"b": (24,), "w": (16, 24)}
SMALL = Compression(topk=4, block_side=8, value_coding="int4")
MAKE = {
    "demo": functools.partial(demo_optax.demo, 1e-2, SMALL, decay=0.9),
    "demo_scaled": functools.partial(demo_optax.demo_scaled, 1e-2),
    "demo_muon": functools.partial(demo_optax.demo_muon, 1e-2),
    "norm limit": functools.partial(demo_optax.demo_scaled, 1e-2),
}


def exchange(name, axis_name=None):
    return demo_optax.AllGather(axis_name, norm_limit=1.1 if name == "norm limit" else None)


@functools.cache
def split(name):
    return MAKE[name](exchange=exchange(name))


def initial():
    rng = np.random.default_rng(0)
    return {n: jnp.asarray(rng.normal(size=s), jnp.float32) for n, s in SHAPES.items()}


@jax.jit
def gradient(params, seed):
    """That of a noisy parabola: local, and dependent on the parameters."""
    keys = dict(zip(SHAPES, jax.random.split(jax.random.key(seed), len(SHAPES)), strict=True))
    noise = {n: jax.random.normal(keys[n], s) for n, s in SHAPES.items()}
    return jax.tree.map(lambda p, n: 0.1 * p + n, params, noise)


@functools.cache
def halves_of(tx):
    """`init`, `send` and `apply`, compiled once for all workers: their number is traced."""
    return jax.jit(tx.init), jax.jit(tx.send), jax.jit(tx.apply)


@functools.cache
def empty_outbox_of(tx):
    return tx.empty_outbox(initial())


def rows(*packets):
    """The packets of the first workers; none came from the others."""
    missing = [np.zeros_like(packets[0])] * (ROWS - len(packets))
    return np.stack([*packets, *missing])


class Worker:
    """One of several workers that exchange by hand."""

    def __init__(self, tx, number, params, state=None):
        self.number, self.params, self.tx = number, params, tx
        init, self.send, self.apply = halves_of(tx)
        self.state = init(params) if state is None else state

    def prepare(self, step, **extra):
        place = demo_optax.local_parameters(self.params, self.state)
        found = gradient(place, 100 * step + self.number)
        self.outbox, self.state = self.send(
            found, self.state, self.params, worker=self.number, **extra
        )
        return np.asarray(self.outbox.packet)

    def follow(self):
        self.outbox = empty_outbox_of(self.tx)

    def finish(self, packets, worker=None, outbox=None):
        updates, self.state = self.apply(
            packets,
            self.outbox if outbox is None else outbox,
            self.state,
            self.params,
            worker=self.number if worker is None else worker,
        )
        self.params = optax.apply_updates(self.params, updates)


def by_hand(name, number, steps, path=None):
    tx, params = split(name), initial()
    each = [Worker(tx, i, params) for i in range(number)]
    for step in range(steps):
        packets = [worker.prepare(step) for worker in each]
        if path is not None:
            for worker, packet in zip(each, packets, strict=True):
                (path / f"{step}-{worker.number}").write_bytes(packet.tobytes())
            read = [(path / f"{step}-{i}").read_bytes() for i in range(number)]
            packets = [np.frombuffer(data, np.uint32) for data in read]
        for worker in each:
            worker.finish(rows(*packets))
    return each


def by_shard_map(name, number, steps):
    tx = MAKE[name](exchange=exchange(name, "data"))
    mesh = workers.mesh_of(number)
    stacked, params = demo_optax.stack_workers(tx, mesh), initial()
    update, state = jax.jit(stacked.update), stacked.init(params)
    for step in range(steps):
        places = demo_optax.local_parameters(params, state)
        if places is params:
            places = jax.tree.map(lambda x: np.broadcast_to(x, (number, *x.shape)), params)
        places = jax.device_get(places)
        found = [
            gradient(jax.tree.map(lambda x, i=i: jnp.asarray(x[i]), places), 100 * step + i)
            for i in range(number)
        ]
        gradients = jax.tree.map(lambda *x: np.stack(x), *found)
        updates, state = update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def assert_bit_equal(one, other):
    chex.assert_trees_all_equal(*jax.device_get((one, other)))

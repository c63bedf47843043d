"""Swarms in one process: each worker is a thread with a device of its own."""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from demo_optax.swarm import Member, SwarmWorker


def mesh_of_worker(number: int) -> Mesh:
    device = jax.devices()[number % len(jax.devices())]
    return jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=[device])


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)


def initial_params():
    keys = jax.random.split(jax.random.key(0))
    return {
        "w": 0.1 * jax.random.normal(keys[0], (32, 48)),
        "v": 0.1 * jax.random.normal(keys[1], (48, 8)),
    }


def batch_of(worker: int, step: int, rows: int = 16):
    drawn = np.random.default_rng((worker, step))
    x = drawn.normal(size=(rows, 32)).astype(np.float32)
    return x, np.sin(x[:, :8])


def make_worker(make_optimizer, store, number: int, **settings) -> SwarmWorker:
    of_member = {"slots": 4, "deadline": 30.0, "min_workers": 1}
    given = {name: settings.pop(name, default) for name, default in of_member.items()}
    member = Member(store, f"worker-{number}", **given)
    return SwarmWorker(loss_fn, make_optimizer, mesh_of_worker(number), member, **settings)


def begin(worker: SwarmWorker):
    return worker.begin(initial_params(), batch_of(0, 0))


def together(actions: list[Callable[[], object]]) -> list:
    """The results of several functions, each in a thread of its own."""
    with ThreadPoolExecutor(len(actions)) as pool:
        futures = [pool.submit(action) for action in actions]
        return [future.result(timeout=120) for future in futures]


def digest(params) -> bytes:
    return b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(params))

"""Swarms in one process: each worker is a thread."""

import functools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax._src.swarm.programs import Programs, compile_programs
from demo_optax.swarm import Member, SwarmWorker

DEMO_SCALED = demo_optax.demo_scaled(1e-2)


def mesh_of_worker(number: int, shards: int = 1) -> Mesh:
    """Workers of one device share it, and so their programs; arrays go to another by default.

    Workers of several devices have their own, since programs of two threads would wait for each
    other there.
    """
    first = number * shards % len(jax.devices()) if shards > 1 else 1
    devices = jax.devices()[first : first + shards]
    types = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh((1, shards), ("data", "fsdp"), types, devices=devices)


def compile_once(loss_fn, tx, mesh, axis_name, params, batch, slots, options) -> Programs:
    """`compile_programs`, once for all that give the same arguments and shapes."""
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype.name), (params, batch))
    leaves, structure = jax.tree.flatten((shapes, options))
    key = loss_fn, tx, mesh, axis_name, slots, structure, *leaves
    with COMPILING:
        if key not in PROGRAMS:
            PROGRAMS[key] = compile_programs(
                loss_fn, tx, mesh, axis_name, params, batch, slots, options
            )
        return PROGRAMS[key]


PROGRAMS: dict[tuple, Programs] = {}
COMPILING = threading.Lock()


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


def batch_of_all(mesh: Mesh, workers: int, step: int):
    """The batches of all workers of one job, divided along its axis of workers."""
    batches = [batch_of(worker, step) for worker in range(workers)]
    batch = jax.tree.map(lambda *x: np.concatenate(x), *batches)
    return jax.device_put(batch, NamedSharding(mesh, P("data")))


def make_worker(tx, store, number: int, *, shards: int = 1, **settings) -> SwarmWorker:
    """A worker of a store; without one it has no place."""
    defaults = {"slots": 4, "deadline": 30.0, "min_workers": 1}
    of_member = {name: settings.pop(name, default) for name, default in defaults.items()}
    member = Member(store, f"worker-{number}", **of_member) if store else None
    mesh = mesh_of_worker(number, shards)
    OPEN.append(SwarmWorker(loss_fn, tx, mesh, member, **settings))
    return OPEN[-1]


OPEN: list[SwarmWorker] = []


def begin(worker: SwarmWorker):
    return worker.begin(initial_params(), batch_of(0, 0))


def together(actions: Sequence[Callable[[], object]]) -> list:
    """The results of several functions, each in a thread of its own."""
    with ThreadPoolExecutor(len(actions)) as pool:
        futures = [pool.submit(action) for action in actions]
        return [future.result(timeout=120) for future in futures]


def digest(params) -> bytes:
    return b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(params))


def take_steps(worker: SwarmWorker, until: int, state=None, batches=batch_of) -> tuple:
    """Takes steps before this one; parameters, state, digests by step, and metrics."""
    params, opt_state = state or begin(worker)
    number, digests, all_metrics = int(worker.member.worker.split("-")[1]), {}, []
    first = worker.number
    while worker.number < until:
        batch = batches(number, first + len(all_metrics))
        params, opt_state, metrics = worker.step(params, opt_state, batch)
        digests[worker.number] = digest(params)
        all_metrics.append(metrics)
    return (params, opt_state), digests, all_metrics


def after(seconds: float, action: Callable[[], object]) -> Callable[[], object]:
    """An action that begins some seconds later."""

    def wait_first():
        time.sleep(seconds)
        return action()

    return wait_first


def slowly(seconds: float):
    """Batches that come so slowly that others can catch up."""

    def batches(worker: int, step: int):
        time.sleep(seconds)
        return batch_of(worker, step)

    return batches


def both(first, second, until: int, states=(None, None), batches=(batch_of, batch_of)) -> list:
    """Two workers take steps at the same time."""
    workers = zip((first, second), states, batches, strict=True)
    return together([functools.partial(take_steps, x, until, *rest) for x, *rest in workers])


def all_take_steps(workers, until: int, states=None, batches=batch_of) -> list:
    """Workers take steps at the same time."""
    pairs = zip(workers, states or [None] * len(workers), strict=True)
    return together([functools.partial(take_steps, x, until, y, batches) for x, y in pairs])


def in_a_swarm(store, tx, until: int, number: int = 4, **settings) -> list:
    """Each worker's digests by step, and its metrics; nobody is missing."""
    workers = [make_worker(tx, store, n, min_workers=number, **settings) for n in range(number)]

    def run(worker):
        with worker:
            return take_steps(worker, until)[1:]

    return together([functools.partial(run, worker) for worker in workers])


def over_shard_map(tx, steps: int, number: int = 4, shards: int = 1, param_specs=None) -> list:
    """Parameters after each exchange, of the same workers along the axis of one mesh."""
    devices = jax.devices()[: number * shards]
    types = (AxisType.Auto, AxisType.Auto)
    mesh = jax.make_mesh((number, shards), ("data", "fsdp"), types, devices=devices)
    placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), param_specs or P())
    params = jax.device_put(initial_params(), placed)
    opt_state = demo_optax.init_opt_state(tx, params, mesh, param_specs=param_specs)
    step = demo_optax.make_train_step(loss_fn, tx, mesh, param_specs=param_specs)
    digests = []
    for number_of_step in range(steps):
        batch = batch_of_all(mesh, number, number_of_step)
        params, opt_state, metrics = step(params, opt_state, batch)
        if metrics.exchanged:
            digests.append(digest(params))
    return digests


def require_equal(*digests) -> dict[int, dict[int, bytes]]:
    """Whoever took a step has the same parameters after it."""
    by_step: dict[int, dict[int, bytes]] = {}
    for worker, of_worker in enumerate(digests):
        for step, found in of_worker.items():
            by_step.setdefault(step, {})[worker] = found
    assert [step for step, x in by_step.items() if len(set(x.values())) > 1] == []
    return by_step

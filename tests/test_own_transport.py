"""The example of `send` and `apply` over files and pipes trains as eight workers of one job do."""

import functools
import multiprocessing.dummy
from concurrent.futures import ThreadPoolExecutor

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import demo_optax
import own_transport
from demo_optax.checkpoint import Checkpointer
from tests import workers
from tests.sweeps import slow

WORKERS, STEPS = 8, 5


@pytest.fixture(scope="module", autouse=True)
def one_optimizer():
    """Eight threads train with the same programs, which a first worker compiles for all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_transport, "optimizer", functools.cache(own_transport.optimizer))
        own_transport.train(lambda step, packet: np.stack([packet] * WORKERS), 0, 2)
        yield


def train_all(transports):
    numbers, steps = range(len(transports)), [STEPS] * len(transports)
    with ThreadPoolExecutor(len(transports)) as threads:
        return list(threads.map(own_transport.train, transports, numbers, steps))


def test_files_and_pipes_bring_the_same_packets(tmp_path):
    found = train_all([own_transport.over_files(tmp_path, i, WORKERS) for i in range(WORKERS)])
    pipes = [multiprocessing.Pipe() for _ in range(WORKERS)]
    with ThreadPoolExecutor(1) as server:
        served = server.submit(own_transport.serve_pipes, [here for here, _ in pipes], STEPS)
        found += train_all([own_transport.over_pipe(there) for _, there in pipes])
        served.result()
    assert any((x != own_transport.initial()[n]).any() for n, x in found[0][1].items())
    for _, params in found[1:]:
        chex.assert_trees_all_equal(params, found[0][1])


@pytest.mark.parametrize("every", [None, 2])
def test_a_worker_is_saved_between_the_halves(every, tmp_path):
    compression = demo_optax.Compression(topk=4, block_side=8)
    look_ahead = 1.0 if every is None else None
    tx = demo_optax.decoupled(optax.sgd(1.0), compression, look_ahead=look_ahead)
    tx = tx if every is None else demo_optax.local_steps(optax.adam(0.1), tx, every)
    send, apply = jax.jit(tx.send), jax.jit(tx.apply)
    params, mesh = {"w": jnp.ones((8, 16))}, workers.mesh_of(1)
    state = tx.init(params)
    for _ in range(every or 1):
        outbox, state = send({"w": jnp.eye(8, 16)}, state, params, worker=0)
    with Checkpointer(tmp_path, tx, mesh, axis_name=None) as checkpointer:
        checkpointer.save(1, params, state, extra=outbox)
    with Checkpointer(tmp_path, tx, mesh, axis_name=None) as checkpointer:
        found = checkpointer.restore(params, extra=tx.empty_outbox(params))
    chex.assert_trees_all_equal((found.opt_state, found.extra), (state, outbox))
    again = apply(outbox.packets, found.extra, found.opt_state, found.params, worker=0)
    chex.assert_trees_all_equal(again, apply(outbox.packets, outbox, state, params, worker=0))


@pytest.mark.parametrize("kind", ["threads", slow("processes")])
def test_the_command(kind, capsys, monkeypatch):
    if kind == "threads":  # which start at once, and need not compile
        monkeypatch.setattr(multiprocessing, "get_context", lambda _: multiprocessing.dummy)
    monkeypatch.setattr("sys.argv", ["own_transport.py", "--workers", "2", "--steps", "3"])
    own_transport.main()
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == "parameters equal to the last bit on all workers: True"

"""Trains with processes that share no collective, over files or pipes: bring your own transport.

    python examples/own_transport.py                       four workers, over files
    python examples/own_transport.py --transport pipes     over multiprocessing pipes

Each worker is a process with a batch of its own. What a transport must do is `over_files`, in ten
lines: hand over this worker's packet, and return those of all workers, a row for each.
"""

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import demo_optax

Transport = Callable[[int, np.ndarray], np.ndarray]


def over_files(folder: Path, worker: int, workers: int) -> Transport:
    """Each worker writes its packet to a file, and reads the files of all."""

    def exchange(step: int, packet: np.ndarray) -> np.ndarray:
        part = folder / f"part-{worker}"
        part.write_bytes(packet.tobytes())
        part.rename(folder / f"{step}-{worker}")  # at once, so that nobody reads half of it
        files = [folder / f"{step}-{other}" for other in range(workers)]
        while not all(file.exists() for file in files):
            time.sleep(0.001)
        return np.stack([np.frombuffer(file.read_bytes(), np.uint32) for file in files])

    return exchange


def over_pipe(pipe: Connection) -> Transport:
    """Each worker sends its packet to the parent process, which answers with all of them."""

    def exchange(step: int, packet: np.ndarray) -> np.ndarray:
        pipe.send(packet)
        return pipe.recv()

    return exchange


def serve_pipes(pipes: list[Connection], steps: int) -> None:
    """What the parent process does."""
    for _ in range(steps):
        packets = np.stack([pipe.recv() for pipe in pipes])
        for pipe in pipes:
            pipe.send(packets)


def optimizer() -> demo_optax.SplitTransformation:
    return demo_optax.demo_scaled(3e-2, demo_optax.Compression(topk=4, block_side=16))


def initial() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = {"hidden": (8, 64), "out": (64, 1)}
    return {name: jnp.asarray(rng.normal(0, 0.3, s), jnp.float32) for name, s in shapes.items()}


def batch(worker: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """A batch that no other worker has."""
    x = np.random.default_rng((worker, step)).normal(size=(32, 8)).astype(np.float32)
    return x, np.sin(x.sum(axis=1, keepdims=True))


@jax.jit
def loss_and_gradient(params, x, y):
    def loss(params):
        return jnp.mean((jnp.tanh(x @ params["hidden"]) @ params["out"] - y) ** 2)

    return jax.value_and_grad(loss)(params)


def train(exchange: Transport, worker: int, steps: int) -> tuple[list[float], dict]:
    """One worker's losses, and its parameters, which are equal on all workers."""
    tx, params = optimizer(), initial()
    state, losses = tx.init(params), []
    send, apply = jax.jit(tx.send), jax.jit(tx.apply)
    for step in range(steps):
        point = demo_optax.local_parameters(params, state)  # not params, if tx looks ahead
        loss, gradient = loss_and_gradient(point, *batch(worker, step))
        outbox, state = send(gradient, state, params, worker=worker)
        packets = exchange(step, np.asarray(outbox.packet))
        updates, state = apply(packets, outbox, state, params, worker=worker)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return losses, jax.device_get(params)


def run(transport: str, place, worker: int, workers: int, steps: int, results) -> None:
    exchange = over_files(place, worker, workers) if transport == "files" else over_pipe(place)
    results.put((worker, *train(exchange, worker, steps)))


def run_all(transport: str, workers: int, steps: int) -> list[tuple[int, list[float], dict]]:
    """Starts a process for each worker; what each of them found."""
    context = multiprocessing.get_context("spawn")
    results, pipes = context.Queue(), [context.Pipe() for _ in range(workers)]
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder)] * workers if transport == "files" else [own for _, own in pipes]
        processes = [
            context.Process(target=run, args=(transport, place, i, workers, steps, results))
            for i, place in enumerate(places)
        ]
        for process in processes:
            process.start()
        if transport == "pipes":
            serve_pipes([server for server, _ in pipes], steps)
        found = sorted((results.get() for _ in processes), key=lambda result: result[0])
        for process in processes:
            process.join()
    return found


def is_equal(one: dict, other: dict) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains over files or pipes.")
    parser.add_argument("--transport", choices=["files", "pipes"], default="files")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    found = run_all(args.transport, args.workers, args.steps)
    for worker, losses, _ in found:
        print(f"worker {worker}: loss {losses[0]:.3f} at first, {np.mean(losses[-10:]):.3f} now")
    equal = all(is_equal(params, found[0][2]) for _, _, params in found)
    print(f"parameters equal to the last bit on all workers: {equal}")


if __name__ == "__main__":
    main()

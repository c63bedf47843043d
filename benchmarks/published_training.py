"""A small model trained by the published PyTorch code and by ours: the losses, seed by seed.

    python benchmarks/published_training.py FOLDER [--steps 300] [--seeds 3]

FOLDER is a checkout of github.com/bloc97/DeMo, of which nothing is part of this project. Needs
torch and einops besides this package. Both train a network that predicts a byte from those before
it, from the same start, on the same bytes of Python's standard library in the same order, with four
workers (processes over gloo; virtual CPU devices), 32 coefficients of each block, a decay of 0.999
and the same schedule of the learning rate.
"""

import argparse
import os
import pathlib
import sys
import sysconfig

import numpy as np

WORKERS, ROWS, CONTEXT, WIDTH = 4, 64, 16, 64
HELD_OUT = 2**14


def text() -> np.ndarray:
    """Bytes of the standard library's largest modules."""
    files = pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")
    largest = sorted(files, key=lambda path: (-path.stat().st_size, path.name))[:40]
    return np.frombuffer(b"".join(path.read_bytes() for path in largest), np.uint8)


def start(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    shapes = {
        "embedding": (256, WIDTH),
        "hidden": (CONTEXT * WIDTH, 512),
        "out": (512, 256),
    }
    return {
        name: random.normal(size=shape).astype(np.float32) / shape[0] ** 0.5
        for name, shape in shapes.items()
    }


def windows(data: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Contexts and the bytes after them, int64."""
    found = data[places[:, None] + np.arange(CONTEXT + 1)].astype(np.int64)
    return found[:, :-1], found[:, -1]


def batches(data: np.ndarray, seed: int, steps: int):
    """For each step the contexts and targets of all workers, ``(workers, rows, ...)``."""
    random = np.random.default_rng(seed + 1)
    for _ in range(steps):
        places = random.integers(HELD_OUT, len(data) - CONTEXT - 1, WORKERS * ROWS)
        x, y = windows(data, places)
        yield x.reshape(WORKERS, ROWS, CONTEXT), y.reshape(WORKERS, ROWS)


def held_out(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return windows(data, np.arange(HELD_OUT - CONTEXT))


def rate(step: int, steps: int) -> float:
    """A cosine to a tenth."""
    return 1e-3 * (0.55 + 0.45 * float(np.cos(np.pi * step / steps)))


def published(worker: int, folder: str, steps: int, seed: int, queue) -> None:
    """One of the workers of the PyTorch run; the first one tells the loss."""
    sys.path.insert(0, folder)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29513"}
    import torch
    from demo import DeMo

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=worker, world_size=WORKERS)
    params = {name: torch.nn.Parameter(torch.tensor(x)) for name, x in start(seed).items()}

    def loss_of(x, y):
        hidden = params["embedding"][torch.tensor(x)].flatten(1) @ params["hidden"]
        logits = torch.relu(hidden) @ params["out"]
        return torch.nn.functional.cross_entropy(logits, torch.tensor(y))

    optimizer = DeMo(
        list(params.values()), compression_decay=0.999, compression_topk=32, compression_chunk=64,
        lr=1e-3,
    )  # fmt: skip
    data = text()
    for step, (x, y) in enumerate(batches(data, seed, steps)):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        optimizer.zero_grad()
        loss_of(x[worker], y[worker]).backward()
        optimizer.step()
    if worker == 0:
        with torch.no_grad():
            queue.put(loss_of(*held_out(data)).item())
    torch.distributed.destroy_process_group()


def ours(steps: int, seed: int) -> float:
    import jax
    import jax.numpy as jnp
    import optax

    import demo_optax

    def loss_fn(params, batch):
        x, y = batch
        hidden = params["embedding"][x].reshape(len(x), -1) @ params["hidden"]
        logits = jax.nn.relu(hidden) @ params["out"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    rates = jnp.array([rate(step, steps) for step in range(steps)])
    compression = demo_optax.Compression(topk=32, block_rule="divisor")
    tx = demo_optax.demo(lambda step: rates[step], compression, decay=0.999, axis_name="data")
    mesh = jax.make_mesh((WORKERS,), ("data",))
    params = {name: jnp.asarray(x) for name, x in start(seed).items()}
    opt_state = demo_optax.init_opt_state(tx, params, mesh)
    train_step = demo_optax.make_train_step(loss_fn, tx, mesh)
    data = text()
    for x, y in batches(data, seed, steps):
        batch = (x.reshape(-1, CONTEXT).astype(np.int32), y.reshape(-1).astype(np.int32))
        params, opt_state, metrics = train_step(params, opt_state, batch)
        metrics.loss.block_until_ready()
    x, y = held_out(data)
    return float(loss_fn(jax.device_get(params), (x.astype(np.int32), y.astype(np.int32))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    import torch.multiprocessing as multiprocessing

    differences = []
    for seed in range(args.seeds):
        queue = multiprocessing.get_context("spawn").SimpleQueue()
        arguments = (args.folder, args.steps, seed, queue)
        multiprocessing.spawn(published, arguments, nprocs=WORKERS)
        losses = queue.get(), ours(args.steps, seed)
        differences.append(losses[1] - losses[0])
        print("seed {}: published {:.4f}, ours {:.4f}".format(seed, *losses), flush=True)
    error = np.std(differences, ddof=1) / len(differences) ** 0.5 if args.seeds > 1 else np.nan
    print(f"ours - published = {np.mean(differences):+.4f} ± {error:.4f} nats per byte")


if __name__ == "__main__":
    import jax

    jax.config.update("jax_num_cpu_devices", WORKERS)
    main()

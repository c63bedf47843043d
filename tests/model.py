"""A small network and its data, for tests of training on eight workers."""

import jax.numpy as jnp
import numpy as np

WORKERS = 8


def init(dtype=jnp.float32):
    random = np.random.default_rng(0)
    shapes = {"hidden": (12, 16), "bias": (16,), "out": (16, 3)}
    return {n: jnp.asarray(0.3 * random.normal(size=s), dtype) for n, s in shapes.items()}


def loss(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["hidden"] + params["bias"][None])
    return jnp.mean(jnp.square(hidden @ params["out"] - batch["y"]))


def one_matrix(dtype=jnp.float32):
    """Parameters of one tensor, for tests to which it does not matter what is optimized."""
    return {"out": jnp.asarray(0.3 * np.random.default_rng(0).normal(size=(12, 3)), dtype)}


def linear_loss(params, batch):
    return jnp.mean(jnp.square(batch["x"] @ params["out"] - batch["y"]))


def affine(dtype=jnp.float32):
    """A matrix and a vector, for tests of what is done to one and not to the other."""
    return one_matrix(dtype) | {"bias": jnp.asarray(np.zeros(3), dtype)}


def affine_loss(params, batch):
    return jnp.mean(jnp.square(batch["x"] @ params["out"] + params["bias"][None] - batch["y"]))


def batch(step, rows=2 * WORKERS):
    """Other data on each step and in each row, so that no two workers see the same."""
    random = np.random.default_rng(step + 1)
    x = random.normal(size=(rows, 12)).astype(np.float32)
    return {"x": x, "y": np.sin(x[:, :3] * 2).astype(np.float32)}


def part(batch, worker, workers=WORKERS):
    """The rows that a worker sees."""
    return {n: np.split(x, workers)[worker] for n, x in batch.items()}


def stacked(batch, workers=WORKERS):
    """The batch with an axis of workers in front."""
    return {n: np.stack(np.split(x, workers)) for n, x in batch.items()}

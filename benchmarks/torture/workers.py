"""Five workers on one device, and what bounds a step of theirs."""

import jax
import numpy as np
import optax

WORKERS = 5
AXIS = "data"
PARAMS = {"b": np.zeros(32, np.float32), "w": np.zeros((48, 32), np.float32)}
DECAY = 0.9


def gradients(rng: np.random.Generator, steps: int) -> list[dict[str, np.ndarray]]:
    """For each step a gradient of each worker; those of a worker are larger than another's."""
    sizes = np.linspace(0.5, 2.0, WORKERS, dtype=np.float32)
    return [
        {
            name: rng.normal(size=(WORKERS, *x.shape)).astype(np.float32)
            * sizes.reshape(-1, *[1] * x.ndim)
            for name, x in PARAMS.items()
        }
        for _ in range(steps)
    ]


def start(tx: optax.GradientTransformation):
    """The state of every worker."""
    return jax.tree.map(lambda x: np.stack([x] * WORKERS), tx.init(PARAMS))


def norms(tree) -> np.ndarray:
    """For each worker the norm of all its leaves, in float64."""
    squares = [
        np.sum(np.square(x, dtype=np.float64).reshape(len(x), -1), axis=1)
        for x in map(np.asarray, jax.tree.leaves(tree))
    ]
    return np.sqrt(np.sum(squares, axis=0))


def aggregate_bound(limit: float, momentum, gradient, weight: float) -> float:
    """The largest norm that an aggregate may have, whatever two of five send with weight 1.

    A message is clipped to ``limit`` medians of the norms that are told, and a minority moves
    the median only among those of honest workers. An honest message is a part of a momentum, whose
    norm is at most that of what was there, decayed, and of the gradient, weighted. The mean of a
    coefficient over its senders is at most their largest, so that the squares of the messages'
    norms add up at worst.
    """
    honest = np.max(DECAY * norms(momentum) + weight * norms(gradient))
    return float(np.sqrt(WORKERS) * limit * honest * (1 + 1e-4))


def finite(tree) -> bool:
    return all(np.isfinite(x).all() for x in map(np.asarray, jax.tree.leaves(tree)))

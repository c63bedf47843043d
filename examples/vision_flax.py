"""Trains a small convolutional network on scikit-learn's digits, with several workers.

    python examples/vision_flax.py

Its kernels are four-dimensional. For DeMo the first, (3, 3, 1, 32), is one block. In the second,
(3, 3, 32, 64), each of the nine taps is one block.
"""

import contextlib
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from rich.progress import track
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import demo_optax


@dataclass(frozen=True)
class Config:
    workers: int = 4
    """Number of workers: virtual CPU devices, or at most one on each accelerator."""
    steps: int = 200
    """Updates of the parameters."""
    batch_size: int = 128
    """Images in one step, of all workers together."""
    learning_rate: float = 5e-3
    """Learning rate, which is also the size of every parameter's step."""
    topk: int = 32
    """Coefficients that are sent of each block."""
    seed: int = 0
    """Seed of the initial parameters and of the order of the images."""


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 32, (3, 3), rngs=rngs)
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, (3, 3), strides=2, rngs=rngs)
        self.out = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits ``(B, 10)`` of images ``(B, 8, 8, 1)``."""
        x = nnx.relu(self.norm(self.conv1(images)))
        return self.out(nnx.relu(self.conv2(x)).max(axis=(1, 2)))


def main(config: Config) -> float:
    """Trains, prints, and returns the share of held-out digits that is recognised."""
    with contextlib.suppress(RuntimeError):  # once JAX runs, its devices are what they are
        jax.config.update("jax_num_cpu_devices", config.workers)
    devices = jax.devices()[: config.workers]
    mesh = jax.make_mesh((len(devices),), ("data",), devices=devices)
    images, labels = load_digits(return_X_y=True)
    images = np.asarray(images, np.float32).reshape(-1, 8, 8, 1) / 16
    train_x, test_x, train_y, test_y = train_test_split(
        images, np.asarray(labels, np.int32), test_size=0.25, random_state=config.seed
    )
    definition, params = nnx.split(Network(nnx.Rngs(config.seed)), nnx.Param)

    def loss_fn(params, batch):
        logits = nnx.merge(definition, params)(batch["image"])
        right = jax.nn.one_hot(batch["label"], 10)
        return -jnp.mean(jnp.sum(right * jax.nn.log_softmax(logits), axis=-1))

    tx = demo_optax.demo(
        config.learning_rate,
        demo_optax.Compression(topk=config.topk, value_coding="int4"),
        decay=0.9,
        axis_name="data",
    )
    opt_state = demo_optax.init_opt_state(tx, params, mesh)
    step = demo_optax.make_train_step(loss_fn, tx, mesh)

    draw = np.random.default_rng(config.seed)
    for _ in track(range(config.steps), "training"):
        chosen = draw.integers(0, len(train_y), config.batch_size)
        batch = {"image": train_x[chosen], "label": train_y[chosen]}
        params, opt_state, metrics = step(params, opt_state, batch)
        jax.block_until_ready(metrics)

    logits = nnx.merge(definition, params)(jnp.asarray(test_x))
    accuracy = float(np.mean(np.argmax(logits, axis=-1) == test_y))
    packet, dense = demo_optax.packet_bytes(tx, params), demo_optax.dense_bytes(params)
    print(f"recognises {accuracy:.1%} of {len(test_y)} held-out digits")
    print(f"sent {packet:,} bytes per step and worker; the gradient has {dense:,}")
    return accuracy


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))

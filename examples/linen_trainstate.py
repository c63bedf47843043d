"""Trains Flax Linen's `TrainState` with DeMo, in your own `shard_map`.

    python examples/linen_trainstate.py

`stack_workers` makes DeMo a transformation that `TrainState` holds like any other. Leaves that
differ between workers have a leading axis of workers, and `state_specs` has a spec for each leaf.
"""

import contextlib
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
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


class Network(nn.Module):
    @nn.compact
    def __call__(self, images):
        return nn.Dense(10)(nn.relu(nn.Dense(128)(images)))


def main(config: Config) -> float:
    """Trains, prints, and returns the share of held-out digits that is recognised."""
    with contextlib.suppress(RuntimeError):  # once JAX runs, its devices are what they are
        jax.config.update("jax_num_cpu_devices", config.workers)
    devices = jax.devices()[: config.workers]
    mesh = jax.make_mesh((len(devices),), ("data",), devices=devices)
    images, labels = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(
        np.asarray(images, np.float32) / 16, np.asarray(labels, np.int32), random_state=0
    )

    network = Network()
    tx = demo_optax.demo(5e-3, decay=0.9, axis_name="data")
    params = network.init(jax.random.key(0), train_x[:1])["params"]
    state = TrainState.create(
        apply_fn=network.apply, params=params, tx=demo_optax.stack_workers(tx, mesh)
    )
    state = state.replace(step=jnp.asarray(state.step))  # an array like everything else in it

    def train_step(state, images, labels):
        def loss_fn(params):
            right = jax.nn.one_hot(labels, 10)
            log_probability = jax.nn.log_softmax(state.apply_fn({"params": params}, images))
            return -jnp.mean(jnp.sum(right * log_probability, axis=-1))

        # Not jax.value_and_grad, which would sum over the workers. With an optimizer that looks
        # ahead, not at state.params but at its demo_optax.local_parameters.
        loss, grads = demo_optax.local_value_and_grad(loss_fn, "data")(state.params)
        return state.apply_gradients(grads=grads), loss[None]

    specs = jax.tree.map(lambda _: P(), state)
    specs = specs.replace(opt_state=demo_optax.state_specs(tx, params, mesh))
    step = jax.jit(
        jax.shard_map(
            train_step,
            mesh=mesh,
            in_specs=(specs, P("data"), P("data")),
            out_specs=(specs, P("data")),
        ),
        donate_argnums=0,
    )
    state = jax.device_put(state, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))

    draw = np.random.default_rng(0)
    divided = NamedSharding(mesh, P("data"))
    for _ in track(range(config.steps), "training"):
        chosen = draw.integers(0, len(train_y), config.batch_size)
        state, losses = step(state, *jax.device_put((train_x[chosen], train_y[chosen]), divided))
        jax.block_until_ready(losses)

    logits = np.asarray(network.apply({"params": jax.device_get(state.params)}, test_x))
    accuracy = float(np.mean(np.argmax(logits, axis=-1) == test_y))
    print(f"recognises {accuracy:.1%} of {len(test_y)} held-out digits")
    return accuracy


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))

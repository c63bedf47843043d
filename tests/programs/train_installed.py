"""Trains some steps on eight virtual CPU devices with the demo_optax that is installed.

python -I train_installed.py FILE, where FILE is the distribution that was installed; -I hides the
checkout.
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

import demo_optax

WORKERS, STEPS = 8, 100


def main(file):
    package = pathlib.Path(demo_optax.__file__).parent
    assert package.is_relative_to(sys.prefix), f"{package} is not in {sys.prefix}"
    assert f"-{demo_optax.__version__}" in file, f"{file} gave {demo_optax.__version__}"
    assert (package / "py.typed").exists()

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", WORKERS)
    mesh = jax.make_mesh((WORKERS,), ("data",))
    tx = demo_optax.demo_scaled(1e-2, axis_name="data")
    params = {"w": jnp.zeros((128, 64)), "b": jnp.zeros(64)}
    target = jax.random.normal(jax.random.key(1), (128, 64)) / 128**0.5
    opt_state = demo_optax.init_opt_state(tx, params, mesh)

    def loss_fn(params, batch):
        return jnp.mean((batch @ (params["w"] - target) + params["b"] - 1.0) ** 2)

    step = demo_optax.make_train_step(loss_fn, tx, mesh)
    losses = []
    for key in jax.random.split(jax.random.key(0), STEPS):
        batch = jax.random.normal(key, (2 * WORKERS, 128))
        params, opt_state, metrics = step(params, opt_state, batch)
        assert int(metrics.exchange.participants) == WORKERS
        losses.append(float(metrics.loss.mean()))
    demo_optax.check_metrics(metrics.exchange)
    for leaf in jax.tree.leaves(params):
        first, *others = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert len(others) == WORKERS - 1
        assert all(other.tobytes() == first.tobytes() for other in others)
    assert not demo_optax.check_replicas((params, opt_state), mesh)
    assert losses[-1] < losses[0] / 2, losses
    print(
        f"{file}: {STEPS} steps on {WORKERS} workers, loss {losses[0]:.3f} to {losses[-1]:.3f}, "
        f"{metrics.packet_bytes} bytes a step and worker, parameters equal to the last bit"
    )


if __name__ == "__main__":
    main(sys.argv[1])

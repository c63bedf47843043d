"""What two phases cost in loss where workers are many: python benchmarks/many_workers.py.

Simulates 256 workers that learn to read digits (scikit-learn's, a network of 19k parameters in
blocks of 8 x 8), by ``jax.vmap``. Prints the loss on held-out digits, mean and standard error over
the seeds, and the coefficients that a worker gets of each block on a step.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import demo_optax

BATCH, HELD_OUT, SIDE = 4, 360, 8
IMAGES, LABELS = (jnp.asarray(x, x.dtype.name[:-2] + "32") for x in load_digits(return_X_y=True))
IMAGES /= 16


def init(key):
    first, second = jax.random.split(key)
    return {
        "hidden": jax.random.normal(first, (64, 256)) / 8,
        "out": jax.random.normal(second, (256, 10)) / 16,
    }


def loss_fn(params, chosen):
    logits = jax.nn.relu(IMAGES[chosen] @ params["hidden"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, LABELS[chosen]).mean()


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def last_loss(compression, exchange, workers, steps, rate, key):
    """The loss on held-out digits, mean of the last ten steps."""
    schedule = optax.cosine_decay_schedule(rate, steps)
    tx = demo_optax.demo_signum(schedule, compression, decay=0.9, exchange=exchange)
    params = init(jax.random.fold_in(key, 0))
    everyone = jnp.arange(workers)

    def step(carry, key):
        params, states = carry

        def worker(state, key):
            chosen = jax.random.randint(key, (BATCH,), HELD_OUT, len(LABELS))
            return tx.update(jax.grad(loss_fn)(params, chosen), state, params)

        keys = jax.random.split(key, workers)
        updates, states = jax.vmap(worker, axis_name="workers")(states, keys)
        params = optax.apply_updates(params, jax.tree.map(lambda u: u[0], updates))
        return (params, states), loss_fn(params, jnp.arange(HELD_OUT))

    states = jax.vmap(lambda _: tx.init(params), axis_name="workers")(everyone)
    keys = jax.random.split(jax.random.fold_in(key, 1), steps)
    return jax.lax.scan(step, (params, states), keys)[1][-10:].mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    settings = [(1, None), (1, 1), (1, 4), (4, 16), (64, 64)]
    print(f"{args.workers} workers, {args.steps} steps, {args.seeds} seeds", flush=True)
    for k, back in settings:
        compression = demo_optax.Compression(k, SIDE, value_coding="int4")
        exchange = demo_optax.AllGather("workers")
        if back is not None:
            exchange = demo_optax.TwoPhase("workers", topk_back=back)
        run = functools.partial(
            last_loss, compression, exchange, args.workers, args.steps, args.rate
        )
        losses = np.array([run(jax.random.key(seed)) for seed in range(args.seeds)])
        error = losses.std(ddof=1) / np.sqrt(args.seeds)
        kind = "all-gather" if back is None else "two-phase"
        name = f"k = {k}" if back is None else f"k = {k}, {back} back"
        got = k * (args.workers - 1) if back is None else k + back
        print(
            f"{kind:10} {name:16} {losses.mean():.3f} ± {error:.3f}  {got:5} coefficients",
            flush=True,
        )


if __name__ == "__main__":
    main()

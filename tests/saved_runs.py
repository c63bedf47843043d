"""Two runs that no other is like, and their checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np

import demo_optax
from demo_optax.checkpoint import Checkpointer
from tests import model, workers

TX = demo_optax.demo(1e-2, demo_optax.Compression(2, 4), axis_name="data")
EXTRA = {"key": jax.random.key(5), "windows": 3, "note": "abc", "table": np.arange(3), "on": True}


def with_other_numbers(run, seed):
    """Like a run, but with floats that no other seed has, of momenta that differ by worker."""
    numbers = np.random.default_rng(seed)

    def another(x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return jax.device_put(numbers.normal(size=x.shape).astype(x.dtype), x.sharding)

    return jax.tree.map(another, run)


def run_of(step):
    """Parameters, state and extra that no other step has."""
    run = workers.initial(TX, workers.mesh_of(2))
    return with_other_numbers(run, step), EXTRA | {"windows": 100 * step}


RUNS = {step: run_of(step) for step in (1, 2)}


def restored(folder, **options):
    with Checkpointer(folder, TX, workers.mesh_of(2)) as checkpointer:
        return checkpointer.restore(model.init(), EXTRA, **options)


def carried_over(folder, run, tx, before, after=None, other=None):
    """Parameters and state that are saved on one mesh, and restored on another or by another."""
    with Checkpointer(folder, tx, before) as checkpointer:
        checkpointer.save(1, *run)
    with Checkpointer(folder, other or tx, after or before) as checkpointer:
        return checkpointer.restore(run[0])


def is_run(found, step):
    """Whether what was found is that step's, to the last bit."""
    run, extra = RUNS[step]
    ours = jax.tree.leaves(((found.params, found.opt_state), found.extra))
    theirs = jax.tree.leaves((run, extra))

    def data(x):
        x = (
            jax.random.key_data(x)
            if isinstance(x, jax.Array) and x.dtype == EXTRA["key"].dtype
            else x
        )
        return np.asarray(x)

    pairs = [(data(a), data(b)) for a, b in zip(ours, theirs, strict=True)]
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs)


def saves(checkpointer, step, **options):
    run, extra = RUNS[2]
    checkpointer.save(step, *run, extra, **options)

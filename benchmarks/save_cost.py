"""What the digests add to a save: python benchmarks/save_cost.py [--parameters 30] [--repeats 7].

Times whole saves, to the last byte on disk, of a model of so many million parameters with two
workers, alternately with digests and without; then the digests alone.
"""

import argparse
import os
import statistics
import tempfile
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import demo_optax
from demo_optax._src.checkpoint import storage
from demo_optax._src.checkpoint.description import by_path
from demo_optax.checkpoint import Checkpointer


def main():
    jax.config.update("jax_num_cpu_devices", 2)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=30, help="in millions")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    mesh = jax.make_mesh((2,), ("data",))
    tx = demo_optax.demo(1e-3, axis_name="data")
    numbers, side = np.random.default_rng(0), 1024
    draws = numbers.normal(size=(arguments.parameters * 10**6 // side**2, side, side))
    params = jax.device_put(
        {f"layer {i}": jnp.float32(x) for i, x in enumerate(draws)},
        jax.NamedSharding(mesh, jax.P()),
    )
    opt_state = demo_optax.init_opt_state(tx, params, mesh)
    opt_state = jax.tree.map(
        lambda x: (
            jax.device_put(numbers.normal(size=x.shape).astype(x.dtype), x.sharding)
            if x.ndim > 2
            else x
        ),
        opt_state,
    )

    def digested():
        return [storage.digests(by_path(tree)) for tree in (params, opt_state)]

    def save(digests):
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.object(storage, "digests", digests),
            Checkpointer(folder, tx, mesh) as checkpointer,
        ):
            checkpointer.save(1, params, opt_state, wait=True)
            os.sync()

    def seconds(action, *given):
        start = time.perf_counter()
        action(*given)
        return time.perf_counter() - start

    print(f"the first digests, compiled: {seconds(digested):.2f} s")
    kinds, times = {"without": lambda leaves: {}, "with": storage.digests}, {}
    for _ in range(arguments.repeats + 1):
        for name, digests in kinds.items():
            times.setdefault(name, []).append(seconds(save, digests))
    medians = {name: statistics.median(found[1:]) for name, found in times.items()}
    alone = statistics.median(seconds(digested) for _ in range(arguments.repeats))
    size = sum(x.nbytes for x in jax.tree.leaves((params, opt_state)))
    plain = medians["without"]
    print(f"{size / 1e6:.0f} MB: a save takes {plain:.2f} s, with digests {medians['with']:.2f} s")
    print(f"the digests alone take {alone:.3f} s, {alone / plain:.1%} of it")


if __name__ == "__main__":
    main()

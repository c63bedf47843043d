"""One of two processes that save twice and restore; process 1 does not see the second save yet.

python restore_an_old_list.py ADDRESS PROCESS FOLDER
"""

import json
import sys

import jax
import numpy as np


def main(address, process, folder):
    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize(address, num_processes=2, process_id=int(process))
    import demo_optax
    from demo_optax._src.checkpoint import reading
    from demo_optax.checkpoint import Checkpointer

    mesh = jax.make_mesh((2,), ("data",))
    everywhere = jax.NamedSharding(mesh, jax.sharding.PartitionSpec())
    params = jax.device_put({"w": np.zeros((8, 8), np.float32)}, everywhere)
    tx = demo_optax.demo(1e-3, demo_optax.Compression(topk=4), axis_name="data")
    with Checkpointer(folder, tx, mesh) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, params, demo_optax.init_opt_state(tx, params, mesh), wait=True)

    whole = reading.listed_steps
    if process == "1":
        reading.listed_steps = lambda directory: whole(directory)[:1]
    with Checkpointer(folder, tx, mesh) as checkpointer:
        latest, restored = checkpointer.latest, checkpointer.restore(params).step
        checkpointer.save(3, params, demo_optax.init_opt_state(tx, params, mesh), wait=True)
    seen = reading.listed_steps(reading.absolute(folder))
    print(json.dumps([seen, latest, restored, checkpointer.latest]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

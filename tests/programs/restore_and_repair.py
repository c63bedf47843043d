"""One of two processes that save twice, restore, and repair a replica of the second one.

Process 1 does not see the second save yet.

python restore_and_repair.py ADDRESS PROCESS FOLDER
"""

import json
import sys

import jax
import numpy as np


def main(address, process, folder):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(address, num_processes=2, process_id=int(process))
    import demo_optax
    from demo_optax import check_replicas, repair_replicas
    from demo_optax._src.checkpoint import reading
    from demo_optax.checkpoint import Checkpointer

    mesh = jax.make_mesh((4,), ("data",))
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

    right, wrong = np.float32([1, 2, 3]), np.float32([1, -2, 3])
    own = [d for d in mesh.devices if d.process_index == jax.process_index()]
    copies = [jax.device_put(wrong if d == mesh.devices[2] else right, d) for d in own]
    x = jax.make_array_from_single_device_arrays((3,), everywhere, copies)
    mended = repair_replicas(x, mesh)
    result = dict(
        steps=[seen, latest, restored, checkpointer.latest],
        drifted=[drift.worker for drift in check_replicas(x, mesh)],
        left=check_replicas(mended, mesh),
        mended=[shard.data.tolist() for shard in mended.addressable_shards],
    )
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

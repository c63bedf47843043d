"""One process of a worker of a swarm; prints the digest of its parameters after each step.

python swarm_worker.py STORE NAME DELAY STEPS [ADDRESS PROCESS [PAUSES]]

With an address the worker has two processes, each with half of its parameters. The pauses, as in
"0.1,0.1,5", are seconds before its first exchanges; the last one comes before all that follow.
"""

import hashlib
import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

SHAPES = {"w": (32, 48), "v": (48, 8)}


def main(url, name, delay, steps, address=None, process="0", pauses=None):
    jax.config.update("jax_platforms", "cpu")
    if address:
        jax.distributed.initialize(address, num_processes=2, process_id=int(process))
    import demo_optax
    from demo_optax._src.swarm.replicated_state import to_host
    from demo_optax.swarm import Member, ObjectStore, SwarmWorker

    mesh = jax.make_mesh((1, jax.device_count()), ("data", "fsdp"))

    def loss_fn(params, x):
        return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - jnp.sin(x[:, :8])) ** 2)

    member = None
    if process == "0":
        few, deadline = (1, 1.5) if pauses else (2, 60.0)
        member = Member(ObjectStore(url), name, slots=4, min_workers=few, deadline=deadline)
        exchange, seconds = member.exchange, [float(x) for x in (pauses or "0").split(",")]

        def exchange_late(*args):
            time.sleep(seconds.pop(0) if len(seconds) > 1 else seconds[0])
            return exchange(*args)

        member.exchange = exchange_late
    worker = SwarmWorker(
        loss_fn,
        demo_optax.demo_scaled(1e-2),
        mesh,
        member,
        delay=int(delay),
        snapshot_every=4,
        param_specs={"w": P("fsdp"), "v": P(None, "fsdp")},
        facts={"seed": 0},
    )
    drawn = np.random.default_rng(0)
    params = {key: drawn.normal(size=x).astype(np.float32) for key, x in SHAPES.items()}
    rows = NamedSharding(mesh, P("fsdp"))

    def batch_of(step):
        x = np.random.default_rng((len(name), step)).normal(size=(8, 32)).astype(np.float32)
        return jax.make_array_from_callback(x.shape, rows, lambda index: x[index])

    with worker:
        params, opt_state = worker.begin(params, batch_of(0))
        digests = {}
        while worker.number < int(steps):
            params, opt_state, metrics = worker.step(params, opt_state, batch_of(worker.number))
            whole = b"".join(to_host(x).tobytes() for x in jax.tree.leaves(params))
            digests[worker.number] = hashlib.sha256(whole).hexdigest()
    print(json.dumps({"digests": digests, "members": metrics.members, "loss": metrics.loss}))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""One of two processes that train together; prints what crossed the loopback interface.

In the end process 1 alone sees an infinite batch, and prints what became of that.

python count_wire_bytes.py ADDRESS PROCESS VALUES
"""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

STEPS = 20


def loopback_bytes():
    line = next(
        text for text in pathlib.Path("/proc/net/dev").read_text().splitlines() if "lo:" in text
    )
    return int(line.split(":")[1].split()[0])


def main(address, process, values):
    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize(address, num_processes=2, process_id=int(process))
    import demo_optax

    mesh = jax.make_mesh((2,), ("data",))
    everywhere = jax.NamedSharding(mesh, jax.sharding.PartitionSpec())
    params = jax.device_put({"w": np.zeros((512, 2048), np.float32)}, everywhere)
    tx = demo_optax.demo(
        1e-3, demo_optax.Compression(topk=128, value_coding=values), axis_name="data"
    )
    state = demo_optax.init_opt_state(tx, params, mesh)

    def loss(params, batch):
        return jnp.mean((batch @ params["w"] - 1.0) ** 2)

    step = demo_optax.make_train_step(loss, tx, mesh)
    rows = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    random = np.random.default_rng(int(process))

    def run(params, state, scale=1.0):
        own = scale * random.normal(size=(4, 512)).astype(np.float32)
        batch = jax.make_array_from_process_local_data(rows, own)
        params, state, metrics = step(params, state, batch)
        return jax.block_until_ready((params, state, metrics))

    params, state, metrics = run(params, state)
    before = loopback_bytes()
    for _ in range(STEPS):
        params, state, metrics = run(params, state)
    seen = (loopback_bytes() - before) / STEPS

    def momentum(state):
        return np.asarray(state[0].momentum["w"].addressable_shards[0].data)

    kept = momentum(state)
    last = run(params, state, np.inf if process == "1" else 1.0)
    result = dict(
        seen=seen,
        participants_at_last=int(last[2].exchange.participants),
        momentum_kept=bool((momentum(last[1]) == kept).all()),
        finite=bool(np.isfinite(last[0]["w"].addressable_shards[0].data).all()),
        packet=int(metrics.packet_bytes),
        participants=int(metrics.exchange.participants),
        parameters=np.asarray(last[0]["w"].addressable_shards[0].data).tobytes().hex()[:4096],
    )
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # From one device to many hosts
#
# The same few lines run on one device, on eight, and on four workers of two devices each. They also
# run as separate processes that talk over a socket. Here the devices are virtual CPU devices. On
# accelerators nothing else changes.
#
# In Colab, first [bring the folder of the source there](../docs/how_to/install.md#colab).

# %%
# This installs what is missing. If nothing is missing, it needs no network.
import os
import sys

sys.path[:0] = [os.path.abspath(".."), os.path.abspath("../examples")]
os.environ["PYTHONPATH"] = sys.path[0]  # of the processes that this notebook starts
try:
    import demo_optax
    import lm.train  # noqa: F401
except ImportError:
    # %pip install -q "..[examples]"
    import demo_optax

# %%
import pathlib
import re
import subprocess
import tempfile

import jax

jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

from demo_optax.checkpoint import Checkpointer

plt.rcParams.update({"figure.dpi": 110, "axes.spines.top": False, "axes.spines.right": False})
images, labels = load_digits(return_X_y=True)
data = {"image": np.float32(images / 16), "label": np.int32(labels)}


def loss_fn(params, batch):
    """One worker's loss of its own part of the batch. No mean over workers: DeMo does that."""
    logits = jax.nn.relu(batch["image"] @ params["hidden"]) @ params["out"]
    right = jax.nn.one_hot(batch["label"], 10)
    return -jnp.mean(jnp.sum(right * jax.nn.log_softmax(logits), axis=-1))


def new_params():
    first, second = jax.random.split(jax.random.key(0))
    return {
        "hidden": jax.random.normal(first, (64, 256)) / 8,
        "out": jax.random.normal(second, (256, 10)) / 16,
    }


def batches(steps, size=96):
    draw = np.random.default_rng(0)
    for _ in range(steps):
        chosen = draw.integers(0, len(labels), size)
        yield {name: x[chosen] for name, x in data.items()}


# %% [markdown]
# ## One device, eight devices, four workers of two
#
# A mesh says which devices are a worker. Each position on the workers' axis is one DeMo worker, with
# its own data and momentum. Devices along any other axis belong to the same worker.

# %%
SETTINGS = demo_optax.Compression(topk=8, value_coding="int4")
LAYOUTS = {
    "1 worker": (jax.make_mesh((1,), ("data",), devices=jax.devices()[:1]), "data", None),
    "8 workers": (jax.make_mesh((8,), ("data",)), "data", None),
    "4 workers x 2 devices": (
        jax.make_mesh((4, 2), ("replica", "fsdp")),
        "replica",
        {"hidden": P(None, "fsdp"), "out": P("fsdp")},
    ),
}

histories, states = {}, {}
for name, (mesh, axis, specs) in LAYOUTS.items():
    tx = demo_optax.demo(3e-3, SETTINGS, decay=0.9, axis_name=axis)
    params = new_params()
    opt_state = demo_optax.init_opt_state(tx, params, mesh, axis, specs)
    step = demo_optax.make_train_step(loss_fn, tx, mesh, axis, param_specs=specs)
    losses = []
    for batch in batches(60):
        params, opt_state, metrics = step(params, opt_state, batch)
        losses.append(float(np.asarray(metrics.loss).mean()))
    histories[name], states[name] = losses, (params, opt_state)
    number = int(metrics.exchange.participants)
    print(f"{name:24} loss {losses[-1]:.3f}, {number} took part, {metrics.packet_bytes} bytes each")

figure, ax = plt.subplots(figsize=(7, 3.6), layout="constrained")
for (name, losses), colour in zip(histories.items(), ("k", "#1b6ca8", "#c8553d"), strict=True):
    ax.plot(losses, color=colour, label=name)
ax.set(xlabel="step", ylabel="loss")
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# On the same batches more workers learn faster here. Each sends its own 8 coefficients of a block, so
# together they send more of them.
#
# ## Where everything lies
#
# Parameters are the same on every worker. The momentum has a leading axis of workers: each row
# belongs to one worker and lies on its devices.

# %%
params, opt_state = states["8 workers"]
momentum = opt_state[0].momentum["hidden"]
for name, x in (("parameter", params["hidden"]), ("momentum", momentum)):
    print(f"{name:10} {x.shape!s:20} {x.sharding.spec}")
    for shard in x.addressable_shards[:3]:
        print(f"    device {shard.device.id} holds {shard.data.shape}, at {shard.index[0]}")

# %% [markdown]
# ## What the compiled program sends
#
# The program has one all-gather of unsigned integers. Nothing else crosses from worker to worker:

# %%
mesh, axis, specs = LAYOUTS["8 workers"]
tx = demo_optax.demo(3e-3, SETTINGS, decay=0.9, axis_name=axis)
step = demo_optax.make_train_step(loss_fn, tx, mesh, axis)
batch = jax.device_put(next(batches(1)), jax.NamedSharding(mesh, P("data")))
compiled = step.lower(params, opt_state, batch).compile()
for shape, kind in re.findall(r"= (\S+) (all-[a-z-]+)\(", compiled.as_text()):
    print(kind, "with the result", shape)
print("counted from shapes:", demo_optax.packet_bytes(tx, params), "bytes from each worker")

# %% [markdown]
# ## Copies that stay copies
#
# A checksum of every leaf on every device finds a replica that differs. The copy of the majority
# repairs it. Say a cosmic ray hits device 3:

# %%
hidden = params["hidden"]
shards = [np.array(shard.data) for shard in hidden.addressable_shards]
shards[3].view(np.uint32)[5, 7] ^= 1 << 20
harmed = jax.make_array_from_single_device_arrays(
    hidden.shape,
    hidden.sharding,
    [jax.device_put(x, s.device) for x, s in zip(shards, hidden.addressable_shards, strict=True)],
)
found = demo_optax.check_replicas({"hidden": harmed}, mesh)
print(found)
repaired = demo_optax.repair_replicas({"hidden": harmed}, mesh)
print("after the repair:", demo_optax.check_replicas(repaired, mesh))

# %% [markdown]
# ## Eight workers save, four go on
#
# The parameters do not change. The momenta of neighbours are merged by their mean. So nothing is lost
# that was still to be sent.

# %%
folder = tempfile.mkdtemp()
with Checkpointer(folder, tx, mesh) as checkpointer:
    checkpointer.save(60, params, opt_state, wait=True)

four = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
with Checkpointer(folder, tx, four) as checkpointer:
    going_on = checkpointer.restore(new_params())
both = opt_state, going_on.opt_state
before, after = (jax.device_get(state[0].momentum["hidden"]) for state in both)
print(f"step {going_on.step}: momenta {before.shape} became {after.shape}")
print("their mean moved by", float(np.abs(np.mean(before, 0) - np.mean(after, 0)).max()))

# %% [markdown]
# ## Processes, as on many hosts
#
# On a cluster you start `examples/train_lm.py` on every host. `launch_local.py` starts such processes
# on this machine, here two of them with two workers each. They find each other and train a nano
# model. Their parameters are equal to the last bit.

# %%
examples = pathlib.Path("../examples").resolve()
command = [sys.executable, examples / "launch_local.py", "-n", "2", "--"]
command += ["--workers", "4", "--preset", "nano", "--steps", "40", "--evaluate-every", "20"]
command += ["--text", examples]
plain = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
result = subprocess.run(command, env=plain, capture_output=True, text=True, check=True)
for line in result.stdout.splitlines():
    if re.search("processes|held-out|bit-identical", line):
        print(line)

# %% [markdown]
# On a cluster the scheduler starts the processes:
# `srun python examples/train_lm.py --distributed --checkpoint-dir ...`. JAX asks SLURM, Kubernetes or
# the TPU pod for their addresses. `docs/how_to/gpu_nodes.md` has a batch script, and
# `docs/how_to/recover.md` says what happens when a process dies.

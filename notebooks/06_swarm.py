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
# # A swarm: workers that come and go
#
# Three workers train one model over an object store, without a collective and without a leader. One
# joins late. Another vanishes without a word, and comes back. At the end all have the same parameters.
#
# Here each worker is a thread, and the store is a folder. With machines in different places each
# worker is a process, and the store is a bucket. The code of a worker stays the same.
#
# In Colab, first [bring the folder of the source there](../docs/how_to/install.md#colab).

# %%
# This installs what is missing. If nothing is missing, it needs no network.
import os
import sys

sys.path.insert(0, os.path.abspath(".."))
try:
    import demo_optax
except ImportError:
    # %pip install -q ..
    import demo_optax
try:
    import matplotlib.pyplot as plt
    import obstore  # noqa: F401
    from sklearn.datasets import load_digits
except ImportError:
    # %pip install -q matplotlib obstore scikit-learn
    import matplotlib.pyplot as plt
    from sklearn.datasets import load_digits

# %%
import pathlib
import tempfile
import threading
import time
import zlib

import jax

jax.config.update("jax_num_cpu_devices", 3)

import jax.numpy as jnp
import numpy as np
import optax
from IPython.display import Image
from jax.sharding import AxisType

from demo_optax.swarm import Member, ObjectStore, SwarmWorker, draw, read_history, status

plt.rcParams.update({"figure.dpi": 110, "axes.spines.top": False, "axes.spines.right": False})
COLOURS = {"paris": "k", "rome": "#1b6ca8", "oslo": "#c8553d"}

images, labels = load_digits(return_X_y=True)
images, labels = np.float32(images / 16), np.int32(labels)
held_out = images[:360], labels[:360]


def logits(params, x):
    return jax.nn.relu(x @ params["hidden"]) @ params["out"]


def loss_fn(params, batch):
    x, y = batch
    log_p = jax.nn.log_softmax(logits(params, x))
    return -jnp.mean(jnp.take_along_axis(log_p, y[:, None], axis=1))


def new_params():
    keys = jax.random.split(jax.random.key(0))
    return {
        "hidden": jax.random.normal(keys[0], (64, 256)) / 8,
        "out": jax.random.normal(keys[1], (256, 10)) / 16,
    }


def batch_of(drawn, rows=32):
    chosen = drawn.integers(360, len(labels), rows)
    return images[chosen], labels[chosen]


# %% [markdown]
# ## A worker
#
# A `Member` is a place in the swarm: a store, a name, and how long to wait for the others. A
# `SwarmWorker` trains from there, with any optimizer of this library. A worker that
# leaves in good order calls `close`, and tells the others. This one can also vanish instead.

# %%
STEPS, PAUSE = 500, 0.03
tx = demo_optax.demo_scaled(2e-3)
folder = tempfile.TemporaryDirectory()
store = ObjectStore(folder.name)
losses, ends = {name: {} for name in COLOURS}, {}


def work(name, vanishes_at=None):
    member = Member(store, name, slots=4, deadline=2.0)
    device = jax.devices()[list(COLOURS).index(name) % jax.device_count()]
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=[device])
    worker = SwarmWorker(loss_fn, tx, mesh, member, snapshot_every=50)
    drawn = np.random.default_rng(zlib.crc32(name.encode()))  # each worker reads other batches
    params, opt_state = worker.begin(new_params(), batch_of(drawn))
    print(f"{name} has slot {member.slot} and joins before step {worker.number}")
    while worker.number < STEPS:
        if vanishes_at and worker.number >= vanishes_at:
            print(f"{name} vanishes before step {worker.number}")
            return
        params, opt_state, metrics = worker.step(params, opt_state, batch_of(drawn))
        losses[name][metrics.step] = metrics.loss
        for late in metrics.late:
            print(f"{name} goes on without {late} in step {metrics.step}")
        time.sleep(PAUSE)  # in place of a larger model
    worker.close()
    ends[name] = jax.device_get(params)


# %% [markdown]
# ## The run
#
# Paris and Rome begin. Oslo starts at step 40. Rome vanishes at step 240, and starts again under its
# name at step 280. Nobody tells the others: each of them looks into the store alone.


# %%
def wait_until(step):
    while not store.get(f"manifests/{step:08d}"):
        time.sleep(0.1)


threads = []


def begin(name, **settings):
    threads.append(threading.Thread(target=work, args=(name,), kwargs=settings))
    threads[-1].start()


begin("paris")
begin("rome", vanishes_at=240)
wait_until(40)
begin("oslo")
wait_until(280)
begin("rome")
for thread in threads:
    thread.join()

# %% [markdown]
# A worker that starts compiles first, then reads the newest snapshot, and applies the packets since
# then. Meanwhile the others train. So it joins some steps after its start.
#
# ## The same parameters everywhere
#
# Every worker averaged the same packets by the same program, whether it took part in a step or caught
# up with it later. So their parameters are equal to the last bit:

# %%
first, *others = [jax.tree.leaves(params) for params in ends.values()]
equal = all(np.array_equal(x, y) for other in others for x, y in zip(first, other, strict=True))
right = np.mean(np.argmax(logits(ends["oslo"], held_out[0]), axis=1) == held_out[1])
print(f"{len(ends)} workers, parameters {'equal' if equal else 'DIFFERENT'} to the last bit")
print(f"{right:.1%} of the held-out digits are read correctly")

# %% [markdown]
# ## The life of the run
#
# The store tells what happened. Its manifests name the packets that counted on each step, and when
# that was decided. `demo-optax swarm FOLDER --picture life.png` prints and draws the same for
# any open run. A run [for members only](../docs/how_to/swarm.md#members-only), in which each worker
# has a key, also needs `--key` and `--owner`.

# %%
history = read_history(store)
print(status(history))
picture = pathlib.Path(folder.name) / "life.png"
draw(history, str(picture))
Image(picture)

# %% [markdown]
# A row is blue where a worker's packets counted, and orange where it was late. When Rome vanishes, the
# others wait for it once, until the deadline of two seconds. This wait is part of a step, so it is blue
# for them. From the next step on they do not expect Rome any more. A cross shows where Rome was missing,
# and a triangle where a worker said that it left. When Oslo joins, and when Rome is
# back, nobody waits for long: a newcomer announces itself only once it has caught up.
#
# ## The loss
#
# Above: each worker's loss on its own batches, a mean over ten steps. Below: how many packets counted.

# %%
figure, (above, below) = plt.subplots(
    2, 1, figsize=(8, 4.6), height_ratios=[3, 1], sharex=True, layout="constrained"
)
for name, seen in losses.items():
    steps = np.array(sorted(seen))
    for part in np.split(steps, np.flatnonzero(np.diff(steps) > 1) + 1):  # where it was away
        if len(part) >= 10:
            mean = np.convolve([seen[step] for step in part], np.full(10, 0.1), mode="valid")
            above.plot(part[9:], mean, color=COLOURS[name], label=name)
handles = dict(zip(*reversed(above.get_legend_handles_labels()), strict=True))
above.legend(handles.values(), handles.keys(), frameon=False)
above.set(ylabel="loss", yscale="log")
below.step([m.step for m in history.manifests], [len(m.packets) for m in history.manifests], "k")
below.set(xlabel="step", ylabel="packets", ylim=(0, 3.5), yticks=[1, 2, 3])
plt.show()
folder.cleanup()

# %% [markdown]
# The loss does not jump when a worker comes or goes. The aggregate is a mean over those who are there.
# What a worker had not sent yet when it vanished is lost with its momentum.

# %% [markdown]
# ## Rounds of local steps
#
# If the store is far away, an exchange takes longer than a step. The workers can then exchange once in
# a *round* of several steps, which each of them takes on parameters of its own. With `delay=1` a worker
# goes on with its next steps while its packet travels, so it never waits for the others.
#
# Here a round has ten steps, as in SparseLoCo, and Oslo needs four times as long for a step as the
# other two. So the result of a round reaches Paris and Rome only at the end of their next one. With
# `merge=0.5` they then move half of the way to the shared parameters.

# %%
EVERY, ROUNDS, PAUSES = 10, 20, {"paris": 0.03, "rome": 0.03, "oslo": 0.12}
sent = demo_optax.Compression(64, value_coding="int2", transform="identity")
outer = demo_optax.decoupled(optax.sgd(1.0), sent, decay=0.95, gradient_weight=1.0, mean="workers")
in_rounds = demo_optax.local_steps(optax.adamw(3e-3), outer, EVERY, merge=0.5)
folder = tempfile.TemporaryDirectory()
store, ends = ObjectStore(folder.name), {}


def work_in_rounds(name):
    member = Member(store, name, slots=4, min_workers=3)
    device = jax.devices()[list(COLOURS).index(name) % jax.device_count()]
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=[device])
    drawn = np.random.default_rng(zlib.crc32(name.encode()))
    with SwarmWorker(loss_fn, in_rounds, mesh, member, delay=1, snapshot_every=5) as worker:
        params, opt_state = worker.begin(new_params(), batch_of(drawn))
        while worker.number < ROUNDS:
            params, opt_state, _ = worker.step(params, opt_state, batch_of(drawn))
            time.sleep(PAUSES[name])
    ends[name] = jax.device_get(params)


threads = [threading.Thread(target=work_in_rounds, args=(name,)) for name in PAUSES]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()

# %% [markdown]
# `params` are the parameters that all workers share. They change when the result of a round is applied,
# and they are equal on all workers again. The manifests say how many steps went into each packet.

# %%
first, *others = [jax.tree.leaves(params) for params in ends.values()]
equal = all(np.array_equal(x, y) for other in others for x, y in zip(first, other, strict=True))
right = np.mean(np.argmax(logits(ends["oslo"], held_out[0]), axis=1) == held_out[1])
print(f"{len(ends)} workers, parameters {'equal' if equal else 'DIFFERENT'} to the last bit")
print(f"{right:.1%} of the held-out digits are read correctly")
history = read_history(store)
print(status(history))

figure, axis = plt.subplots(figsize=(8, 2.6), layout="constrained")
for offset, (name, colour) in enumerate(COLOURS.items()):
    counted = [(m.step, x.steps) for m in history.manifests for x in m.packets]
    members = [history.names[x.member] for m in history.manifests for x in m.packets]
    own = np.array([x for x, member in zip(counted, members, strict=True) if member == name])
    axis.bar(own[:, 0] + 0.27 * (offset - 1), own[:, 1], 0.27, color=colour, label=name)
axis.set(xlabel="round", ylabel="steps in its packet", xticks=range(0, ROUNDS, 5))
figure.legend(frameon=False, ncols=3, loc="outside upper center")
plt.show()
folder.cleanup()

# %% [markdown]
# Paris and Rome do not wait for Oslo. Their rounds go on until the result of the last one is there, so
# they have more steps. A packet counts in the mean by the sum of its steps' weights, which are equal
# here.
#
# `docs/how_to/swarm.md` shows the same with three machines and a bucket, by the trainer.

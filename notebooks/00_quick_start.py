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
# # Quick start
#
# Eight workers learn together to read handwritten digits, once with DeMo and once with AdamW. With
# AdamW each worker sends its whole gradient on every step. With DeMo it sends a packet that is hundreds
# of times smaller. Run the cells one after the other: the first result is there within a minute.
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
    from sklearn.datasets import load_digits
except ImportError:
    # %pip install -q matplotlib scikit-learn
    import matplotlib.pyplot as plt
    from sklearn.datasets import load_digits

# %% [markdown]
# ## Eight workers
#
# A mesh says how many workers there are. This one has no devices, so the eight workers are *simulated*:
# they share one device of this machine, a GPU or a CPU. With a device for each worker you would write
# `mesh = jax.make_mesh((jax.device_count(),), ("data",))`, and the rest would stay the same.

# %%
import jax
import numpy as np
import optax

mesh = jax.sharding.AbstractMesh((8,), ("data",))
print(mesh.size, "workers on one", jax.devices()[0].device_kind)

# %% [markdown]
# ## A model and its loss
#
# The network reads images of 8 × 8 pixels. Nothing in it knows about the workers.

# %%
images, labels = load_digits(return_X_y=True)
images, labels = np.float32(images / 16), np.int32(labels)
train, held_out = (images[360:], labels[360:]), (images[:360], labels[:360])


def init(key):
    keys = jax.random.split(key, 3)
    shapes = {"first": (64, 256), "second": (256, 256), "last": (256, 10)}
    pairs = zip(keys, shapes.items(), strict=True)
    return {name: jax.random.normal(k, s) / s[0] ** 0.5 for k, (name, s) in pairs}


def loss_fn(params, batch):
    x, labels = batch
    x = jax.nn.relu(x @ params["first"])
    x = jax.nn.relu(x @ params["second"])
    logits = x @ params["last"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


# %% [markdown]
# ## Train
#
# Three lines differ from a loop that you know. The optimizer gets the name of the workers' axis.
# `init_opt_state` makes a state in which each worker has a momentum of its own. `make_train_step` gives
# each worker its part of the batch and computes its own gradient. The optimizer then exchanges what the
# workers send.


# %%
def fit(name, tx, steps=100, batch=128):
    """Returns the held-out loss after each step, and the bytes that one worker sends per step."""
    params = init(jax.random.key(0))
    opt_state = demo_optax.init_opt_state(tx, params, mesh)
    step = demo_optax.make_train_step(loss_fn, tx, mesh)
    evaluate, draw, losses = jax.jit(loss_fn), np.random.default_rng(0), []
    for number in range(1, steps + 1):
        rows = draw.integers(0, len(train[0]), batch)
        params, opt_state, metrics = step(params, opt_state, (train[0][rows], train[1][rows]))
        losses.append(float(evaluate(params, held_out)))
        if number in (1, steps // 4, steps):
            print(f"{name}, step {number}: held-out loss {losses[-1]:.3f}")
    print(f"{name}: each worker sent {metrics.packet_bytes:,} bytes per step")
    return losses, metrics.packet_bytes


results = {"DeMo": fit("DeMo", demo_optax.demo_scaled(3e-3, axis_name="data"))}

# %% [markdown]
# Each worker has only 16 images on a step, so this is `demo_scaled`. With large batches take
# `demo_muon`: [Choose](../docs/how_to/choose.md) has the rule.
#
# AdamW needs the mean of all gradients, which an all-reduce computes:

# %%
adamw = optax.chain(demo_optax.mean_over_workers("data"), optax.adamw(3e-3))
results["AdamW"] = fit("AdamW", adamw)

# %% [markdown]
# ## The picture
#
# Left: the loss against the steps. Right: the same loss against the bytes that one worker had sent.


# %%
def draw(results):
    _, (left, right) = plt.subplots(
        1, 2, figsize=(9, 3.6), dpi=110, sharey=True, layout="constrained"
    )
    for name, (losses, size) in results.items():
        steps = np.arange(1, len(losses) + 1)
        left.plot(steps, losses, label=name)
        right.plot(steps * size / 1e6, losses)
    left.set(xlabel="step", ylabel="held-out loss", yscale="log")
    right.set(xlabel="MB that one worker sent", xscale="log")
    left.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    plt.show()


draw(results)

# %% [markdown]
# Step by step the two learn about equally fast. Byte by byte they lie far apart.
#
# ## Change one thing
#
# `demo_scaled` divides the momentum of each matrix into blocks, and the coefficients of each block into
# 32 bins. A packet holds the place and the sign of the largest coefficient in each bin. What happens if
# there are only four bins, so that an eighth of the coefficients is sent? Then try 1, or 512.

# %%
BINS = 4  # change this number, and run this cell again

sent = demo_optax.Compression(BINS, value_coding="sign", selection="bins")
fewer = demo_optax.demo_scaled(3e-3, sent, axis_name="data")
results[f"DeMo, {BINS} bins"] = fit(f"DeMo, {BINS} bins", fewer)
draw(results)

# %% [markdown]
# With fewer bins the loss falls more slowly at first, because more of the momentum has to wait. Nothing
# of it is lost: it stays with its worker, and is sent on a later step. So its curve comes closer to
# the other two.
#
# ## Next
#
# - [Notebook 1](01_why_it_works.ipynb) shows why few coefficients suffice.
# - `make train`, in the folder of the source, compares the two on a language model.
# - `examples/train.py` is one file that trains such a model, for you to copy and change.
# - [Your own loop](../docs/how_to/loop.md) puts DeMo into the loop that you have.

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
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/demo-optax/demo_optax/blob/main/notebooks/00_quick_start.ipynb)
#
# Eight workers train a small network, once with DeMo and once with AdamW. Each worker sends a
# packet per step with DeMo, and its whole gradient with AdamW. The picture at the end shows the loss
# against the bytes that one worker sent.
#
# **1. Install.** In Colab or Jupyter this cell installs what is missing. To start Jupyter on your own
# machine, see [Install](https://demo-optax.github.io/demo_optax/how_to/install.html#a-notebook).

# %%
try:
    import demo_optax
except ImportError:
    # %pip install -q "demo_optax @ git+https://github.com/demo-optax/demo_optax"
    import demo_optax
try:
    import matplotlib.pyplot as plt
    from sklearn.datasets import load_digits
except ImportError:
    # %pip install -q matplotlib scikit-learn
    import matplotlib.pyplot as plt
    from sklearn.datasets import load_digits

# %% [markdown]
# **2. Workers.** A mesh says how many workers there are. This one has no devices. So the eight
# workers are *simulated*: they share one device of this machine, a GPU or a CPU. If each worker has
# a device, make the mesh by `jax.make_mesh((jax.device_count(),), ("data",))`.

# %%
import jax
import numpy as np
import optax

mesh = jax.sharding.AbstractMesh((8,), ("data",))
print(mesh.size, "workers on", jax.devices()[0].device_kind)

# %% [markdown]
# **3. Model and optimizers.** The network reads digits of 8 × 8 pixels. `axis_name` is the axis of
# the mesh along which the workers exchange. AdamW needs the mean of all gradients.

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


optimizers = {
    "DeMo": demo_optax.demo_scaled(3e-3, axis_name="data"),
    "AdamW": optax.chain(demo_optax.mean_over_workers("data"), optax.adamw(3e-3)),
}

# %% [markdown]
# **4. Train.** `init_opt_state` replaces `tx.init`. Each worker computes the gradient of its own part
# of the batch, and `tx` exchanges what the workers send.


# %%
def fit(tx, steps=150, batch=128):
    """Held-out losses, and the bytes that one worker sends in a step."""
    params = init(jax.random.key(0))
    opt_state = demo_optax.init_opt_state(tx, params, mesh)
    step = demo_optax.make_train_step(loss_fn, tx, mesh)
    evaluate, draw, losses = jax.jit(loss_fn), np.random.default_rng(0), []
    for _ in range(steps):
        chosen = draw.integers(0, len(train[0]), batch)
        params, opt_state, metrics = step(params, opt_state, (train[0][chosen], train[1][chosen]))
        losses.append(float(evaluate(params, held_out)))
    return losses, metrics.packet_bytes


results = {name: fit(tx) for name, tx in optimizers.items()}
for name, (losses, size) in results.items():
    print(f"{name}: held-out loss {losses[-1]:.3f}, {size:,} bytes per step and worker")

# %% [markdown]
# **5. Picture.**

# %%
figure, axes = plt.subplots(figsize=(6, 4), dpi=110)
for name, (losses, size) in results.items():
    axes.plot(np.arange(1, len(losses) + 1) * size / 1e6, losses, label=name)
axes.set(xscale="log", yscale="log", xlabel="MB that one worker sent", ylabel="held-out loss")
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# AdamW ends lower here. The run is short and the model is tiny: DeMo sends most of its momentum later.
# In 1,020 steps of a language model [the two losses were close](https://demo-optax.github.io/demo_optax/explanation/quality.html).
#
# To train a language model the same way, run `make train` in the repository. Why do few coefficients
# suffice? See [notebook 1](01_why_it_works.ipynb).

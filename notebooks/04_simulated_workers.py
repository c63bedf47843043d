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
# # Many simulated workers on one device
#
# The short way to simulate workers is `make_train_step` with an `AbstractMesh`, as in notebook 0 and in
# [Simulate workers](../docs/how_to/simulate.md). This notebook does the same by hand:
# `jax.vmap(axis_name=...)` simulates any number of workers on one device. They exchange the same
# packets as workers on devices of their own. Here eight workers learn to read digits, and we watch
# two things. The momenta drift apart. The parameters must not.
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

# %%
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

plt.rcParams.update({"figure.dpi": 110, "axes.spines.top": False, "axes.spines.right": False})
WORKERS, STEPS, BATCH, SEEDS = 8, 150, 16, 3

images, labels = load_digits(return_X_y=True)
images, labels = jnp.asarray(images / 16.0), jnp.asarray(labels)


def init(key):
    first, second = jax.random.split(key)
    return {
        "hidden": jax.random.normal(first, (64, 128)) / 8,
        "out": jax.random.normal(second, (128, 10)) / jnp.sqrt(128),
    }


def loss_fn(params, chosen):
    logits = jax.nn.relu(images[chosen] @ params["hidden"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels[chosen]).mean()


# %% [markdown]
# ## The whole run as one program
#
# Each worker draws its own examples, takes its own gradient and keeps its own state. `tx.update`
# inside the `vmap` exchanges. The parameters are *not* shared: every worker steps its own copy.
# So we can see whether the copies stay equal.


# %%
def train(tx, key, watch=lambda state: ()):
    """Losses ``(steps,)`` on the test images, and what ``watch`` saw on each step."""

    def step(carry, key):
        params, states = carry

        def worker(params, state, key):
            chosen = jax.random.randint(key, (BATCH,), 360, len(labels))
            updates, state = tx.update(jax.grad(loss_fn)(params, chosen), state, params)
            return optax.apply_updates(params, updates), state

        keys = jax.random.split(key, WORKERS)
        params, states = jax.vmap(worker, axis_name="workers")(params, states, keys)
        first = jax.tree.map(lambda x: x[0], params)
        apart = jnp.stack([jnp.abs(x - x[:1]).max() for x in jax.tree.leaves(params)]).max()
        return (params, states), (loss_fn(first, jnp.arange(360)), apart, watch(states))

    params = init(jax.random.fold_in(key, 0))
    copies = jax.tree.map(lambda x: jnp.tile(x, (WORKERS,) + (1,) * x.ndim), params)
    states = jax.vmap(lambda _: tx.init(params))(jnp.arange(WORKERS))
    return jax.lax.scan(
        step, (copies, states), jax.random.split(jax.random.fold_in(key, 1), STEPS)
    )[1]


def demo(topk=8, decay=0.9, subtraction_factor=1.0, transform="dct", rate=3e-3):
    return demo_optax.decoupled(
        optax.chain(optax.scale_by_sign(), optax.scale_by_learning_rate(rate)),
        demo_optax.Compression(topk, value_coding="int4", transform=transform),
        decay=decay,
        gradient_weight=rate,
        subtraction_factor=subtraction_factor,
        axis_name="workers",
    )


# %% [markdown]
# ## Momenta diverge, parameters do not


# %%
def likeness(states):
    """Mean cosine between the momenta of two workers, and their norm."""
    m = states[0].momentum["hidden"].reshape(WORKERS, -1)
    norm = jnp.linalg.norm(m, axis=1, keepdims=True)
    cosine = (m / norm) @ (m / norm).T
    return (cosine.sum() - WORKERS) / (WORKERS * (WORKERS - 1)), norm.mean()


figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
for topk, colour in ((1, "#174a74"), (8, "#1b6ca8"), (64, "#6db4e0"), (4096, "#c8553d")):
    run = jax.jit(functools.partial(train, demo(topk), watch=likeness))
    losses, apart, (cosine, norm) = run(jax.random.key(0))
    label = "everything" if topk == 4096 else f"k = {topk}"
    axes[0].plot(cosine, color=colour, label=label)
    axes[1].plot(norm, color=colour)
    axes[2].plot(apart, color=colour)
    assert float(apart.max()) == 0.0
axes[0].set(title="cosine between two workers' momenta", xlabel="step", ylim=(-0.05, 1))
axes[0].legend(frameon=False)
axes[1].set(title="norm of a worker's momentum", xlabel="step", yscale="log")
axes[2].set(title="largest difference of a parameter", xlabel="step", ylim=(-1, 1))
plt.show()

# %% [markdown]
# What all workers agree on is large in every momentum, is sent, and leaves. What is left in a
# momentum is special to its worker. If fewer coefficients are sent, more of the common signal waits
# there, too. If all are sent in four bits, only rounding errors are left. In the right picture the
# copies of the parameters are equal to the last bit.
#
# ## What the settings do
#
# The picture has four sweeps around one setting. A point is the loss on held-out digits over the last
# ten steps, the mean of three seeds. The bars are the standard deviation. $\beta$ and $\alpha$ are
# ordinary numbers, so a whole sweep is one program. The number `k` changes shapes, so each value is
# compiled anew.


# %%
def last_loss(settings):
    keys = jax.random.split(jax.random.key(1), SEEDS)
    losses = jax.lax.map(lambda key: train(demo(**settings), key)[0][-10:].mean(), keys)
    return losses.mean(), losses.std()


def sweep(name, values):
    if name in ("topk", "transform"):
        return [jax.jit(lambda value=value: last_loss({name: value}))() for value in values]
    means, deviations = jax.jit(
        lambda: jax.lax.map(lambda value: last_loss({name: value}), jnp.array(values))
    )()
    return list(zip(means, deviations, strict=True))


SWEEPS = {
    "topk": ("k, coefficients of 64 × 64", [1, 2, 8, 32, 128]),
    "decay": ("β, decay of the momentum", [0.0, 0.5, 0.8, 0.9, 0.95, 0.99, 0.999]),
    "transform": ("transform", ["dct", "identity"]),
    "subtraction_factor": ("α, share of the message that leaves", [0.1, 0.2, 0.5, 0.8, 1.0]),
}
found = {name: sweep(name, values) for name, (_, values) in SWEEPS.items()}

# %%
figure, axes = plt.subplots(1, 4, figsize=(15, 3.6), sharey=True, layout="constrained")
for ax, (name, (title, values)) in zip(axes, SWEEPS.items(), strict=True):
    mean, deviation = np.array(found[name]).T
    ax.errorbar(range(len(values)), mean, deviation, marker="o", color="#1b6ca8", capsize=3)
    ax.set_xticks(range(len(values)), values)
    ax.set(xlabel=title)
axes[0].set_ylabel(f"held-out loss after {STEPS} steps")
plt.show()

# %% [markdown]
# - **k.** More coefficients give a lower loss.
# - **$\beta$.** With $\beta = 0$ what is not sent is lost. With a long memory it waits for a later
#   step. After hundreds of steps it is stale. Here even the published 0.999 does little harm.
#   `docs/explanation/quality.md` has the decays of a language model.
# - **$\alpha$.** Below 1, a part of what was sent stays in the momentum and is sent again. Here it
#   hardly matters.
# - **Transform.** The identity has a much higher loss than the DCT, though its entries hold more
#   energy (notebook 1). An entry moves one parameter. A coefficient of a transform moves a whole
#   block. With the identity, a step by the sign changes only k of 4096 parameters.

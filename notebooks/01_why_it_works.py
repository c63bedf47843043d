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
# # Why it works: where the energy of a momentum lies
#
# DeMo sends a few coefficients of each block of the momentum and keeps the rest for later. That can
# only work if few coefficients hold much of the energy. Here we take momenta from a real training
# run and cut them into blocks of 64 × 64. We look at each block in three bases. These are the cosine
# transform (DCT), a random orthogonal basis, and no transform (identity).
#
# In Colab, first [bring the folder of the source there](../docs/how_to/install.md#colab).

# %%
# This installs what is missing. If nothing is missing, it needs no network.
import os
import sys

sys.path[:0] = [os.path.abspath(".."), os.path.abspath("../examples")]
try:
    import demo_optax
    import lm.train  # noqa: F401
except ImportError:
    # %pip install -q "..[examples]"
    import demo_optax  # noqa: F401

# %%
import itertools
import re

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

from lm.config import Config
from lm.setup import batches_of, prepare

plt.rcParams.update({"figure.dpi": 110, "axes.spines.top": False, "axes.spines.right": False})
COLOURS = {"dct": "#1b6ca8", "random": "#8d8d8d", "identity": "#c8553d"}

# %% [markdown]
# ## Momenta of a real run
#
# The `tiny` language model of the examples has 1.1M parameters. It learns from the sources of
# Python's standard library, with AdamW on one device. We also keep two momenta, with a decay of 0.95:
#
# - one of the *plain* gradient, as in the paper;
# - one of the *scaled* gradient, divided by the root of its second moment, as
#   `precondition=optax.scale_by_rms(...)` does.

# %%
STEPS = 120
run = prepare(Config(workers=1, batch_size=8, steps=STEPS))
adamw = optax.adamw(3e-3)
plain = optax.ema(0.95, debias=False)
scaled = optax.chain(
    optax.scale_by_rms(0.95, eps_in_sqrt=False, bias_correction=True), optax.ema(0.95, debias=False)
)


@jax.jit
def step(params, states, batch):
    loss, gradient = jax.value_and_grad(run.loss_fn)(params, batch)
    updates, adamw_state = adamw.update(gradient, states[0], params)
    momentum, plain_state = plain.update(gradient, states[1])
    scaled_momentum, scaled_state = scaled.update(gradient, states[2])
    states = adamw_state, plain_state, scaled_state
    return (
        optax.apply_updates(params, updates),
        states,
        loss,
        (momentum, scaled_momentum),
        gradient,
    )


def of_matrix(tree, name):
    (found,) = [x for path, x in jax.tree.leaves_with_path(tree) if name_of(path) == name]
    return np.asarray(found)


def name_of(path):
    return "".join(f"[{str(key).strip('.[]')}]" for key in path if "value" not in str(key))


STREAM = "['blocks'][0]['ff_out']['kernel']"  # a matrix whose gradients we keep, for later
stream = []
params = run.params
states = adamw.init(params), plain.init(params), scaled.init(params)
for batch in itertools.islice(batches_of(run, 0), STEPS):
    params, states, loss, momenta, gradient = step(params, states, batch)
    stream.append(of_matrix(gradient, STREAM))
print(f"loss after {STEPS} steps: {loss:.2f} nats per byte")


# %%
PROJECTIONS = ("attn_proj", "attn_out", "ff_proj", "ff_out")


def blocks_of(tree):
    """All blocks of all matrices, each scaled to an energy of 1, with the name of their matrix."""
    found = []
    for path, x in jax.tree.leaves_with_path(tree):
        rows, columns = x.shape
        cut = x.reshape(rows // 64, 64, columns // 64, 64).swapaxes(1, 2).reshape(-1, 64, 64)
        words = re.findall(r"\w+", jax.tree_util.keystr(path))
        name = next(word for word in words if word in ("embedding", *PROJECTIONS))
        found += [(name, np.asarray(block / jnp.linalg.norm(block))) for block in cut]
    return found


BASES = {
    "dct": np.asarray(jax.scipy.fft.dct(jnp.eye(64), norm="ortho", axis=0)),
    "random": np.asarray(jax.random.orthogonal(jax.random.key(0), 64)),
    "identity": np.eye(64),
}


def coefficients(block, name):
    return BASES[name] @ block @ BASES[name].T


named = {"plain": blocks_of(momenta[0]), "scaled": blocks_of(momenta[1])}
print(f"{len(named['plain'])} blocks")

# %% [markdown]
# ## A block, seen in three bases
#
# The darkest spots are the coefficients that would be sent. The picture shows one block of a
# feed-forward matrix, among the most structured:


# %%
def compact(block, name, k=32):
    """Share of the energy in the k largest coefficients."""
    return np.sort((coefficients(block, name) ** 2).ravel())[-k:].sum()


names = [name for name, _ in named["plain"]]
candidates = [block for name, block in named["plain"] if name == "ff_out"]
example = sorted(candidates, key=lambda block: compact(block, "identity"))[-4]
figure, axes = plt.subplots(1, 3, figsize=(9, 3.4), layout="constrained")
for ax, name in zip(axes, BASES, strict=True):
    shown = np.log10(coefficients(example, name) ** 2 + 1e-12)
    picture = ax.imshow(shown, vmin=-7, vmax=-1.5, cmap="magma_r")
    ax.set(title=name, xticks=[], yticks=[])
figure.colorbar(picture, ax=axes, label="log₁₀ of the share of energy", shrink=0.8)
plt.show()

# %% [markdown]
# Rows and columns of a weight's gradient are features. They come in no order, unlike the pixels of
# a photograph. So the energy of a momentum does not gather at low frequencies. A gradient is a sum
# of a few outer products, so some rows and columns are much larger than others. The identity shows
# these rows and columns; a transform mixes them.
#
# ## How much of the energy the largest coefficients hold


# %%
def curve(blocks, name):
    energy = np.stack([np.sort((coefficients(b, name) ** 2).ravel())[::-1] for _, b in blocks])
    return energy.cumsum(axis=1).mean(axis=0)


noise = np.random.default_rng(0).normal(size=(32, 64, 64))
noise = [("noise", x / np.linalg.norm(x)) for x in noise]
sent = np.arange(1, 4097)
figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
for ax, (kind, blocks) in zip(axes, named.items(), strict=True):
    for name, colour in COLOURS.items():
        ax.plot(sent, curve(blocks, name), color=colour, label=name)
    ax.plot(sent, curve(noise, "identity"), "k:", lw=1, label="white noise")
    for k in (8, 32, 128):
        ax.axvline(k, color="k", lw=0.5, alpha=0.3)
        ax.text(k, 1.01, f"k={k}", ha="center", fontsize=8)
    ax.set(xscale="log", xlabel="coefficients sent, of 4096", xlim=(1, 4096), ylim=(0, 1))
    ax.set_title(f"momentum of the {kind} gradient", pad=18)
axes[0].set_ylabel("share of the energy")
axes[0].legend(frameon=False, loc="upper left")
plt.show()

print(f"{'share of energy in':>20}" + "".join(f"{name:>10}" for name in BASES) + f"{'noise':>10}")
for kind, blocks in named.items():
    for k in (8, 32, 128):
        row = [curve(blocks, name)[k - 1] for name in BASES] + [curve(noise, "identity")[k - 1]]
        print(f"{kind:>8}, k = {k:<4}    " + "".join(f"{share:10.1%}" for share in row))

# %% [markdown]
# No basis is as compact as the DCT is for a photograph. For the plain gradient, single entries
# (identity) are the most compact by far. DCT and random bases differ little, and lie a little
# above noise. The scaled gradient has lost its large rows and columns, and all bases are
# about equally compact.
#
# By this measure alone one would send single entries. But the paper found that they train worst,
# and so does notebook 4. An entry moves one parameter. A coefficient of a transform moves its whole
# block.
#
# ## Not all matrices are the same

# %%
kinds = sorted(set(names))
figure, ax = plt.subplots(figsize=(9, 3.2), layout="constrained")
for i, (name, colour) in enumerate(COLOURS.items()):
    shares = [curve([b for b in named["plain"] if b[0] == kind], name)[31] for kind in kinds]
    ax.bar(np.arange(len(kinds)) + 0.25 * i - 0.25, shares, 0.25, color=colour, label=name)
ax.set_xticks(range(len(kinds)), kinds)
ax.set(ylabel="energy in 32 of 4096", title="plain gradient, by matrix")
ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# The identity is the most compact for the embedding and the feed-forward matrices. Their rows and
# columns are the most unequal. It is not the most compact for the attention's output.
#
# ## What arrives
#
# This is the same block, restored from its largest coefficients. The cosine transform draws it in
# waves, the identity in dots. Both keep what is missing for later steps.

# %%
figure, axes = plt.subplots(2, 4, figsize=(11, 5.6), layout="constrained")
limit = np.abs(example).max() / 2
for row, name in zip(axes, ("dct", "identity"), strict=True):
    whole = coefficients(example, name)
    for ax, k in zip(row, (8, 32, 128, 4096), strict=True):
        kept = np.where(np.abs(whole) >= np.sort(np.abs(whole).ravel())[-k], whole, 0)
        restored = BASES[name].T @ kept @ BASES[name]
        ax.imshow(restored, vmin=-limit, vmax=limit, cmap="RdBu")
        share = (kept**2).sum()
        ax.set(title=f"{name}, k = {k}: {share:.0%}", xticks=[], yticks=[])
plt.show()

# %% [markdown]
# ## What is not sent today is sent later
#
# This is the second reason. Only the coefficients that were sent leave the momentum. The rest stays.
# A component that later gradients agree on grows, until it is among the largest. Noise does not
# agree with itself, and cancels.
#
# Here the gradients of one matrix go through such a momentum, over the whole run. Each step sends
# some of the 4096 coefficients of a block. The picture shows the cosine
# between the sum of all that was sent and the sum of all gradients.


# %%
def delivered(gradients, name, k, decay=0.95, feedback=True):
    """Cosine between all that was sent and all gradients, for one block, after each step."""
    momentum, sent, whole, cosines = 0, 0, 0, []
    for gradient in gradients:
        momentum = decay * momentum + coefficients(gradient, name)
        threshold = np.partition(np.abs(momentum).ravel(), -k)[-k]
        chosen = np.where(np.abs(momentum) >= threshold, momentum, 0)
        momentum = momentum - chosen if feedback else momentum
        sent, whole = sent + chosen, whole + coefficients(gradient, name)
        cosines.append((sent * whole).sum() / np.linalg.norm(sent) / np.linalg.norm(whole))
    return cosines


tiles = np.stack(stream)[:, :256, :].reshape(STEPS, 4, 64, 2, 64).swapaxes(2, 3)
tiles = tiles.reshape(STEPS, 8, 64, 64).swapaxes(0, 1)
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), sharey=True, layout="constrained")
for name, colour in COLOURS.items():
    left.plot(np.mean([delivered(t, name, 32) for t in tiles], 0), color=colour, label=name)
    without = np.mean([delivered(t, name, 32, feedback=False) for t in tiles], 0)
    left.plot(without, color=colour, ls=":", lw=1)
for k, shade in ((1, 0.75), (8, 0.5), (32, 0.25), (128, 0.0)):
    curve_of_k = np.mean([delivered(t, "dct", k) for t in tiles], 0)
    right.plot(curve_of_k, color=str(shade), label=f"k = {k}")
left.set(title="32 of 4096 (dotted: what is sent stays too)", xlabel="step", ylim=(0, 1))
left.set_ylabel("cosine: all sent, all gradients")
right.set(title="DCT", xlabel="step")
for ax in (left, right):
    ax.legend(frameon=False, ncols=2)
plt.show()

# %% [markdown]
# With 32 coefficients each step sends less than a hundredth of them. After forty
# steps the cosine is above 0.8 in every basis. The more coefficients are sent, the larger it is. Without the subtraction the same
# coefficients would be sent again and again (dotted line). Notebook 4 shows what these choices do to
# the loss.

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
# # Bytes, bandwidth, and the number of workers
#
# This notebook computes the seconds of a step from a model and a link, before any training. It
# allocates no parameters: their shapes are enough.
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
except ImportError:
    # %pip install -q matplotlib
    import matplotlib.pyplot as plt

# %%
import math

import jax
import numpy as np

from demo_optax.accounting import index_cost, preset_shapes

plt.rcParams.update({"figure.dpi": 110, "axes.spines.top": False, "axes.spines.right": False})
shapes = preset_shapes("300m")  # the paper's smaller model; any tree of shapes or arrays will do
parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
dense = demo_optax.dense_bytes(shapes) / 1e6
print(f"{parameters:,} parameters, {dense:,.0f} MB of float32 gradient")

# %% [markdown]
# ## What a packet is made of
#
# The paper's code spends 12 bytes on a coefficient. The fewer coefficients are sent, the more bits
# each position needs. The dotted line is the least that any coding can need.

# %%
TOPK = (1, 2, 4, 8, 16, 32, 64)
CODINGS = ("float32", "int8", "int4", "sign")
COLOURS = plt.get_cmap("viridis")(np.linspace(0, 0.85, len(CODINGS)))

figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
costs = [index_cost(4096, k) for k in TOPK]
left.plot(TOPK, [cost.bits for cost in costs], "o-", color="#1b6ca8", label="sent")
left.plot(TOPK, [cost.bound for cost in costs], "k:", label="entropy")
left.set(xscale="log", xlabel="k of 4096", ylabel="bits per position", ylim=(0, 13))
left.legend(frameon=False)
published = [demo_optax.reference_bytes(shapes, topk=k) / 1e6 for k in TOPK]
right.plot(TOPK, published, "o-", color="#c8553d", label="published code")
for coding, colour in zip(CODINGS, COLOURS, strict=True):
    settings = [demo_optax.Compression(topk=k, value_coding=coding) for k in TOPK]
    sizes = [demo_optax.packet_bytes(setting, shapes) / 1e6 for setting in settings]
    right.plot(TOPK, sizes, "o-", color=colour, label=coding)
right.set(xscale="log", yscale="log", xlabel="k of 4096", ylabel="MB per step and worker")
right.legend(frameon=False)
for ax in (left, right):
    ax.set_xticks(TOPK, TOPK)
plt.show()

# %% [markdown]
# ## Seconds per step over a link
#
# A step computes, then exchanges. `step_times` treats both collectives as rings. An all-reduce moves
# about twice the gradient over every link, whatever the number of workers. An all-gather moves the
# packets of all other workers. Say a step computes for one second:

# %%
SETTINGS = {
    "DeMo, k = 32, int4": demo_optax.Compression(topk=32, value_coding="int4"),
    "DeMo, k = 8, int4": demo_optax.Compression(topk=8, value_coding="int4"),
    "DeMo, k = 1, sign": demo_optax.Compression(topk=1, value_coding="sign"),
}


def step_times(workers, bandwidth, latency=0.02, compute_time=1.0):
    return demo_optax.accounting.step_times(
        shapes, SETTINGS, workers, bandwidth, latency, compute_time
    )


bandwidths = np.logspace(6.5, 11, 60)
palette = ["#8c2f1b", "#c8553d", "#174a74", "#1b6ca8", "#6db4e0"]


def draw_seconds(ax, workers, latency=0.02, compute_time=1.0):
    times = [step_times(workers, b, latency, compute_time) for b in bandwidths]
    for name, colour in zip(times[0], palette, strict=True):
        ax.plot(bandwidths, [t[name].step for t in times], color=colour, label=name)
    ax.set(xscale="log", yscale="log", xlabel="bandwidth, bits per second")
    ax.set_title(f"{workers} workers")
    ax.set_xticks([1e7, 1e8, 1e9, 1e10, 1e11], ["10M", "100M", "1G", "10G", "100G"])


figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
for ax, workers in zip(axes, (4, 64), strict=True):
    draw_seconds(ax, workers)
axes[0].set_ylabel("seconds per step")
axes[0].legend(frameon=False)
plt.show()

# %% [markdown]
# The floor on the right is compute and latency. Where a curve rises from it, the exchange begins to
# take time:

# %%
print(f"{'':22}{'workers':>8}{'MB sent':>10}{'s/step at 1 Gbit/s':>20}{'hides above':>16}")
for workers in (4, 64, 1024):
    for name, time in step_times(workers, 1e9, latency=0.0).items():
        print(
            f"{name:22}{workers:8}{time.wire / 1e6:10,.1f}{time.step:20.2f}"
            f"{time.hiding_bandwidth / 1e9:11.3f} Gbit/s"
        )

# %% [markdown]
# ## One all-gather, or two phases
#
# The traffic of one all-gather grows with the number of workers. That of an all-reduce does not. In
# two phases each worker owns a share of the blocks. It averages its share and sends the mean to all.
# That traffic hardly grows.
#
# The maps show how many times faster a step is than bfloat16 data parallelism. DeMo is faster where
# the map is blue. If you have many devices, make those with fast links between them one worker
# (hybrid sharding). Then the workers are few.

# %%
SENT = demo_optax.Compression(topk=32, value_coding="int4")
SENT_OF_A_ROUND = demo_optax.Compression(topk=64, value_coding="int2", transform="identity")
GATHER, OWNERS = demo_optax.AllGather("data"), demo_optax.TwoPhase("data")
WAYS = {  # what is sent, how it travels, and the steps of a round
    "one all-gather": (SENT, GATHER, 1),
    "two phases": (SENT, OWNERS, 1),
    "two phases, delayed": (SENT, demo_optax.Delayed(OWNERS), 1),
    "SparseLoCo, two phases": (SENT_OF_A_ROUND, OWNERS, 30),
}
many = np.unique(np.logspace(np.log10(2), np.log10(4096), 24).astype(int))


def speedups(compression, exchange, local_steps):
    def speedup(workers, bandwidth):
        times = demo_optax.accounting.step_times(
            shapes, (compression, exchange), workers, bandwidth, 0.0, 1.0, local_steps
        )
        return times["AdamW, bfloat16"].step / times["DeMo"].step

    return np.array([[speedup(w, b) for b in bandwidths] for w in many])


maps = {name: speedups(*way) for name, way in WAYS.items()}
figure, axes = plt.subplots(1, 2, figsize=(12, 4.2), sharey=True, layout="constrained")
for ax, name in zip(axes, WAYS, strict=False):
    ax.set(xscale="log", yscale="log", xlabel="bandwidth, bits per second", title=name)
    picture = ax.pcolormesh(bandwidths, many, np.log2(maps[name]), cmap="RdBu", vmin=-6, vmax=6)
    lines = ax.contour(
        bandwidths, many, maps[name], levels=[0.5, 1, 2, 10, 50], colors="k", linewidths=0.7
    )
    ax.clabel(lines, fmt=lambda level: f"{level:g}×", fontsize=8)
axes[0].set_ylabel("workers")
figure.colorbar(picture, label="log₂ of the speed-up, k = 32, int4")
plt.show()

# %% [markdown]
# This map shows the fastest method. Among those within two per cent of it, it shows the simplest.
# One all-gather is enough for few workers on a fast link. A delay hides an exchange that takes no
# longer than the compute. 30 local steps divide the time of an exchange by 30. The map does not show
# what each method costs in loss.

# %%
ways = ["AdamW, bfloat16", *WAYS]
every = np.stack([np.ones_like(maps["two phases"]), *maps.values()])
fastest = (every > 0.98 * every.max(axis=0)).argmax(axis=0)
colours = plt.get_cmap("viridis", len(ways))
figure, ax = plt.subplots(figsize=(8.5, 4.2), layout="constrained")
ax.set(xscale="log", yscale="log", xlabel="bandwidth, bits per second", ylabel="workers")
picture = ax.pcolormesh(bandwidths, many, fastest, cmap=colours, vmin=-0.5, vmax=len(ways) - 0.5)
figure.colorbar(picture, ticks=range(len(ways))).set_ticklabels(ways)
plt.show()

# %% [markdown]
# ## Try your own
#
# With `ipywidgets` installed and a live kernel, move the sliders and press the button.

# %%
try:
    import ipywidgets
except ImportError:
    print("pip install ipywidgets, and run this cell again")
else:

    @ipywidgets.interact_manual(
        workers=ipywidgets.SelectionSlider(options=[2, 4, 8, 16, 64, 256, 1024], value=16),
        latency_ms=ipywidgets.FloatSlider(min=0, max=200, step=5, value=20),
        compute_seconds=ipywidgets.FloatLogSlider(min=-2, max=1.5, value=1.0),
    )
    def explore(workers, latency_ms, compute_seconds):
        _, ax = plt.subplots(figsize=(7, 4), layout="constrained")
        draw_seconds(ax, workers, latency_ms / 1e3, compute_seconds)
        ax.set_ylabel("seconds per step")
        ax.legend(frameon=False)
        plt.show()


# %% [markdown]
# `demo_optax.packet_bytes` and `demo_optax.accounting.step_times` count your own parameters in the same
# way.

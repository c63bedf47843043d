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
# # The optimizer from first principles
#
# First we write DeMo in sixty lines of JAX, close to the paper. There are no packets and no codings,
# and every array is dense. Then the library runs on the same gradients, step by step.
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
import jax
import jax.numpy as jnp
import numpy as np

plt.rcParams.update({"figure.dpi": 110, "axes.spines.top": False, "axes.spines.right": False})

# %% [markdown]
# ## The algorithm
#
# For each worker $i$ and each matrix, on every step (version 1 of the paper):
#
# 1. $M_i \leftarrow \beta M_i + \eta\, G_i$: the worker's own momentum of its own gradient.
# 2. $Q_i = \operatorname{top}_k(T M_i)$: the $k$ largest coefficients of each block's cosine
#    transform.
# 3. $M_i \leftarrow M_i - T^{-1} Q_i$: what is sent leaves the momentum. The rest stays, as error
#    feedback.
# 4. $\bar Q$: for each coefficient the mean over *those workers that sent it*. This is all that
#    workers tell each other.
# 5. $X \leftarrow X - \eta \operatorname{sign}(T^{-1} \bar Q)$, the same on all workers.

# %%
BLOCK, K, DECAY, RATE = 16, 8, 0.95, 1e-3


def cosine_basis(n):
    frequency, position = jnp.arange(n)[:, None], jnp.arange(n)[None, :]
    basis = jnp.sqrt(2 / n) * jnp.cos(jnp.pi * frequency * (2 * position + 1) / (2 * n))
    return basis.at[0].divide(jnp.sqrt(2.0))


def to_blocks(x):
    rows, columns = x.shape
    cut = x.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    return cut.swapaxes(1, 2)


def from_blocks(blocks):
    rows, columns = blocks.shape[0] * BLOCK, blocks.shape[1] * BLOCK
    return blocks.swapaxes(1, 2).reshape(rows, columns)


def transform(x):
    basis = cosine_basis(BLOCK)
    return jnp.einsum("ia,rcab,jb->rcij", basis, to_blocks(x), basis)


def inverse(coefficients):
    basis = cosine_basis(BLOCK)
    return from_blocks(jnp.einsum("ia,rcij,jb->rcab", basis, coefficients, basis))


def top_k(coefficients):
    """The k largest coefficients of each block, and zeros elsewhere."""
    flat = coefficients.reshape(*coefficients.shape[:2], -1)
    _, chosen = jax.lax.top_k(jnp.abs(flat), K)
    mask = jax.nn.one_hot(chosen, flat.shape[-1]).sum(-2)
    return (flat * mask).reshape(coefficients.shape)


def select(momentum, gradient):
    """One worker's part: its momentum, and what it sends."""
    momentum = DECAY * momentum + RATE * gradient
    sent = top_k(transform(momentum))
    return momentum - inverse(sent), sent


def mean_of_senders(sent):
    """Over the first axis, the workers."""
    senders = jnp.maximum((sent != 0).sum(0), 1)
    return sent.sum(0) / senders


@jax.jit
def exchange(momenta, gradients):
    """All workers' momenta, and the aggregate that every one of them gets."""
    momenta, sent = jax.vmap(select)(momenta, gradients)
    return momenta, inverse(mean_of_senders(sent))


# %% [markdown]
# ## A small problem
#
# Four workers, each with data of its own, learn a matrix by least squares.

# %%
WORKERS, STEPS = 4, 300
key = jax.random.key(0)
truth = 0.2 * jax.random.normal(key, (64, 32))
inputs = jax.random.normal(jax.random.fold_in(key, 1), (STEPS, WORKERS, 16, 64))
targets = inputs @ truth


def loss_fn(params, x, y):
    return jnp.mean((x @ params - y) ** 2)


local_gradients = jax.jit(jax.vmap(jax.grad(loss_fn), in_axes=(None, 0, 0)))

# %% [markdown]
# ## The library, on the same gradients
#
# The library keeps the momentum as coefficients, which saves a transform. It sends packets of bits,
# and decodes them worker by worker. With 32-bit values it does the same arithmetic.
# `decoupled_momentum` is steps 1 to 4, and `gradient_weight` is the learning rate of step 1.
# `demo_optax.demo` has step 5 as well. `jax.vmap` with an `axis_name` simulates the four workers on
# one device.

# %%
tx = demo_optax.decoupled_momentum(
    DECAY,
    demo_optax.Compression(topk=K, block_side=BLOCK),
    axis_name="workers",
    gradient_weight=RATE,
)
library_exchange = jax.jit(jax.vmap(tx.update, axis_name="workers"))


def stored(momenta):
    """Momenta as the library has them: coefficients, in blocks (columns, rows)."""
    return jax.vmap(transform)(momenta).swapaxes(-1, -2)


def relative(a, b):
    return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))


params, momenta = jnp.zeros((64, 32)), jnp.zeros((WORKERS, 64, 32))
states = jax.vmap(lambda _: tx.init(params))(jnp.arange(WORKERS))
of_aggregate, of_momenta, distance = [], [], []
for x, y in zip(inputs, targets, strict=True):
    gradients = local_gradients(params, x, y)
    # Both begin each step with the same momenta, so that one tie does not blur all that follows.
    states = states._replace(momentum=stored(momenta).reshape(states.momentum.shape))
    momenta, aggregate = exchange(momenta, gradients)
    updates, states = library_exchange(gradients, states)
    assert (updates == updates[0]).all()  # every worker has the same, to the last bit
    of_aggregate.append(relative(updates[0], aggregate))
    of_momenta.append(relative(states.momentum.ravel(), stored(momenta).ravel()))
    params = params - RATE * jnp.sign(aggregate)  # step 5
    distance.append(relative(params, truth))

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
left.plot(distance, color="#1b6ca8")
left.set(xlabel="step", ylabel="distance from the true matrix", ylim=(0, 1.02))
right.plot(of_aggregate, color="#c8553d", label="aggregates")
right.plot(of_momenta, color="#1b6ca8", label="momenta")
right.axhline(np.finfo(np.float32).eps, color="k", lw=0.7, ls=":", label="one float32 rounding")
right.set(xlabel="step", yscale="log", ylim=(3e-8, 1e-4))
right.set_ylabel("library against by hand, relative")
right.legend(frameon=False)
plt.show()
ties = np.sum(np.array(of_aggregate) > 1e-4)
print(f"aggregates agree to {np.median(of_aggregate):.1e}, momenta to {np.median(of_momenta):.1e}")
print(f"{ties} steps of {STEPS} with a tie")
assert np.median(of_aggregate) < 1e-5 and np.median(of_momenta) < 1e-5 and ties < 10

# %% [markdown]
# On a *tie* the last chosen coefficient and the first other one were equal up to rounding. Our
# code then chose one of them, and the library the other.
#
# Here both programs begin each step with the same momenta and gradients. Otherwise they would drift
# apart. A tie or a sign turns a rounding error into a large one. So all workers must decode
# the same bytes in the same order.

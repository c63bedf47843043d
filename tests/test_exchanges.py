"""Ways to exchange against their equations in NumPy: phases, delays, shared positions."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import demo_optax

SIZE, SIDE = 44, 8  # six blocks, the last of four elements
DECAY, WEIGHT = 0.9, 0.5


class Simulated:
    """Some workers' momenta of one vector, in blocks, without a transform."""

    def __init__(self, count, compression, mean, alpha):
        self.compression, self.mean, self.alpha = compression, mean, alpha
        self.blocks = [slice(i, min(i + SIDE, SIZE)) for i in range(0, SIZE, SIDE)]
        self.momenta = np.zeros((count, SIZE))
        self.residual = np.zeros(SIZE)
        self.waiting = np.zeros((count, SIZE)), np.zeros((count, SIZE), bool)
        self.step = 0

    def places(self, x, block, k, step):
        n, k = len(x[block]), min(k, len(x[block]))
        if k == n:
            return np.arange(n)
        if self.compression.selection == "striding":
            return (np.arange(k) * n // k + step) % n
        if self.compression.selection == "random-slicing":
            return (np.arange(k) + start_of_run(step, n)) % n
        return np.sort(np.argsort(-np.abs(x[block]), kind="stable")[:k])

    def select(self, x, k, coding, step):
        """What is sent of ``x``, and where."""
        values, where = np.zeros(SIZE), np.zeros(SIZE, bool)
        for block in self.blocks:
            at = block.start + self.places(x, block, k, step)
            where[at] = True
            rounded = x[at].astype(np.float32)
            if coding == "bfloat16":
                rounded = rounded.astype(ml_dtypes.bfloat16)
            values[at] = rounded
        return values, where

    def send(self, gradients):
        """Accumulates and selects; who is not finite does neither."""
        sound = np.isfinite(gradients).all(axis=1)
        self.momenta[sound] = DECAY * self.momenta[sound] + WEIGHT * gradients[sound]
        c = self.compression
        now = [self.select(m, c.topk, c.value_coding, self.step) for m in self.momenta]
        values, where = (np.stack(x) for x in zip(*now, strict=True))
        return values * sound[:, None], where & sound[:, None]

    def settle(self, values, where, step):
        """Takes out what was sent, and averages it."""
        c = self.compression
        self.momenta -= self.alpha * values
        taking_part = where.any(axis=1).sum()
        number = where.sum(axis=0) if self.mean == "senders" else taking_part
        aggregate = values.sum(axis=0) / np.maximum(number, 1)
        if c.exchange == "two-phase":
            total = self.residual + aggregate
            k = c.topk_back or (4 * c.topk if c.selection == "topk" else c.topk)
            aggregate, _ = self.select(total, k, c.value_coding_back, step)
            self.residual = total - aggregate
        return aggregate

    def update(self, gradients):
        if self.compression.delay:
            aggregate = self.settle(*self.waiting, self.step - 1)
            self.waiting = self.send(gradients)
        else:
            aggregate = self.settle(*self.send(gradients), self.step)
        self.step += 1
        return aggregate


@functools.cache
def start_of_run(step, n):
    """Where a run starts, of key 0 for the step, its draws (1) and the section of these blocks."""
    key = jax.random.key(0)
    for number in (step % 2**32, 1, 0 if n == SIDE else 1):
        key = jax.random.fold_in(key, number)
    return int(jax.random.randint(key, (), 0, n))


def momentum(compression, mean="senders", alpha=1.0):
    return demo_optax.decoupled_momentum(
        DECAY,
        compression,
        gradient_weight=WEIGHT,
        mean=mean,
        subtraction_factor=alpha,
        axis_name="data",
    )


def gradients(step, count, broken=True):
    drawn = np.random.default_rng(step).normal(size=(count, SIZE)).astype(np.float32)
    if broken and step == 3:
        drawn[1, 5] = np.nan
    return drawn


def started(tx, count):
    """``tx.update`` for all workers, compiled, and the first state."""
    params = jnp.zeros(SIZE)
    init = jax.vmap(lambda _: tx.init(params), axis_name="data")(jnp.arange(count))
    return jax.jit(jax.vmap(tx.update, axis_name="data")), init


def plain(**settings):
    return demo_optax.Compression(block_side=SIDE, transform="identity", **settings)


# Means of a few rounded values lie between two others, where NumPy's last bit would decide.
ALL = dict(exchange="all-gather")
OWNERS = dict(exchange="two-phase", value_coding_back="float32")
SETTINGS = [
    dict(**exchange, delay=delay, selection=selection, value_coding=coding)
    for exchange, delay, selection, coding in itertools.product(
        [ALL, OWNERS], [0, 1], ["topk", "striding", "random-slicing"], ["float32", "bfloat16"]
    )
]


@pytest.mark.parametrize("mean, alpha, count", [("senders", 1.0, 3), ("workers", 0.4, 4)])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: " ".join(map(str, s.values())))
def test_twenty_steps_follow_the_equations(settings, mean, alpha, count):
    compression = plain(topk=2, **settings)
    tx, simulated = momentum(compression, mean, alpha), Simulated(count, compression, mean, alpha)
    update, state = started(tx, count)
    for step in range(20):
        drawn = gradients(step, count)
        updates, state = update(drawn, state)
        expected = simulated.update(drawn.astype(np.float64))
        np.testing.assert_allclose(updates, np.stack([expected] * count), atol=2e-5)
        np.testing.assert_array_equal(updates[:1], updates[1:2])
        stored = np.asarray(state.momentum).reshape(count, -1)[:, :SIZE]
        np.testing.assert_allclose(stored, simulated.momenta, atol=2e-5)

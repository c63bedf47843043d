"""Ways to exchange against their equations in NumPy: phases, delays, shared positions."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from hypothesis import given
from hypothesis import strategies as st

import demo_optax
from benchmarks import hlo
from demo_optax import AllGather, Delayed, TwoPhase
from demo_optax._src.exchange import collectives, two_phase
from tests import draws, workers
from tests.sweeps import sweep

SIZES, SIDE = (40, 4), 8  # two vectors: five blocks of eight elements, and one of four
SIZE = sum(SIZES)
DECAY, WEIGHT = 0.9, 0.5


class Simulated:
    """Some workers' momenta of two vectors in a row, in blocks, without a transform."""

    def __init__(self, count, compression, exchange, mean, alpha):
        self.compression, self.mean, self.alpha = compression, mean, alpha
        self.delayed = isinstance(exchange, Delayed)
        self.exchange = exchange.inner if self.delayed else exchange
        self.blocks = [slice(i, min(i + SIDE, SIZE)) for i in range(0, SIZE, SIDE)]
        self.momenta = np.zeros((count, SIZE))
        self.residual = np.zeros(SIZE)
        self.pending = np.zeros((count, SIZE)), np.zeros((count, SIZE), bool)
        self.step = 0

    def places(self, x, block, k, step):
        n, k = len(x[block]), min(k, len(x[block]))
        if k == n:
            return np.arange(n)
        if self.compression.selection == "striding":
            return (np.arange(k) * n // k + step) % n
        if self.compression.selection == "random-slicing":
            return (np.arange(k) + start_of_run(step, n)) % n
        if self.compression.selection == "bins":
            own = np.abs(x[block])
            return np.array([b + k * np.argmax(own[b::k]) for b in range(k)])
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
        """Accumulates, selects and takes out; who is not finite does nothing."""
        sound = np.isfinite(gradients).all(axis=1)
        self.momenta[sound] = DECAY * self.momenta[sound] + WEIGHT * gradients[sound]
        c = self.compression
        now = [self.select(m, c.topk, c.value_coding, self.step) for m in self.momenta]
        values, where = (np.stack(x) for x in zip(*now, strict=True))
        values, where = values * sound[:, None], where & sound[:, None]
        self.momenta -= self.alpha * values
        return values, where

    def average(self, values, where, step):
        """Averages what was sent."""
        c = self.compression
        taking_part = where.any(axis=1).sum()
        number = where.sum(axis=0) if self.mean == "senders" else taking_part
        aggregate = values.sum(axis=0) / np.maximum(number, 1)
        if isinstance(self.exchange, TwoPhase):
            total = self.exchange.residual_decay * self.residual + aggregate
            k = 4 * c.topk if c.selection in ("topk", "bins") else c.topk
            aggregate, _ = self.select(total, k, self.exchange.value_coding_back, step)
            self.residual = total - aggregate
        return aggregate

    def update(self, gradients):
        sent = self.send(gradients)
        if self.delayed:
            aggregate = self.average(*self.pending, self.step - 1)
            self.pending = sent
        else:
            aggregate = self.average(*sent, self.step)
        self.step += 1
        return aggregate


@functools.cache
def start_of_run(step, n):
    """Where a run starts, of key 0 for the step, its draws (1) and the section of these blocks."""
    key = jax.random.key(0)
    for number in (step % 2**32, 1, 0 if n == SIDE else 1):
        key = jax.random.fold_in(key, number)
    return int(jax.random.randint(key, (), 0, n))


def momentum(compression, exchange=AllGather("data"), mean="senders", alpha=1.0):
    return demo_optax.decoupled_momentum(
        DECAY,
        compression,
        gradient_weight=WEIGHT,
        mean=mean,
        subtraction_factor=alpha,
        exchange=exchange,
    )


def gradients(step, count, broken=True):
    drawn = np.random.default_rng(step).normal(size=(count, SIZE)).astype(np.float32)
    if broken and step == 3:
        drawn[1, 5] = np.nan
    return drawn


def in_a_row(tx):
    """``tx`` of the two vectors, for gradients and updates that are one."""

    def split(x):
        return jnp.split(x, np.cumsum(SIZES[:-1]))

    def update(gradient, state):
        updates, state = tx.update(split(gradient), state)
        return jnp.concatenate(updates), state

    return optax.GradientTransformation(lambda params: tx.init(split(params)), update)


def stored(state):
    """All workers' momenta, ``(workers, SIZE)``."""
    return np.concatenate([np.reshape(x, (len(x), -1)) for x in state.momentum], axis=1)


def of_all(update):
    """One worker's update for all workers, compiled."""
    return jax.jit(jax.vmap(update, axis_name="data"))


def started(tx, count, params=np.zeros(SIZE, np.float32)):
    """``tx.update`` for all workers, compiled, and the first state."""
    init = jax.jit(jax.vmap(lambda _: tx.init(params), axis_name="data"))(np.arange(count))
    return of_all(tx.update), init


@functools.cache
def three(exchange):
    """Three workers that send two numbers of each block, compiled once for all tests."""
    tx = in_a_row(momentum(plain(topk=2), exchange))
    return tx, *started(tx, 3)


def plain(**settings):
    return demo_optax.Compression(block_side=SIDE, transform="identity", **settings)


ALL, OWNERS = AllGather("data"), TwoPhase("data", topk_back=1)
AT_ONCE = {"gather": ALL, "two-phase": OWNERS}
# Means of a few rounded values lie between two others, where NumPy's last bit would decide.
EXACT = TwoPhase("data", value_coding_back="float32")
WAYS = {
    "gather": ALL,
    "two-phase": EXACT,
    "delayed": Delayed(ALL),
    "delayed two-phase": Delayed(EXACT),
}


@sweep(
    ("gather", "bins", "bfloat16", ("workers", 0.4, 4)),
    ("two-phase", "striding", "float32", ("workers", 0.4, 4)),
    ("delayed", "random-slicing", "bfloat16", ("senders", 1.0, 3)),
    ("delayed two-phase", "topk", "bfloat16", ("workers", 0.4, 4)),
    exchange=WAYS,
    selection=["topk", "bins", "striding", "random-slicing"],
    coding=["float32", "bfloat16"],
    setting=[("senders", 1.0, 3), ("workers", 0.4, 4)],
)
def test_twenty_steps_follow_the_equations(exchange, selection, coding, setting):
    exchange, (mean, alpha, count) = WAYS[exchange], setting
    compression = plain(topk=2, selection=selection, value_coding=coding)
    tx = in_a_row(momentum(compression, exchange, mean, alpha))
    simulated = Simulated(count, compression, exchange, mean, alpha)
    update, state = started(tx, count)
    for step in range(20):
        drawn = gradients(step, count)
        updates, state = update(drawn, state)
        expected = simulated.update(drawn.astype(np.float64))
        np.testing.assert_allclose(updates, np.stack([expected] * count), atol=2e-5)
        np.testing.assert_array_equal(updates[:1], updates[1:2])
        np.testing.assert_allclose(stored(state), simulated.momenta, atol=2e-5)


@draws.examples(3)
@given(
    shapes=draws.trees,
    compression=draws.compressions,
    delay=st.booleans(),
    topk_back=st.integers(1, 20),
    alpha=st.sampled_from([1.0, 0.4]),
    residual_decay=st.sampled_from([1.0, 0.9, 0.0]),
    seed=draws.seeds,
)
def test_nothing_is_lost_between_workers_and_owners(
    shapes, compression, delay, topk_back, alpha, residual_decay, seed
):
    """Of the coefficients' sums: what momenta lose, owners apply, still owe, or let decay."""
    count = 3
    compression = dataclasses.replace(compression, transform="identity")
    exchange = TwoPhase("data", topk_back=topk_back, residual_decay=residual_decay)
    tx = momentum(compression, Delayed(exchange) if delay else exchange, "workers", alpha)
    update, state = started(tx, count, [np.zeros(shape, np.float32) for shape in shapes])
    applied, kept, last, decayed = 0.0, 0.0, 0.0, 0.0

    def total(tree):
        return sum(np.sum(np.asarray(x, np.float64)) for x in tree)

    for step in range(4):
        drawn = draws.gradients(seed + step, shapes, count)
        before, arrived = total(state.momentum), total(drawn)
        owed_before = total(residual_of(state))
        updates, state = update(drawn, state)
        if state.metrics.participants.any():
            decayed += (1 - residual_decay) * owed_before
        after = total(state.momentum)
        kept += (last if delay else DECAY * before + WEIGHT * arrived - after) / alpha / count
        last = DECAY * before + WEIGHT * arrived - after
        applied += total(x[0] for x in updates)
        owed = total(residual_of(state))
        assert abs(kept - applied - owed - decayed) < 1e-4 * max(
            1.0, sum(np.abs(x).sum() for x in drawn)
        )


def residual_of(state):
    return getattr(state.exchange, "inner", state.exchange).residual


@sweep(1, delay=[0, 1])
def test_on_a_step_of_nobody_owners_keep_what_they_owe(delay):
    exchange = TwoPhase("data", topk_back=4)
    tx = momentum(demo_optax.Compression(4, SIDE), Delayed(exchange) if delay else exchange)
    update, state = started(tx, 4, np.zeros((SIDE, 3 * SIDE), np.float32))
    drawn = np.random.default_rng(0).normal(size=(4, SIDE, 3 * SIDE)).astype(np.float32)
    for _ in range(3):
        _, state = update(drawn, state)
    for _ in range(1 + delay):  # with a delay the last packets arrive first
        before = state
        updates, state = update(np.full_like(drawn, np.nan), state)
    assert np.all(state.metrics.participants == 0) and np.any(residual_of(before)[0])
    assert not np.any(updates)
    chex.assert_trees_all_equal(residual_of(state), residual_of(before))
    chex.assert_trees_all_equal(state.momentum, before.momentum)


def test_a_state_may_be_made_where_it_is_used():
    tx, update, state = three(Delayed(OWNERS))
    drawn = gradients(0, 3)
    made = of_all(lambda g: tx.update(g, tx.init(g))[1])(drawn)
    chex.assert_trees_all_equal(made, update(drawn, state)[1])


def test_an_owner_that_lies_of_a_limit_moves_no_momentum_beyond_what_was_sent(monkeypatch):
    tx, _, start = three(TwoPhase("data", topk_back=1, norm_limit=1.0))
    drawn = gradients(0, 3)
    plain = two_phase.to_words

    def lies(said, gradient, state):
        def to_words(medians):
            return plain(jnp.where(jax.lax.axis_index("data") == 1, said, medians))

        monkeypatch.setattr(two_phase, "to_words", to_words)
        return tx.update(gradient, state)

    update = of_all(lies)
    for said in (-1e30, 0.0, 1e30, np.inf, np.nan):
        updates, state = update(np.full(3, said, np.float32), drawn, start)
        assert np.abs(stored(state)).max() <= WEIGHT * np.abs(drawn).max()
        np.testing.assert_array_equal(updates[0], updates[2])


def damaged(plain, wrong, places):
    """A collective whose results are ``wrong`` at these places."""

    def collective(words, axis_name):
        return wrong(plain(words, axis_name), places)

    return collective


def flipped(packets, places):
    for place in places:
        packets = packets.at[place, 3].set(packets[place, 3] ^ 4)
    return packets


def test_a_part_that_is_damaged_on_its_way_to_an_owner_stays_with_its_sender(monkeypatch):
    tx, update, state = three(OWNERS)
    drawn = gradients(0, 3)
    _, whole = update(drawn, state)

    def from_1_to_2(packets, places):
        is_2 = jax.lax.axis_index("data") == 2
        return jnp.where(is_2, flipped(packets, places), packets)

    monkeypatch.setattr(
        collectives, "all_to_all", damaged(collectives.all_to_all, from_1_to_2, [1])
    )
    _, new = of_all(tx.update)(drawn, state)
    # Of five blocks of eight two each; the first one has the block of four as well.
    of_owner = [np.r_[0:16, 40:44], np.r_[16:32], np.r_[32:40]]
    for worker in range(3):
        for owner, part in enumerate(of_owner):
            own, counted = stored(new)[worker, part], stored(whole)[worker, part]
            if (worker, owner) == (1, 2):
                np.testing.assert_allclose(own, WEIGHT * drawn[1][part], rtol=1e-6)
            else:
                np.testing.assert_array_equal(own, counted)
    assert new.metrics.participants.tolist() == [3, 3, 3]
    assert new.metrics.agreed.all()


def test_an_owners_packet_that_is_damaged_counts_for_nobody_and_nothing_of_it_is_lost(monkeypatch):
    tx, update, state = three(OWNERS)
    for step in range(2):
        _, state = update(gradients(step, 3), state)
    drawn = gradients(2, 3)
    monkeypatch.setattr(collectives, "gather", damaged(collectives.gather, flipped, [1]))
    updates, new = of_all(tx.update)(drawn, state)
    part = slice(16, 32)
    assert not updates[:, part].any() and updates[:, :16].any()
    accumulated = DECAY * stored(state)[:, part] + WEIGHT * drawn[:, part]
    np.testing.assert_allclose(stored(new)[:, part], accumulated, rtol=1e-5, atol=1e-7)
    for old, now in zip(state.exchange.residual, new.exchange.residual, strict=True):
        np.testing.assert_array_equal(old[1], now[1])
        assert (old[0] != now[0]).any()


def test_a_packet_that_only_one_receiver_gets_otherwise_is_noticed_a_step_later(monkeypatch):
    tx, update, state = three(OWNERS)
    _, state = update(gradients(0, 3), state)

    def at_2(packets, places):
        return jnp.where(jax.lax.axis_index("data") == 2, flipped(packets, places), packets)

    monkeypatch.setattr(collectives, "gather", damaged(collectives.gather, at_2, [1]))
    _, state = of_all(tx.update)(gradients(1, 3), state)
    assert state.metrics.agreed.all()
    _, state = update(gradients(2, 3), state)
    assert not state.metrics.agreed.any()


@sweep(("gather", 0), ("two-phase", 1), name=AT_ONCE, delay=[0, 1])
def test_a_delayed_collective_does_not_wait_for_the_gradient(name, delay):
    exchange = AT_ONCE[name]
    way, mesh = Delayed(exchange) if delay else exchange, workers.mesh_of(4)
    tx = momentum(plain(topk=2), way)
    stacked = demo_optax.stack_workers(tx, mesh)
    state = jax.eval_shape(stacked.init, np.zeros(SIZE, np.float32))

    def update(gradient, state):
        return stacked.update(gradient, state, None)

    text = jax.jit(update).lower(np.ones((4, SIZE), np.float32), state).compile().as_text()
    behind = [arguments for _, arguments in hlo.arguments_behind(text)]
    assert len(behind) == 1 + (exchange == OWNERS)
    assert all(arguments for arguments in behind)
    assert ["gradient" in arguments for arguments in behind] == [not delay] * len(behind)

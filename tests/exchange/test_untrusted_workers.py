"""Packets that one worker alone gets wrong, and well-formed packets that are far too big."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax._src.compression import packet
from demo_optax._src.exchange import averaging, collectives
from tests import workers
from tests.sweeps import sweep

WORKERS = 5
PARAMS = {"w": np.zeros((16, 8), np.float32), "b": np.zeros(16, np.float32)}
EVERYTHING = demo_optax.Compression(topk=64, block_side=8, transform="identity")

EXCHANGES = [kind("data", norm_limit=1.5) for kind in (demo_optax.AllGather, demo_optax.TwoPhase)]


def momentum(compression=EVERYTHING, norm_limit=None, **options):
    exchange = demo_optax.AllGather("data", norm_limit=norm_limit)
    return demo_optax.decoupled_momentum(
        0.5, compression, gradient_weight=1.0, exchange=exchange, **options
    )


def gradients(seed, sizes=(1.0,) * WORKERS):
    rng = np.random.default_rng(seed)
    sizes = np.asarray(sizes, np.float32)
    return {
        n: rng.normal(size=(len(sizes), *x.shape)).astype(np.float32)
        * sizes.reshape(-1, *[1] * x.ndim)
        for n, x in PARAMS.items()
    }


def every_worker(tx):
    """``tx.update``, with what every worker gets out of it, equal or not."""
    stacked = jax.tree.map(lambda _: P("data"), tx.init(PARAMS))
    return workers.spread(tx.update, (P("data"), stacked), (P("data"), stacked), WORKERS, "vmap")


@functools.cache
def sends_everything():
    tx = momentum()
    return tx, every_worker(tx)


def stacked_state(tx):
    return jax.tree.map(lambda x: np.stack([x] * WORKERS), tx.init(PARAMS))


@sweep(3, receiver=[0, 3])
def test_damage_on_the_way_into_one_worker_is_told_by_all_until_it_is_mended(monkeypatch, receiver):
    """The step itself cannot tell: that worker misses a packet which the others get."""
    (tx, update), plain = sends_everything(), collectives.gather

    def damaged(words, axis_name, own):
        here = jax.lax.axis_index(axis_name) == receiver
        gathered = plain(words, axis_name, own)
        return gathered.at[1, 7].set(gathered[1, 7] ^ here.astype(jnp.uint32))

    _, state = update(gradients(0), stacked_state(tx))
    monkeypatch.setattr(collectives, "gather", damaged)
    updates, state = every_worker(tx)(gradients(1), state)
    others = [i for i in range(WORKERS) if i != receiver]
    assert np.any(updates["w"][receiver] != updates["w"][others[0]])
    assert state.metrics.participants.tolist() == [4 + (i != receiver) for i in range(WORKERS)]
    assert state.metrics.agreed.all()
    demo_optax.check_metrics(state.metrics._replace(participants=np.full(WORKERS, WORKERS)))
    for seed in (2, 3):
        gradient = gradients(seed)
        if seed == 2:  # whoever has to be silent on the next step is found on the one after
            gradient["w"][receiver] = np.nan
        _, state = update(gradient, state)
        silent = int(seed == 2)
        assert state.metrics.participants.tolist() == [WORKERS - silent] * WORKERS
        assert state.metrics.agreed.tolist() == [bool(silent)] * WORKERS
    with pytest.raises(ValueError, match="repair_replicas"):
        demo_optax.check_metrics(state.metrics)
    majority = np.full(WORKERS, state.metrics.received[others[0]])
    mended = state._replace(metrics=state.metrics._replace(received=majority))
    _, state = update(gradients(4), mended)
    assert state.metrics.agreed.all()


def test_a_worker_whose_gradient_is_not_finite_agrees_with_the_others():
    tx, update = sends_everything()
    state = stacked_state(tx)
    for seed in range(4):
        gradient = gradients(seed)
        if seed == 1:
            gradient["w"][2, 0, 0] = np.nan
        _, state = update(gradient, state)
        assert np.all(state.metrics.participants == WORKERS - (seed == 1))
        assert state.metrics.agreed.all()


def norm_of(gradient, worker):
    return np.sqrt(sum(np.sum(np.square(g[worker], dtype=np.float64)) for g in gradient.values()))


@sweep(
    ("senders", 0.6, "vmap"),
    ("workers", 1.0, "shard_map"),
    mean=["senders", "workers"],
    alpha=[1.0, 0.6],
    mode=["vmap", "shard_map"],
)
def test_messages_are_clipped_at_a_multiple_of_the_median(mode, alpha, mean):
    tx = momentum(norm_limit=2.0, subtraction_factor=alpha, mean=mean)
    sizes = [1.0, 1e9, 1.1, 0.9, 30.0]
    gradient = gradients(0, sizes)
    update, state = workers.started(tx, PARAMS, WORKERS, mode)
    updates, state = update(gradient, state, PARAMS)

    norms = np.array([norm_of(gradient, i) for i in range(WORKERS)])
    scales = np.minimum(1.0, 2.0 * np.median(norms) / norms)
    assert (scales < 1).tolist() == [False, True, False, False, True]
    for n, g in gradient.items():
        messages = g * scales.reshape(-1, *[1] * (g.ndim - 1))
        np.testing.assert_allclose(updates[n], messages.mean(axis=0), rtol=2e-5, atol=1e-6)
        rests = ((1 - alpha * scales).reshape(-1, *[1] * (g.ndim - 1)) * g).reshape(WORKERS, -1)
        kept = state.momentum[n].reshape(WORKERS, -1)
        np.testing.assert_allclose(np.sort(kept), np.sort(rests), rtol=2e-5, atol=1e-6)
    assert state.metrics.participants == WORKERS


@sweep(EXCHANGES[0], EXCHANGES[1], exchange=EXCHANGES)
def test_a_weight_times_a_norm_is_at_most_the_limit_times_their_median(exchange):
    tx = demo_optax.decoupled_momentum(0.5, EVERYTHING, gradient_weight=1.0, exchange=exchange)
    weights = np.array([1.0, 1.2, 1.0, 4.0, 0.5], np.float32)
    sizes = np.array([1.0, 1.2, 1.0, 4.0, 1.4], np.float32)
    of_one = gradients(0, [1.0])
    gradient = jax.tree.map(lambda g: np.multiply.outer(sizes, g[0]), of_one)

    def update(gradient, state, weight):
        return tx.update(gradient, state, message_weight=weight)

    state = demo_optax.init_opt_state(tx, PARAMS, workers.mesh_of(WORKERS))
    specs = workers.specs_of(state)
    each = workers.spread(
        update, (P("data"), specs, P("data")), (P("data"), specs), WORKERS, "vmap"
    )
    updates, state = each(gradient, jax.tree.map(np.asarray, state), weights)
    counted = np.minimum(weights, 1.5)
    taken = np.array([1.0, 1.0, 1.0, 1.5 / 1.5 / 4.0, 1.0])
    mean = np.average(sizes * taken, weights=counted)
    for n, g in of_one.items():
        for update in updates[n]:
            np.testing.assert_allclose(update, mean * g[0], rtol=1e-5, atol=1e-6)
        kept = np.linalg.norm(state.momentum[n].reshape(WORKERS, -1), axis=1)
        expected = (1 - taken) * sizes * np.linalg.norm(g)
        np.testing.assert_allclose(kept, expected, rtol=1e-4, atol=1e-4)


def test_of_two_workers_the_smaller_sets_the_limit():
    tx = momentum(norm_limit=4.0)
    gradient = {n: g[:2] for n, g in gradients(0, [1.0, 1e12, 1.0]).items()}
    update, state = workers.started(tx, PARAMS, 2)
    updates, _ = update(gradient, state, PARAMS)
    total = np.sqrt(sum(np.sum(np.square(u, dtype=np.float64)) for u in updates.values()))
    assert total <= (1 + 4) / 2 * norm_of(gradient, 0) * (1 + 1e-5)


@sweep(
    (1e17, 5.0, 4),
    (3e38, None, 64),
    size=[1e17, 1e30, 3e38],
    limit=[None, 5.0],
    topk=[4, 64],  # added at once, and in turn
)
def test_liars_whose_norm_is_beyond_float32_are_not_heard(monkeypatch, size, limit, topk):
    """Two workers send well-formed packets of huge values and tell a small energy."""
    compression = demo_optax.Compression(topk, 8)
    tx = optax.chain(momentum(compression, limit), optax.scale_by_adam(), optax.sgd(1e-3))
    plain = packet.encode

    def encode(sections, message):
        lies = jax.lax.axis_index("data") >= WORKERS - 2
        values = [jnp.where(lies, jnp.float32(size), v) for v in message.values]
        coded, _ = plain(sections, message._replace(values=tuple(values)))
        return coded, plain(sections, message)[1]

    monkeypatch.setattr(packet, "encode", encode)
    update, state = workers.started(tx, PARAMS, WORKERS)
    for seed in range(3):
        gradient = gradients(seed)
        updates, state = update(gradient, state, PARAMS)
        assert all(np.isfinite(u).all() for u in updates.values())
        assert state[0].metrics.participants == (WORKERS if size < 1e19 else WORKERS - 2)
    if limit or size > 1e19:
        assert all((x < 1e3).all() for x in jax.tree.leaves(state[1].nu))


def test_a_limit_that_is_not_reached_changes_no_bit():
    free, limited = (
        momentum(demo_optax.Compression(4, 8, "int4"), limit) for limit in (None, 10.0)
    )
    updates = [every_worker(tx) for tx in (free, limited)]
    states = [stacked_state(tx) for tx in (free, limited)]
    for seed in range(3):
        (one, first), (two, second) = (
            update(gradients(seed), state) for update, state in zip(updates, states, strict=True)
        )
        chex.assert_trees_all_equal((one, first), (two, second))
        states = first, second


@pytest.mark.parametrize("exchange", [demo_optax.AllGather, demo_optax.TwoPhase])
def test_a_limit_from_numpy_widens_nothing(exchange):
    assert type(exchange("data", norm_limit=np.float64(2.0)).norm_limit) is float


@pytest.mark.parametrize("limit", [-1e30, -1.0, 0.0, 1.0, np.inf])
@pytest.mark.parametrize("norm", [0.0, 1e-30, 1.0, 3e38])
def test_a_part_of_a_message_counts_from_none_to_all_whatever_is_said(norm, limit):
    part = averaging.clip_factor(jnp.float32(norm), jnp.float32(limit))
    assert part == (1.0 if norm <= max(limit, 0.0) else max(limit, 0.0) / np.float32(norm))


@sweep(EXCHANGES[0], EXCHANGES[1], exchange=EXCHANGES)
def test_no_weight_makes_a_message_count_for_more_than_the_limit(monkeypatch, exchange):
    """One worker's header states any weight; the others' messages are all alike."""
    tx = demo_optax.decoupled_momentum(0.5, EVERYTHING, gradient_weight=1.0, exchange=exchange)
    plain = packet.build

    def update(weight, gradient, state):
        def build(layout, header, *rest, **kwargs):
            lies = jax.lax.axis_index("data") == 4
            header = header._replace(weight=jnp.where(lies, weight, header.weight))
            return plain(layout, header, *rest, **kwargs)

        monkeypatch.setattr(packet, "build", build)
        return tx.update(gradient, state)

    of_one = gradients(0, [1.0])
    sizes = np.array([1.0, 1.0, 1.0, 1.0, 1e6], np.float32)
    gradient = jax.tree.map(lambda g: np.multiply.outer(sizes, g[0]), of_one)
    start = demo_optax.init_opt_state(tx, PARAMS, workers.mesh_of(WORKERS))
    specs = workers.specs_of(start)
    update = workers.spread(update, (P(), P("data"), specs), (P(), specs), WORKERS, "vmap")
    start = jax.tree.map(np.asarray, start)
    for weight in np.float32([np.nan, 0.0, 1e-30, 1e15, 3e38]):
        updates, state = update(weight, gradient, start)
        assert state.metrics.agreed.all()
        for n, g in of_one.items():
            assert np.linalg.norm(updates[n]) <= (4 + 1.5) / 4 * np.linalg.norm(g) * (1 + 1e-5)

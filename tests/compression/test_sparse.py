"""Selection and sparse sums: every formulation against NumPy, and all against each other."""

import contextlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import demo_optax
from demo_optax._src.compression import sparse
from demo_optax._src.compression.bins import Bins
from demo_optax._src.compression.packet import (
    Header,
    Message,
    Origin,
    PacketLayout,
    Section,
    build,
    encode,
    parse_headers,
)
from demo_optax._src.compression.top_k import TopK
from demo_optax._src.exchange import averaging
from demo_optax._src.exchange.protocol import MEANS
from tests import draws, model, workers
from tests.sweeps import sweep

blocks = st.integers(1, 5)
sizes = st.sampled_from([1, 3, 17, 64, 100, 1088, 4096])


def drawn(seed, workers, blocks, n, k):
    """Positions, unique in each block, and values of some workers."""
    rng = np.random.default_rng(seed)
    order = rng.permuted(np.tile(np.arange(n), (workers, blocks, 1)), axis=-1)
    positions = np.sort(order[..., :k], axis=-1).astype(np.int32)
    return positions, rng.normal(size=positions.shape).astype(np.float32)


def dense(positions, values, n):
    """Each worker's values in their places, float64 ``(workers, blocks, n)``."""
    out = np.zeros((*positions.shape[:2], n))
    np.put_along_axis(out, positions, values, axis=-1)
    return out


@sweep((TopK._by_strided_groups, 8), way=[TopK._by_kernel, TopK._by_strided_groups], k=[1, 8, 32])
@draws.examples(5)
@given(seed=draws.seeds, n=st.sampled_from([32, 100, 1024, 4096]), ties=st.booleans())
def test_the_largest_magnitudes_are_chosen(way, k, seed, n, ties):
    magnitudes = np.abs(np.random.default_rng(seed).normal(size=(3, n))).astype(np.float32)
    magnitudes = np.round(magnitudes, 1) if ties else magnitudes
    chosen = np.sort(way(TopK(n, k), jnp.asarray(magnitudes)))
    assert (np.diff(chosen) > 0).all()
    found = np.sort(np.take_along_axis(magnitudes, chosen, axis=1))
    np.testing.assert_array_equal(found, np.sort(magnitudes)[:, -k:])


WAYS = [sparse.scatter, sparse._add_by_comparison, sparse._add_by_product]


@draws.cases(
    {
        f"{way.__name__}-{n}": dict(way=way, seed=0, blocks=3, n=n, k=5)
        for way in WAYS
        for n in (17, 1088)
    },
    number=24,
    way=st.sampled_from(WAYS),
    seed=draws.seeds,
    blocks=blocks,
    n=sizes,
    k=st.sampled_from([1, 5]),
)
def test_values_are_added_in_their_places(way, seed, blocks, n, k):
    positions, values = drawn(seed, 1, blocks, n, min(k, n))
    start = np.random.default_rng(seed + 1).normal(size=(blocks, n)).astype(np.float32)
    ours = jax.jit(way)(start, positions[0], values[0])
    np.testing.assert_allclose(ours, start + dense(positions, values, n)[0], atol=1e-6)


def on_a_tpu(*args, default, tpu=None, **others):
    """``jax.lax.platform_dependent`` that takes the branch for TPUs."""
    return (tpu or default)(*args)


def averaged(selector, positions, values, largest, mean, at_once):
    """The mean of the workers' packets, the odd ones damaged on the way, ``(blocks, n)``."""
    workers, blocks, _ = values.shape
    section = Section(blocks, selector, "float32")
    layout = PacketLayout((section,))
    zero, none = jnp.float32(0), jnp.uint32(0)

    def packet(worker, positions, values):
        coded, message = encode([section], Message((positions,), (values,)))
        header = Header(none, none, none, zero, zero, zero, zero, zero + 1)
        origin = Origin(jnp.int32(0), worker[None])
        packet = build(layout, header, coded, message, jnp.array(True), origin)[0]
        return jnp.where(worker % 2, packet ^ jnp.uint32(0xDEADBEEF), packet)

    @jax.jit
    def average(positions, values):
        numbers = jnp.arange(workers, dtype=jnp.int32)
        packets = jax.vmap(packet)(numbers, positions, values)
        _, _, intact = parse_headers(layout, packets, Origin(jnp.int32(0), numbers))
        means, weights = averaging.average(
            layout, packets, intact, [None], jnp.full(workers, largest), jnp.ones(workers), mean
        )
        return means[0].dense(), weights

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(selector), "workers_at_once", at_once)
        found, weights = average(positions, values)
    np.testing.assert_array_equal(weights[1::2], 0.0)
    return found


def mean_by_hand(positions, values, n, largest, mean):
    """The same in float64, from the workers with even numbers."""
    positions, values = positions[::2], values[::2].astype(np.float64)
    norms = np.sqrt(np.sum(values**2, axis=(1, 2), keepdims=True))
    total = np.sum(dense(positions, values * np.minimum(1.0, largest / norms), n), axis=0)
    senders = np.sum(dense(positions, np.ones_like(values), n), axis=0)
    return total / np.maximum(senders if mean == "senders" else len(values), 1)


@contextlib.contextmanager
def on(platform):
    """The branches for a platform."""
    with pytest.MonkeyPatch.context() as patch:
        if platform == "tpu":
            patch.setattr(jax.lax, "platform_dependent", on_a_tpu)
        yield


PLATFORMS, ANY_MEAN = st.sampled_from(["here", "tpu"]), st.sampled_from(MEANS)


@draws.cases(
    {
        "here": dict(mean="senders", platform="here", n=100, workers=5, seed=0),
        "tpu": dict(mean="workers", platform="tpu", n=1088, workers=3, seed=0),
    },
    number=16,
    mean=ANY_MEAN,
    platform=PLATFORMS,
    n=sizes,
    workers=st.integers(1, 5),
    seed=draws.seeds,
)
def test_means_are_those_of_who_sent(mean, platform, n, workers, seed):
    positions, values = drawn(seed, workers, 2, n, min(7, n))
    largest = np.float32(3.0)
    expected = mean_by_hand(positions, values, n, largest, mean)
    with on(platform):
        for at_once in (workers, 2, 1):
            ours = averaged(TopK(n, min(7, n)), positions, values, largest, mean, at_once)
            np.testing.assert_allclose(ours, expected, atol=1e-6)


def drawn_of_bins(seed, workers, blocks, n, k):
    """Values like those of `drawn`, at a place in each bin."""
    rng = np.random.default_rng(seed)
    members = -(-(n - np.arange(k)) // k)
    places = rng.integers(0, members, size=(workers, blocks, k)).astype(np.int32)
    return places, places * k + np.arange(k), rng.normal(size=places.shape).astype(np.float32)


@sweep(
    (17, 3, True),
    (100, 7, False),
    (4096, 32, True),
    n=[1, 3, 17, 64, 100, 1088, 4096],
    k=[1, 3, 7, 8, 32],
    ties=[False, True],
)
def test_the_largest_of_each_bin_is_chosen(n, k, ties, seed=0):
    k = min(k, n)
    x = np.random.default_rng(seed).normal(size=(3, n)).astype(np.float32)
    x = np.round(x, 1) if ties else x
    bins = Bins(n, k)
    by_maximum = jax.jit(bins._largest)(np.abs(x))
    for found in (by_maximum, jax.jit(bins.select)(x)):
        positions = np.asarray(bins.in_block(found))
        for b in range(k):
            taken = np.take_along_axis(x, positions[:, b : b + 1], 1)[:, 0]
            np.testing.assert_array_equal(np.abs(taken), np.abs(x[:, b::k]).max(axis=1))
            assert (positions[:, b] % k == b).all()


@draws.cases(
    {
        "here": dict(mean="workers", platform="here", n=100, k=7, workers=4, seed=0),
        "tpu": dict(mean="senders", platform="tpu", n=64, k=8, workers=4, seed=0),
    },
    number=16,
    mean=ANY_MEAN,
    platform=PLATFORMS,
    n=sizes,
    k=st.sampled_from([1, 7, 8]),
    workers=st.integers(1, 4),
    seed=draws.seeds,
)
def test_bins_are_taken_added_and_averaged(mean, platform, n, k, workers, seed):
    places, positions, values = drawn_of_bins(seed, workers, 2, n, min(k, n))
    x = np.random.default_rng(seed).normal(size=(2, n)).astype(np.float32)
    bins, own = Bins(n, min(k, n)), places[0]
    largest = np.float32(3.0)
    expected = mean_by_hand(positions, values, n, largest, mean)
    with on(platform):
        taken = jax.jit(bins.take)(x, own)
        added = jax.jit(bins.add)(x, own, values[0])
        for at_once in (workers, 1):
            ours = averaged(bins, places, values, largest, mean, at_once)
            np.testing.assert_allclose(ours, expected, atol=1e-6)
    np.testing.assert_array_equal(taken, np.take_along_axis(x, positions[0], 1))
    np.testing.assert_allclose(added, x + dense(positions[:1], values[:1], n)[0], atol=1e-6)


def trained(steps=3, **compression):
    compression = demo_optax.Compression(block_side=16, **compression)
    momentum = demo_optax.decoupled_momentum(0.9, compression, axis_name="data")
    tx = optax.chain(momentum, optax.scale_by_learning_rate(0.1))
    return workers.train(tx, range(steps), params=model.one_matrix, loss=model.linear_loss)[0]


@sweep(("topk", 5), selection=["topk", "bins"], topk=[5, 30])
def test_a_step_as_a_tpu_takes_it_is_the_same_and_keeps_replicas_identical(topk, selection):
    wanted = trained(topk=topk, selection=selection)
    with on("tpu"):
        ours = trained(topk=topk, selection=selection)
    for leaf in jax.tree.leaves(ours):
        assert len({bytes(np.asarray(shard.data)) for shard in leaf.addressable_shards}) == 1
    chex.assert_trees_all_close(ours, wanted, rtol=1e-4, atol=1e-6)


@sweep(200, topk=[200, 2048])
def test_memory_does_not_explode_with_the_coefficients(topk):
    """A single worker's positions need not be compared with anybody's."""
    tx = demo_optax.demo(1e-3, demo_optax.Compression(topk=topk))
    params = np.ones((256, 256), np.float32)
    compiled = jax.jit(tx.update).lower(params, tx.init(params), params).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * params.size

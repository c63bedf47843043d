"""Selection and sparse sums: every formulation against NumPy, and all against each other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import demo_optax
from demo_optax.compression import bins, selection, sparse
from tests import draws, model

pytestmark = pytest.mark.sweep

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


@pytest.mark.parametrize("k", [1, 8, 32])
@pytest.mark.parametrize("way", [selection._by_kernel, selection._by_strands])
@draws.examples(5)
@given(seed=draws.seeds, n=st.sampled_from([32, 100, 1024, 4096]), ties=st.booleans())
def test_the_largest_magnitudes_are_chosen(way, k, seed, n, ties):
    magnitudes = np.abs(np.random.default_rng(seed).normal(size=(3, n))).astype(np.float32)
    magnitudes = np.round(magnitudes, 1) if ties else magnitudes
    chosen = np.sort(way(jnp.asarray(magnitudes), k))
    assert (np.diff(chosen) > 0).all()
    found = np.sort(np.take_along_axis(magnitudes, chosen, axis=1))
    np.testing.assert_array_equal(found, np.sort(magnitudes)[:, -k:])


@pytest.mark.parametrize(
    "way", [sparse._add_by_scatter, sparse._add_by_comparison, sparse._add_by_product]
)
@draws.examples(8)
@given(seed=draws.seeds, blocks=blocks, n=sizes, k=st.sampled_from([1, 5]))
def test_values_are_added_in_their_places(way, seed, blocks, n, k):
    positions, values = drawn(seed, 1, blocks, n, min(k, n))
    start = np.random.default_rng(seed + 1).normal(size=(blocks, n)).astype(np.float32)
    ours = way(jnp.asarray(start), jnp.asarray(positions[0]), jnp.asarray(values[0]))
    np.testing.assert_allclose(ours, start + dense(positions, values, n)[0], atol=1e-6)


def on_a_tpu(*args, default, tpu=None, **others):
    """``jax.lax.platform_dependent`` that takes the branch for TPUs."""
    return (tpu or default)(*args)


@pytest.mark.parametrize("mean", sparse.MEANS)
@pytest.mark.parametrize("platform", ["here", "tpu"])
@draws.examples(6)
@given(seed=draws.seeds, n=sizes, workers=st.integers(1, 6))
def test_means_are_those_of_who_sent(mean, platform, seed, n, workers):
    positions, values = drawn(seed, workers, 2, n, min(7, n))
    weights = np.random.default_rng(seed).choice(np.float32([0, 0.25, 1]), workers)
    counts = weights > 0
    everyone = dense(positions, np.ones_like(values), n)
    all_values = dense(positions, values * weights[:, None, None], n)
    number = np.sum(everyone[counts], axis=0) if mean == "senders" else np.sum(counts)
    expected = np.sum(all_values[counts], axis=0) / np.maximum(number, 1)
    zeros = jnp.zeros((2, n))
    damaged = np.where(counts[:, None, None], positions, 10**6)  # what does not count is anything
    with pytest.MonkeyPatch.context() as patch:
        if platform == "tpu":
            patch.setattr(jax.lax, "platform_dependent", on_a_tpu)
        sent = sparse.weighted(*map(jnp.asarray, (damaged, values, weights)))
        at_once = sparse.mean_of_sent(zeros, sent, mean)
        sums = sparse.Sums(zeros, zeros)
        for part in range(workers):
            sums = sparse.add_sent(sums, jax.tree.map(lambda x, i=part: x[i : i + 1], sent))
        in_turn = sparse.mean_of_sums(sums, mean, jnp.float32(np.sum(counts)))
    np.testing.assert_allclose(at_once, expected, atol=1e-6)
    np.testing.assert_allclose(in_turn, expected, atol=1e-6)


def drawn_of_bins(seed, workers, blocks, n, k):
    """As `drawn`, with a position in each bin."""
    rng = np.random.default_rng(seed)
    members = -(-(n - np.arange(k)) // k)
    places = rng.integers(0, members, size=(workers, blocks, k)).astype(np.int32)
    return places, places * k + np.arange(k), rng.normal(size=places.shape).astype(np.float32)


@draws.examples(10)
@given(seed=draws.seeds, n=sizes, k=st.sampled_from([1, 3, 7, 8, 32]), ties=st.booleans())
def test_the_largest_of_each_bin_is_chosen(seed, n, k, ties):
    k = min(k, n)
    x = np.random.default_rng(seed).normal(size=(3, n)).astype(np.float32)
    x = np.round(x, 1) if ties else x
    by_maximum = bins.largest(jnp.abs(jnp.asarray(x)), k)
    for found in (by_maximum, selection.largest_of_bins(jnp.asarray(x), k)):
        for b in range(k):
            taken = np.take_along_axis(x, np.asarray(found.positions)[:, b : b + 1], 1)[:, 0]
            np.testing.assert_array_equal(np.abs(taken), np.abs(x[:, b::k]).max(axis=1))
            assert (np.asarray(found.positions)[:, b] % k == b).all()


@pytest.mark.parametrize("mean", sparse.MEANS)
@pytest.mark.parametrize("platform", ["here", "tpu"])
@draws.examples(6)
@given(seed=draws.seeds, n=sizes, k=st.sampled_from([1, 7, 8]), workers=st.integers(1, 4))
def test_bins_are_taken_added_and_averaged(mean, platform, seed, n, k, workers):
    places, positions, values = drawn_of_bins(seed, workers, 2, n, min(k, n))
    counts = np.random.default_rng(seed).random(workers) < 0.7
    x = np.random.default_rng(seed).normal(size=(2, n)).astype(np.float32)
    own = bins.Bins(jnp.asarray(places[0]))
    everyone = dense(positions, np.ones_like(values), n)[counts]
    number = everyone.sum(axis=0) if mean == "senders" else counts.sum()
    expected = dense(positions, values, n)[counts].sum(axis=0) / np.maximum(number, 1)
    zeros = jnp.zeros((2, n))
    with pytest.MonkeyPatch.context() as patch:
        if platform == "tpu":
            patch.setattr(jax.lax, "platform_dependent", on_a_tpu)
        taken = selection.take(jnp.asarray(x), own)
        added = sparse.add_at(jnp.asarray(x), own, jnp.asarray(values[0]))
        damaged = bins.Bins(jnp.where(counts[:, None, None], places, 10**6))
        sent = sparse.weighted(damaged, jnp.asarray(values), jnp.float32(counts))
        at_once = sparse.mean_of_sent(zeros, sent, mean)
        sums = sparse.Sums(zeros, zeros)
        for part in range(workers):
            sums = sparse.add_sent(sums, jax.tree.map(lambda y, i=part: y[i : i + 1], sent))
        in_turn = sparse.mean_of_sums(sums, mean, jnp.float32(np.sum(counts)))
    np.testing.assert_array_equal(taken, np.take_along_axis(x, positions[0], 1))
    np.testing.assert_allclose(added, x + dense(positions, values, n)[0], atol=1e-6)
    np.testing.assert_allclose(at_once, expected, atol=1e-6)
    np.testing.assert_allclose(in_turn, expected, atol=1e-6)


def trained(steps=3, **compression):
    compression = demo_optax.Compression(**{"topk": 5, "block_side": 16} | compression)
    momentum = demo_optax.decoupled_momentum(0.9, compression, axis_name="data")
    tx = optax.chain(momentum, optax.scale_by_learning_rate(0.1))
    return model.train(tx, steps)[0]


def assert_replicas_are_identical(params):
    for leaf in jax.tree.leaves(params):
        assert len({bytes(np.asarray(shard.data)) for shard in leaf.addressable_shards}) == 1


@pytest.mark.parametrize("selection", ["topk", "bins"])
@pytest.mark.parametrize("topk", [5, 40])
def test_a_step_as_a_tpu_takes_it_is_the_same_and_keeps_replicas_identical(
    topk, selection, monkeypatch
):
    expected = trained(topk=topk, selection=selection)
    monkeypatch.setattr(jax.lax, "platform_dependent", on_a_tpu)
    ours = trained(topk=topk, selection=selection)
    assert_replicas_are_identical(ours)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, ours, expected)


@pytest.mark.parametrize("platform", ["here", "tpu"])
@pytest.mark.parametrize("selection", ["topk", "bins"])
def test_packets_decoded_in_several_rounds_are_those_decoded_at_once(
    selection, platform, monkeypatch
):
    if platform == "tpu":
        monkeypatch.setattr(jax.lax, "platform_dependent", on_a_tpu)
    expected = trained(selection=selection)
    monkeypatch.setattr(sparse, "AT_ONCE", 15)  # three packets in a round, of eight
    monkeypatch.setattr(sparse, "BINS_AT_ONCE", 3)
    ours = trained(selection=selection)
    assert_replicas_are_identical(ours)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, ours, expected)


@pytest.mark.parametrize("topk", [200, 2048])
def test_memory_does_not_explode_with_the_coefficients(topk):
    """Of a single worker, whose positions need not be compared with anybody's."""
    tx = demo_optax.demo(1e-3, demo_optax.Compression(topk=topk))
    params = jnp.ones((256, 256))
    compiled = jax.jit(tx.update).lower(params, tx.init(params), params).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * params.size

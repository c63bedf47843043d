"""Index codings against an encoder written with Python integers, and against their entropy."""

import functools
import math
from itertools import chain

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from demo_optax._src.compression import top_k as codings
from demo_optax._src.compression.bins import Bins
from demo_optax._src.compression.top_k import TopK
from demo_optax.accounting import index_cost


@st.composite
def positions(draw):
    """``(n, positions)``: ascending positions in some blocks of n."""
    # Few sizes, since each is another program to compile; any contents.
    n, k = draw(
        st.sampled_from([(1, 1), (3, 2), (17, 5), (97, 1), (512, 300), (1000, 33), (4096, 8)])
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([n, min(n, 2 * k)]))
    chosen = [np.sort(rng.choice(spread, size=k, replace=False)) for _ in range(3)]
    return n, np.array(chosen, np.int32)


@functools.partial(jax.jit, static_argnums=(1, 2))
def encode(positions, n, coding):
    return TopK(n, positions.shape[1]).encode(positions, coding)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def decode(words, num_blocks, n, k, coding):
    return TopK(n, k).decode(words, num_blocks, coding)


def bits_by_hand(block, n, coding):
    """One block's low fields and bitmap, as lists of bits, least significant first."""
    k = len(block)
    if coding == "packed":
        width, ones, size = max(n - 1, 0).bit_length(), [], 0
    elif coding == "bitmap":
        width, ones, size = 0, list(block), n
    else:
        width = math.floor(math.log2(n / k))
        ones = [(p >> width) + i for i, p in enumerate(block)]
        size = k + math.ceil(n / 2**width) - 1
    low = [int(p) >> b & 1 for p in block for b in range(width)]
    return low, [int(i in ones) for i in range(size)]


def words_by_hand(bits):
    bits = list(bits)
    bits += [0] * (-len(bits) % 32)
    return [sum(b << i for i, b in enumerate(bits[w : w + 32])) for w in range(0, len(bits), 32)]


@pytest.mark.parametrize("n, k", [(17, 5), (512, 300), (1000, 33), (4096, 64), (6, 6)])
def test_places_in_bins_are_fields_as_wide_as_the_deepest_bin_needs(n, k):
    rng = np.random.default_rng(n)
    places = rng.integers(0, -(-(n - np.arange(k)) // k), size=(3, k))
    width = math.ceil(math.log2(math.ceil(n / k)))
    expected = words_by_hand([int(p) >> b & 1 for p in places.ravel() for b in range(width)])
    bins = Bins(n, k)
    encode, decode = jax.jit(bins.encode), jax.jit(bins.decode, static_argnums=1)
    words = encode(places.astype(np.int32))
    np.testing.assert_array_equal(words, np.array(expected, np.uint32))
    assert len(words) == bins.position_words(3)
    found, inside = decode(words, 3)
    assert inside and bins.in_block(found).max() < n
    np.testing.assert_array_equal(found, places)
    if n % k:
        beyond = np.full((3, k), n // k, np.int32)  # a place that the last bins do not have
        assert not decode(encode(beyond), 3)[1]


@pytest.mark.parametrize("coding", codings.CODINGS)
@settings(deadline=None, max_examples=30)
@given(case=positions())
def test_words_are_those_written_by_hand_and_decode_to_the_positions(coding, case):
    n, chosen = case
    blocks, k = chosen.shape
    low, high = zip(*[bits_by_hand(block, n, coding) for block in chosen], strict=True)
    whole = len(high[0]) // 32 * 32  # bits of each block's bitmap that fill words of their own
    expected = words_by_hand(chain(*low))
    expected += words_by_hand(chain(*[bits[:whole] for bits in high]))
    expected += words_by_hand(chain(*[bits[whole:] for bits in high]))

    words = encode(jnp.asarray(chosen), n, coding)

    assert words.tolist() == expected
    if coding == TopK(n, k).coding:
        assert len(words) == TopK(n, k).position_words(blocks)
    decoded, sound = decode(words, blocks, n, k, coding)
    assert sound
    np.testing.assert_array_equal(decoded, chosen)


@pytest.mark.parametrize("coding", codings.CODINGS)
@settings(deadline=None, max_examples=60)
@given(case=positions(), data=st.data())
def test_words_that_nobody_would_write_are_found_or_decode_to_valid_positions(coding, case, data):
    n, chosen = case
    blocks, k = chosen.shape
    words = np.array(encode(jnp.asarray(chosen), n, coding))
    if words.size:
        words[data.draw(st.integers(0, words.size - 1))] ^= data.draw(st.integers(1, 2**32 - 1))
    decoded, sound = decode(jnp.asarray(words), blocks, n, k, coding)
    valid = all(0 <= p < n for block in np.array(decoded) for p in block)
    valid &= bool((np.diff(decoded, axis=1) > 0).all())
    if sound:
        assert valid


@pytest.mark.parametrize("k", [1, 2, 4, 8, 16, 32, 64])
def test_blocks_of_4096_cost_at_most_11_percent_more_than_entropy(k):
    cost = index_cost(4096, k)
    bound = math.log2(math.comb(4096, k)) / k
    assert cost.bound == pytest.approx(bound)
    assert bound <= cost.bits <= 1.11 * bound
    rng = np.random.default_rng(k)
    chosen = np.sort([rng.choice(4096, size=k, replace=False) for _ in range(64)])
    words = encode(jnp.asarray(chosen, jnp.int32), 4096, cost.coding)
    assert 32 * words.size == 64 * k * cost.bits


def test_the_cheapest_coding_is_taken():
    for n in (7, 64, 1000):
        for k in range(1, n):
            costs = [TopK(n, k).position_bits(coding) for coding in codings.CODINGS]
            assert TopK(n, k).position_bits(TopK(n, k).coding) == min(costs) <= n

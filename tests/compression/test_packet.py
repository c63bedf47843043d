"""The packet: what arrives, what is refused, and that nothing is lost either way."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax import Compression
from demo_optax._src import exchange
from demo_optax._src.compression import make_plan
from demo_optax._src.compression import packet as packets
from demo_optax._src.compression.bins import Bins
from demo_optax._src.compression.packet import PacketLayout
from demo_optax._src.compression.values import VALUE_CODINGS
from tests import oracles, workers
from tests.sweeps import sweep

SHAPES = {"w": (24, 16), "b": (7,), "s": ()}
PARAMS = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
WORKERS = 4
DECAY = 0.9
CODINGS = {
    **{
        f"{values}-topk": Compression(topk=5, block_side=16, value_coding=values)
        for values in VALUE_CODINGS
    },
    "sign-bins": Compression(topk=5, block_side=16, value_coding="sign", selection="bins"),
}


def gradients(seed):
    """All workers' gradients, heavy-tailed, ``(workers, *shape)``."""
    rng = np.random.default_rng(seed)
    return {n: rng.standard_t(3, (WORKERS, *s)).astype(np.float32) for n, s in SHAPES.items()}


def in_parameter_space(stored, shape, compression):
    sides = oracles.block_sides(shape, compression.block_side, "pad")
    return np.stack([oracles.to_tensor(m, shape, sides, oracles.inverse_dct) for m in stored])


def momentum_tx(compression):
    return demo_optax.decoupled_momentum(
        DECAY, compression, axis_name="data", gradient_weight=1.0, mean="workers"
    )


OF_WORKER_2 = packets.Origin(jnp.int32(0), jnp.int32(2))


def resealed(change, origin=OF_WORKER_2):
    """A change whose checksum is right again: a sender that is wrong itself."""

    def forge(words):
        rest = change(words)[1:]
        validity = packets._expected_checksum(LAYOUT_BY_COEFFICIENT, rest, origin)
        return jnp.concatenate([validity[None], rest])

    return forge


SORTED_SHAPES = tuple(SHAPES[n] for n in sorted(SHAPES))  # as jax.tree orders them
decode = jax.jit(packets.decode, static_argnums=0)
LAYOUTS = [
    PacketLayout(make_plan(Compression(5, 16, "int4", selection=selection), SORTED_SHAPES).sections)
    for selection in ("topk", "bins")
]
BY_COEFFICIENT = Compression(topk=2, block_side=16, value_coding="float32")  # packed positions
LAYOUT_BY_COEFFICIENT = PacketLayout(make_plan(BY_COEFFICIENT, SORTED_SHAPES).sections)


def first_of(block_size, part):
    """The first word of a packet that holds a part of the section of blocks of this size."""
    start = LAYOUT_BY_COEFFICIENT.header_words
    for section in LAYOUT_BY_COEFFICIENT.sections:
        if section.selector.n == block_size:
            return start + sum(section.word_counts[:part])
        start += sum(section.word_counts)
    raise AssertionError


def put(word, value):
    return lambda words: words.at[word].set(jnp.uint32(value))


FORGERIES = {
    "nothing": lambda words: words,
    "not its checksum": lambda words: words.at[0].add(1),
    "only zeros": jnp.zeros_like,
    "only ones": lambda words: jnp.full_like(words, 0xFFFFFFFF),
    "an infinite value": resealed(put(first_of(256, 2), 0x7F800000)),
    "a value that is NaN": resealed(put(first_of(256, 2), 0x7FC00001)),
    "one position twice": resealed(put(first_of(256, 0), 0)),
    "an energy that is NaN": resealed(
        put(1 + packets.Header._fields.index("sent_energy"), 0x7FC00001)
    ),
    "another worker's": resealed(lambda words: words, packets.Origin(jnp.int32(0), jnp.int32(1))),
    "another step's": resealed(lambda words: words, packets.Origin(jnp.int32(1), jnp.int32(2))),
}


@functools.cache
def update_and_state(mode):
    """An update that forges what worker 2 sent, on its way to everybody, and the first state."""
    tx, gather = momentum_tx(BY_COEFFICIENT), exchange.collectives.gather
    _, state = workers.initial(tx, workers.mesh_of(WORKERS), lambda: PARAMS)
    specs = workers.specs_of(state)

    def update(forgery, gradient, state, params):
        def forge(packet, axis_name, own):
            gathered = gather(packet, axis_name, own)
            forged = jax.lax.switch(forgery, list(FORGERIES.values()), gathered[2])
            return gathered.at[2].set(forged)

        with mock.patch.object(exchange.collectives, "gather", forge):
            return tx.update(gradient, state, params)

    in_specs = P(), P("data"), specs, P()
    update = workers.spread(update, in_specs, (P(), specs), WORKERS, mode)
    return update, jax.tree.map(np.asarray, state)


@functools.cache
def with_worker_2_silent(mode):
    update, state = update_and_state(mode)
    silent = {n: np.copy(g) for n, g in gradients(0).items()}
    for gradient in silent.values():
        gradient[2] = np.nan
    return update(list(FORGERIES).index("nothing"), silent, state, PARAMS)


@sweep(
    *[(forgery, "vmap") for forgery in FORGERIES if forgery != "nothing"],
    forgery=[forgery for forgery in FORGERIES if forgery != "nothing"],
    mode=["vmap", "shard_map"],
)
def test_a_bad_packet_counts_for_nobody_and_its_sender_keeps_everything(forgery, mode):
    (update, state), gradient = update_and_state(mode), gradients(0)
    updates, new = update(list(FORGERIES).index(forgery), gradient, state, PARAMS)
    expected, without = with_worker_2_silent(mode)

    assert new.metrics.participants == without.metrics.participants == WORKERS - 1
    for n, shape in SHAPES.items():
        np.testing.assert_array_equal(updates[n], expected[n])
        kept = in_parameter_space(new.momentum[n], shape, BY_COEFFICIENT)
        np.testing.assert_allclose(kept[2], gradient[n][2], atol=1e-5)
        others = [0, 1, 3]
        np.testing.assert_array_equal(new.momentum[n][others], without.momentum[n][others])


@sweep("int8-topk", "sign-bins", name=CODINGS)
def test_any_bit_that_flips_on_the_way_is_noticed(name):
    sections = make_plan(CODINGS[name], SORTED_SHAPES).sections
    layout, rng = PacketLayout(sections), np.random.default_rng(0)
    momenta = [rng.normal(size=(s.num_blocks, s.selector.n)).astype(np.float32) for s in sections]
    origin = packets.Origin(jnp.int32(0), jnp.array([2], jnp.int32))

    @jax.jit
    def packet(momenta):
        positions = [
            s.selector.select(m)
            if s.selector.sends_positions
            else s.selector.positions(s.num_blocks, jnp.int32(0))
            for s, m in zip(sections, momenta, strict=True)
        ]
        values = [
            s.selector.take(m, at) for s, m, at in zip(sections, momenta, positions, strict=True)
        ]
        message = packets.Message(tuple(positions), tuple(values))
        coded, message = packets.encode(sections, message)
        header = packets.Header(*[jnp.uint32(1)] * 3, *[jnp.float32(1)] * 5)
        return packets.build(layout, header, coded, message, jnp.array(True), origin)[0]

    words = packet(momenta)
    assert words.shape == (layout.words,)

    @jax.jit
    @jax.vmap
    def intact(word, bit):
        changed = words.at[word].set(words[word] ^ (jnp.uint32(1) << bit))
        return packets.parse_headers(layout, changed[None], origin)[2][0]

    word, bit = np.divmod(np.arange(32 * words.size), 32)
    assert packets.parse_headers(layout, words[None], origin)[2][0]
    assert not intact(word, bit.astype(np.uint32)).any()


@pytest.mark.parametrize("layout", LAYOUTS, ids=["topk", "bins"])
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_packets_of_random_bytes_decode_to_something_harmless_or_are_refused(layout, data):
    """With a checksum that is right: every position that is accepted lies in its block."""
    words = data.draw(st.binary(min_size=4 * layout.words, max_size=4 * layout.words))
    message, valid = decode(layout, np.frombuffer(words, np.uint32)[None])
    if valid[0]:
        for section, positions, values in zip(layout.sections, *message, strict=True):
            selector = section.selector
            assert np.isfinite(values).all()
            if selector.sends_positions:
                positions = positions[0]
                if isinstance(selector, Bins):
                    positions = selector.in_block(positions)
                    assert (np.asarray(positions) % selector.k == np.arange(selector.k)).all()
                else:
                    assert (np.diff(positions, axis=1) > 0).all()
                assert int(positions.min()) >= 0 and int(positions.max()) < selector.n

"""What lies in a store: whatever it holds, a reader gets a record or an error of its own."""

import functools
import json
import tempfile
from unittest import mock

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from demo_optax._src.swarm import records, snapshots
from demo_optax._src.swarm.records import Claim, Damaged, Manifest, PacketRef, SnapshotIndex
from demo_optax._src.swarm.steps import Steps
from demo_optax.swarm import ObjectStore
from tests.members import put_packet

HASHES = st.text("0123456789abcdef", min_size=64, max_size=64)
COUNTS = st.integers(0, 2**31 - 1)
TIMES = st.floats(0, 10**11, exclude_max=True)
# The least weight of a worker is the smallest normal number in float32.
TOKENS = st.one_of(st.integers(0, 2**53), st.floats(2.0**-126, 1e30)).map(records.tokens_of)


@st.composite
def manifests(draw):
    slots = sorted(draw(st.sets(st.integers(0, 500), min_size=1, max_size=8)))
    packets = tuple(
        PacketRef(slot, draw(COUNTS), draw(HASHES), draw(COUNTS), draw(TOKENS)) for slot in slots
    )
    return Manifest(draw(COUNTS), packets, draw(st.one_of(st.just(""), HASHES)), draw(TIMES))


@hypothesis.given(manifests())
def test_a_manifest_is_read_as_it_was_written(manifest):
    assert records.decode(Manifest, records.encode(manifest)) == manifest


@pytest.mark.parametrize(
    ("weight", "text"),
    [(4096.0, "4096"), (0.25, "0.25"), (3 * 0.1, "0.3"), (2.5e-7, "2.5e-07"), (1e30, "9" * 16)],
)
def test_tokens_are_written_with_few_digits(weight, text):
    packet = PacketRef(0, 1, "0" * 64, 1, records.tokens_of(weight))
    assert f", 1, {text}, " in records.encode(Manifest(0, (packet,), "", 0.0)).decode()


@hypothesis.given(st.text(), st.text(), TIMES)
def test_a_claim_is_read_as_it_was_written_if_its_name_can_be_printed(worker, nonce, seconds):
    claim = Claim(worker, nonce, seconds)
    if worker.isprintable():
        assert records.decode(Claim, records.encode(claim)) == claim
    else:
        with pytest.raises(Damaged):
            records.decode(Claim, records.encode(claim))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | HASHES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=10,
)


@hypothesis.given(manifests(), st.sampled_from(Manifest._fields), VALUES)
def test_a_manifest_with_another_field_is_read_or_damaged(manifest, field, value):
    changed = json.loads(records.encode(manifest)) | {field: value}
    try:
        decoded = records.decode(Manifest, json.dumps(changed).encode())
    except Damaged:
        return
    assert decoded.packets
    assert all(x.slot >= 0 and len(x.sha256) == 64 for x in decoded.packets)


KINDS = Manifest, Claim, SnapshotIndex
READERS = [*(functools.partial(records.decode, kind) for kind in KINDS), records.parse]


@pytest.mark.parametrize("read", READERS)
@hypothesis.given(st.binary() | VALUES.map(lambda x: json.dumps(x).encode()))
def test_anything_else_is_damaged(read, data):
    try:
        record = read(data)
    except Damaged:
        return
    assert record == {} or isinstance(record, dict)  # only an object without fields is no record


LATE = b'{"worker": "", "nonce": "", "time": 999999999999}'  # no calendar has this time
HALF = b'{"worker": "\\ud800", "nonce": "", "time": 1}'  # of a surrogate pair: it cannot be printed


@pytest.mark.parametrize("data", [b"[" * 10**5, b'{"time": 1e999}', b"9" * 5000, HALF, LATE])
@pytest.mark.parametrize("read", READERS[:3])
def test_what_breaks_parsers_is_damaged(read, data):
    with pytest.raises(Damaged):
        read(data)


NONCE = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    "file", [f"snapshots/00000009/{NONCE}", "snapshots/00000008/../../run.json", "/etc/passwd"]
)
def test_a_snapshot_names_a_file_of_its_own(file):
    index = SnapshotIndex(8, file, 1, "0" * 64)
    with tempfile.TemporaryDirectory() as folder:
        store = ObjectStore(folder)
        store.put("snapshots/00000008.json", records.encode(index))
        with pytest.raises(Damaged, match="00000008"):
            snapshots.read_index(store, 8)


@pytest.mark.parametrize("parts", [0, 2, 9_999_999_999])
def test_of_a_snapshot_with_another_number_of_parts_none_is_read(parts):
    index = SnapshotIndex(8, f"snapshots/00000008/{NONCE}", parts, "0" * 64)
    with pytest.raises(Damaged, match=f"{NONCE}' is damaged, or of another model"):
        snapshots.read(mock.Mock(spec=[]), index, [np.ones(2, np.float32)])


@pytest.mark.parametrize("data", [b"", b"1234567", b"12345678", b"123456789"])
def test_a_snapshot_with_the_digest_of_other_arrays_is_damaged(data):
    index = SnapshotIndex(8, f"snapshots/00000008/{NONCE}", 1, "0" * 64)
    store = mock.Mock(get=lambda key: data)
    with pytest.raises(Damaged, match=f"{NONCE}' is damaged, or of another model"):
        snapshots.read(store, index, [np.ones(2, np.float32)])


def test_names_that_are_not_ours_are_ignored(tmp_path):
    store, packet = ObjectStore(str(tmp_path)), PacketRef(0, 10**9, records.sha256(b"x"))
    put_packet(store, 0, packet._replace(slot=777), b"x")
    genuine = store.get("packets/00000000/777.1000000000.packet")
    for name in "notes.txt", "000.000001.tmp", "9.1.here", "000.000001.here":
        store.put(f"packets/00000000/{name}", genuine)
    store.put("packets/00000000/001.000001.packet", b"something else")
    put_packet(store, 0, packet._replace(incarnation=10**10), b"x")  # no manifest can list it
    put_packet(store, 0, packet, b"x")
    said = Steps(store, 4).sent(0, range(1000))
    assert {slot: x.packet for slot, x in said.items()} == {0: packet}
    steps = ["00000042", "00000042.json", "00000042/a/b", "readme.md", "42", "0000004x"]
    assert list(map(records.step_of, steps)) == [42, 42, 42, None, None, None]


@hypothesis.given(
    st.floats(-3, 3), st.sampled_from([np.float32, "bfloat16", np.float16]), st.integers(1, 20)
)
def test_relative_difference(change, dtype, size):
    other = np.full(size, 4.0, dtype)
    own = np.full(size, 4.0 + change, dtype)
    counts = np.arange(3)
    drift = snapshots.relative_difference([own, counts], [other, counts + 1])
    expected = np.linalg.norm(own.astype(float) - other.astype(float)) / np.linalg.norm(
        other.astype(float)
    )
    np.testing.assert_allclose(drift, expected, rtol=1e-12)


ARRAYS = st.tuples(
    st.sampled_from(["float32", "bfloat16", "int32", "bool", "uint32"]),
    st.lists(st.integers(0, 4), max_size=3),
)


@hypothesis.given(st.lists(ARRAYS, max_size=5), st.integers(0, 2**32))
def test_a_snapshot_is_read_to_the_last_bit(kinds, seed):
    drawn = np.random.default_rng(seed)
    leaves = [drawn.normal(size=shape).astype(dtype) for dtype, shape in kinds]
    with tempfile.TemporaryDirectory() as folder:
        store = ObjectStore(folder)
        snapshots.write(store, 8, leaves)
        index = snapshots.read_index(store, 8)
        assert index is not None
        restored = snapshots.read(store, index, leaves)
    assert [x.dtype for x in restored] == [x.dtype for x in leaves]
    assert [x.tobytes() for x in restored] == [x.tobytes() for x in leaves]

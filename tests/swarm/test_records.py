"""What lies in a store: whatever it holds, a reader gets a record or an error of its own."""

import json
import tempfile

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from demo_optax._src.swarm import records, snapshots
from demo_optax._src.swarm.records import Claim, Damaged, Manifest, Packet, SnapshotIndex
from demo_optax.swarm import ObjectStore

HASHES = st.text("0123456789abcdef", min_size=64, max_size=64)
COUNTS = st.integers(0, 2**31 - 1)
TIMES = st.floats(0, 2**52)


@st.composite
def manifests(draw):
    slots = sorted(draw(st.sets(st.integers(0, 500), min_size=1, max_size=8)))
    packets = tuple(Packet(slot, draw(COUNTS), draw(HASHES)) for slot in slots)
    return Manifest(draw(COUNTS), packets, draw(st.one_of(st.just(""), HASHES)), draw(TIMES))


@hypothesis.given(manifests())
def test_a_manifest_is_read_as_it_was_written(manifest):
    assert Manifest.decode(manifest.encode()) == manifest


@hypothesis.given(st.text(), st.text(), TIMES)
def test_a_claim_is_read_as_it_was_written(worker, nonce, seconds):
    claim = Claim(worker, nonce, seconds)
    assert records.read_claim(records.to_json(claim)) == claim


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | HASHES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=10,
)


@hypothesis.given(manifests(), st.sampled_from(Manifest._fields), VALUES)
def test_a_manifest_with_another_field_is_read_or_damaged(manifest, field, value):
    changed = json.loads(manifest.encode()) | {field: value}
    try:
        found = Manifest.decode(json.dumps(changed).encode())
    except Damaged:
        return
    assert found.packets and all(x.slot >= 0 and len(x.sha256) == 64 for x in found.packets)


READERS = [Manifest.decode, records.read_claim, records.read_index, records.parsed]


@pytest.mark.parametrize("read", READERS)
@hypothesis.given(st.binary() | VALUES.map(lambda x: json.dumps(x).encode()))
def test_anything_else_is_damaged(read, data):
    try:
        found = read(data)
    except Damaged:
        return
    assert found == {} or isinstance(found, dict)  # only an object without fields is no record


@pytest.mark.parametrize("data", [b"[" * 10**5, b'{"time": 1e999}', b"9" * 5000])
@pytest.mark.parametrize("read", READERS[:3])
def test_what_breaks_parsers_is_damaged(read, data):
    with pytest.raises(Damaged):
        read(data)


@pytest.mark.parametrize("file", ["run.json", "snapshots/00000009/x.npz", "/etc/passwd"])
def test_a_snapshot_names_a_file_of_its_own(file):
    index = SnapshotIndex(8, file, "0" * 64, "0" * 64)
    with pytest.raises(Damaged):
        records.read_index(records.to_json(index))


def test_names_that_are_not_ours_are_ignored():
    names = ["notes.txt", "000.000001.here", "000.000001.tmp", "9.1.here", "777.000001.left"]
    assert records.read_folder(names, slots=4) == ({}, frozenset({(0, 1)}), frozenset())
    steps = ["00000042", "00000042.json", "00000042/a/b", "readme.md", "42", "0000004x"]
    assert list(map(records.step_of, steps)) == [42, 42, 42, None, None, None]


@hypothesis.given(
    st.floats(-3, 3), st.sampled_from([np.float32, "bfloat16", np.float16]), st.integers(1, 20)
)
def test_relative_difference(change, dtype, size):
    other = np.full(size, 4.0, dtype)
    own = np.full(size, 4.0 + change, dtype)
    counts = np.arange(3)
    found = snapshots.relative_difference([own, counts], [other, counts + 1])
    expected = np.linalg.norm(own.astype(float) - other.astype(float)) / np.linalg.norm(
        other.astype(float)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-12)


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
        index = snapshots.write(store, 8, leaves)
        found = snapshots.read(store, index, leaves)
    assert [x.dtype for x in found] == [x.dtype for x in leaves]
    assert [x.tobytes() for x in found] == [x.tobytes() for x in leaves]

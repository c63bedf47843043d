"""A bit that flips in one replica is found, named and repaired from the majority."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import demo_optax
from benchmarks import hlo
from demo_optax._src.parallel.replicas import Drift, _checksums, check_replicas, repair_replicas
from tests import model, workers
from tests.workers import mesh_of

FLOATS = ["float32", "bfloat16", "float16", "float8_e4m3fn", "complex64"]
DTYPES = [*FLOATS, "int8", "int16", "int32", "uint32", "bool", "key"]
SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 4)]
HYBRID = ("replica", "fsdp")


def values(dtype, shape, seed=0):
    """Any bits, NaNs of all kinds among them."""
    random = np.random.default_rng(seed)
    if dtype == "key":
        return jax.random.split(jax.random.key(seed), shape)
    if dtype == "bool":
        return random.integers(2, size=shape) > 0
    dtype = jnp.dtype(dtype)
    return np.frombuffer(random.bytes(dtype.itemsize * int(np.prod(shape))), dtype).reshape(shape)


def place(x, mesh, spec=P()):
    return jax.device_put(x, NamedSharding(mesh, spec))


def raw(x):
    """A key's data, or an array itself."""
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def flip(x, device, bit):
    """The array with one bit of one device's buffer turned over."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(flip(raw(x), device, bit), impl=jax.random.key_impl(x))

    def damage(buffer):
        data = bytearray(np.asarray(buffer).tobytes())
        width = 1 if x.dtype == bool else 8
        data[bit // width % len(data)] ^= 1 << bit % width
        return np.frombuffer(bytes(data), x.dtype).reshape(buffer.shape)

    buffers = [
        jax.device_put(damage(s.data), device) if s.device == device else s.data
        for s in x.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, buffers)


def copies(x):
    """The bytes on each device, in the order of the devices."""
    shards = sorted(raw(x).addressable_shards, key=lambda shard: shard.device.id)
    return [np.asarray(shard.data).tobytes() for shard in shards]


def assert_same(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (a.dtype, a.shape, a.sharding) == (b.dtype, b.shape, b.sharding)
        assert copies(a) == copies(b)


def replicated(mesh):
    return {f"{d}{len(s)}": place(values(d, s), mesh) for d in DTYPES for s in SHAPES}


MESH = mesh_of(8)
TREE = replicated(MESH)


@settings(max_examples=60, deadline=None)
@given(leaf=st.sampled_from(list(TREE)), worker=st.integers(0, 7), bit=st.integers(0, 2000))
def test_any_flipped_bit_is_named_and_repaired(leaf, worker, bit):
    harmed = TREE | {leaf: flip(TREE[leaf], MESH.devices[worker], bit)}
    assert check_replicas(harmed, MESH) == (Drift(f"['{leaf}']", worker, (worker,), True),)
    repaired = repair_replicas(harmed, MESH)
    assert_same(repaired, TREE)
    assert all(repaired[name] is TREE[name] for name in TREE if name != leaf)


@pytest.mark.parametrize("dtype", ["float64", "int64", "complex128"])
def test_numbers_of_64_bits(dtype):
    with jax.enable_x64(True):
        x = place(values(dtype, (3, 4)), MESH)
        for bit in (0, 31, 32, 63, 700):
            harmed = flip(x, MESH.devices[3], bit)
            assert check_replicas(harmed, MESH) == (Drift("", 3, (3,), True),)
            assert_same(repair_replicas(harmed, MESH), x)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e5m2", "int8", "int4"])
def test_every_number_of_a_small_dtype_survives_a_repair(dtype):
    bits = jnp.finfo(dtype).bits if "float" in dtype else jnp.iinfo(dtype).bits
    numbers = np.arange(2**bits).astype(f"uint{max(bits, 8)}")
    every = numbers.view(dtype) if bits >= 8 else (numbers.astype(np.int8) - 8).astype(dtype)
    x = place(np.concatenate([every, every[:1]]), MESH)
    other = place(np.concatenate([every, every[1:2]]), MESH)
    harmed = mixed(other, *[x] * 7)
    assert [drift.worker for drift in check_replicas(harmed, MESH)] == [0]
    assert_same(repair_replicas(harmed, MESH), x)


def mixed(*arrays):
    """The array of which each device holds the copy of one of these."""
    buffers = [x.addressable_shards[i].data for i, x in enumerate(arrays)]
    return jax.make_array_from_single_device_arrays(arrays[0].shape, arrays[0].sharding, buffers)


@pytest.mark.parametrize(
    "right, wrong",
    [
        ([0.0, 2.0], [-0.0, 2.0]),
        ([1.0, -1.0], [-1.0, 1.0]),  # both signs flipped, or both elements swapped
        ([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]),
        ([0.0] * 4, [-0.0] * 4),
    ],
)
def test_signs_and_places_count(right, wrong):
    right, wrong = (place(np.float32(x), MESH) for x in (right, wrong))
    harmed = mixed(*[right] * 5, wrong, *[right] * 2)
    assert [drift.worker for drift in check_replicas(harmed, MESH)] == [5]
    assert_same(repair_replicas(harmed, MESH), right)


def test_equal_replicas_drift_nowhere():
    assert check_replicas(TREE, MESH) == ()
    assert all(a is TREE[name] for name, a in repair_replicas(TREE, MESH).items())
    assert check_replicas((), MESH) == check_replicas(place(np.ones((0, 3)), MESH), MESH) == ()


def test_two_workers_drift_each_in_its_own_way():
    x = model.init() | {"steps": jnp.int32(7)}
    x = place(x, MESH)
    harmed = x | {
        "out": flip(flip(x["out"], MESH.devices[6], 3), MESH.devices[1], 99),
        "steps": flip(x["steps"], MESH.devices[6], 0),
    }
    expected = [("['out']", 1), ("['out']", 6), ("['steps']", 6)]
    assert [drift[:2] for drift in check_replicas(harmed, MESH)] == expected
    assert_same(repair_replicas(harmed, MESH), x)


@pytest.mark.parametrize("workers, harmed", [(2, 1), (8, 4), (8, 7)])
def test_without_a_majority_nobody_is_believed(workers, harmed):
    mesh = mesh_of(workers)
    x = place(model.init(), mesh)
    for worker in range(harmed):
        x["bias"] = flip(x["bias"], mesh.devices[worker], worker if harmed == 7 else 5)
    found = check_replicas(x, mesh)
    assert found == tuple(Drift("['bias']", w, (w,), False) for w in range(workers))
    message = r"leaf\['bias'\] differs between the workers \[0, 1.*restore the last checkpoint"
    with pytest.raises(ValueError, match=message):
        repair_replicas(x, mesh)


def hybrid():
    """A mesh of 4 x 2 and arrays that lie on it in each way."""
    mesh = mesh_of(4, 2, names=HYBRID)
    specs = {
        "divided": P(None, "fsdp"),
        "everywhere": P(),
        "momentum": P("replica", None, "fsdp"),
        "second": P("replica"),
    }
    shapes = {"divided": (6, 8), "everywhere": (5,), "momentum": (4, 3, 8), "second": (8, 2)}
    return mesh, {n: place(values("float32", shapes[n]), mesh, specs[n]) for n in specs}


@pytest.mark.parametrize("leaf", ["divided", "everywhere"])
@pytest.mark.parametrize("position", [(0, 0), (2, 1)])
def test_each_device_is_compared_on_a_mesh_with_a_sharded_replica(leaf, position):
    mesh, tree = hybrid()
    assert check_replicas(tree, mesh, "replica") == ()
    harmed = tree | {leaf: flip(tree[leaf], mesh.devices[position], 77)}
    expected = Drift(f"['{leaf}']", position[0], position, True)
    assert check_replicas(harmed, mesh, "replica") == (expected,)
    assert_same(repair_replicas(harmed, mesh, "replica"), tree)


def test_each_part_of_a_divided_leaf_has_a_majority_of_its_own():
    mesh, tree = hybrid()
    x = tree["divided"]
    for position in [(0, 0), (3, 1)]:
        x = flip(x, mesh.devices[position], 30)
    assert {drift.position for drift in check_replicas(x, mesh, "replica")} == {(0, 0), (3, 1)}
    assert_same(repair_replicas(x, mesh, "replica"), tree["divided"])


def test_what_belongs_to_a_worker_is_compared_with_nobody_elses():
    """Of its own two devices' copies none has a majority; the rest is one device's alone."""
    mesh, tree = hybrid()
    harmed = tree | {"momentum": flip(tree["momentum"], mesh.devices[1, 1], 8)}
    assert check_replicas(harmed, mesh, "replica") == ()
    assert repair_replicas(harmed, mesh, "replica")["momentum"] is harmed["momentum"]
    harmed = tree | {"second": flip(tree["second"], mesh.devices[1, 1], 8)}
    expected = tuple(Drift("['second']", 1, (1, i), False) for i in range(2))
    assert check_replicas(harmed, mesh, "replica") == expected
    with pytest.raises(ValueError, match=r"\['second'\] differs between the workers \[1\]"):
        repair_replicas(harmed, mesh, "replica")


def test_workers_along_two_axes_are_counted_like_jax_does():
    mesh, tree = hybrid()
    x = flip(tree["everywhere"], mesh.devices[2, 1], 4)
    for names, worker in {HYBRID: 5, HYBRID[::-1]: 6, "fsdp": 1}.items():
        assert check_replicas(x, mesh, names) == (Drift("", worker, (2, 1), True),)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_every_type_of_mesh_and_a_mesh_in_context(kind):
    mesh = mesh_of(8, kind=jax.sharding.AxisType[kind])
    tree = replicated(mesh)
    harmed = tree | {"key1": flip(tree["key1"], mesh.devices[4], 9)}
    with jax.set_mesh(mesh):
        assert [drift.worker for drift in check_replicas(harmed, mesh)] == [4]
        assert_same(repair_replicas(harmed, mesh), tree)


def test_one_gather_of_a_word_a_leaf(compiled):
    params = place(model.init(), MESH)
    specs = (P(),) * 3
    program = _checksums.lower(tuple(params.values()), MESH, specs).compile().as_text()
    [gather] = hlo.collectives(program)
    assert (gather.kind, gather.dtype, gather.operand_bytes) == ("all-gather", "u32", 4 * 3)
    check_replicas(params, MESH)
    compiled()
    params["out"] = flip(params["out"], MESH.devices[2], 40)
    assert len(check_replicas(params, MESH)) == 1
    assert compiled() == []


@pytest.mark.parametrize("leaf", [np.ones(3), jnp.ones(3), 1.0, place(np.ones(3), mesh_of(4))])
def test_a_leaf_must_lie_on_the_mesh(leaf):
    for function in (check_replicas, repair_replicas):
        with pytest.raises(ValueError, match=r"leaf\['w'\] must be an array on the mesh.*dev"):
            function({"w": leaf}, MESH)


def test_it_is_called_outside_of_jit():
    with pytest.raises(ValueError, match=r"outside of jax.jit"):
        jax.jit(lambda x: check_replicas(x, MESH))(TREE["int321"])


TX = demo_optax.demo(5e-3, demo_optax.Compression(4, 6), decay=0.95, axis_name="data")


def test_training_goes_on_after_a_repair_as_if_nothing_had_happened():
    def placed():
        return place(model.one_matrix(), MESH)

    def train(steps, start=None):
        params, state, metrics = workers.train(
            TX, steps, mesh=MESH, params=placed, loss=model.linear_loss, start=start
        )
        return params, state, [np.asarray(one.loss).tolist() for one in metrics]

    params, state, _ = train(range(4))
    assert check_replicas((params, state), MESH) == ()
    unharmed = train(range(4, 8), (params, state))

    def harmed():
        params, state, _ = train(range(4))
        return params | {"out": flip(params["out"], MESH.devices[5], 22)}, state

    assert check_replicas(harmed(), MESH) == (Drift("[0]['out']", 5, (5,), True),)
    params, state = repair_replicas(harmed(), MESH)
    assert check_replicas((params, state), MESH) == ()
    again = train(range(4, 8), (params, state))
    assert_same(again[:2], unharmed[:2])
    assert again[2] == unharmed[2]

    params, state, losses = train(range(4, 8), harmed())
    found = check_replicas((params, state), MESH)
    assert ("[0]['out']", 5) in {drift[:2] for drift in found}
    assert {drift.worker for drift in found} == {5}
    assert losses != unharmed[2]

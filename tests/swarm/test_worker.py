"""A swarm's workers against the same optimizer over ``shard_map``, and against each other."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax._src.compression import make_plan
from demo_optax._src.compression.packet import Origin, parse_headers
from demo_optax._src.swarm import replicated_state
from demo_optax._src.swarm.programs import division_of, text_of
from demo_optax._src.swarm.records import PacketRef, sha256
from demo_optax.swarm import Member, SwarmError, SwarmWorker
from tests import swarms
from tests.members import put_packet
from tests.sweeps import slow, sweep

pytestmark = pytest.mark.usefixtures("virtual_waits")

OPTIMIZERS = {
    "demo_scaled": lambda **exchange: demo_optax.demo_scaled(1e-2, **exchange),
    "demo": lambda **exchange: demo_optax.demo(
        1e-3, demo_optax.Compression(topk=8, value_coding="int4"), **exchange
    ),
    "demo_adamw": lambda **exchange: demo_optax.demo_adamw(
        1e-3, demo_optax.Compression(topk=8), **exchange
    ),
    "demo_muon": lambda **exchange: demo_optax.demo_muon(1e-2, **exchange),  # looks ahead
}


@sweep("demo_muon", name=OPTIMIZERS)
def test_parameters_are_those_of_shard_map_to_the_last_bit(name, store):
    make, steps = OPTIMIZERS[name], 25
    expected = swarms.over_shard_map(make(exchange=demo_optax.AllGather("data")), steps)
    for digests, _ in swarms.in_a_swarm(store, make(), steps):
        assert list(digests.values()) == expected


SPECS = {"w": P(None, "fsdp"), "v": P("fsdp", None)}
OF_SHARDS = {"number": 2, "shards": 2, "param_specs": SPECS}


@pytest.mark.parametrize(
    ("name", "delay", "settings"),
    [
        ("demo_scaled", 1, {}),
        slow("demo_muon", 1, {}),
        ("demo", 0, OF_SHARDS),
        slow("demo", 1, OF_SHARDS),
    ],
)
def test_a_delay_and_shards_are_those_of_shard_map_to_the_last_bit(name, delay, settings, store):
    make, steps, inner = OPTIMIZERS[name], 20, demo_optax.AllGather("data")
    exchange = demo_optax.Delayed(inner) if delay else inner
    expected = swarms.over_shard_map(make(exchange=exchange), steps, **settings)
    for digests, _ in swarms.in_a_swarm(store, make(), steps, delay=delay, **settings):
        assert list(digests.values())[:steps] == expected


@pytest.mark.parametrize("order", [("fsdp", "tensor"), slow(("tensor", "fsdp"))])
def test_shards_along_two_axes_get_their_own_aggregate(order, store):
    """The order of the axes in the specs is not that of the mesh."""
    mesh = jax.make_mesh((1, 2, 2), ("data", "fsdp", "tensor"), devices=jax.devices()[:4])
    specs = {"w": P(order[0]), "v": P(None, order[1])}
    compression = demo_optax.Compression(topk=64, block_side=8, transform="identity")

    plain_sgd = demo_optax.decoupled(optax.scale(-1.0), compression, decay=0.0, gradient_weight=1.0)

    member = Member(store, "paris", slots=2)
    params, batch = swarms.initial_params(), swarms.batch_of(0, 0)
    gradient = jax.jit(jax.grad(swarms.loss_fn))(params, batch)
    with SwarmWorker(swarms.loss_fn, plain_sgd, mesh, member, param_specs=specs) as worker:
        new_params, opt_state = worker.begin(swarms.initial_params(), batch)
        new_params, _, _ = worker.step(new_params, opt_state, batch)
    for name, x in new_params.items():
        np.testing.assert_allclose(x, params[name] - gradient[name], atol=1e-6)


def test_random_keys_go_to_the_devices_of_several_processes(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    keys = jax.random.split(jax.random.key(1, impl="rbg"), 4)
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    for spec in P(), P("data"):
        sharding = NamedSharding(mesh, spec)
        placed = replicated_state.to_devices({"keys": keys}, {"keys": sharding})["keys"]
        assert placed.dtype == keys.dtype and placed.sharding.is_equivalent_to(sharding, 1)
        assert (jax.random.key_data(placed) == jax.random.key_data(keys)).all()


def test_a_loss_may_loop_from_zeros(store):
    def loss(params, batch):
        total = jax.lax.scan(lambda carry, x: (carry + x.sum(), None), 0.0, batch[0])[0]
        return swarms.loss_fn(params, batch) + 0 * total

    member = Member(store, "worker-0", slots=4)
    mesh, tx = swarms.mesh_of_worker(0, 1), swarms.DEMO_SCALED
    with SwarmWorker(loss, tx, mesh, member) as worker:
        swarms.begin(worker)


def test_a_packet_is_sealed_with_its_workers_slot(store):
    Member(store, "worker-1", slots=4)  # which takes slot 0
    with swarms.make_worker(swarms.DEMO_SCALED, store, 0, deadline=0.1) as worker:
        params, opt_state = swarms.begin(worker)
        worker.step(params, opt_state, swarms.batch_of(0, 0))
    (said,) = worker.member._steps.sent(0, [1]).values()
    packet = np.frombuffer(said.payload, np.uint32)
    compression, shapes = swarms.DEMO_SCALED.compression, map(np.shape, jax.tree.leaves(params))
    layout = swarms.DEMO_SCALED.exchange.layout(make_plan(compression, tuple(shapes)))
    rows = Origin(jnp.int32(0), jnp.arange(3, dtype=jnp.int32))
    *_, intact = jax.jit(parse_headers, static_argnums=0)(layout, np.stack([packet] * 3), rows)
    assert worker.member.slot == 1 and intact.tolist() == [False, True, False]


def mesh_of(shape, names):
    return jax.make_mesh(shape, names, devices=jax.devices()[: np.prod(shape)])


def test_who_divides_the_parameters_otherwise_is_refused(store):
    with swarms.make_worker(swarms.DEMO_SCALED, store, 0) as one:
        swarms.begin(one)
    settings = {"shards": 2, "param_specs": SPECS}
    with (
        swarms.make_worker(swarms.DEMO_SCALED, store, 1, **settings) as other,
        pytest.raises(SwarmError, match=r"number of shards is 1 there and 2 \(divided as "),
    ):
        swarms.begin(other)


def test_workers_of_unlike_meshes_train_together_if_their_optimizers_are_equal(store):
    ends = {}
    for number, (rate, shards) in enumerate([(1e-2, 1), (1e-2, 2), (2e-2, 2)]):
        tx = demo_optax.demo_scaled(rate)
        with swarms.make_worker(tx, store, number, shards=shards) as worker:
            if rate > 1e-2:
                with pytest.raises(SwarmError, match=r"optimizer is .* there and"):
                    swarms.begin(worker)
                continue
            (ends[number], _), *_ = swarms.take_steps(worker, 3)
    for name, x in ends[0].items():
        np.testing.assert_allclose(ends[1][name], x, atol=1e-6)


def test_the_division_of_parameters_has_no_names_of_axes_or_devices():
    params = {"w": np.zeros((8, 4)), "b": np.zeros(3)}
    two = mesh_of((1, 2), ("data", "fsdp"))

    def of(mesh, spec):
        return division_of(mesh, params, {"w": spec, "b": P()})

    rows = of(two, P("fsdp"))
    assert of(two, P()) == of(mesh_of((1, 1), ("data", "fsdp")), P("fsdp")) == "1"
    assert rows == of(mesh_of((2, 1), ("t", "d")), P("t")) == of(two, P("fsdp", None))
    assert rows == of(mesh_of((1, 2, 2), ("data", "batch", "fsdp")), P("fsdp"))
    four = mesh_of((1, 2, 2), ("data", "a", "b"))
    divided = [of(four, P(*x)) for x in [("a", "b"), ("b", "a"), (("a", "b"),), (("b", "a"),)]]
    assert len({rows, of(two, P(None, "fsdp")), *divided}) == 6


def test_the_text_of_an_optimizer_has_the_values_of_its_settings_and_no_names_of_axes():
    def text(rate, names=("data",), link=None):
        tx = demo_optax.demo(rate, precondition=link)
        return text_of(tx, {"w": np.zeros((8, 4), np.float32)}, 2, jax.devices()[0], names)

    def over(axis):
        return optax.stateless(lambda g, _: jax.tree.map(lambda x: jax.lax.psum(x, axis), g))

    assert text(1e-2) == text(1e-2, ("data", "fsdp")) != text(2e-2)
    assert text(1e-2, ("data", "x"), over("x")) == text(1e-2, ("y", "data"), over("y"))
    tables = [jnp.linspace(rate, 1e-4, 100) for rate in (1e-2, 2e-2)]
    one, other = [text(lambda count, x=x: x[count]) for x in tables]
    assert one != other


def test_the_text_of_an_optimizer_is_that_of_its_devices_platform(monkeypatch):
    """Large models are divided into fewer parts on a GPU."""
    tx = demo_optax.demo(1e-3, demo_optax.Compression(1, transform="identity"))
    params = {str(n): jax.ShapeDtypeStruct((1024, 1024), np.float32) for n in range(6)}
    texts = [text_of(tx, params, 2, jax.devices()[0], ())]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    texts.append(text_of(tx, params, 2, jax.devices()[0], ()))
    assert texts[0] == texts[1]


def test_a_packet_with_a_wrong_checksum_counts_for_nobody_and_is_told_once(store):
    told = []
    with swarms.make_worker(swarms.DEMO_SCALED, store, 0, deadline=0.1) as worker:
        other, skips = (Member(store, name, slots=4) for name in ("other", "skips"))
        worker.member.tell = told.append
        state, size = swarms.begin(worker), worker._programs.packet_bytes
        for step in range(4):
            data = np.full(size // 4, step + 1, np.uint32).tobytes()
            put_packet(store, step, PacketRef(*other.me, sha256(data)), data)
            put_packet(store, step, PacketRef(*skips.me, sha256(data), steps=0), data)
            state, _, metrics = swarms.take_steps(worker, step + 1, state)
            assert metrics[0].members == ("worker-0", "other")
            assert metrics[0].skipped == ("skips",)
            assert metrics[0].exchange.participants == 1
    (line,) = [line for line in told if "checksum" in line]
    assert line.startswith("step 0: 1 of the packets of worker-0, other counted for nobody")

"""Bytes and seconds: the paper's table, the command, and what other programs send."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import demo_optax
from benchmarks import hlo
from demo_optax import Compression, accounting
from demo_optax._src import axes
from demo_optax._src.compression import make_plan
from demo_optax.accounting import preset_shapes
from tests.sweeps import sweep
from tests.workers import mesh_of

# Peng et al., version 2: MB per step and worker, as printed there (truncated).
PAPER = {
    "300m": {32: "29.9", 16: "14.9", 8: "7.49", 4: "3.74", 2: "1.87", 1: "0.93"},
    "1b": {32: "110.32", 16: "55.16", 8: "27.58", 4: "13.79", 2: "6.89", 1: "3.44"},
}
GATHER, TWO_PHASE = demo_optax.AllGather("data"), demo_optax.TwoPhase("data")
PARAMETERS = {"300m": 319_946_752, "1b": 1_176_764_416}


@pytest.mark.parametrize("preset", PAPER)
def test_the_papers_byte_table_digit_for_digit(preset):
    shapes = preset_shapes(preset)
    assert demo_optax.dense_bytes(shapes, 1) == PARAMETERS[preset]
    for k, printed in PAPER[preset].items():
        digits = len(printed.split(".")[1])
        size = demo_optax.reference_bytes(shapes, topk=k, block_side=64)
        assert math.floor(size / 10 ** (6 - digits)) / 10**digits == float(printed)


def test_300m_with_four_bits_is_five_hundred_times_smaller_than_the_papers_adamw():
    size = demo_optax.packet_bytes(Compression(topk=8, value_coding="int4"), preset_shapes("300m"))
    assert size <= 1_260_000 + 512
    assert 636.9e6 / size > 500


@pytest.mark.parametrize(
    ("settings", "per_block"),
    [
        (dict(topk=8, value_coding="int4"), 8 * 4 + 10 + (8 * 9 + 8 + 8 - 1)),
        (dict(topk=8, value_coding="sign"), 8 + 10 + (8 * 9 + 8 + 8 - 1)),
        (dict(topk=1, value_coding="bfloat16"), 16 + 12),
        (dict(topk=2048, value_coding="int8"), 2048 * 8 + 10 + 4096),
        (dict(topk=4096, value_coding="float32"), 4096 * 32),
        (dict(topk=8, value_coding="int8", selection="random"), 8 * 8 + 10),
    ],
)
def test_packets_are_as_large_as_the_sum_of_their_bits(settings, per_block):
    params = {"w": jax.ShapeDtypeStruct((512, 2048), jnp.bfloat16)}  # 256 blocks: whole words
    expected = 20 + 256 * per_block / 8
    packet = demo_optax.packet_bytes(Compression(**settings), params)
    assert packet == 512 * math.ceil(expected / 512)  # TPUs gather multiples of 128 words


def shapes(**of_params):
    return {n: jax.ShapeDtypeStruct(shape, jnp.float32) for n, shape in of_params.items()}


@pytest.mark.parametrize(("sites", "each"), [(1, 4), (2, 1), (2, 4), (3, 2)])
def test_the_uplink_of_a_site_carries_what_its_workers_and_those_elsewhere_exchange(sites, each):
    """Counted worker by worker: a ring in the order of the sites, or straight to each owner."""
    params, small, workers = shapes(w=(512, 256)), Compression(topk=8), sites * each
    site_of = [number // each for number in range(workers)]
    crossings = sum(site_of[n] == 0 != site_of[(n + 1) % workers] for n in range(workers))
    straight = sum(site_of[m] == 0 != site_of[n] for m in range(workers) for n in range(workers))
    packet = demo_optax.packet_bytes(small, params)
    counted = functools.partial(accounting.uplink_bytes, params=params, sites=sites)
    assert counted(small, workers_per_site=each) == crossings * packet * (workers - 1)
    traffic = TWO_PHASE.traffic(make_plan(small, ((512, 256),)), workers)
    of_one = traffic.direct / (workers - 1)
    results = (workers - 1) * (traffic.sent - workers * of_one)
    expected = straight * of_one + crossings * results
    assert counted((small, TWO_PHASE), workers_per_site=each) == pytest.approx(expected)
    dense = 4 * 512 * 256 * 2 * (workers - 1) / workers
    assert counted("float32", workers_per_site=each) == pytest.approx(crossings * dense)
    in_rounds = counted("float32", workers_per_site=each, local_steps=10)
    assert in_rounds == pytest.approx(crossings * dense / 10)


WITHOUT_AXIS = {
    "demo": lambda axis=None: demo_optax.demo(1e-3, Compression(topk=8), axis_name=axis),
    "rounds": lambda axis=None: demo_optax.local_steps(
        optax.adam(1e-3), WITHOUT_AXIS["demo"](axis), 5, axis_name=axis
    ),
}


@pytest.mark.parametrize("name", WITHOUT_AXIS)
def test_the_bytes_of_an_optimizer_without_an_axis_are_those_of_its_packet(name):
    make, params = WITHOUT_AXIS[name], shapes(w=(64, 64), b=(64,))
    words = jax.eval_shape(make().empty_outbox, params).packet.shape
    assert demo_optax.packet_bytes(make(), params) == 4 * words[0] > 20
    mesh = AbstractMesh((2, 2), ("data", "fsdp"))
    on_shards = params, "data", mesh, {"w": P("fsdp"), "b": P("fsdp")}
    of_a_collective = demo_optax.packet_bytes(make("data"), *on_shards)
    assert demo_optax.packet_bytes(make(), *on_shards) == of_a_collective


@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(1.0),
        optax.chain(optax.clip_by_global_norm(1.0), demo_optax.demo(1e-3)),
        demo_optax.local_steps(optax.sgd(1.0), demo_optax.demo(1e-3), 4, fragments=2),
    ],
    ids=["sgd", "chain", "fragments"],
)
def test_what_exchanges_over_no_axis_has_no_bytes(tx):
    with pytest.raises(ValueError, match="must exchange over that axis"):
        demo_optax.packet_bytes(tx, shapes(w=(8, 8)))


def by(exchange):
    return demo_optax.demo(1e-3, Compression(topk=8, value_coding="int4"), exchange=exchange)


DENSE = optax.chain(demo_optax.mean_over_workers("data"), optax.adam(1e-3))
in_rounds = functools.partial(demo_optax.local_steps, optax.adam(1e-3), axis_name="data")
OPTIMIZERS = {
    "gather": by(GATHER),
    "delayed": by(demo_optax.Delayed(GATHER)),
    "two phases": by(TWO_PHASE),
    "two phases of known positions": demo_optax.demo(
        1e-3, Compression(topk=8, selection="striding"), exchange=TWO_PHASE
    ),
    "delayed two phases of few": by(demo_optax.Delayed(demo_optax.TwoPhase("data", topk_back=3))),
    "dense": DENSE,
    "injected": optax.inject_hyperparams(lambda rate: demo_optax.demo(rate, axis_name="data"))(0.1),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.masked(by(GATHER), True)),
    "both": optax.partition({"a": by(GATHER), "b": by(TWO_PHASE)}, {"w": "a", "b": "b"}),
    "rounds": in_rounds(by(TWO_PHASE), 4),
    "dense rounds": in_rounds(DENSE, 4),
    "fragments": in_rounds(by(TWO_PHASE), 4, fragments=2),
    "accumulated": demo_optax.multi_steps(by(GATHER), 4, axis_name="data"),
}


GATHERED, DEALT, SUMMED = ("all-gather", "u32"), ("all-to-all", "u32"), ("all-reduce", "f32")
KINDS = {name: {GATHERED} for name in OPTIMIZERS}
KINDS |= {name: {GATHERED, DEALT} for name in OPTIMIZERS if "two phases" in name}
KINDS |= {name: {GATHERED, DEALT} for name in ("both", "rounds", "fragments")}
KINDS |= {name: {SUMMED} for name in ("dense", "dense rounds")}


@sweep("dense rounds", "fragments", "two phases of known positions", name=OPTIMIZERS)
def test_counted_bytes_are_those_of_the_compiled_collectives(name):
    tx, mesh, batch = OPTIMIZERS[name], mesh_of(4), np.ones((8, 100), np.float32)
    params = {"w": jnp.zeros((100, 64)), "b": jnp.zeros(64)}
    loss_fn = lambda params, x: jnp.mean((x @ params["w"] + params["b"][None] - 1) ** 2)  # noqa: E731
    step = demo_optax.make_train_step(loss_fn, tx, mesh)
    args = params, demo_optax.init_opt_state(tx, params, mesh), batch
    lowered = step.lower(*args)
    found = hlo.collectives(lowered.compile().as_text())
    assert {(one.kind, one.dtype) for one in found} == KINDS[name]
    sent = sum(one.operand_bytes for one in found)
    assert demo_optax.packet_bytes(tx, params, workers=4) == sent > 0
    assert step(*args)[2].packet_bytes == sent
    if "two phases" in name:
        way = dict(exchange=tx.exchange, workers=4)
        assert demo_optax.packet_bytes(tx.compression, params, **way) == sent
        received = [one.operand_bytes / {"all-to-all": 4}.get(one.kind, 1) for one in found]
        times = accounting.step_times(params, (tx.compression, tx.exchange), 4, 1e9)
        assert times["DeMo"].wire == 3 * sum(received)


def operand():
    return jax.lax.axis_index("data").astype(jnp.uint32) * jnp.ones(1024, jnp.uint32)


def pass_on(x):
    return jax.lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)])


@jax.custom_vjp
def passed_on(x):
    return pass_on(x)


passed_on.defvjp(lambda x: (pass_on(x), None), lambda _, gradient: (gradient,))

COLLECTIVES = {
    "psum": lambda: jax.lax.psum((operand(), operand()[:8]), "data"),
    "pmax": lambda: jax.lax.pmax(operand(), "data"),
    "all_gather": lambda: jax.lax.all_gather(operand(), "data"),
    "invarying": lambda: jax.lax.all_gather(operand(), "data", to="invarying"),
    "of pairs": lambda: jax.lax.all_gather(operand(), "data", axis_index_groups=[[0, 1], [2, 3]]),
    "psum_scatter": lambda: jax.lax.psum_scatter(operand(), "data", tiled=True),
    "all_to_all": lambda: jax.lax.all_to_all(operand().reshape(4, 256), "data", 0, 0),
    "ppermute": lambda: pass_on(operand()),
    "jit": lambda: jax.jit(pass_on)(operand()),
    "checkpoint": lambda: jax.checkpoint(pass_on)(operand()),
    "custom_vjp": lambda: passed_on(operand()),
    "vmap": lambda: jax.vmap(pass_on)(operand().reshape(4, 256)),
    "none": lambda: jax.lax.while_loop(lambda x: jnp.all(x < 5), lambda x: x + 1, operand()),
}


def traced(fn, mesh):
    """The program of a worker on a mesh."""

    def worker():
        fn()
        return jnp.zeros(())

    return jax.make_jaxpr(jax.shard_map(worker, mesh=mesh, in_specs=(), out_specs=P()))()


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_count_as_in_the_compiled_program(name):
    program = traced(COLLECTIVES[name], AbstractMesh((4,), ("data",)))
    counted = axes.bytes_handed_over(program, "data")

    def worker():
        return jax.tree.map(lambda x: x[None], COLLECTIVES[name]())

    spread = jax.shard_map(
        worker, mesh=mesh_of(4), in_specs=(), out_specs=P("data"), check_vma=False
    )
    found = hlo.collectives(jax.jit(spread).lower().compile().as_text())
    assert counted == sum(one.operand_bytes for one in found)
    assert (counted > 0) == (name != "none")


def choose(number, *branches):
    return jax.lax.switch(number, branches, operand())


CONTROL_FLOW = {
    "scan": (3, lambda: jax.lax.scan(lambda x, _: (pass_on(x), None), operand(), length=3)),
    "fori_loop": (3, lambda: jax.lax.fori_loop(0, 3, lambda _, x: pass_on(x), operand())),
    "switch": (2, lambda: choose(0, pass_on, lambda x: pass_on(pass_on(x)), lambda x: x)),
    "both": (
        6,
        lambda: jax.lax.scan(
            lambda x, _: (choose(x[0], lambda x: x, lambda x: pass_on(pass_on(x))), None),
            operand(),
            length=3,
        ),
    ),
    "unused sizes": (
        1,
        lambda: jax.lax.ragged_all_to_all(
            operand(), operand(), *[operand()[:4].astype(jnp.int32)] * 4, axis_name="data"
        ),
    ),
    "another axis": (0, lambda: jax.lax.psum(jnp.ones(8), "inside")),
    "both axes": (
        1,
        lambda: jax.lax.psum(axes.as_varying(operand(), "inside"), ("data", "inside")),
    ),
}


@pytest.mark.parametrize("name", CONTROL_FLOW)
def test_every_pass_counts_and_the_largest_branch(name):
    times, fn = CONTROL_FLOW[name]
    program = traced(fn, AbstractMesh((4, 2), ("data", "inside")))
    assert axes.bytes_handed_over(program, "data") == times * 4096


def scatter_and_gather(x):
    part = jax.lax.psum_scatter(x, "data", tiled=True) / 4
    return jax.lax.all_gather(part, "data", tiled=True, to="invarying")


def test_a_mean_of_ones_own_counts_in_the_step_too():
    params, mesh = {"w": np.ones(256, np.float32)}, mesh_of(4)
    mean = optax.stateless(lambda gradient, _: jax.tree.map(scatter_and_gather, gradient))
    tx = optax.chain(mean, optax.sgd(1e-2))
    step = demo_optax.make_train_step(lambda params, x: jnp.mean(x @ params["w"]), tx, mesh)
    opt_state = demo_optax.init_opt_state(tx, params, mesh)
    *_, metrics = step(params, opt_state, np.ones((8, 256), np.float32))
    assert metrics.packet_bytes == 4 * 256 + 4 * 256 // 4
    assert metrics.packet_bytes == demo_optax.packet_bytes(tx, params, workers=4)


def test_a_single_worker_sends_nothing():
    params = shapes(w=(64, 64), b=(64,))
    compression = Compression(topk=8)
    alone = demo_optax.demo(1e-3, compression)
    locally = demo_optax.local_steps(optax.adam(1e-3), alone, every=5)
    for tx in alone, locally, optax.adam(1e-3), compression:
        assert demo_optax.packet_bytes(tx, params, axis_name=None) == 0
    by_none = demo_optax.AllGather(None)
    assert demo_optax.packet_bytes(compression, params, exchange=by_none) == 0


def test_bytes_are_those_of_one_worker_whatever_its_axes_and_the_mesh_in_context():
    params = {"w": jnp.ones((8, 8))}
    of_two_axes = demo_optax.demo(1e-3, Compression(2, 4), axis_name=("rows", "columns"))
    tx = demo_optax.demo(1e-3, Compression(2, 4), axis_name="data")
    expected = demo_optax.packet_bytes(tx, params, workers=4)
    assert demo_optax.packet_bytes(of_two_axes, params, ("rows", "columns"), workers=4) == expected
    with jax.set_mesh(mesh_of(2, 2)):
        assert demo_optax.packet_bytes(tx, params, workers=4) == expected


def test_step_times_add_up():
    params = jax.ShapeDtypeStruct((1000, 1000), jnp.float32)
    settings = {"k=8": Compression(topk=8), "k=1": Compression(topk=1)}
    times = demo_optax.accounting.step_times(
        params, settings, 16, bandwidth=1e8, latency=0.01, compute_time=2.0
    )
    dense, packet = times["AdamW, float32"], times["k=8"]
    assert dense.transfer == pytest.approx(2 * 4e6 * 15 / 16 * 8 / 1e8)
    assert dense.waiting == pytest.approx(30 * 0.01)
    assert packet.packet == demo_optax.packet_bytes(settings["k=8"], params)
    assert packet.wire == 15 * packet.packet
    assert packet.step == pytest.approx(2.0 + packet.transfer + packet.waiting)
    at_that = demo_optax.accounting.step_times(
        params, settings, 16, packet.hiding_bandwidth, 0.01, 2.0
    )["k=8"]
    assert at_that.transfer + at_that.waiting == pytest.approx(2.0)
    assert times["k=1"].step < packet.step < times["AdamW, bfloat16"].step < dense.step
    rounds = demo_optax.accounting.step_times(params, settings, 16, 1e8, 0.01, 2.0, local_steps=5)
    for name, time in {"DiLoCo, float32": dense, "k=8": packet}.items():
        assert rounds[name].packet == time.packet
        assert rounds[name].wire == pytest.approx(time.wire / 5)
        assert rounds[name].step - 2.0 == pytest.approx((time.step - 2.0) / 5)
    assert rounds["AdamW, float32"] == dense
    alone = demo_optax.accounting.step_times(params, settings, 1, 1e8, 0.01, 2.0)
    assert {time.step for time in alone.values()} == {2.0}
    with pytest.raises(ValueError, match="workers must be at least 1, not 0"):
        demo_optax.accounting.step_times(params, settings, 0, 1e8)


def test_delays_hide_and_phases_do_not_grow():
    params = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    compression, delayed = Compression(topk=8), demo_optax.Delayed(TWO_PHASE)
    settings = {
        "gather": compression,
        "gather too": (compression, GATHER),
        "two phases": (compression, TWO_PHASE),
        "delayed": (compression, delayed),
    }

    def times(workers, **options):
        return demo_optax.accounting.step_times(
            params, settings, workers, 1e8, 0.01, 9.0, **options
        )

    few, many = times(16), times(512)
    assert few["gather"] == few["gather too"]
    assert many["gather"].wire > 30 * few["gather"].wire
    assert many["two phases"].wire < min(1.5 * few["two phases"].wire, many["gather"].wire / 10)
    traffic = TWO_PHASE.traffic(make_plan(compression, ((4096, 4096),)), 16)
    assert few["two phases"].wire == round(traffic.received)
    assert few["two phases"].waiting == pytest.approx(2 * few["gather"].waiting)
    assert few["delayed"]._replace(overlaps=False) == few["two phases"]
    assert few["delayed"].step == 9.0 < few["two phases"].step
    rounds = times(16, local_steps=4)  # which waits at the end of a round all the same
    assert rounds["delayed"] == rounds["two phases"]


@pytest.mark.parametrize(
    "written, groups",
    [
        ("{{0,2},{1,3}}", ((0, 2), (1, 3))),
        ("[2,2]<=[4]", ((0, 1), (2, 3))),
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}", ((0, 1), (2, 3))),
        ("{}", ((0, 1, 2, 3),)),
    ],
)
def test_groups_of_devices_in_every_way_that_programs_write_them(written, groups):
    line = f"%x.1 = u32[2,8]{{1,0}} all-gather(%y), channel_id=1, replica_groups={written}, d={{0}}"
    (found,) = hlo.collectives(f"HloModule m, num_partitions=4\n{line}")
    assert found.groups == groups
    mesh = mesh_of(2, 2, names=("replica", "fsdp"))
    assert found.crosses(mesh, "replica") == (groups != ((0, 1), (2, 3)))
    assert found.crosses(mesh, ("replica", "fsdp"))


def test_groups_that_cannot_be_read_are_no_guess():
    with pytest.raises(ValueError, match="not known here"):
        hlo.collectives("%x = u32[8] all-gather(%y), replica_groups=@somewhere, d={0}")

"""Workers that come late, go, are stopped, differ, or bring other settings."""

import dataclasses
import threading
import time
from unittest import mock

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax import Compression
from demo_optax._src.swarm import records, snapshot_turns, snapshots
from demo_optax._src.swarm.snapshot_turns import SnapshotTurns
from demo_optax.swarm import Member, SwarmError
from tests import swarms
from tests.sweeps import slow, sweep

pytestmark = pytest.mark.usefixtures("virtual_waits")

DELAYS = sweep(1, delay=[0, 1])


def make(store, number, tx=swarms.DEMO_SCALED, **settings):
    settings = {"deadline": 1.0, "snapshot_every": 4} | settings
    return swarms.make_worker(tx, store, number, **settings)


def both(first, second, until, states=(None, None), batches=swarms.batch_of):
    return swarms.both(first, second, until, states, (batches, batches))


slow_batch_of = swarms.slowly(0.02)


@DELAYS
def test_a_newcomer_replays_and_takes_part(store, delay):
    first = make(store, 0, delay=delay)
    state, before, _ = swarms.take_steps(first, 11)
    second = make(store, 1, delay=delay)
    begun = swarms.begin(second)
    assert second.number in (11, 12)  # with a delay the twelfth is decided in a thread
    states = state, begun
    (_, alone, metrics), (_, joined, of_second) = both(first, second, 30, states, slow_batch_of)
    by_step = swarms.require_equal(before | alone, joined)
    assert len(by_step[30]) == 2
    assert set(metrics[-1].members) == {"worker-0", "worker-1"} == set(of_second[-1].members)
    assert int(metrics[-1].exchange.participants) == 2


def noisy():
    base = optax.chain(optax.add_noise(1e-3, 0.5, key=jax.random.key(3)), optax.sgd(1e-2))
    preconditioner = optax.add_noise(1e-4, 0.5, key=jax.random.key(4))
    return demo_optax.decoupled(base, precondition=preconditioner)


@DELAYS
def test_a_newcomer_draws_the_random_numbers_of_the_others(store, delay):
    """The states of links that hold keys go through snapshots, for workers of two shards each."""
    settings = {"delay": delay, "shards": 2, "param_specs": {"w": P(None, "fsdp"), "v": P("fsdp")}}
    tx = noisy()
    first = make(store, 0, tx, **settings)
    state, before, _ = swarms.take_steps(first, 7)
    second = make(store, 1, tx, **settings)
    begun = swarms.begin(second)
    (_, alone, _), (_, joined, metrics) = both(first, second, 16, (state, begun), slow_batch_of)
    by_step = swarms.require_equal(before | alone, joined)
    assert any(len(x) == 2 for x in by_step.values())
    assert max(len(x.members) for x in metrics) == 2


@sweep("others", mesh=["own", "others"])
def test_the_mesh_of_the_context_does_not_matter(mesh, store):
    devices = jax.devices()[: 1 if mesh == "own" else 8]
    tx = demo_optax.demo_scaled(1e-2)  # its own, for which everything is compiled anew
    with jax.set_mesh(jax.make_mesh((len(devices),), ("data",), devices=devices)):
        _, digests, _ = swarms.take_steps(make(store, 0, tx, delay=1), 6)
    assert len(digests) == 7


def test_all_processes_hear_of_a_store_that_fails(store, monkeypatch):
    """What the first process of a worker asks the store for, it asks for inside of ``by_lead``."""
    heard, asked = [False], set()

    def by_lead(fn):
        heard[0] = True
        try:
            return fn()
        finally:
            heard[0] = False

    def watched(kind, name):
        method = getattr(kind, name)

        def ask(*args):
            if threading.current_thread() is threading.main_thread():
                assert heard[0], name
                asked.add(name)
            return method(*args)

        monkeypatch.setattr(kind, name, ask)

    swarms.take_steps(make(store, 0, snapshot_every=6), 5)  # for another one to replay
    monkeypatch.setattr("demo_optax._src.swarm.worker.by_lead", by_lead)
    monkeypatch.setattr("demo_optax._src.swarm.worker.READ_AT_ONCE", 2)
    names = {"announce", "manifest", "read_ahead", "receive", "name_of"}
    for name in names:
        watched(Member, name)
    watched(SnapshotTurns, "take")
    swarms.take_steps(make(store, 1, snapshot_every=6), 7)
    assert asked == names | {"take"}


@DELAYS
def test_one_that_was_stopped_catches_up_and_counts_again(store, delay):
    first, second = make(store, 0, delay=delay), make(store, 1, delay=delay)
    (state, _, _), (stopped, _, _) = both(first, second, 6)
    state, alone, _ = swarms.take_steps(first, 9, state)
    states = state, stopped
    (_, of_first, _), (_, of_second, metrics) = both(first, second, 30, states, slow_batch_of)
    by_step = swarms.require_equal(alone | of_first, of_second)
    assert len(by_step[30]) == 2
    assert metrics[0].replayed + metrics[1].replayed >= 1
    assert set(metrics[-1].members) == {"worker-0", "worker-1"}


@DELAYS
def test_one_whose_packets_were_swept_jumps_to_a_snapshot(store, delay):
    first, second = make(store, 0, delay=delay), make(store, 1, delay=delay)
    (state, alone, _), (stopped, _, _) = both(first, second, 6)
    while first.number < 16 or store.names("packets/00000006") or store.names("packets/00000005"):
        state, more, _ = swarms.take_steps(first, first.number + 5, state)
        alone |= more
    until = first.number
    stopped, woken, metrics = swarms.take_steps(second, until + 1, stopped)
    assert metrics[0].replayed < 6 < until - 7  # not all that it missed, since it jumped
    states = state, stopped
    (_, of_first, _), (_, of_second, _) = both(first, second, until + 15, states, slow_batch_of)
    by_step = swarms.require_equal(alone | of_first, woken | of_second)
    assert len(by_step[until + 15]) == 2


@DELAYS
def test_all_come_back_where_they_were_and_go_on(store, delay):
    first, second = make(store, 0, delay=delay), make(store, 1, delay=delay)
    (_, of_first, _), (_, of_second, _) = both(first, second, 8)
    before = swarms.require_equal(of_first, of_second)
    for worker in first, second:
        worker.close()  # with a delay the exchange of the last step may never be decided
    again = make(store, 1, delay=delay)
    params, opt_state = swarms.begin(again)
    assert again.number == 8 + delay or again.number == 8
    assert again.number > 8 or swarms.digest(params) in before[8].values()
    _, after, _ = swarms.take_steps(again, 16, (params, opt_state))
    assert max(after) == 16


def nothing_finite(worker, step):
    x, y = swarms.batch_of(worker, step)
    return (x * np.nan if worker == 1 and step in (3, 4) else x), y


@DELAYS
def test_a_gradient_that_is_not_finite_is_not_sent(store, delay):
    settings = {"min_workers": 2, "deadline": 20.0, "delay": delay}
    workers = [make(store, number, **settings) for number in range(2)]
    results = swarms.all_take_steps(workers, 12, batches=nothing_finite)
    swarms.require_equal(*[digests for _, digests, _ in results])
    participants = [int(x.exchange.participants) for x in results[0][2]]
    assert participants[1 if delay else 0 :] == [2, 2, 2, 1, 1, 2, 2, 2, 2, 2, 2, 2]
    (params, _), _, _ = results[1]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))


def plain_mean():
    """All coefficients of the gradient, so that the aggregate is the weighted mean."""
    compression = Compression(topk=64, block_side=8, transform="identity")
    return demo_optax.decoupled(optax.scale(-1.0), compression, decay=0.0, gradient_weight=1.0)


def test_messages_are_weighed(store):
    weights = 1.0, 3.0, 0.5
    settings, tx = {"deadline": 20.0, "min_workers": 3}, plain_mean()
    workers = [make(store, n, tx, weight=weight, **settings) for n, weight in enumerate(weights)]
    results = swarms.all_take_steps(workers, 1)
    params, gradient = swarms.initial_params(), jax.jit(jax.grad(swarms.loss_fn))
    gradients = [gradient(params, swarms.batch_of(n, 0)) for n in range(3)]

    def expected(x, *each):
        mean = sum(w * np.float64(g) for w, g in zip(weights, each, strict=True)) / sum(weights)
        return np.float64(x) - mean

    wanted = jax.tree.map(expected, params, *gradients)
    for (new_params, _), _, _ in results:
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-6), new_params, wanted)


@pytest.mark.parametrize(
    ("factor", "delay", "drift", "is_replaced"),
    [
        pytest.param(1.001, 1, (1e-5, 2e-3), True, id="a little"),
        slow(1.001, 0, (1e-5, 2e-3), True, id="a little, without delay"),
        pytest.param(np.nan, 0, (0.0, np.inf), True, id="not finite"),
        pytest.param(2.0, 0, (0.1, 1.0), False, id="more than rounding explains"),
    ],
)
def test_parameters_that_differ_are_replaced_at_the_next_snapshot_or_told(
    store, factor, delay, drift, is_replaced, monkeypatch
):
    monkeypatch.setattr(snapshot_turns, "POLL_SECONDS", 0.02)  # between looks for the snapshot
    settings = {"min_workers": 2, "deadline": 20.0, "delay": delay, "snapshot_every": 10}
    first, second = (make(store, number, **settings) for number in range(2))
    said = []
    first.member.tell = second.member.tell = said.append
    (state, _, _), ((params, opt_state), _, _) = both(first, second, 5)
    states = state, (jax.tree.map(lambda x: x * factor, params), opt_state)
    (_, of_first, metrics), (_, of_second, of_other) = both(
        first, second, 60, states, slow_batch_of
    )
    drifts = [x.drift for x in [*metrics, *of_other] if x.drift is not None]
    assert of_first[6] != of_second[6]
    assert all(drift[0] <= x <= drift[1] or np.isnan(x) for x in drifts if x != 0.0)
    assert (of_first[60] == of_second[60]) == (0.0 in drifts) == is_replaced
    assert any("stop the worker that is wrong" in line for line in said) != is_replaced
    assert np.isfinite(np.frombuffer(of_second[60], np.float32)).all()


FEWER = dataclasses.replace(swarms.DEMO_SCALED.compression, topk=4)
LIMITED = demo_optax.AllGather(norm_limit=2.0)


def scaled(**settings):
    return demo_optax.demo_scaled(**{"learning_rate": 1e-2} | settings)


@pytest.mark.parametrize(
    ("other", "settings", "message"),
    [
        (scaled(learning_rate=2e-2), {}, "optimizer is"),
        slow(scaled(decay=0.5), {}, "optimizer is"),
        (scaled(compression=FEWER), {}, r"compression is Compression\(topk=32.*\(topk=4"),
        (scaled(exchange=LIMITED), {}, r"AllGather.*norm_limit=None, gather=None\) there"),
        (swarms.DEMO_SCALED, {"snapshot_every": 7}, "snapshot_every is 100 there"),
        (swarms.DEMO_SCALED, {"slots": 5}, "slots is 4 there and 5 here"),
        (swarms.DEMO_SCALED, {"facts": {"--seed": 2}}, "--seed is missing there"),
    ],
)
def test_another_run_in_the_same_place_is_refused(store, other, settings, message):
    """All but another program are refused before anything is compiled."""
    swarms.begin(make(store, 0, snapshot_every=100))
    second = make(store, 1, other, **{"snapshot_every": 100} | settings)
    refused = pytest.raises(SwarmError, match=f"the run there has other settings: .*{message}")
    with mock.patch.object(second, "_compile", wraps=second._compile) as compiling, refused:
        swarms.begin(second)
    assert compiling.called == ("optimizer" in message)


def forge(store, step):
    """Writes the index of a snapshot whose file is not there."""
    file = f"snapshots/{step:08d}/{'0' * 32}"
    index = records.SnapshotIndex(step, file, 1, "0" * 64)
    store.create(f"snapshots/{step:08d}.json", records.encode(index))


def test_a_sweep_lists_each_folder_once(store):
    for step in range(4, 20, 4):
        snapshots.write(store, step, [np.ones(4, np.float32)])
    with mock.patch.object(store, "names", wraps=store.names) as names:
        snapshots.sweep(store, 16)
    listed = [call.args[0] for call in names.call_args_list]
    assert sorted(listed) == ["attested", "packets", "snapshots"]
    assert snapshots.attested_steps(store) == [12, 16]


def test_forged_snapshots_neither_take_the_place_of_intact_ones_nor_sweep_them(store):
    said, first = [], make(store, 0)
    first.member.tell = said.append
    state, _, _ = swarms.take_steps(first, 3)
    forge(store, 99_999_999)
    forge(store, 8)
    (params, _), _, _ = swarms.take_steps(first, 10, state)
    first.close()
    assert any("before step 8 was not written, since another one" in line for line in said)
    second = make(store, 1)
    joined, _ = swarms.begin(second)
    assert second.number == 10 and swarms.digest(joined) == swarms.digest(params)


def test_a_lost_packet_with_nothing_but_forged_snapshots_after_it_ends_the_newcomer(store):
    swarms.take_steps(make(store, 0, snapshot_every=100), 3)
    store.delete([f"packets/00000001/{x}" for x in store.names("packets/00000001")])
    forge(store, 50)
    forge(store, 60)
    with pytest.raises(SwarmError, match=r"no snapshot can be read: 'snapshots/00000060/"):
        swarms.begin(make(store, 1, snapshot_every=100))


def test_a_worker_that_has_compared_a_snapshot_remembers_no_more_steps_than_before(store):
    member, leaves = Member(store, "paris"), [np.ones(4, np.float32)]
    turns = SnapshotTurns(member, 4)
    manifest = records.Manifest(0, (records.PacketRef(7, 1, "0" * 64),), "", 0.0)
    snapshots.write(store, 4, leaves)
    turns.take(4, leaves, 1, manifest)
    assert turns._compared.result(timeout=10)[1] == 0.0
    for step in range(20):
        member.exchange(step, b"packet")
    assert len(member.chain._decided) <= 3


def test_snapshots_are_compared_whatever_else_stands_in_the_store(store, monkeypatch):
    monkeypatch.setattr(snapshot_turns, "POLL_SECONDS", 0.02)
    said, leaves = [], [np.ones(4, np.float32)]
    turns = SnapshotTurns(Member(store, "paris", tell=said.append), 4)
    manifest = records.Manifest(0, (records.PacketRef(7, 1, "0" * 64),), "", 0.0)
    forge(store, 4)
    forge(store, 99_999_999)
    turns.take(4, leaves, 1, manifest)
    assert turns._compared.result(timeout=10) is None and turns.comparison() is None
    assert "the snapshot before step 4 was not compared: 'snapshots/00000004/" in said[0]
    turns.take(8, leaves, 1, manifest)
    time.sleep(0.1)  # in which it looks for it
    snapshots.write(store, 8, leaves)
    index, *compared = turns._compared.result(timeout=10)
    assert (index.step, *compared) == (8, 0.0, None)
    turns.close()


def test_snapshots_are_listed_once_by_a_newcomer_and_never_by_those_who_wait(store, monkeypatch):
    """A store may hold any number of another's objects, each of which a list returns."""
    monkeypatch.setattr(snapshot_turns, "POLL_SECONDS", 0.01)
    leaves, listed, names = [np.ones(4, np.float32)], [], store.names
    monkeypatch.setattr(store, "names", lambda folder: listed.append(folder) or names(folder))
    turns = SnapshotTurns(Member(store, "paris"), 4)
    manifest = records.Manifest(0, (records.PacketRef(7, 1, "0" * 64),), "", 0.0)
    listed.clear()
    for step in 4, 8, 12:  # of a writer that is gone, and comes back before the last one
        turns.take(step, leaves, 1, manifest)
    time.sleep(0.1)
    snapshots.write(store, 12, leaves)
    assert turns._compared.result(timeout=10) is None and listed == []
    turns.close()
    snapshots.read_newest(store, leaves)
    assert listed == ["snapshots"]


@pytest.mark.parametrize(
    ("wrong", "factor", "drift"),
    [("parameters", 1.5, 1 / 3), ("state", 1.5, 1 / 3), ("parameters", 0.0, 1.0)],
)
def test_nothing_hides_a_difference_from_a_snapshot(store, wrong, factor, drift):
    """The state holds the norm of a large residual, and arrays such as an outer momentum."""
    said, step, residual = [], 4, np.float32(1e4)
    own = {"parameters": np.ones(4, np.float32), "state": np.ones(2, np.float32)}
    theirs = own | {wrong: factor * own[wrong]}
    snapshots.write(store, step, [*theirs.values(), residual])
    turns = SnapshotTurns(Member(store, "paris", tell=said.append), step)
    manifest = records.Manifest(0, (records.PacketRef(7, 1, "0" * 64),), "", 0.0)
    turns.take(step, [*own.values(), residual], 1, manifest)
    index, *compared = turns._compared.result(timeout=10)
    assert (index.step, *compared) == (step, pytest.approx(drift), None)
    assert f"differs from this worker's parameters or state by {drift:.2g} of" in said[0]
    turns.close()


def muon():
    return demo_optax.decoupled(optax.contrib.muon(1e-2, ns_steps=1), Compression(4))


def test_a_worker_that_cannot_compile_leaves_no_settings(store):
    worker = make(store, 0)
    with mock.patch.object(worker, "_compile", side_effect=MemoryError), pytest.raises(MemoryError):
        swarms.begin(worker)
    assert store.get("run.json") is None


@pytest.mark.parametrize(
    ("make_tx", "setting", "message"),
    [
        (
            lambda: swarms.DEMO_SCALED,
            jax.default_prng_impl("rbg"),
            "jax_default_prng_impl is threefry2x32 there and rbg here",
        ),
        (muon, jax.default_matmul_precision("highest"), "optimizer is"),
    ],
)
def test_another_setting_of_jax_is_refused_where_it_changes_the_optimizer(
    store, make_tx, setting, message
):
    swarms.begin(make(store, 0, make_tx()))
    with setting, pytest.raises(SwarmError, match=message):
        swarms.begin(make(store, 1, make_tx()))


def test_another_batch_and_another_weight_are_welcome(store):
    first = make(store, 0)
    swarms.begin(first)
    second = make(store, 1, weight=7.0, clip_norm=1.0)
    second.begin(swarms.initial_params(), swarms.batch_of(0, 0, rows=4))


def test_a_store_that_fails_ends_the_worker_for_good(store, monkeypatch):
    worker = make(store, 0, delay=1)
    state, _, _ = swarms.take_steps(worker, 3)
    monkeypatch.setattr(store, "put", failing)
    with pytest.raises(OSError, match="gone"):
        swarms.take_steps(worker, 9, state)
    with pytest.raises(SwarmError, match="stopped at an error before"):
        worker.step({}, (), swarms.batch_of(0, 0))


def failing(key, data):
    raise OSError("gone")

"""Rounds of local steps in a swarm, beside the same rounds over ``shard_map``."""

import functools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import demo_optax
from demo_optax._src.swarm import records
from demo_optax._src.swarm.round_clock import RoundClock
from demo_optax.swarm import Left, Member, SwarmError, read_history, status
from tests import swarms
from tests.sweeps import sweep

pytestmark = pytest.mark.usefixtures("virtual_waits")

WORKERS, EVERY = 4, 3

SPARSE = demo_optax.Compression(8, 8, value_coding="int2", transform="identity")
DENSE = demo_optax.Compression(64, 8, value_coding="int8", transform="identity")
OPTIONS = dict(gradient_weight=1.0, mean="workers")
OUTER = {
    "sparseloco": lambda **options: demo_optax.decoupled(
        optax.sgd(1.0), SPARSE, decay=0.95, **OPTIONS, **options
    ),
    "diloco": lambda **options: demo_optax.decoupled(
        optax.sgd(0.7, momentum=0.9, nesterov=True), DENSE, decay=1.0, **OPTIONS, **options
    ),
    "demo_scaled": lambda **options: demo_optax.demo_scaled(1e-2, **options),
}


@functools.cache
def rounds(name, axis_name=None, **options):
    inner = optax.adamw(optax.linear_schedule(1e-2, 1e-3, 12), b2=0.95)
    outer = OUTER[name](axis_name=axis_name)
    return demo_optax.local_steps(inner, outer, EVERY, axis_name=axis_name, **options)


@sweep("sparseloco", "diloco", name=OUTER)
def test_parameters_after_each_round_are_those_of_shard_map_to_the_last_bit(name, store):
    expected = swarms.over_shard_map(rounds(name, "data"), 8 * EVERY)
    for digests, seen in swarms.in_a_swarm(store, rounds(name), 8):
        assert [digests[n + 1] for n in range(8)] == expected
        assert [metrics.round_steps for metrics in seen] == 8 * [0, 0, EVERY]
        assert [metrics.applied for metrics in seen if metrics.members] == list(range(8))


@pytest.mark.parametrize("merge", [None, 0.5])
def test_workers_go_on_while_packets_travel_and_stay_equal(merge, store):
    results = swarms.in_a_swarm(store, rounds("sparseloco", merge=merge), 12, delay=1)
    by_round = swarms.require_equal(*[digests for digests, _ in results])
    assert sum(len(found) == WORKERS for found in by_round.values()) > 8
    for _, seen in results:
        assert seen[-1].loss < seen[0].loss
        assert all(metrics.round_steps in (0, *range(EVERY, 100)) for metrics in seen)
        assert all(metrics.applied == metrics.step - 1 for metrics in seen if metrics.members)


def both(first, second, until, states=(None, None), seconds=(0.02, 0.02)):
    return swarms.both(first, second, until, states, map(swarms.slowly, seconds))


@pytest.mark.parametrize("delay", [0, 1])
def test_a_newcomer_stands_where_the_others_do(delay, store):
    tx, settings = rounds("diloco"), dict(delay=delay, deadline=1.0, snapshot_every=4)
    first = swarms.make_worker(tx, store, 0, **settings)
    state, alone, _ = swarms.take_steps(first, 6)
    second = swarms.make_worker(tx, store, 1, **settings)
    here = swarms.begin(second)
    assert second.number >= 6
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(here[1].displacement))
    (_, before, _), ((_, joined), after, seen) = both(first, second, 20, (state, here))
    swarms.require_equal(alone | before, after)
    assert any(set(metrics.members) == {"worker-0", "worker-1"} for metrics in seen)
    schedule = optax.tree.get(joined.inner, "ScaleByScheduleState")
    assert int(schedule.count) >= 19 * EVERY  # though it has taken fewer steps itself
    assert int(optax.tree.get(joined.inner, "ScaleByAdamState").count) < 16 * EVERY


def test_one_that_misses_rounds_keeps_what_it_went_and_delivers_it_later(store):
    tx, settings = rounds("sparseloco"), dict(delay=1, deadline=0.3)
    first, second = (swarms.make_worker(tx, store, n, **settings) for n in range(2))
    (state, _, _), (stopped, _, _) = both(first, second, 4)
    state, alone, _ = swarms.take_steps(first, 8, state)
    before = jax.tree.map(np.asarray, stopped[1].displacement)
    (_, of_first, _), (_, of_second, seen) = both(first, second, 20, (state, stopped))
    swarms.require_equal(alone | of_first, of_second)
    assert any(x.any() for x in jax.tree.leaves(before))
    assert sum(metrics.replayed for metrics in seen) >= 3
    assert "worker-1" in seen[-1].members or "worker-1" in seen[-2].members


def test_rounds_of_some_seconds_end_for_all_and_weigh_by_steps(store):
    tx, settings = rounds("sparseloco"), dict(delay=1, round_seconds=0.3, weight=10.0)
    first, second = (swarms.make_worker(tx, store, n, **settings) for n in range(2))
    (_, of_first, _), (_, of_second, _) = both(first, second, 10, seconds=(0.005, 0.06))
    swarms.require_equal(of_first, of_second)
    history = read_history(store)
    counted = [m for m in history.manifests if len(m.packets) == 2]
    steps = np.array([[packet.steps for packet in m.packets] for m in counted])
    assert len(counted) > 6 and np.median(steps[:, 0]) > 2 * np.median(steps[:, 1]) > 0
    tokens = np.array([[packet.tokens for packet in m.packets] for m in counted])
    assert (tokens == 10 * steps).all()
    duration = history.manifests[-1].time - history.manifests[0].time
    after = sum(packet.tokens for m in history.manifests[1:] for packet in m.packets)
    assert history.tokens_per_second() == pytest.approx(after / duration)
    assert duration > 0.0 and history.goodput() > 0.5
    last = {history.names[x.member]: x.steps for x in history.manifests[-1].packets}
    assert {name: steps[-1] for name, steps in history.taken().items()} == last
    assert status(history).startswith(f"round {history.manifests[-1].step}, decided at ")


@pytest.mark.parametrize(
    ("of_rounds", "broken", "counted"),
    [(True, {1, 3, 4, 5}, [2, 0, 3]), (False, {1}, [1, 0, 1])],
    ids=["rounds", "every step"],
)
def test_only_steps_with_a_finite_gradient_are_said_to_count(of_rounds, broken, counted, store):
    def batches(worker, step):
        x, y = swarms.batch_of(worker, step)
        return (x * np.nan, y) if step in broken else (x, y)

    tx = rounds("sparseloco") if of_rounds else swarms.DEMO_SCALED
    with swarms.make_worker(tx, store, 0, weight=0.25) as worker:
        _, _, seen = swarms.take_steps(worker, 3, batches=batches)
    history, results = read_history(store), [x for x in seen if x.applied is not None]
    assert history.taken() == {"worker-0": counted}
    assert [x.tokens for m in history.manifests for x in m.packets] == [n / 4 for n in counted]
    assert [x.members for x in results] == [("worker-0",) if n else () for n in counted]
    assert [x.skipped for x in results] == [() if n else ("worker-0",) for n in counted]
    assert [int(x.exchange.participants) for x in results] == [int(n > 0) for n in counted]
    assert not any(x.late for x in results) and "skipped" not in status(history)


def linear(params, batch):
    """A loss whose gradient is the batch."""
    return sum(jnp.sum(params[n] * batch[n][0]) for n in params)


def test_a_message_weighs_the_steps_in_it(store):
    """With plain steps and all coefficients, x goes by the mean of the workers' progress."""
    whole = demo_optax.Compression(64, 8, transform="identity")
    outer = demo_optax.decoupled(optax.sgd(1.0), whole, decay=1.0, **OPTIONS)
    tx = demo_optax.local_steps(optax.sgd(0.5), outer, EVERY)
    params = swarms.initial_params()
    gradients = [
        jax.tree.map(lambda x, n=n: np.full((1, *x.shape), n + 1.0), params) for n in (0, 1)
    ]
    members = [
        demo_optax.swarm.Member(store, f"worker-{n}", slots=2, deadline=30.0, min_workers=2)
        for n in range(2)
    ]
    workers = [
        demo_optax.swarm.SwarmWorker(
            linear, tx, swarms.mesh_of_worker(n), member, round_seconds=1e-3, weight=weight
        )
        for n, (member, weight) in enumerate(zip(members, (1.0, 4.0), strict=True))
    ]

    def run(n):
        with workers[n] as worker:
            ours, opt_state = worker.begin(swarms.initial_params(), gradients[n])
            while not worker.number:
                ours, opt_state, _ = worker.step(ours, opt_state, gradients[n])
        return ours

    results = swarms.together([functools.partial(run, n) for n in range(2)])
    packets = read_history(store).manifests[0].packets
    steps, tokens = ([getattr(x, name) for x in packets] for name in ("steps", "tokens"))
    assert tokens == [steps[0], 4 * steps[1]]
    went = np.average([-0.5 * steps[0] * 1.0, -0.5 * steps[1] * 2.0], weights=tokens)
    for ours in results:
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x - y, went, rtol=1e-5), ours, params)


def begun(store, name="sparseloco", **settings):
    """A worker, its parameters and its state."""
    worker = swarms.make_worker(rounds(name), store, 0, **settings)
    return worker, swarms.begin(worker)


def taken(worker, state, steps, factor=1.0):
    """The state after some steps, and the metrics of the last; a factor may make it not finite."""
    metrics = None
    for step in range(steps):
        x, y = swarms.batch_of(0, step)
        *state, metrics = worker.step(*state, (factor * x, y))
    return state, metrics


@pytest.mark.parametrize("delay", [0, 1])
def test_one_that_leaves_in_peace_sends_what_it_went(delay, store):
    tx, settings = rounds("sparseloco"), dict(delay=delay, deadline=5.0)
    first, second = (swarms.make_worker(tx, store, n, **settings) for n in range(2))
    (state, _, _), (leaving, _, _) = both(first, second, 5)
    while not second._steps:
        leaving, _ = taken(second, leaving, 1)
    number, fresh = second.number, second._steps
    assert second.leave(*leaving) == 0
    second.close()
    swarms.take_steps(first, 8, state)
    packets = [m.packets for m in read_history(store).manifests if m.step in (number, number + 1)]
    assert fresh and fresh in [x.steps for m in packets for x in m if x.slot == 1]
    assert second.member.last_sent in (number, number + 1) and second.member.unit == "round"


def late(worker, monkeypatch) -> None:
    """Lets another member decide each step before this worker's packet is there."""
    send, slots = worker.member.send, worker.member.slots
    other = Member(worker.member.store, "other", slots=slots, deadline=0.1)

    def send_too_late(step, packet, *counts):
        other.exchange(step, bytes(len(packet)))
        return send(step, packet, *counts)

    monkeypatch.setattr(worker.member, "send", send_too_late)


def asked_to_leave(worker, monkeypatch) -> None:
    worker.member.leave()


def never_sent(worker, monkeypatch) -> None:
    monkeypatch.setattr(worker.member, "send", lambda *_: threading.Event().wait(5))


@pytest.mark.parametrize(
    ("settings", "first", "hinder", "then", "lost"),
    [
        pytest.param({}, 2, asked_to_leave, 0, 0, id="it was asked to leave before"),
        pytest.param({}, 2, late, 0, 2, id="its last packet comes too late"),
        pytest.param({"delay": 1, "min_workers": 2}, EVERY + 2, None, 0, 2, id="no result comes"),
        pytest.param({"delay": 1}, 0, never_sent, EVERY + 2, EVERY + 2, id="no packet is sent"),
    ],
)
def test_one_that_leaves_says_how_many_steps_are_lost_and_takes_no_more(
    settings, first, hinder, then, lost, store, monkeypatch
):
    """The packet under way, of which no result comes, counts once it is decided."""
    monkeypatch.setattr("demo_optax._src.swarm.worker.LEAVE_SECONDS", 0.1)
    worker, state = begun(store, **settings)
    state, _ = taken(worker, state, first)
    if hinder:
        hinder(worker, monkeypatch)
    state, _ = taken(worker, state, then)
    assert worker.leave(*state) == worker.leave(*state) == lost
    assert hinder is never_sent or worker.member.last_sent == 0
    with pytest.raises(SwarmError, match="this worker has left, with what it had not sent"):
        worker.step(*state, swarms.batch_of(0, 0))


def test_one_that_came_back_leaves_the_packet_of_its_former_life(store):
    for steps, lost in (2, 0), (1, 1):
        worker, state = begun(store)
        state, _ = taken(worker, state, steps)
        assert worker.leave(*state) == lost
        worker.close()
    (said,) = worker.member._steps.sent(0, [0]).values()
    size = len(said.payload)
    other = Member(store, "worker-1", slots=worker.member.slots, deadline=0.2)
    packet, _ = other.exchange(0, bytes(size)).manifest.packets
    assert (packet.slot, packet.incarnation, packet.steps) == (0, 1, 2)


@pytest.mark.parametrize("others_decide", [False, True])
def test_one_that_is_asked_to_leave_while_it_waits_says_what_is_lost(store, others_decide):
    worker, state = begun(store, min_workers=2)
    state, _ = taken(worker, state, EVERY - 1)
    if others_decide:
        worker.member._agree = functools.partial(decided_by_others, worker.member)
    else:
        worker.member.leave()
    with pytest.raises(Left):
        taken(worker, state, 1)
    assert worker.leave(*state) == (EVERY if others_decide else 0)


def decided_by_others(member, step, *_):
    """Others decide without this member's packet, while it is asked to leave."""
    other = records.PacketRef((member.slot + 1) % member.slots, 1, "0" * 64)
    decision = records.Manifest(step, (other,), "", 1.0)
    member.store.create(records.step_key("manifests", step), records.encode(decision))
    member.leave()
    member.end_if_leaving()


def test_a_packet_without_a_finite_step_delivers_nothing_that_came_too_late(store, monkeypatch):
    worker, state = begun(store, deadline=0.5)
    with monkeypatch.context() as patched:
        late(worker, patched)
        state, _ = taken(worker, state, EVERY)
    state, metrics = taken(worker, state, EVERY, np.nan)
    assert metrics.skipped == ("worker-0",) and not metrics.members
    assert worker.leave(*state) == 0 and worker.member.last_sent == worker.number == 2
    assert any(np.asarray(values).any() for values in worker._outbox.message.values)


def test_steps_that_counted_are_not_lost_by_a_later_packet(store, monkeypatch):
    worker, state = begun(store, "diloco")
    state, metrics = taken(worker, state, EVERY)
    assert metrics.members == ("worker-0",)
    state, _ = taken(worker, state, 1, np.nan)
    late(worker, monkeypatch)
    assert worker.leave(*state) == 1


def test_a_packet_under_way_delivers_what_came_too_late_before(store, monkeypatch):
    monkeypatch.setattr("demo_optax._src.swarm.worker.LEAVE_SECONDS", 0.1)
    worker, state = begun(store, delay=1)
    send = worker.member.send
    late(worker, monkeypatch)
    send_too_late = worker.member.send

    def send_second(step, *packet):
        worker.member.min_workers = 3 if step else 1  # so that the second one stays undecided
        return (send if step else send_too_late)(step, *packet)

    monkeypatch.setattr(worker.member, "send", send_second)
    while not worker.number or worker._outbox is None:
        state, _ = taken(worker, state, 1)
    while worker.member.last_sent != worker.number:
        time.sleep(0.01)
    assert worker._returned_steps == EVERY and worker.member.manifest(worker.number) is None
    assert worker.leave(*state) == worker._steps
    worker.member.leave()


@pytest.mark.parametrize("more", [0, 1])
def test_one_whose_message_came_too_late_sends_it_again_when_it_leaves(more, store, monkeypatch):
    said, (worker, state) = [], begun(store)
    with monkeypatch.context() as patched:
        late(worker, patched)
        state, metrics = taken(worker, state, EVERY)
    assert metrics.round_steps == EVERY and "worker-0" not in metrics.members
    state, _ = taken(worker, state, more)
    worker.member.tell = said.append
    assert worker.leave(*state) == 0
    assert worker.member.last_sent == 1 and float(worker._outbox.factor) == 1.0
    assert float(worker._outbox.packets.view(np.float32)[0, 0, 8]) == EVERY + more  # weight
    assert any(np.asarray(values).any() for values in worker._outbox.message.values)
    worker.close()
    other = Member(store, "another", slots=worker.member.slots, deadline=0.1)
    packets = other.exchange(1, bytes(worker._programs.packet_bytes)).manifest.packets
    assert EVERY + more in [packet.steps for packet in packets if packet.slot == worker.member.slot]
    assert "of its outer momentum, by norm: a packet holds no more" in said[0]


def test_a_snapshot_is_taken_over_in_rounds_without_a_wait(store, monkeypatch):
    worker, state = begun(store, "diloco", delay=1, min_workers=2)
    asked = []
    monkeypatch.setattr(worker._turns, "comparison", lambda: asked.append(worker._outbox))
    taken(worker, state, EVERY + 3)
    assert asked == [None] * EVERY  # none once its packet waits for a second worker
    worker.member.leave()


def test_another_length_of_rounds_is_refused(store):
    begun(store)
    other = demo_optax.local_steps(optax.sgd(1e-2), OUTER["sparseloco"](), EVERY + 1)
    with pytest.raises(SwarmError, match="steps_per_round is 3 there and 4 here"):
        swarms.begin(swarms.make_worker(other, store, 1))


class Watched(Member):
    """A member of a round that others may end or decide."""

    def __init__(self):
        pass

    decided, ended, looks, shortest_round = False, False, 0, 0.0

    def manifest(self, step):
        self.looks += 1
        return object() if self.decided else None

    def others_ended(self, step):
        return self.ended


def until(clock, number, steps, wanted, seconds=5.0):
    started = time.monotonic()
    while (found := clock.look(number, steps)) != wanted and time.monotonic() < started + seconds:
        time.sleep(0.01)
    return found


def test_a_round_ends_by_steps_or_by_seconds_or_with_the_others():
    member = Watched()
    by_steps, by_seconds = RoundClock(member, 3, None), RoundClock(member, 3, 0.5)
    assert [by_steps.look(0, steps) for steps in (1, 2, 3, 4)] == ["open", "open", "over", "over"]
    by_seconds.restart()  # what was compiled before is no part of the round
    assert by_seconds.look(0, 100) == "open"
    time.sleep(0.6)
    assert by_seconds.look(0, 1) == "over"
    by_seconds.restart(), by_steps.restart()
    assert by_seconds.look(1, 1) == "open"
    unwatched = Watched()
    long, longest = RoundClock(member, 3, 10.0), RoundClock(unwatched, 3, 200.0)
    assert long.look(1, 1) == longest.look(1, 1) == "open"
    member.ended = True
    assert until(long, 1, 1, "over") == "over" and by_steps.look(1, 1) == "open"
    member.decided = True
    assert until(by_seconds, 1, 1, "decided") == until(by_steps, 1, 1, "decided") == "decided"
    assert by_steps.look(2, 1) == "open"
    assert member.looks >= 4 and unwatched.looks == 0  # in a long round it looks rarely
    for clock in by_steps, by_seconds, long, longest:
        clock.close()


def test_a_store_that_fails_while_a_round_is_watched_ends_the_worker(monkeypatch):
    monkeypatch.setattr(Watched, "manifest", lambda *_: 1 / 0)
    clock = RoundClock(Watched(), 3, None)
    with pytest.raises(ZeroDivisionError):
        until(clock, 0, 1, "decided")


def test_a_worker_of_enormous_weight_counts_too(store):
    worker = swarms.make_worker(rounds("sparseloco"), store, 0, weight=1e30)
    _, _, seen = swarms.take_steps(worker, 2)
    assert seen[-1].members == ("worker-0",) and int(seen[-1].exchange.participants) == 1


def test_a_packet_of_an_earlier_process_counts_and_the_newer_one_is_sent_later(store):
    early = Member(store, "worker-0", slots=2, deadline=0.2)
    early.exchange(0, b"0 in 0")
    early.send(1, b"early", steps=4)
    late = Member(store, "worker-0", slots=2, deadline=0.2)
    result = late.exchange(1, b"late!", steps=9)
    assert result.own is None and result.packets == {0: b"early"}
    result = late.exchange(2, b"late!", steps=9)
    assert result.own == 0 and result.manifest.packets[0].steps == 9

"""Who counts in a step: deadlines, late workers, slots, and packets that cannot be read."""

import concurrent.futures
import functools
import itertools
import os
import sys
import threading
import time
from unittest import mock

import numpy as np
import pytest

from demo_optax._src.swarm import records, slots, snapshots
from demo_optax._src.swarm.member import ExchangeResult
from demo_optax._src.swarm.members_only import MembersOnly
from demo_optax._src.swarm.records import Manifest
from demo_optax.swarm import Left, Member, ObjectStore, SwarmError
from tests.members import NAMES, Run, everybody, exchange, put_packet
from tests.swarms import after, together

pytestmark = pytest.mark.usefixtures("virtual_waits")


@pytest.fixture
def store(tmp_path):
    return ObjectStore(str(tmp_path), patience=1.0)


def members(store, number, **settings):
    settings = {"slots": 8, "deadline": 20.0} | settings
    return [Member(store, f"worker-{n}", **settings) for n in range(number)]


def manifest_of(store, step):
    return records.decode(Manifest, store.get(records.step_key("manifests", step)))


@pytest.fixture(params=["open", "members only"])
def join(request, tmp_path):
    """A function that makes members, of an open run or of one for members only."""
    if request.param == "members only":
        return Run(tmp_path).member
    return functools.partial(Member, ObjectStore(str(tmp_path), patience=1.0), slots=8)


def test_all_get_the_packets_of_all(join):
    joined = [join(name, deadline=20.0, min_workers=3) for name in NAMES]
    named = joined[0].store.roster.name if isinstance(joined[0].store, MembersOnly) else ""
    for step in range(5):
        results = everybody(joined, step)
        assert all(x.manifest == results[0].manifest for x in results)
        expected = {n: f"{name:5} in {step}".encode() for n, name in enumerate(NAMES)}
        assert all(x.packets == expected for x in results)
        assert [x.own for x in results] == [0, 1, 2]
        assert results[0].members == NAMES and not any(x.late for x in results)
        assert results[0].manifest.roster == named


def test_manifests_are_a_chain(store):
    (member,) = members(store, 1)
    for step in range(3):
        exchange(member, step)
    decided = [manifest_of(store, step) for step in range(3)]
    heads = [records.head(manifest) for manifest in decided]
    assert [manifest.previous for manifest in decided] == ["", *heads[:2]]
    assert records.head(decided[0]._replace(time=7.0)) == heads[0]
    assert records.head(decided[0], without=[0]) != heads[0]


def test_who_is_late_is_waited_for_once_and_then_counts_again(join):
    first, second, third = joined = [join(name, deadline=2.0, min_workers=1) for name in NAMES]
    everybody(joined, 0)
    began = time.monotonic()
    without = everybody([first, second], 1)
    assert 2 <= time.monotonic() - began < 4
    assert all(x.late == ("oslo",) and sorted(x.packets) == [0, 1] for x in without)
    began = time.monotonic()
    assert not any(x.late for x in everybody([first, second], 2))
    assert time.monotonic() - began < 2

    missed = exchange(third, 1)
    assert missed.own is None and missed.packets == without[0].packets
    assert third.receive(2).packets == {0: b"paris in 2", 1: b"rome  in 2"}
    third.announce(3)
    assert [sorted(x.packets) for x in everybody(joined, 3)] == [[0, 1, 2]] * 3


@pytest.mark.parametrize(("taken", "left"), [(1, 1), (6, 2)], ids=["in time", "it replays"])
def test_who_leaves_is_not_waited_for_and_who_comes_is(join, taken, left):
    paris, rome = (join(name, deadline=20.0) for name in ("paris", "rome"))
    for step in range(taken):
        everybody([paris, rome], step)
    rome.leave(left)
    began = time.monotonic()
    assert exchange(paris, taken).late == () and time.monotonic() - began < 15
    oslo, then = join("oslo", deadline=20.0), taken + 1
    for step in range(then):
        oslo.receive(step)
    oslo.announce(then)
    late = after(0.5, functools.partial(exchange, oslo, then))
    results = together([functools.partial(exchange, paris, then), late])
    assert [x.members for x in results] == [("paris", "oslo")] * 2
    assert time.monotonic() - began < 15


def test_one_that_left_in_the_middle_of_a_step_is_not_waited_for_in_the_next(store):
    first, second = members(store, 2)
    everybody([first, second], 0)
    data = b"worker-1 in 1"
    put_packet(store, 1, records.PacketRef(1, 1, records.sha256(data)), data)
    second.leave(1)
    began = time.monotonic()
    assert sorted(exchange(first, 1).packets) == [0, 1]
    exchange(first, 2)
    assert time.monotonic() - began < 15


def test_a_deadline_is_unknown_in_the_first_four_steps_and_then_follows_the_median(store):
    (member,) = members(store, 1, deadline=None)
    for step in range(4):
        assert member.deadline == 60.0
        exchange(member, step)
    assert member.deadline == 2.0
    with mock.patch.object(time, "monotonic", side_effect=map(float, range(1000))):
        for step in range(4, 12):
            exchange(member, step)
    assert 3 < member.deadline < 60


@pytest.mark.parametrize(
    ("of_rounds", "deadline"),
    [(dict(steps=1), 30.0), (dict(steps=1, ends_round=True), 5.0), (dict(steps=4), 5.0)],
)
def test_the_deadline_of_rounds_is_half_a_round_however_few_steps_the_last_has(
    of_rounds, deadline, store
):
    (member,) = members(store, 1, deadline=None)
    member.exchange(0, b"a packet", **of_rounds)
    member.exchange(1, b"a packet", steps=1)
    member.pace._durations.extend([10.0] * 4)
    assert member.deadline == deadline


@pytest.mark.parametrize("wrong", [dict(steps=-1), dict(tokens=-0.5), dict(tokens=float("nan"))])
def test_a_packet_of_no_valid_number_of_steps_or_tokens_is_refused(wrong, store):
    (member,) = members(store, 1)
    with pytest.raises(ValueError, match=r"must (be at least 0|lie in \[0, inf\)), not"):
        member.exchange(0, b"a packet", **wrong)


def test_a_wait_ends_when_the_worker_leaves(store):
    (member,) = members(store, 1, min_workers=2)
    with pytest.raises(Left):
        together([functools.partial(exchange, member, 0), after(0.3, member.leave)])


def test_fewer_than_min_workers_wait_and_say_so(store, monkeypatch):
    said = []
    monkeypatch.setattr("demo_optax._src.swarm.member.LOG_EVERY_SECONDS", 0.1)
    first = Member(store, "first", min_workers=2, deadline=0.1, tell=said.append)
    second = Member(store, "other", min_workers=2, deadline=0.1)
    both = functools.partial(exchange, first, 0), after(0.6, functools.partial(exchange, second, 0))
    assert [sorted(x.packets) for x in together(both)] == [[0, 1]] * 2
    assert any("1 of at least 2 workers are here" in line for line in said), said


@pytest.mark.parametrize("digest", ["0" * 64, records.sha256(b"longer than those of this run")])
def test_a_packet_with_another_hash_or_of_another_length_is_not_proposed(store, digest):
    first, _ = members(store, 2, deadline=0.3)
    data = b"worker-0 in 0" if digest == "0" * 64 else b"longer than those of this run"
    put_packet(store, 0, records.PacketRef(1, 1, digest), data)
    assert list(exchange(first, 0).packets) == [0]


def test_a_packet_that_counts_and_cannot_be_read_ends_the_worker(store, monkeypatch):
    monkeypatch.setattr("demo_optax._src.swarm.member.LOG_EVERY_SECONDS", 0.1)
    first, second = members(store, 2, min_workers=2)
    nothing = ExchangeResult(Manifest(0, (), "", 0.0), {}, False, ())
    with mock.patch.object(first, "_fetch", return_value=nothing):
        together([functools.partial(exchange, x, 0) for x in (first, second)])
    store.delete(["packets/00000000/001.000001.packet"])
    said = []
    third = Member(store, "third", slots=8, tell=said.append)
    with pytest.raises(SwarmError, match=r"a packet that counts in step 0, of .*, cannot be read"):
        third.receive(0)
    [waits] = [x for x in said if "cannot be read yet: waits for" in x]
    assert waits.startswith(f"a packet that counts in step 0, of {second.worker}, ")


def test_swept_packets_are_told_apart_from_lost_ones(store):
    first, second = members(store, 2)
    everybody([first, second], 0)
    store.delete([f"packets/00000000/{x}" for x in store.names("packets/00000000")])
    for step in 1, 2:
        snapshots.write(store, step, [np.ones(2, np.float32)])
    late = Member(store, "third", slots=8)
    result = late.receive(0)
    assert result.swept and result.packets == {}


def test_who_goes_back_to_a_snapshot_takes_no_later_step_before_those_in_between(store):
    member, other = joined = members(store, 2, min_workers=2)
    for step in range(5):
        everybody(joined, step)
    member.go_on_from(snapshots.write(store, 2, [np.ones(4, np.float32)]))
    assert member.manifest(4) is None and member.manifest(2) is not None
    for step in range(2, 4):
        member.receive(step)
    assert member.manifest(4) == other.manifest(4)


def test_a_worker_that_comes_back_has_its_slot_and_a_new_incarnation(join):
    first, before = (join(name, deadline=20.0) for name in ("paris", "rome"))
    everybody([first, before], 0)
    again = join("rome", deadline=20.0)
    assert again.slot == 1 and again.incarnation > before.incarnation
    again.receive(0)
    again.announce(1)
    everybody([first, again], 1)
    with pytest.raises(SwarmError, match="another process is worker 'rome' now"):
        exchange(before, 1)


def test_steps_are_read_ahead_and_no_more_packets_at_once_than_there_are_slots(store):
    first, second = members(store, 2, min_workers=2)
    rounds = [everybody([first, second], step)[0] for step in range(10)]
    late = Member(store, "third", slots=8)
    names, held = [late.name_of(x.me) for x in (first, second)], []
    late.read_ahead(2, 5)
    with mock.patch.object(store, "get", wraps=store.get) as get:
        for step in range(2, 7):
            result = late.receive(step)
            assert result.packets == rounds[step].packets and list(result.members) == names
            asked = [call.args[0] for call in get.call_args_list]
            assert all(key.endswith(".packet") for key in asked)
            held.append(len(asked) - 2 * (step - 2))  # with those of this step
    assert held == [8, 6, 4, 2, 2]
    assert late.receive(7).packets == rounds[7].packets
    assert store.names("packets/00000010") == []
    late.read_ahead(7, 5)
    assert store.names("packets/00000012") == ["002.000001.here"]


def test_large_packets_are_not_read_ahead(store, monkeypatch):
    size, ahead = len(b"worker-0 in 0"), "demo_optax._src.swarm.member.AHEAD_BYTES"
    (first,) = members(store, 1)
    rounds = [exchange(first, step) for step in range(4)]
    late = Member(store, "second", slots=8)
    monkeypatch.setattr(ahead, size)
    late.expect(size)
    late.read_ahead(0, 4)
    with mock.patch.object(store, "get", wraps=store.get) as get:
        assert late.receive(0).packets == rounds[0].packets
    assert sum(call.args[0].endswith(".packet") for call in get.call_args_list) == 1
    monkeypatch.setattr(ahead, size - 1)
    late.expect(size)
    late.read_ahead(1, 3)
    assert [late.receive(step).packets for step in range(1, 4)] == [x.packets for x in rounds[1:]]


def test_a_packet_much_larger_than_those_of_the_run_is_not_read(store, monkeypatch):
    monkeypatch.setattr("demo_optax._src.swarm.member.PART", 400)
    first, second = members(store, 2, deadline=0.3)
    first.expect(len(b"worker-0 in 0"))
    data = b"longer" * 100
    large = records.PacketRef(*second.me, records.sha256(data))
    for step in range(2):
        put_packet(store, step, large, data)
    assert list(exchange(first, 0).packets) == [0]
    previous = records.head(manifest_of(store, 0))
    store.put(records.step_key("manifests", 1), records.encode(Manifest(1, (large,), previous, 0)))
    with pytest.raises(SwarmError, match=r"a packet that counts in step 1, of .*, cannot be read"):
        first.receive(1)


def test_a_listed_packet_of_another_length_counts_for_nobody_and_is_told_once(store):
    told = []
    first, second = members(store, 2, tell=told.append)
    first.expect(len(b"0 in 0"))
    previous = ""
    for step in range(2):
        good, short = f"0 in {step}".encode(), f"{step}".encode()
        sent = [
            records.PacketRef(*x.me, records.sha256(data))
            for x, data in zip((first, second), (good, short), strict=True)
        ]
        for packet, data in zip(sent, (good, short), strict=True):
            put_packet(store, step, packet, data)
        manifest = Manifest(step, tuple(sent), previous, 0)
        store.put(records.step_key("manifests", step), records.encode(manifest))
        previous, result = records.head(manifest), first.receive(step)
        assert result.packets == {0: good} and result.members == ("worker-0",)
        assert not result.swept
    (line,) = [line for line in told if "counts for nobody" in line or "count for nobody" in line]
    assert line.startswith("step 0: the packet of worker-1 has 1 bytes instead of 6")


def test_a_packet_that_was_emptied_is_an_error_and_not_one_that_counts_for_nobody(store):
    (first,) = members(store, 1)
    exchange(first, 0)
    (name,) = store.names("packets/00000000")
    store.put(f"packets/00000000/{name}", b"")
    with pytest.raises(SwarmError, match=r"a packet that counts in step 0, of .*, cannot be read"):
        Member(store, "late", slots=8).receive(0)


def test_a_manifest_that_is_too_large_is_left_out(store, tmp_path):
    (member,) = members(store, 1)
    for step in range(3):
        exchange(member, step)
    os.truncate(tmp_path / "manifests" / "00000001", 10**12)
    assert [x.step for x in slots.last_manifests(store)] == [0, 2]


def test_the_memory_of_slots_is_told(store):
    said = []
    Member(store, "paris", slots=4, tell=said.append).expect(2_500_000)
    assert "4 slots take 10.0 MB" in said[0] and "2.5 MB each" in said[0]


@pytest.mark.parametrize("junk", ["000/9999999999", "000/notes", "x"])
def test_names_that_no_worker_writes_take_no_slot(store, junk):
    store.put(f"slots/{junk}", b"{}")
    assert Member(store, "paris").me == (0, 1)


def test_an_announcement_holds_for_a_step_that_is_about_to_be_decided(store):
    first, second = members(store, 2, deadline=20.0)
    exchange(first, 0)
    second.announce(0)
    both = functools.partial(exchange, first, 1), after(0.5, functools.partial(exchange, second, 1))
    results = together(both)
    assert [x.packets.keys() for x in results] == [{0, 1}, {0, 1}]


def test_who_leaves_does_not_mind_that_the_exchange_goes_on(store, monkeypatch):
    (member,) = members(store, 1)
    for name in "put", "create":
        monkeypatch.setattr(store, name, lambda key, data: True)
    monkeypatch.setattr(member.chain, "_require_next", lambda step, manifest: None)
    ended, packet = threading.Event(), records.PacketRef(0, 0, "0" * 64)

    def exchanging():
        for step in itertools.takewhile(lambda _: not ended.is_set(), itertools.count()):
            member.chain.keep(step, Manifest(step, (packet,), "", 0.0))

    def leaving():
        try:
            for _ in range(20_000):
                member.leave(5)
        finally:
            ended.set()

    switches = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:  # of threads that may meet anywhere
            futures = [pool.submit(exchanging), pool.submit(leaving)]
        assert [future.result() for future in futures] == [None, None]
    finally:
        sys.setswitchinterval(switches)


def test_of_many_that_join_at_once_each_has_its_own_slot(store):
    def join(number):
        return Member(store, f"w{number}", slots=8).me

    claimed = together([functools.partial(join, number) for number in range(8)])
    assert sorted(claimed) == [(slot, 1) for slot in range(8)]


def test_a_slot_is_taken_over_only_from_a_worker_that_is_long_gone(store, monkeypatch):
    first, second = members(store, 2, slots=2, deadline=0.1)
    everybody([first, second], 0)
    exchange(first, 1)  # the second is late, and not gone
    with pytest.raises(SwarmError, match=r"all slots=2 are taken, by worker-0, worker-1"):
        Member(store, "third", slots=2)
    monkeypatch.setattr(slots, "IDLE_STEPS", 1)
    with pytest.raises(SwarmError, match="are taken"):  # it could be compiling
        Member(store, "third", slots=2)
    monkeypatch.setattr(slots, "IDLE_SECONDS", -1.0)
    assert Member(store, "third", slots=2).me == (1, 2)


def test_the_slot_of_one_that_left_is_free_at_once(store):
    first, second = members(store, 2, slots=2, deadline=0.1)
    everybody([first, second], 0)
    second.leave(1)
    for step in 1, 2:
        with pytest.raises(SwarmError, match="are taken"):  # its packets may be on their way
            Member(store, "third", slots=2)
        exchange(first, step)
    assert Member(store, "third", slots=2).me == (1, 2)
    Member(store, "third", slots=2).leave(3)  # before its first packet
    assert Member(store, "fourth", slots=2).me == (1, 4)


def test_a_claim_whose_answer_was_lost_is_found_again(store):
    create = store.create

    def lost(key, data):
        create(key, data)
        return False

    with mock.patch.object(store, "create", lost):
        assert Member(store, "paris").me == (0, 1)

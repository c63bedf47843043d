"""A run for members only whose store is open to others, or one of whose members lies."""

import contextlib
import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from demo_optax._src.swarm import agreement, records, roster, seals, snapshots, steps
from demo_optax._src.swarm.records import PacketRef, SwarmError
from demo_optax._src.swarm.slots import FIRST_SECOND, last_manifests
from demo_optax._src.swarm.snapshot_turns import SnapshotTurns
from demo_optax.swarm import Left, read_history
from tests import swarms
from tests.members import (
    NAMES,
    Counting,
    Run,
    everybody,
    exchange,
    know_otherwise,
    make_workers,
    numbered,
    physical,
    put_manifest,
    shared_of,
    signed_manifest,
    slowly,
)
from tests.swarms import together

pytestmark = pytest.mark.usefixtures("virtual_waits")


@hypothesis.given(st.binary(max_size=200), st.integers(0, 10**6), st.integers(0, 255))
@hypothesis.settings(
    deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
def test_a_signed_object_with_any_byte_changed_does_not_exist(run, body, place, change):
    store, key = run.store("paris"), "manifests/00000007"
    store.put(key, body)
    assert store.get(key) == body
    physical = store._name(key)
    data = bytearray(run.anybody.get(physical))
    data[place % len(data)] ^= change
    run.anybody.put(physical, bytes(data))
    assert store.get(key) == (body if change == 0 else None)


def test_a_roster_that_another_owner_signed_does_not_exist(run):
    run.make("mallory")
    before = run.roster()
    public = seals.read_public(run.folder / "mallory.pub")
    forged = roster.change(
        before._replace(boxes={}, number=0, earlier=(before.name,)), run.key("mallory"), [public]
    )
    joined = run.members()
    run.anybody.put(roster.KEY, forged)
    for member in joined:
        member.store.look_for_roster()
        assert member.store.roster == before


def test_a_record_of_two_packets_is_nobodys(run):
    paris, rome = run.member("paris"), run.member("rome")
    said = rome._steps._signed(
        0, PacketRef(*rome.me, records.sha256(b"data"), 1, 1), b"data", "0" * 64
    )
    spoken = records.decode(records.Manifest, said.partition(b"\n")[0])
    other = spoken.packets[0]._replace(slot=rome.slot + 1)
    for packets, is_read in (spoken.packets, True), ((*spoken.packets, other), False):
        data = records.encode(spoken._replace(packets=packets)) + b"\ndata"
        rome.store.put(f"packets/00000000/{rome.slot:03d}.packet", data)
        assert (paris._steps._read(0, f"{rome.slot:03d}.packet") is not None) == is_read


def test_junk_in_place_of_a_roster_is_not_kept_in_memory(run, monkeypatch):
    verified = []
    monkeypatch.setattr(seals, "_verify", lambda *given: verified.append(given[2]) or False)
    line = run.anybody.get(roster.KEY).partition(b"\n")[0]
    for junk in b"9" * 1_000_000, line + b"9" * 1_000_000, line + b"\n" + b"9" * 1_000_000:
        assert roster.parse(junk, run.key("owner").public) is None
    assert max(map(len, verified)) < 1000


def test_whoever_has_the_store_and_no_key_is_believed_in_nothing(run):
    joined = run.members(min_workers=3, deadline=30.0)
    everybody(joined, 0)
    (run.folder / "other").mkdir()
    other = Run(run.folder / "other")
    for member in other.members(min_workers=3)[:1]:
        member.announce(0)
    tries = 0
    for step in range(1, 16):
        anybody, previous = run.anybody, joined[0].chain.head(step - 1)
        ref = PacketRef(0, 9, records.sha256(b"evil"), 1, 1, "0" * 128)
        forged = records.encode(records.Manifest(step, (ref,), previous, 1.0))
        held = [x for f in ("manifests", "packets", "slots") for x in physical(run, f)]
        genuine = anybody.get(physical(run, "manifests")[-1])
        attacks = [
            (f"manifests/{step:08d}", forged),
            (f"manifests/{'0' * 32}.{step:08d}", forged),
            (f"manifests/{step + 1:08d}", genuine),
            (f"slots/000/{step + 5:06d}", b"{}"),
            (f"slots/000/{'1' * 32}.{step + 5:06d}", genuine),
            (f"packets/{step:08d}/000.000009.packet", forged + b"\nevil"),
            (f"packets/{step:08d}/{'2' * 32}.000.packet", forged + b"\nevil"),
            (f"packets/{step:08d}/001.packet", forged + b"\nleft"),
            (f"packets/{step:08d}/007.packet", forged + b"\nhere"),
            (f"snapshots/{step:08d}.json", b"{}"),
            (f"snapshots/{'3' * 32}.{step:08d}.json", genuine),
            (f"attested/{step:08d}/{'4' * 32}.000", genuine),
            ("run.json", b'{"slots": "1"}'),
            (f"{'5' * 32}.run.json", b"{}"),
            (f"packets/{step:08d}/{'6' * 32}.ends", forged + b"\nends"),
            (roster.KEY, b"9" * 100 if step % 2 else other.anybody.get(roster.KEY)),
            *[(name, other.anybody.get(name)) for name in physical(other, "packets")],
        ]
        for name, data in attacks:
            anybody.put(name, data)
            tries += 1
        copies = [x.replace(f"{step - 1:08d}", f"{step:08d}") for x in held]
        for name, copied in zip(held, copies, strict=True):
            if name != copied and anybody.get(copied) is None:  # a genuine one in another step
                anybody.put(copied, anybody.get(name))
                tries += 1
        results = everybody(joined, step)
        assert len({x.manifest for x in results}) == 1
        assert sorted(results[0].packets) == [0, 1, 2]
        assert len({member.chain.head(step) for member in joined}) == 1
    assert tries >= 300
    assert [x.step for x in last_manifests(joined[0].store)] == list(range(16))


@pytest.mark.parametrize("damage", ["deleted", "junk", "another reference", "another step"])
def test_a_manifest_that_was_lost_is_decided_again_and_nobody_has_another_head(run, damage):
    paris, rome, oslo = joined = run.members(deadline=2.0)
    everybody(joined, 0)
    for member in joined:
        member.send(1, f"{member.worker:5} in 1".encode())
    paris_first = paris._agree(1, joined[0].manifest(0).members, len(b"paris in 1"), 0.0)
    (name,) = [x for x in physical(run, "manifests") if x.endswith("00000001")]
    genuine = run.anybody.get(name)
    if damage == "deleted":
        run.anybody.delete([name])
    elif damage == "junk":
        run.anybody.put(name, b"junk")
    elif damage == "another step":
        (before,) = [x for x in physical(run, "manifests") if x.endswith("00000000")]
        run.anybody.put(name, run.anybody.get(before))
    else:
        run.anybody.put(name, genuine.replace(b", 1, 1,", b", 2, 1,"))
    for member in (rome, oslo):
        member._agree(1, member.manifest(0).members, len(b"paris in 1"), time.monotonic())
    assert paris_first.packets == rome.manifest(1).packets
    assert len({member.chain.head(1) for member in joined}) == 1
    everybody(joined, 2)
    assert len({member.chain.head(2) for member in joined}) == 1


def test_an_instant_proposer_that_lists_itself_alone_gains_nothing(run):
    paris, rome, oslo = joined = run.members(deadline=5.0)
    everybody(joined, 0)
    own = oslo.send(1, b"oslo  in 1")
    put_manifest(run, "oslo", 1, [own], oslo.chain.head(0))
    assert paris.manifest(1) is None and rome.manifest(1) is None
    results = together([functools.partial(exchange, x, 1) for x in (paris, rome)])
    assert all(sorted(x.packets) == [0, 1, 2] for x in results)
    assert paris.chain.head(1) == rome.chain.head(1)


def test_the_side_of_more_members_goes_on_and_the_other_one_goes_back(run):
    said = []
    paris, rome, oslo = joined = run.members(deadline=1.0, tell=said.append)
    everybody(joined, 0)
    know_otherwise(oslo, 0, head="a" * 64)
    results = together([functools.partial(exchange, x, 1) for x in joined])
    assert [x.swept for x in results] == [False, False, True]
    assert sorted(results[0].packets) == [0, 1]
    assert "2 members go on from another step 0 than this worker, whose side has 1" in said[-1]
    assert paris.chain.head(1) == rome.chain.head(1) and oslo.chain.astray


def test_a_packet_of_another_head_or_step_or_run_is_of_nobody(run):
    paris, rome = run.members("paris", "rome")
    everybody([paris, rome], 0)
    packet = PacketRef(1, 1, records.sha256(b"x"))
    signed = rome.store.sign(1, packet, rome.chain.head(0))
    assert paris.store.is_signed(1, signed, rome.chain.head(0))
    for step, changed, previous in [
        (2, signed, rome.chain.head(0)),
        (1, signed, "0" * 64),
        (1, signed._replace(slot=0), rome.chain.head(0)),
        (1, signed._replace(tokens=10**15), rome.chain.head(0)),
        (1, signed._replace(steps=2), rome.chain.head(0)),
        (1, signed._replace(incarnation=2), rome.chain.head(0)),
        (1, signed._replace(sha256="0" * 64), rome.chain.head(0)),
        (1, signed._replace(seal=""), rome.chain.head(0)),
    ]:
        assert not paris.store.is_signed(step, changed, previous)
    rome.store.roster = rome.store.roster._replace(run="0" * 32)
    foreign = rome.store.sign(1, packet, rome.chain.head(0))
    assert not paris.store.is_signed(1, foreign, rome.chain.head(0))


def test_who_announces_itself_in_vain_is_waited_for_once_in_ten_steps(run):
    paris, rome, oslo = run.members(deadline=0.5)
    everybody([paris, rome], 0)
    waited = []
    for step in range(1, 12):
        oslo._steps.say(step, oslo.me, "here")
        began = time.monotonic()
        everybody([paris, rome], step)
        waited.append(time.monotonic() - began > 0.45)
    assert waited == [True] + 9 * [False] + [True]


def test_who_has_read_a_packet_takes_its_step_though_its_sender_was_waited_for_in_vain(run):
    paris, rome, oslo = joined = run.members()
    everybody(joined, 0)
    refs = [x.send(1, f"{x.worker:5} in 1".encode()) for x in joined]
    rome._steps.sent(1, [oslo.slot])
    oslo.send(1, b"oslo  once more")
    put_manifest(run, "paris", 1, refs, paris.chain.head(0))
    for member in paris, rome:
        member.chain.vain = {oslo.slot: 0}
    assert rome.manifest(1) is not None and paris.manifest(1) is None


def test_what_belongs_to_a_slot_is_written_by_its_member_alone(run):
    rome, paris = run.store("rome"), run.store("paris")
    rome.put("slots/000/000009", b"{}")
    rome.put("attested/00000004/000", b"x")
    assert paris.get("slots/000/000009") is None and paris.get("attested/00000004/000") is None
    rome.put("slots/001/000009", b"{}")
    assert paris.get("slots/001/000009") == b"{}"


def test_a_forged_snapshot_of_one_member_is_passed_over(tmp_path):
    run = numbered(tmp_path)
    workers = make_workers(run, 3, snapshot_every=4, min_workers=3)
    ends = swarms.all_take_steps(workers, 10)
    for worker in workers:
        worker._turns.close()
    liar = workers[2].member
    leaves = snapshots.read_newest(liar.store, shared_of(workers[0], *ends[0][0]))[1]
    forged = [x + 1 if x.dtype.kind == "f" else x for x in leaves]
    chain = {"head": liar.chain.head(9), "since": 9, "roster": run.roster().name}
    assert snapshots.write(liar.store, 10, forged, slot=2, **chain)
    chain |= {"since": 0, "head": "0" * 64}
    assert snapshots.write(liar.store, 1000, forged, slot=2, **chain)
    for step, since in ((2000, 2000), (2001, 2005)):  # windows in which nobody counted
        assert snapshots.write(liar.store, step, forged, slot=2, **chain | {"since": since})
        index = snapshots.read_index(liar.store, step, 2)
        assert index
        snapshots.attest(liar.store, index)
    newcomer = swarms.make_worker(swarms.DEMO_SCALED, run.store("worker-3"), 3, snapshot_every=4)
    params, _ = swarms.begin(newcomer)
    assert newcomer.number == 10 and swarms.digest(params) == ends[0][1][10]


def test_a_worker_on_the_smaller_side_goes_back_to_a_snapshot_and_has_equal_parameters(tmp_path):
    run = numbered(tmp_path)
    workers = make_workers(run, 3, snapshot_every=2, min_workers=2, deadline=3.0)
    ends = swarms.all_take_steps(workers, 5)
    astray = workers[2].member
    know_otherwise(astray, 4, head="a" * 64)
    states = [end[0] for end in ends]
    later = swarms.all_take_steps(workers, 12, states)
    assert later[0][1] == later[1][1]
    assert later[2][1][12] == later[0][1][12] and astray.chain.astray is None


def its_own_future(run, liar, since, until):
    """Steps in which a member lists itself alone, and a snapshot after them that it alone signs."""
    head = "ab" * 32
    for step in range(since, until):
        ref = liar.store.sign(step, PacketRef(*liar.me, records.sha256(b"x")), head)
        manifest = records.Manifest(step, (ref,), head, 0.0, run.roster().name)
        liar.store.put(records.step_key("manifests", step), records.encode(manifest))
        head = records.head(manifest)
    chain = dict(head=head, since=since, roster=run.roster().name)
    return snapshots.write(liar.store, until, [x * 666 for x in LEAVES], slot=liar.slot, **chain)


def test_a_future_that_one_member_writes_alone_is_for_no_worker_that_takes_part(run):
    joined, first = trained(run, 6)
    paris, rome, oslo = joined
    forged = [its_own_future(run, oslo, since, since + 4) for since in (900, 950)]
    assert all(snapshots.is_attested(paris.store, x) for x in forged)  # for a newcomer
    refs = [x.send(6, f"{x.worker:5} in 6".encode()) for x in joined]
    put_manifest(run, "oslo", 6, refs, paris.chain.head(5))
    run.anybody.delete([oslo.store._name(oslo._steps.key(6, refs[2]))])
    results = together([functools.partial(x.receive, 6) for x in (paris, rome)])
    assert [sorted(x.packets) for x in results] == [[0, 1]] * 2  # nothing is swept
    assert snapshots.read_newest(paris.store, LEAVES, is_believed=paris.chain.believes)[0] == first
    for member in paris, rome:
        assert not any(map(member.chain.believes, forged))
        assert list(member.chain.later_snapshots(6)) == []


def trained(run, steps, every=4):
    """Members that have taken some steps from the first snapshot."""
    joined = run.members(deadline=0.3)
    first, _ = snapshots.read_newest(joined[0].store, LEAVES)
    for member in joined:
        member.store.every = every
        member.go_on_from(first)
    for step in range(steps):
        everybody(joined, step)
    return joined, first


def test_a_past_that_one_member_writes_over_is_for_no_worker_that_takes_part(run):
    joined, _ = trained(run, 30)
    paris, rome, oslo = joined
    chain = dict(head=paris.chain.head(19), since=16, roster=run.roster().name)
    genuine = snapshots.write(paris.store, 20, LEAVES, slot=0, **chain)
    snapshots.attest(rome.store, genuine)
    for member in joined:
        member.chain.judged_from = 24
    everybody(joined, 30)
    known = min(paris.chain._decided)
    assert known > genuine.step and paris.chain.head(known - 1) == ""
    forged = its_own_future(run, oslo, known - 4, known)
    assert snapshots.is_attested(paris.store, forged) and not paris.chain.believes(forged)
    with mock.patch.object(snapshots, "attesters", return_value={0}):  # not by most signatures
        assert not paris.chain.believes(forged)


def test_what_leads_to_all_that_a_worker_knows_is_believed(run):
    joined, _ = trained(run, 30)
    paris, _, oslo = joined
    chain = dict(head=paris.chain.head(19), since=16, roster=run.roster().name)
    genuine = snapshots.write(paris.store, 20, LEAVES, slot=0, **chain)
    for member in joined:
        member.chain.judged_from = 24
    everybody(joined, 30)
    assert min(oslo.chain._decided) > 20 and not oslo.chain.believes(genuine)
    with mock.patch.object(snapshots, "is_attested", return_value=True):
        assert oslo.chain.believes(genuine)
        assert not oslo.chain.believes(genuine._replace(head="c" * 64))


def test_a_snapshot_that_only_its_writer_believes_in_is_not_taken_over_in_its_turn(run):
    joined, _ = trained(run, 24)
    turns = SnapshotTurns(joined[0], 4)
    joined[0].chain.judged_from = 20
    everybody(joined, 24)
    oslo, counted = joined[2], joined[0].chain.counted
    forged = its_own_future(run, oslo, min(counted) - 1, 25)
    assert snapshots.is_attested(joined[0].store, forged, counted)
    turns._last = 26
    assert turns._compare(25, oslo.slot, LEAVES, 1, turns._origin(25)) == (forged, mock.ANY, None)
    turns.close()


def test_who_stood_still_believes_in_what_most_of_the_others_did_meanwhile(run):
    (paris, rome, oslo), _ = trained(run, 4)
    for step in range(4, 12):
        everybody([paris, rome], step)
    chain = dict(head=paris.chain.head(11), since=8, roster=run.roster().name)
    index = snapshots.write(paris.store, 12, LEAVES, slot=0, **chain)
    snapshots.attest(rome.store, index)
    oslo.store.look_for_roster()
    assert list(oslo.chain.later_snapshots(4)) == [index] == list(paris.chain.later_snapshots(4))
    forged = its_own_future(run, rome, 13, 17)
    assert forged and list(oslo.chain.later_snapshots(4)) == [index]


def test_what_is_written_under_a_name_stays_if_the_roster_changes_meanwhile(run):
    run.make("lima")
    run.change("lima")
    store = run.store("paris")
    store.begin(0, run.roster().named(1))
    store.hold(5, run.roster().name)
    put = store.inner.put

    def put_and_begin_again(key, data):
        put(key, data)
        store.begin(0, run.roster().named(1))

    with mock.patch.object(store.inner, "put", put_and_begin_again):
        store.put("attested/00000010/000", b"signed")
    assert store.get("attested/00000010/000") == b"signed"


def test_nobody_is_left_out_half_by_half(run):
    for name in ("lima", "bonn"):
        run.make(name)
    run.change("lima", "bonn")
    names = (*NAMES, "lima", "bonn")
    joined = run.members(*names, deadline=30.0)
    everybody(joined, 0)
    refs = [x.send(1, f"{x.worker:5} in 1".encode()) for x in joined[:3]]
    put_manifest(run, "oslo", 1, refs, joined[0].chain.head(0))
    assert joined[0].manifest(1) is not None  # three of five
    head = joined[0].chain.head(1)
    refs = [joined[2].store.sign(2, PacketRef(*joined[2].me, "0" * 64), head)]
    refs = [joined[1].store.sign(2, PacketRef(*joined[1].me, "0" * 64), head), *refs]
    put_manifest(run, "oslo", 2, refs, head)
    assert joined[0].manifest(2) is None  # two of the three, but two of five lately


def test_a_mark_is_no_packet(run):
    paris, rome = run.members("paris", "rome")
    everybody([paris, rome], 0)
    rome._steps.say(1, rome.me, "left")
    left = paris._steps._read(1, "001.packet").packet
    assert paris.store.is_signed(1, left, "", "left")
    assert not paris.store.is_signed(1, left, "")
    put_manifest(run, "paris", 1, [left], "")
    assert paris.manifest(1) is None


def test_a_manifest_of_those_who_were_taken_out_is_not_believed(run):
    paris, oslo = run.members("paris", "oslo")
    everybody([paris, oslo], 0)
    ref = oslo.send(1, b"oslo  in 1")
    name, data = signed_manifest(run, "oslo", 1, [ref], oslo.chain.head(0))
    run.change(without=["oslo"])
    run.anybody.put(name, data)
    late = run.member("rome")
    late.receive(0)
    know_otherwise(late, 0, learned=-1e9)
    assert late.manifest(1) is None


def test_all_go_on_if_what_they_signed_was_deleted_for_as_long_as_all_had_two_turns(tmp_path):
    run = numbered(tmp_path)
    workers = make_workers(run, 3, snapshot_every=2, deadline=0.5)
    states, ended = [swarms.begin(worker) for worker in workers], threading.Event()
    members = [worker.member for worker in workers]

    def delete():
        while not all(x.chain.is_unheard for x in members):
            keys = physical(run, "attested")
            run.anybody.delete([x for x in keys if "/00000000/" not in x])
            time.sleep(0.005)
        ended.set()

    def go(worker, state):
        while not ended.is_set() or worker.number < last + 6:
            *state, _ = worker.step(*state, slowly(worker.member.slot, worker.number))

    last = 10**9
    all_of_them = [functools.partial(go, *x) for x in zip(workers, states, strict=True)]
    with ThreadPoolExecutor(2) as threads:
        threads.submit(delete)
        going = threads.submit(together, all_of_them)
        assert ended.wait(timeout=60)
        last = max(worker.number for worker in workers)
        going.result(timeout=60)
    assert min(worker.number for worker in workers) >= last + 6


def test_who_is_asked_to_leave_does_not_wait_for_something_in_the_way_to_be_gone(run, monkeypatch):
    monkeypatch.setattr("demo_optax._src.swarm.store.LEAVING", 0.3)
    paris, rome = run.members("paris", "rome", deadline=0.3)
    for step in 0, 1:
        everybody([paris, rome], step)
    (run.folder / "run" / "packets" / "00000002").touch()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(exchange, paris, 2)
        time.sleep(1.5)  # longer than patience
        assert not waiting.done()
        with pytest.raises(OSError, match="is in the way"):
            paris.leave(2)
        with pytest.raises((OSError, Left)):
            waiting.result(timeout=20)


def test_a_member_that_writes_each_snapshot_first_ends_only_its_own_turns(tmp_path):
    run = numbered(tmp_path)
    workers = make_workers(run, 3, snapshot_every=2, min_workers=3)
    states = [swarms.begin(worker) for worker in workers]
    liar = workers[2].member.store
    for step in 2, 4:
        junk = records.SnapshotIndex(step, f"snapshots/{step:08d}/{'0' * 32}", 1, "0" * 64)
        for name in "", ".001", ".002":
            liar.put(f"snapshots/{step:08d}{name}.json", records.encode(junk))
    swarms.all_take_steps(workers, 4, states, slowly)
    for worker in workers:
        worker._turns.close()
    assert snapshots.attested_steps(run.store("worker-3"), 100) == [0, 2]  # the turn of slot 1


def test_a_time_that_a_member_signs_decides_nothing(run):
    joined = run.members(deadline=2.0)
    everybody(joined, 0)
    first = joined[2].manifest(0)
    alone = [joined[2].send(1, b"oslo  in 1")]
    for step, packets, previous in (
        (0, first.packets, first.previous),
        (1, alone, joined[2].chain.head(0)),
    ):
        put_manifest(run, "oslo", step, packets, previous, time=0.0)
    late = run.member("rome", deadline=0.1)
    assert late.receive(0).manifest.time == 0 and late.chain.head(0) == joined[2].chain.head(0)
    assert late.manifest(1) is None
    time.sleep(0.6)  # five deadlines by its own clock, but others may lack a packet for a second
    assert late.manifest(1) is None
    time.sleep(0.8)
    assert late.manifest(1) is not None


def test_a_step_of_fewer_than_min_workers_is_not_there_for_readers_either(run):
    oslo, paris, rome = run.member("oslo"), run.member("paris", min_workers=2), run.member("rome")
    put_manifest(run, "oslo", 0, [oslo.send(0, b"x")], oslo.chain.head(-1))
    assert paris.manifest(0) is None and rome.manifest(0) is not None


def test_no_byte_of_a_packet_is_parsed_before_its_signature_was_verified(run, monkeypatch):
    paris, rome = run.members("paris", "rome")
    rome.send(0, b"x")
    (name,) = physical(run, "packets/00000000")
    genuine, parsed = run.anybody.get(name), []
    decode = records.decode
    monkeypatch.setattr(records, "decode", lambda *x: parsed.append(x[1]) or decode(*x))
    run.anybody.put(name, genuine.replace(b'"step": 0', b'"step":  0'))
    assert paris._steps._read(0, "001.packet") is None and not any(parsed)
    run.anybody.put(name, genuine)
    assert paris._steps._read(0, "001.packet").payload == b"x" and any(parsed)


def test_a_worker_whose_snapshots_nobody_signs_stops_until_the_owner_takes_the_others_out(tmp_path):
    run, said = numbered(tmp_path), []
    workers = make_workers(run, 2, snapshot_every=2, deadline=0.2)
    states = [swarms.begin(worker) for worker in workers]
    state = swarms.all_take_steps(workers, 1, states)[0][0]
    alone = workers[0]  # the other one is gone without a word
    alone.member.tell = said.append
    with ThreadPoolExecutor(1) as thread:
        going = thread.submit(swarms.take_steps, alone, 12, state, slowly)
        time.sleep(12)
        assert not going.done() and alone.member.chain.is_unheard and alone.number < 10
        waits = "so this worker sends nothing until they do: let the owner take"
        assert any(waits in x for x in said)
        run.change(without=["worker-1"])
        going.result(timeout=30)
    assert alone.number == 12


def test_a_roster_that_was_put_back_is_missed_and_its_successor_is_waited_for(run, monkeypatch):
    monkeypatch.setattr(steps, "ROSTER_SECONDS", 0.0)
    monkeypatch.setattr("demo_optax._src.swarm.member.LOG_EVERY_SECONDS", 0.1)
    said, before = [], run.anybody.get(roster.KEY)
    paris, rome = run.members("paris", "rome", deadline=0.3)
    everybody([paris, rome], 0)
    run.change(without=["oslo"])
    after = run.anybody.get(roster.KEY)
    rome.send(1, b"rome  in 1")
    manifest = exchange(paris, 1).manifest
    written = {name: run.anybody.get(name) for name in physical(run, "manifests")}
    run.anybody.put(roster.KEY, before)
    late = run.member("rome", deadline=0.3, tell=said.append)
    late.receive(0)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(exchange, late, 1)
        missing = "roster.json holds roster 1, but the owner has signed number 2: put that"
        until = time.monotonic() + 20
        while not any(missing in x for x in said) and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.5)
        assert not waiting.done() and late.manifest(1) is None
        assert written == {name: run.anybody.get(name) for name in physical(run, "manifests")}
        assert missing in said[-1]
        run.anybody.put(roster.KEY, after)
        assert waiting.result(timeout=10).manifest == manifest


def test_a_roster_that_the_owner_has_not_signed_stops_nobody(run):
    paris, rome = run.members("paris", "rome")
    everybody([paris, rome], 0)
    word, number, digest, signature = run.roster().name.split()
    refs = [x.send(1, b"in 1") for x in (paris, rome)]
    for forged in (
        f"{word} 2 {digest} {signature}",
        f"{'0' * 32} 2 {digest} {signature}",
        f"{word} {number} {'0' * 64} {signature}",
    ):
        put_manifest(run, "rome", 1, refs, paris.chain.head(0), roster=forged)
        assert paris.manifest(1) is None and not paris.store.missing


def test_who_has_long_known_a_roster_takes_no_manifest_that_comes_later_with_an_earlier_one(run):
    paris, rome = run.members("paris", "rome")
    everybody([paris, rome], 0)
    earlier = run.roster().name
    run.change(without=["oslo"])
    paris.store.look_for_roster()
    assert paris.manifest(1) is None
    paris.store.known_since -= 100
    assert paris.manifest(1) is None
    refs = tuple(x.send(1, b"in 1") for x in (paris, rome))
    manifest = records.Manifest(1, refs, paris.chain.head(0), time.time(), earlier)
    rome.store.put("manifests/00000001", records.encode(manifest))
    late = run.member("rome")
    late.receive(0)
    assert paris.manifest(1) is None and late.manifest(1) is not None


LEAVES = [np.ones(1000, np.float32), np.ones(1, np.float32), np.ones(1, np.int32)]


def test_a_run_that_one_member_shows_alone_or_in_haste_is_not_believed(run):
    oslo = run.member("oslo")
    for step in range(4):
        exchange(oslo, step)
    store = run.member("paris", min_workers=2).store
    for since, every, min_workers, is_believed in (
        (0, 4, 1, True),
        (0, 4, 2, False),
        (2, 2, 1, True),
        (2, 3, 1, False),
        (4, 1, 1, False),
    ):
        chain = {"head": oslo.chain.head(3), "since": since, "roster": run.roster().name}
        oslo.store.delete(["snapshots/00000004.002.json"])
        assert snapshots.write(oslo.store, 4, LEAVES, slot=2, **chain)
        store.min_workers, store.every = min_workers, every
        index = snapshots.read_index(store, 4, 2)
        assert snapshots.is_attested(store, index) == is_believed


@pytest.mark.parametrize(
    ("changed", "change", "is_signed"),
    [(0, 1e-4, True), (0, 1e-2, False), (1, 2e-2, False), (2, 1, False)],
    ids=["rounding", "an array", "a small array", "an integer"],
)
def test_a_member_signs_no_snapshot_of_which_one_array_differs(run, changed, change, is_signed):
    paris, rome = joined = run.members("paris", "rome")
    for step in range(4):
        everybody(joined, step)
    theirs = [x + np.asarray(change, x.dtype) * (n == changed) for n, x in enumerate(LEAVES)]
    turns = SnapshotTurns(paris, 4)
    chain = turns._origin(4)
    turns.take(4, LEAVES, 3, paris.manifest(3))
    assert snapshots.write(rome.store, 4, theirs, slot=1, **chain)
    index = snapshots.read_index(paris.store, 4, 1)
    until = time.monotonic() + (5.0 if is_signed else 1.0)
    while 0 not in snapshots.attesters(paris.store, index) and time.monotonic() < until:
        time.sleep(0.05)
    assert (0 in snapshots.attesters(paris.store, index)) == is_signed
    turns.close()


def test_a_packet_is_lost_only_if_most_of_those_who_counted_have_signed_that(run):
    joined = run.members()
    for step in range(2):
        everybody(joined, step)
    oslo, manifest = joined[2], joined[2].manifest(1)
    head = records.head(manifest, [0])
    ref = oslo.store.sign(2, PacketRef(*oslo.me, records.sha256(b"x")), head)
    put_manifest(run, "oslo", 2, [ref], head, lost=(0,))
    late = run.member("rome")
    late.receive(0)
    assert sorted(late.receive(1).packets) == [0, 1, 2]
    assert late.chain.head(1) == joined[0].chain.head(1)


def test_snapshots_that_nobody_signs_do_not_make_a_lost_packet_a_swept_one(run):
    joined = run.members()
    for step in range(2):
        everybody(joined, step)
    liar, late = joined[2].store, run.member("rome")
    for step in 10, 20:
        chain = {"head": "0" * 64, "roster": run.roster().name}
        assert snapshots.write(liar, step, LEAVES, slot=2, **chain)
    gone = joined[0].manifest(1).packets[0]
    run.anybody.delete([liar._name(joined[0]._steps.key(1, gone))])
    late.receive(0)
    result = late.receive(1)
    assert not result.swept and sorted(result.packets) == [1, 2]


def test_no_member_replaces_the_settings_that_most_have(run):
    paris, rome, oslo = (run.store(name) for name in NAMES)
    device = {"device": "cpu", "program": "1"}
    for store in paris, rome, oslo:
        agreement.require(store, {"slots": 8}, device)
    for name in "lima", "bonn":
        run.make(name)
        run.change(name)
        agreement.require(run.store(name), {"slots": 8}, device)
    for overwritten in "", "settings/001/", "settings/000/":
        for name in "run.json", f"programs/{records.sha256(b'cpu')[:16]}.json":
            rome.put(f"{overwritten}{name}", b'{"slots": "9"}')
        if overwritten != "settings/000/":
            with pytest.raises(SwarmError, match="slots is 8 there and 9 here"):
                agreement.compare(run.store("rome"), {"slots": 9})
        for name in "oslo", "lima":
            agreement.compare(run.store(name), {"slots": 8})
            agreement.require(run.store(name), {"slots": 8}, device)


@pytest.mark.parametrize(
    ("facts", "program"), [({"slots": 8}, "2"), ({"slots": 9}, "1")], ids=["program", "settings"]
)
def test_who_has_other_settings_than_the_first_member_is_refused_and_has_no_say(
    run, facts, program
):
    paris, rome, oslo = (run.store(name) for name in NAMES)
    firsts = {"slots": 8}, {"device": "cpu", "program": "1"}
    agreement.require(paris, *firsts)
    with pytest.raises(SwarmError, match="the run there has other settings"):
        agreement.require(rome, facts, {"device": "cpu", "program": program})
    for store in paris, oslo, paris, rome:
        agreement.require(store, *firsts)


def test_of_as_many_members_with_other_settings_those_of_the_lowest_slot_hold(run):
    paris, rome, oslo = (run.store(name) for name in NAMES)
    agreement.require(paris, {"slots": 8}, {"device": "cpu"})
    rome.put("settings/001/run.json", b'{"slots": "9"}')
    for _ in range(2):
        with pytest.raises(SwarmError, match="slots is 8 there and 9 here"):
            agreement.compare(oslo, {"slots": 9})
        agreement.require(oslo, {"slots": 8}, {"device": "cpu"})


def test_numbers_that_another_member_writes_for_a_slot_count_for_nothing(run):
    oslo, slots = run.store("oslo"), range(3)
    for slot in slots:
        for number in 7, 10**8, 10**9 - 1:
            oslo.put(f"slots/{slot:03d}/{number:06d}", b"{}")
    joined = run.members("paris", "rome")
    everybody(joined, 0)
    for member in joined:
        oslo.put(records.left_key(member.me), b"")
    latest = int(time.time()) - FIRST_SECOND + 9
    assert all(member.incarnation < latest for member in joined)
    assert read_history(joined[0].store).left == frozenset()
    joined[1].leave(1)
    assert read_history(joined[0].store).left == {joined[1].me}


def test_a_slow_clock_gives_no_earlier_number_than_the_last_one(run, monkeypatch):
    rome, now = run.member("rome"), time.time()
    monkeypatch.setattr(time, "time", lambda: now - 3600)
    assert run.member("rome").incarnation == rome.incarnation + 1


def test_snapshots_of_one_member_cost_the_others_no_more_in_a_long_run(run):
    joined, heads = run.members(), []
    for step in range(40):
        everybody(joined, step)
        heads.append(joined[2].chain.head(step))
    liar = joined[2].store
    for step, head in enumerate(heads[20:], 21):
        assert snapshots.write(liar, step, LEAVES, slot=2, head=head, roster=run.roster().name)
    counting = Counting(run.anybody)
    assert snapshots.attested_steps(run.store("paris", counting)) == []
    assert counting.counts["get"] < 20 * 9  # index, three that sign, a manifest, two that left


def test_a_founder_that_is_killed_once_its_index_is_there_ends_nobody(run, monkeypatch):
    def killed(store, index):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
        patched.setattr(snapshots, "attest", killed)
        snapshots.read_newest(run.store("paris"), LEAVES)
    for name in "rome", "paris":
        assert snapshots.read_newest(run.store(name), LEAVES)[0].step == 0


@pytest.mark.parametrize(
    "name", ["slots/000/000001", "manifests/00000000", "snapshots/00000000.json"]
)
def test_a_run_is_founded_only_where_nothing_of_another_one_lies(run, name):
    paris = run.member("paris")
    run.anybody.put(name, b"{}")
    with pytest.raises(SwarmError, match="other objects of a run, perhaps under a newer roster"):
        snapshots.read_newest(paris.store, LEAVES)
    run.anybody.delete([name])
    assert snapshots.read_newest(paris.store, LEAVES)[0].step == 0


def test_two_places_of_one_owner_are_two_runs(run):
    public = run.key("paris").public
    first, second = (
        roster.parse(roster.change(None, run.key("owner"), [public]), run.key("owner").public)
        for _ in range(2)
    )
    assert first.run != second.run
    run.anybody.put(roster.KEY, roster.change(run.roster(), run.key("owner"), without=["oslo"]))
    assert run.roster().run == run.store("paris").roster.run

"""Members that lack a packet, lie or come back: which side goes on, and how all others join it."""

import functools
import time

import numpy as np
import pytest

from demo_optax._src.swarm import records, snapshots
from demo_optax._src.swarm.records import SnapshotIndex
from demo_optax._src.swarm.slots import last_claim
from tests.members import Run, everybody, exchange, physical, signed_manifest
from tests.swarms import together


def send_all(run, joined, step):
    """All send, and the last one decides; returns the references."""
    refs = [x.send(step, f"{x.worker:5} in {step}".encode()) for x in joined]
    name, data = signed_manifest(run, joined[-1].worker, step, refs, joined[0].head(step - 1))
    run.anybody.put(name, data)
    return refs


def hide(run, member, step, ref):
    """Deletes a packet, which its sender does not send again."""
    name = member.store._name(member._steps.key(step, ref))
    data = run.anybody.get(name)
    run.anybody.delete([name])
    member._sent = {}
    return name, data


def index_of(run, step, **chain):
    file, empty = f"snapshots/{step:08d}/{'0' * 32}", "0" * 64
    return SnapshotIndex(step, file, 1, empty, empty, roster=run.roster().name, **chain)


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def test_a_member_that_decides_the_first_step_alone_gains_nothing(run):
    paris, rome, oslo = run.members(deadline=0.3, min_workers=2)
    ref = oslo.send(0, b"oslo  in 0")
    name, data = signed_manifest(run, "oslo", 0, [ref], oslo.head(-1))
    run.anybody.put(name, data)
    results = together([functools.partial(exchange, x, 0) for x in (paris, rome)])
    assert all(sorted(x.packets) == [0, 1, 2] and not x.swept for x in results)


def test_more_workers_may_be_wanted_from_a_step_on(run):
    alone = run.member("paris", deadline=0.3)
    for step in range(3):
        exchange(alone, step)
    paris, rome = run.members("paris", "rome", deadline=0.3, min_workers=2)
    results = everybody([paris, rome], 0)
    assert all(sorted(x.packets) == [0, 1] for x in results)
    assert all(sorted(x.packets) == [0, 1] for x in everybody([paris, rome], 1))


def test_all_go_on_from_a_snapshot_before_which_a_packet_was_lost(run):
    joined = run.members(deadline=0.3)
    everybody(joined, 0)
    refs = send_all(run, joined, 1)
    hide(run, joined[2], 1, refs[2])
    together([functools.partial(x.receive, 1) for x in joined[:2]])
    head, lost = joined[0].head(1), joined[0].lost(1)
    index, again = index_of(run, 2, head=head, lost=lost), run.members(deadline=0.3)
    for member in again:
        member.go_on_from(index)
    results = everybody(again, 2)
    assert lost == (2,) and {x.head(1) for x in again} == {head}
    assert all(len(x.packets) == 3 and x.manifest.lost == (2,) for x in results)


@pytest.mark.parametrize(("number", "have"), [(5, 2), (4, 2)])
def test_those_who_lack_a_packet_stay_together_whenever_each_gives_up(tmp_path, number, have):
    names = [f"m{n}" for n in range(number)]
    run = Run(tmp_path, names)
    joined = run.members(*names, deadline=0.3)
    everybody(joined, 0)
    refs = send_all(run, joined, 1)
    for member in joined[:have]:
        member.receive(1)
    hide(run, joined[0], 1, refs[0])
    for member in joined[:have]:
        member.send(2, f"{member.worker:5} in 2".encode())
    for member in joined[have:]:  # one after another
        member.receive(1)
        member.send(2, f"{member.worker:5} in 2".encode())
    assert {x.lost(1) for x in joined[have:]} == {(0,)} and not any(x.astray for x in joined)
    results = together([functools.partial(exchange, x, 2) for x in joined])
    assert [x.swept for x in results] == [True] * have + [False] * (number - have)


def test_a_decided_step_is_believed_by_those_who_had_left(run):
    paris, rome, oslo = joined = run.members(deadline=0.3)
    everybody(joined, 0)
    refs = send_all(run, joined, 1)
    name, data = hide(run, rome, 1, refs[1])
    rome.leave(2), oslo.leave(2)
    paris.receive(1)
    for step in 2, 3:
        exchange(paris, step)
    run.anybody.put(name, data)
    written = {name: run.anybody.get(name) for name in physical(run, "manifests")}
    late = run.member("rome", deadline=0.3)
    for step in range(4):
        late.receive(step)
    assert late.head(3) == paris.head(3) and not late.astray
    assert written == {name: run.anybody.get(name) for name in physical(run, "manifests")}


def test_a_run_goes_on_from_its_snapshot_once_most_are_taken_out(run):
    joined, ones = run.members(deadline=0.3), [np.ones(4, np.float32)]
    first, _ = snapshots.read_newest(joined[0].store, ones)
    for member in joined:
        member.go_on_from(first)
    for step in range(4):
        everybody(joined, step)
    chain = dict(head=joined[0].head(3), since=0, roster=run.roster().name)
    index = snapshots.write(joined[0].store, 4, ones, slot=0, **chain)
    for member in joined[1:]:
        snapshots.attest(member.store, index)
    everybody(joined, 4)
    run.change(without=["rome", "oslo"])
    alone = run.member("paris", deadline=0.3)
    index, _ = snapshots.read_newest(alone.store, ones)
    alone.go_on_from(index)
    assert index.step == 4 and [sorted(exchange(alone, n).packets) for n in (4, 5)] == [[0], [0]]


def test_no_member_writes_another_beginning_of_a_run_that_has_begun(run):
    joined, ones = run.members(deadline=0.3), [np.ones(4, np.float32)]
    first, _ = snapshots.read_newest(joined[0].store, ones)
    for member in joined:
        member.go_on_from(first)
    everybody(joined, 0)
    liar = joined[2].store
    snapshots.write(liar, 0, [np.full(4, 666, np.float32)], slot=2, roster=liar.roster.name)
    index, leaves = snapshots.read_newest(run.store("rome"), [np.zeros(4, np.float32)])
    assert index == first and leaves[0].tolist() == ones[0].tolist()


def test_who_left_and_came_back_is_waited_for_again_when_it_dies(run):
    paris, rome = run.members("paris", "rome", deadline=0.2)
    everybody([paris, rome], 0)
    rome.leave(1)
    exchange(paris, 1)
    exchange(paris, 2)
    again = run.member("rome", deadline=0.2)
    for step in range(3):
        again.receive(step)
    again.send(3, b"rome  in 3")
    assert sorted(exchange(paris, 3).packets) == [0, 1]
    started = time.monotonic()
    assert sorted(exchange(paris, 4).packets) == [0]
    assert time.monotonic() - started >= paris._patient_wait > 1


def test_claims_are_compared_as_numbers(run):
    store = run.store("paris")
    for incarnation in 99_999_990, 100_000_005:
        claim = records.Claim("paris", "", 0.0)
        store.create(records.claim_key((0, incarnation)), records.encode(claim))
    assert last_claim(store, 0) == 100_000_005

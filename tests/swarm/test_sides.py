"""Members that lack a packet, lie or come back: which side goes on, and how all others join it."""

import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from demo_optax._src.swarm import records, sides, snapshots, steps
from demo_optax._src.swarm.chain import Decided
from demo_optax._src.swarm.pace import Pace
from demo_optax._src.swarm.records import PacketRef, SnapshotIndex
from demo_optax._src.swarm.slots import last_claim
from demo_optax._src.swarm.snapshot_turns import SnapshotTurns
from demo_optax._src.swarm.steps import Said
from demo_optax.swarm import Member
from tests.members import (
    NAMES,
    Run,
    everybody,
    exchange,
    know_otherwise,
    physical,
    put_manifest,
    signed_manifest,
)
from tests.swarms import together

ONES = [np.ones(4, np.float32)]

pytestmark = pytest.mark.usefixtures("virtual_waits")


def send_all(run, joined, step):
    """All send, and the last one decides; returns the references."""
    refs = [x.send(step, f"{x.worker:5} in {step}".encode()) for x in joined]
    put_manifest(run, joined[-1].worker, step, refs, joined[0].chain.head(step - 1))
    return refs


def hide(run, member, step, ref):
    """Deletes a packet, which its sender does not send again."""
    name = member.store._name(member._steps.key(step, ref))
    data = run.anybody.get(name)
    run.anybody.delete([name])
    member._sent = {}
    return name, data


def begun(run, *names, **settings):
    """Members that go on from the first snapshot of their run, and this one."""
    joined = run.members(*names, **settings)
    first, _ = snapshots.read_newest(joined[0].store, ONES)
    for member in joined:
        member.go_on_from(first)
    return joined, first


def index_of(run, step, **chain):
    file, empty = f"snapshots/{step:08d}/{'0' * 32}", "0" * 64
    return SnapshotIndex(step, file, 1, empty, roster=run.roster().name, **chain)


def test_a_member_that_decides_the_first_step_alone_gains_nothing(run):
    paris, rome, oslo = run.members(deadline=0.3, min_workers=2)
    ref = oslo.send(0, b"oslo  in 0")
    put_manifest(run, "oslo", 0, [ref], oslo.chain.head(-1))
    results = everybody([paris, rome], 0)
    assert all(sorted(x.packets) == [0, 1, 2] and not x.swept for x in results)


def test_more_workers_may_be_wanted_from_a_step_on(run):
    alone = run.member("paris", deadline=0.3)
    for step in range(3):
        exchange(alone, step)
    paris, rome = run.members("paris", "rome", deadline=0.3, min_workers=2)
    results = everybody([paris, rome], 0)
    assert all(sorted(x.packets) == [0, 1] for x in results)
    assert all(sorted(x.packets) == [0, 1] for x in everybody([paris, rome], 1))


def test_nobody_goes_back_to_follow_a_manifest_that_is_not_there(run):
    alone = run.member("paris", deadline=0.3)
    for step in range(3):
        exchange(alone, step)
    paris, rome = run.members("paris", "rome", deadline=0.3, min_workers=2)
    everybody([paris, rome], 0)
    assert rome._steps.sent(1, [paris.slot])[0].head != rome.chain.head(0)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(exchange, rome, 1)
        while rome.last_sent != 1:
            time.sleep(0.01)
        time.sleep(0.2)  # it looks at what was said before
        assert sorted(exchange(paris, 1).packets) == sorted(waiting.result().packets) == [0, 1]


def test_all_go_on_from_a_snapshot_before_which_a_packet_was_lost(run):
    joined = run.members(deadline=0.3)
    everybody(joined, 0)
    refs = send_all(run, joined, 1)
    hide(run, joined[2], 1, refs[2])
    together([functools.partial(x.receive, 1) for x in joined[:2]])
    head, lost = joined[0].chain.head(1), joined[0].chain.lost(1)
    index, again = index_of(run, 2, head=head, lost=lost), run.members(deadline=0.3)
    for member in again:
        member.go_on_from(index)
    results = everybody(again, 2)
    assert lost == (2,) and {x.chain.head(1) for x in again} == {head}
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
    assert {x.chain.lost(1) for x in joined[have:]} == {(0,)}
    assert not any(x.chain.astray for x in joined)
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
    assert late.chain.head(3) == paris.chain.head(3) and not late.chain.astray
    assert written == {name: run.anybody.get(name) for name in physical(run, "manifests")}


def test_a_run_goes_on_from_its_snapshot_once_most_are_taken_out(run):
    joined, _ = begun(run, deadline=0.3)
    for step in range(4):
        everybody(joined, step)
    chain = dict(head=joined[0].chain.head(3), since=0, roster=run.roster().name)
    index = snapshots.write(joined[0].store, 4, ONES, slot=0, **chain)
    for member in joined[1:]:
        snapshots.attest(member.store, index)
    everybody(joined, 4)
    run.change(without=["rome", "oslo"])
    alone = run.member("paris", deadline=0.3)
    index, _ = snapshots.read_newest(alone.store, ONES)
    alone.go_on_from(index)
    assert index.step == 4 and [sorted(exchange(alone, n).packets) for n in (4, 5)] == [[0], [0]]


def test_members_who_began_a_run_twice_from_equal_parameters_are_in_one_run(run):
    (paris,), first = begun(run, "paris", deadline=5.0, min_workers=2)
    run.anybody.delete(physical(run, "snapshots"))
    (rome,), again = begun(run, "rome", deadline=5.0, min_workers=2)
    assert first.file != again.file
    assert [sorted(x.packets) for x in everybody([paris, rome], 0)] == [[0, 1]] * 2


def test_no_member_writes_another_beginning_of_a_run_that_has_begun(run):
    joined, first = begun(run, deadline=0.3)
    everybody(joined, 0)
    liar = joined[2].store
    snapshots.write(liar, 0, [np.full(4, 666, np.float32)], slot=2, roster=liar.roster.name)
    index, leaves = snapshots.read_newest(run.store("rome"), [np.zeros(4, np.float32)])
    assert index == first and leaves[0].tolist() == ONES[0].tolist()


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
    assert time.monotonic() - started >= paris.pace.patient_wait > 1


def joined_again(run, others):
    """A third member that was killed, and comes back after the others have attested a snapshot."""
    joined = [*others, run.member("oslo", deadline=None)]
    for member in joined:
        member.store.every = 5
        member.go_on_from(snapshots.read_newest(member.store, ONES)[0])
    for step in range(7):
        everybody(joined, step)
    for step in range(7, 12):
        everybody(others, step)
        if step == 9:
            chain = dict(head=others[0].chain.head(9), since=0, roster=run.roster().name)
            index = snapshots.write(others[0].store, 10, ONES, slot=others[0].slot, **chain)
            snapshots.attest(others[1].store, index)
    again = run.member("oslo", deadline=None)
    again.store.every = 5
    again.go_on_from(snapshots.read_newest(again.store, ONES)[0])
    for step in range(10, 12):
        again.receive(step)
    again.announce(12)
    return again


def test_who_has_just_joined_goes_on_with_one_when_the_third_is_late(run):
    """It knows of the time before its snapshot who counted, so that it sees that most are there."""
    paris, rome = others = run.members("paris", "rome", deadline=None)
    again = joined_again(run, others)
    started = time.monotonic()
    results = everybody([rome, again], 12)
    assert [sorted(x.packets) for x in results] == [[1, 2], [1, 2]]
    assert time.monotonic() - started < 5.0
    assert sorted(exchange(paris, 12).packets) == [1, 2]  # and was late


def test_who_joins_takes_a_step_from_which_those_who_were_late_have_gone_on(run):
    said = []
    paris, _, oslo = joined = run.members(deadline=5.0)
    everybody(joined, 0)
    refs = [oslo.send(1, b"oslo  in 1")]
    put_manifest(run, "oslo", 1, refs, oslo.chain.head(0))
    late = run.member("rome", deadline=5.0, tell=said.append)
    late.receive(0)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(exchange, late, 1)
        time.sleep(7.0)
        know_otherwise(paris, 0, learned=-1e9)  # it has waited for long
        paris.receive(1)
        assert not waiting.done() and said[-1].startswith(
            "step 1: others have decided it without half or more of those who counted lately, such "
            "as paris: waits "
        )
        paris.send(2, b"paris in 2")
        started = time.monotonic()
        assert sorted(waiting.result().packets) == [2]
        assert time.monotonic() - started < 6.0 < late.pace.patient_wait / 2


def test_who_lacks_a_step_that_others_are_past_goes_on_from_their_snapshot(run):
    said = []
    run.change(without=["oslo"])
    joined, first = begun(run, "paris", "rome", deadline=0.3)
    for step in range(3):
        everybody(joined, step)
    chain = dict(head=joined[0].chain.head(2), since=2, roster=run.roster().name)
    snapshots.attest(joined[1].store, snapshots.write(joined[0].store, 3, ONES, slot=0, **chain))
    gone = [x for x in physical(run, "manifests") if x.endswith(".00000001")]
    run.anybody.delete(gone)
    run.change("oslo")
    late = run.member("oslo", deadline=0.3, tell=said.append)
    late.go_on_from(first)
    late.receive(0)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(exchange, late, 1)
        time.sleep(4 * late.pace.patient_wait)
        late.leave()
        assert waiting.result().swept and late.chain.astray
    assert "step 1: most members have signed a later snapshot: it goes back to a snapshot" in said
    late.go_on_from(first)  # nobody can read that snapshot
    late.chain._look_for_later_snapshot(1)
    assert not late.chain.astray


def test_a_packet_that_most_could_not_read_counts_for_nobody_even_if_it_comes_back(run):
    said = []
    paris, rome, _ = joined = run.members(deadline=5.0, tell=said.append)
    everybody(joined, 0)
    refs = send_all(run, joined, 1)
    gone, hidden = hide(run, joined[2], 1, refs[2])
    results = together([functools.partial(x.receive, 1) for x in (paris, rome)])
    assert all(sorted(x.packets) == [0, 1] and not x.swept for x in results)
    assert (
        "a packet that counts in step 1, of " in said[-1]
        and "cannot be read since 0.5 s" in said[-1]
    )
    decided = together([functools.partial(exchange, x, 2) for x in (paris, rome)])[0].manifest
    assert decided.lost == (2,) and paris.chain.head(2) == rome.chain.head(2)
    run.anybody.put(gone, hidden)
    late = run.member("oslo")
    late.receive(0)
    assert sorted(late.receive(1).packets) == [0, 1]
    assert late.receive(2).manifest == decided and late.chain.head(2) == paris.chain.head(2)


def test_packets_that_are_gone_after_the_decision_are_put_back_by_who_sent_them(run, monkeypatch):
    """Each has its own packet alone when all of them are deleted."""
    joined = run.members(deadline=30.0, min_workers=3)
    everybody(joined, 0)
    read, gone = Member._read, threading.Event()

    def decided_unread(member, step, packets, size=None):
        packets = list(packets)
        if step == 1 and size is None and member not in seen:  # it fetches, and was told by others
            seen.append(member)
            member._packets = {x: y for x, y in member._packets.items() if x.member == member.me}
            name = f"{member.slot:03d}.packet"
            member._steps._said[1] = {name: member._steps._said[1][name]}
            if len(seen) == 3:
                run.anybody.delete(physical(run, "packets/00000001"))
                gone.set()
            assert gone.wait(timeout=20)
        return read(member, step, packets, size)

    seen: list[Member] = []
    monkeypatch.setattr(Member, "_read", decided_unread)
    results = everybody(joined, 1)
    assert len(seen) == 3 and all(len(x.packets) == 3 for x in results)
    assert len({x.chain.head(1) for x in joined}) == 1 and not any(x.chain.lost(1) for x in joined)


def test_who_cannot_read_what_most_have_applies_nothing_else(run):
    said = []
    paris, rome, oslo = joined = run.members(deadline=0.2, tell=said.append)
    everybody(joined, 0)
    refs = send_all(run, joined, 1)
    for member in paris, rome:
        assert len(member.receive(1).packets) == 3
    gone, hidden = hide(run, paris, 1, refs[0])
    together([functools.partial(exchange, x, 2) for x in (paris, rome)])
    result = oslo.receive(1)
    assert (
        oslo.chain.astray
        and result.swept
        and "Most members have it: this worker goes back to a snapshot" in said[-1]
    )
    run.anybody.put(gone, hidden)
    oslo.chain.astray = None
    assert len(oslo.receive(1).packets) == 3 and oslo.chain.head(1) == paris.chain.head(1)


def test_who_wakes_up_late_decides_nothing_again_from_which_another_has_gone_on(run):
    paris, rome = run.members("paris", "rome", deadline=0.3)
    everybody([paris, rome], 0)
    rome.send(1, b"rome  in 1")  # and stands still
    for step in 1, 2, 3:
        exchange(paris, step)
    written = {name: run.anybody.get(name) for name in physical(run, "manifests")}
    assert sorted(paris.manifest(2).members) == [paris.me]
    rome._agree(1, rome.manifest(0).members, 10, time.monotonic())
    for step in 2, 3:
        assert exchange(rome, step).manifest == paris.manifest(step) and not rome.chain.astray
    assert written == {name: run.anybody.get(name) for name in physical(run, "manifests")}


def test_who_wants_more_workers_than_others_does_not_decide_their_steps_again(run):
    paris, oslo = run.members("paris", "oslo", deadline=0.3)
    rome = run.member("rome", deadline=0.3, min_workers=3)
    everybody([paris, rome, oslo], 0)
    for step in 1, 2:
        together([functools.partial(exchange, x, step) for x in (paris, oslo)])
    written = {name: run.anybody.get(name) for name in physical(run, "manifests")}
    assert exchange(rome, 1).swept and "go" in rome.chain.astray
    assert written == {name: run.anybody.get(name) for name in physical(run, "manifests")}


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("is_back", [True, False])
def test_of_two_equal_sides_the_one_that_lacks_a_packet_goes_on(run, least, is_back):
    paris, rome = run.members("paris", "rome", deadline=0.2, min_workers=least)
    everybody([paris, rome], 0)
    refs = send_all(run, [paris, rome], 1)
    paris.receive(1)
    gone, hidden = hide(run, paris, 1, refs[0])
    assert rome.receive(1).members == ("rome",)
    if is_back:
        run.anybody.put(gone, hidden)

    def go_on_again():
        assert exchange(paris, 2).swept
        assert "1 members go on from another step 1" in paris.chain.astray
        beginning = Decided(paris.manifest(0).previous, time.monotonic())
        paris.chain._decided, paris.chain.astray = {-1: beginning}, None
        for step in 0, 1:
            paris.receive(step)
        return exchange(paris, 2)

    results = together([go_on_again, functools.partial(exchange, rome, 2)])
    assert paris.chain.head(1) == rome.chain.head(1)
    assert paris.chain.lost(1) == rome.chain.lost(1) == (0,)
    assert results[0].manifest == results[1].manifest and not results[0].swept


def test_who_lists_a_packet_that_nobody_can_read_delays_one_step_in_ten(run):
    paris, rome, oslo = run.members(deadline=0.3)
    everybody([paris, rome, oslo], 0)
    slots = []
    for step in range(1, 5):
        head, lost = paris.chain.head(step - 1), paris.chain.lost(step - 1)
        ref = oslo.store.sign(step, PacketRef(*oslo.me, records.sha256(b"never")), head)
        refs = [x.send(step, f"{x.worker:5} in {step}".encode()) for x in (paris, rome)]
        put_manifest(run, "oslo", step, [*refs, ref], head, lost=lost)
        both = together([functools.partial(exchange, x, step) for x in (paris, rome)])
        slots.append(sorted(x.slot for x in both[0].manifest.packets))
        assert paris.chain.head(step) == rome.chain.head(step)
    assert slots == [[0, 1, 2], [0, 1], [0, 1], [0, 1]]


def test_who_starts_again_takes_what_the_other_has_decided_alone(run):
    paris, rome = run.members("paris", "rome", deadline=0.3)
    everybody([paris, rome], 0)
    alone = exchange(paris, 1).manifest  # it has applied this, and sent nothing since then
    again = run.member("rome", deadline=0.3)
    again.receive(0)
    assert exchange(again, 1).manifest == alone
    assert again.chain.head(1) == paris.chain.head(1)


def test_who_goes_on_from_a_snapshot_knows_what_was_lost_before(run):
    paris = run.member("paris")
    file, head, named = f"snapshots/00000005/{'0' * 32}", "a" * 64, run.roster().name
    index = records.SnapshotIndex(5, file, 1, "0" * 64, head, 0, named, (2,))
    paris.go_on_from(index)
    assert paris.chain.lost(4) == (2,) and paris.chain.head(4) == head


def test_packets_that_somebody_deletes_before_the_decision_are_sent_again(run, monkeypatch):
    monkeypatch.setattr("demo_optax._src.swarm.member.LOG_EVERY_SECONDS", 0.1)
    said = []
    paris, rome = run.members("paris", "rome", deadline=0.3, min_workers=2, tell=said.append)
    everybody([paris, rome], 0)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(exchange, paris, 1)
        while paris.last_sent != 1:
            time.sleep(0.01)
        run.anybody.delete(physical(run, "packets/00000001"))
        time.sleep(0.3)
        both = exchange(rome, 1).manifest, waiting.result(timeout=10).manifest
    assert both[0] == both[1] and sorted(both[0].members) == sorted([paris.me, rome.me])
    assert "step 1: this worker's packet is gone, and is sent again" in said


@pytest.mark.parametrize(("names", "least"), [(NAMES, 1), (NAMES[:2], 2)])
def test_who_decides_with_a_packet_that_is_gone_sends_it_again(run, monkeypatch, names, least):
    """Somebody deletes what all send in a step, until one of them has noticed."""
    monkeypatch.setattr("demo_optax._src.swarm.member.LOG_EVERY_SECONDS", 0.4)
    said, put, create = [], run.anybody.put, run.anybody.create

    def losing(write):
        def attempt(key, data):
            result = write(key, data)
            if key.startswith("packets/00000001/") and not said:
                run.anybody.delete([key])
            return result

        return attempt

    def tell(line):
        said.extend([line] if "is sent again" in line else [])

    def go_on(member):
        return exchange(member, 1), member.chain.head(1), exchange(member, 2)

    all_of_them = run.members(*names, deadline=0.1, min_workers=least, tell=tell)
    everybody(all_of_them, 0)
    monkeypatch.setattr(run.anybody, "put", losing(put))
    monkeypatch.setattr(run.anybody, "create", losing(create))
    (first, head, _), *others = together([functools.partial(go_on, x) for x in all_of_them])
    assert said and len(first.packets) == len(first.manifest.packets) >= least
    assert all((x.packets, of_x) == (first.packets, head) for x, of_x, _ in others)


def test_with_two_against_two_the_side_that_goes_on_puts_its_manifest_in_place_again(tmp_path):
    run = Run(tmp_path, ["paris", "rome", "oslo", "lima"])
    joined = run.members("paris", "rome", "oslo", "lima", deadline=1.0)
    everybody(joined, 0)
    refs = [x.send(1, f"{x.worker:5} in 1".encode()) for x in joined]
    decided = {}
    for name, packets in ("paris", refs[:3]), ("lima", refs[1:]):
        key, data = signed_manifest(run, name, 1, packets, joined[0].chain.head(0))
        run.anybody.put(key, data)
        manifest = run.member(name).store.get("manifests/00000001")
        decided[records.head(records.decode(records.Manifest, manifest))] = data
    first, second = joined[:2], joined[2:]
    losing = max(decided)
    for head, data in decided.items():
        run.anybody.put(key, data)
        for member in second if head == losing else first:
            assert member.receive(1).manifest is not None and member.chain.head(1) == head
    run.anybody.put(key, decided[losing])
    results = together([functools.partial(exchange, x, 2) for x in joined])
    assert [x.swept for x in results] == [False, False, True, True]
    late = run.member("oslo")
    for step in range(2):
        late.receive(step)
    assert late.chain.head(1) == first[0].chain.head(1)
    assert late.receive(2).manifest == first[0].manifest(2)


def test_who_lists_more_packets_is_followed_by_nobody_that_has_gone_on(run):
    joined = run.members(deadline=0.3)
    everybody(joined, 0)
    refs = [x.send(1, f"{x.worker:5} in 1".encode()) for x in joined]
    paris, rome, oslo = joined
    for listed, followers in (refs[:2], (paris, rome)), (refs, (oslo,)):
        put_manifest(run, "oslo", 1, listed, paris.chain.head(0))
        for member in followers:
            member.receive(1)
    oslo.send(2, b"oslo  in 2")
    results = together([functools.partial(exchange, x, 2) for x in (paris, rome)])
    assert all(sorted(x.packets) == [0, 1] and not x.swept for x in results)
    assert exchange(oslo, 2).swept and "2 members go on from another step 1" in oslo.chain.astray


def test_a_manifest_of_a_liar_at_the_first_step_that_is_known_parts_nobody(run):
    joined = run.members(deadline=0.3)
    for step in range(3):
        everybody(joined, step)
    paris, rome, oslo = joined
    for n in -1, 0:  # as once most have signed a snapshot
        paris.chain._decided.pop(n, None)
    fake = oslo.store.sign(1, PacketRef(*oslo.me, "1" * 64), "f" * 64)
    put_manifest(run, "oslo", 1, [fake], "f" * 64)
    for member in joined:
        member.send(3, b"a packet")
    assert paris.chain.compare(3)
    assert rome.store.get("manifests/00000001") == records.encode(paris.manifest(1))


def test_a_snapshot_that_most_have_signed_says_which_side_goes_on(run):
    joined, _ = begun(run, deadline=0.3)
    everybody(joined, 0)
    paris, rome, oslo = joined
    refs = [x.send(1, f"{x.worker:5} in 1".encode()) for x in joined]
    for members, listed in ([paris], refs[:2]), ([rome, oslo], refs):
        put_manifest(run, "oslo", 1, listed, paris.chain.head(0))
        for member in members:
            member.receive(1)
            member.send(2, b"a packet")
    chain = dict(head=rome.chain.head(1), since=0, roster=run.roster().name)
    snapshots.attest(oslo.store, snapshots.write(rome.store, 2, ONES, slot=1, **chain))
    assert rome.chain.compare(2) and not rome.chain.astray
    assert not paris.chain.compare(2)
    assert "most members signed a snapshot at 2 of others: it goes back" in paris.chain.astray


def test_a_snapshot_that_a_liar_signed_alone_settles_nothing(run):
    joined = run.members(deadline=0.3)
    for step in range(2):
        everybody(joined, step)
    paris, rome, oslo = joined
    fake = oslo.store.sign(9, PacketRef(*oslo.me, "1" * 64), "f" * 64)
    put_manifest(run, "oslo", 9, [fake], "f" * 64)
    head = records.head(records.decode(records.Manifest, oslo.store.get("manifests/00000009")))
    chain = dict(head=head, since=9, roster=run.roster().name)
    assert snapshots.is_attested(oslo.store, snapshots.write(oslo.store, 10, ONES, slot=2, **chain))
    for member in paris, rome:
        member.send(2, b"a packet")
    oslo._steps.send(2, PacketRef(*oslo.me, records.sha256(b"x")), b"x", "f" * 64, ())
    assert paris.chain.compare(2) and not paris.chain.astray


def test_each_member_votes_for_what_it_has_followed_last():
    said = {slot: Said(head, PacketRef(slot, 1, ""), b"") for slot, head in enumerate("xxy")}
    followed = {"x": {2: 4}, "y": {0: 5, 1: 5, 2: 5, 3: 2}}
    assert sides.votes(4, said, {}) == {"x": {0, 1}, "y": {2}}
    assert sides.votes(4, said, followed) == {"y": {0, 1, 2, 3}}
    assert sides.votes(4, said, {"z": {0: 4}, "x": {3: 4}}) == {"x": {0, 1, 3}, "y": {2}}


@pytest.mark.parametrize("are_out", [False, True])
def test_who_was_taken_out_has_no_vote(tmp_path, are_out):
    run = Run(tmp_path, names := ["paris", "rome", "oslo", "lima", "nice"])
    joined = run.members(*names, deadline=5.0)
    everybody(joined, 0)
    refs = [x.send(1, f"{x.worker:5} in 1".encode()) for x in joined]
    for members, listed in (joined[3:], refs), (joined[:3], refs[:4]):
        put_manifest(run, "paris", 1, listed, joined[0].chain.head(0))
        for member in members:
            member.receive(1)
            member.send(2, b"a packet")
    paris, *_, nice = joined
    if are_out:
        run.change(without=["rome", "oslo"])
        paris.store.look_for_roster(), nice.store.look_for_roster()
    assert paris.chain.compare(2) != are_out
    assert nice.chain.compare(2) == are_out


def test_who_waits_for_nobody_puts_manifests_that_are_gone_back_all_the_same(run, monkeypatch):
    monkeypatch.setattr(Pace, "patient_wait", 0.2)
    paris, rome = run.members("paris", "rome", deadline=0.3)
    everybody([paris, rome], 0)
    (gone,) = physical(run, "manifests")
    run.anybody.delete([gone])
    everybody([paris, rome], 1)
    for step in 2, 3:  # one of them has looked at the first steps, by turns
        time.sleep(0.3)
        everybody([paris, rome], step)
    assert run.anybody.get(gone) is not None


def test_who_goes_back_past_its_own_turns_writes_nothing_twice_and_signs_what_it_passes(run):
    joined, first = begun(run, "paris", "rome", deadline=0.5)
    paris, rome = joined
    manifests = [everybody(joined, step)[0].manifest for step in range(4)]
    turns = {member: SnapshotTurns(member, 2) for member in joined}

    def take(member, step, writer):
        packets = tuple(x for x in manifests[step - 1].packets if x.slot == writer.slot)
        manifest = manifests[step - 1]._replace(packets=packets)
        turns[member].take(step, ONES, 1, manifest)

    for step in 2, 4:
        take(paris, step, paris)
        turns[paris]._written.result(timeout=10)
    written = paris.store.names("snapshots")
    paris.go_on_from(first), rome.go_on_from(first)
    for step in range(1, 5):
        paris.receive(step - 1), rome.receive(step - 1)
        if step % 2 == 0:
            take(paris, step, paris), take(rome, step, paris)
            turns[rome]._compared.result(timeout=10)
    indices = [snapshots.read_index(paris.store, step, paris.slot) for step in (2, 4)]
    assert [snapshots.attesters(paris.store, x) for x in indices] == [{0, 1}, {0, 1}]
    assert paris.store.names("snapshots") == written and not paris.chain.is_unheard
    for each in turns.values():
        each.close()


def test_what_nobody_expects_of_a_snapshot_is_raised_at_the_next_turn(run, monkeypatch):
    joined = begun(run, "paris", "rome", deadline=0.5)[0]
    manifest, turns = everybody(joined, 0)[0].manifest, SnapshotTurns(joined[0], 2)
    monkeypatch.setattr(snapshots, "write", lambda *_, **__: 1 / 0)
    turns.take(2, ONES, 1, manifest._replace(packets=manifest.packets[:1]))
    time.sleep(1.0)
    with pytest.raises(ZeroDivisionError):
        turns.take(4, ONES, 1, manifest._replace(packets=manifest.packets[:1]))
    turns.close()


def test_who_comes_later_takes_a_step_from_which_one_went_on_whose_others_were_taken_out(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(steps, "ROSTER_SECONDS", 0.0)
    run = Run(tmp_path, ["paris", "rome", "oslo", "lima"])
    joined, first = run.members("paris", "rome", "oslo", deadline=0.3), index_of(run, 0)
    for member in joined:
        member.go_on_from(first)
    everybody(joined, 0)
    run.change(without=["rome", "oslo"])
    late = run.member("lima", deadline=0.3)
    late.go_on_from(first)
    assert late.manifest(0) is None  # somebody who was taken out may have written it since then
    for step in 1, 2:
        exchange(joined[0], step)
    for step in range(3):
        assert late.receive(step).manifest == joined[0].manifest(step)


def test_a_step_of_those_who_were_taken_out_stands_if_another_member_has_gone_on_from_it(tmp_path):
    run = Run(tmp_path, ["paris", "rome", "oslo", "lima"])
    (paris, rome, oslo, lima), first = begun(run, "paris", "rome", "oslo", "lima", deadline=0.3)
    everybody([paris, rome, oslo, lima], 0)
    refs = [x.send(1, f"{x.worker:5} in 1".encode()) for x in (paris, rome, oslo)]
    put_manifest(run, "oslo", 1, refs, paris.chain.head(0))
    run.change(without=["rome", "oslo"])
    again = run.member("paris", deadline=0.3)
    again.go_on_from(first)
    again.receive(0)
    assert again.manifest(1) is None
    lima.receive(1)
    lima.send(2, b"lima  in 2")
    assert again.manifest(1) is not None


def test_who_joins_behind_a_step_that_few_decided_waits_for_the_others(run):
    (paris, rome, oslo), _ = begun(run, deadline=0.5)
    for member in paris, rome, oslo:
        member.store.every = 5
    for step in range(3):
        everybody([paris, rome, oslo], step)
    for step in 3, 4:
        exchange(paris, step)
    for member in rome, oslo:
        for step in 3, 4:
            time.sleep(0.0 if member.manifest(step) else 3.0)
            member.receive(step)
    chain = dict(head=paris.chain.head(4), since=0, roster=run.roster().name)
    index = snapshots.write(paris.store, 5, ONES, slot=0, **chain)
    for member in rome, oslo:
        snapshots.attest(member.store, index)
    again = run.member("oslo", deadline=0.5)
    again.store.every = 5
    again.go_on_from(snapshots.read_newest(again.store, ONES)[0])
    again.announce(5)
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(exchange, again, 5)
        time.sleep(0.2)
        results = [first, *(threads.submit(exchange, x, 5) for x in (paris, rome))]
        assert [sorted(x.result().packets) for x in results] == [[0, 1, 2]] * 3


def test_what_another_side_says_under_an_earlier_roster_is_seen(run):
    paris, rome = run.members("paris", "rome")
    everybody([paris, rome], 0)
    said = paris.send(1, b"paris in 1")
    run.change(without=["oslo"])
    later = run.store("rome")
    later._holds = [(0, 1), (1, 2)]
    assert later.get(paris._steps.key(1, said)) is not None
    later._holds = [(0, 2)]
    assert later.get(paris._steps.key(1, said)) is None


def test_who_says_something_else_under_another_roster_is_not_heard_twice(run):
    (paris, rome), _ = begun(run, "paris", "rome")
    everybody([paris, rome], 0)
    paris.announce(1)
    run.change(without=["oslo"])
    for member in paris, rome:
        member.store.look_for_roster()
    paris.store.hold(1, run.roster().name)  # it has decided a step that rome has not
    assert rome._steps.sent(1, [0]) == {}
    said = paris.send(1, b"paris in 1")
    assert rome._steps.sent(1, [0])[0].packet == said
    assert len([x for x in physical(run, "packets/00000001") if ".000." in x]) == 1


def test_who_stood_in_a_step_still_looks_for_its_packets_in_later_ones(run):
    paris, rome = run.members("paris", "rome", deadline=0.2)
    everybody([paris, rome], 0)
    exchange(rome, 1)
    paris.receive(1)
    paris.send(2, b"paris in 2")
    exchange(rome, 2)
    again = run.member("paris", deadline=0.2)
    for step in range(3):
        assert again.may_send(step) == (step == 1)
        again.receive(step)
    assert again.may_send(3) and not again.pace.may_replay


def test_claims_are_compared_as_numbers(run):
    store = run.store("paris")
    for incarnation in 99_999_990, 100_000_005:
        claim = records.Claim("paris", "", 0.0)
        store.create(records.claim_key((0, incarnation)), records.encode(claim))
    assert last_claim(store, 0) == 100_000_005

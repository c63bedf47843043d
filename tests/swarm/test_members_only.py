"""A run for members only: what nobody of the roster has signed does not exist in it."""

import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor

import hypothesis
import pytest
from hypothesis import strategies as st

from demo_optax._src.swarm import agreement, roster, seals, snapshots, steps
from demo_optax._src.swarm.records import SwarmError
from demo_optax.swarm import Left, Member, ObjectStore, read_history, status
from tests import swarms
from tests.members import (
    NAMES,
    Counting,
    everybody,
    exchange,
    make_workers,
    numbered,
    physical,
    slowly,
)

pytestmark = pytest.mark.usefixtures("virtual_waits")


def test_a_key_is_for_its_owner_alone_and_is_never_written_over_or_printed(tmp_path):
    path = tmp_path / "paris.key"
    public = seals.make_key(path, "paris")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    with pytest.raises(FileExistsError):
        seals.make_key(path, "paris")
    key = seals.read_key(path)
    assert key.public == public
    assert key.seed.hex() not in repr(key) + public.line


@hypothesis.given(st.lists(st.binary(max_size=9) | st.text(max_size=9) | st.integers()), st.data())
@hypothesis.settings(deadline=None)
def test_no_two_lists_of_fields_have_the_same_frame(fields, data):
    texts = [x if isinstance(x, bytes) else str(x).encode() for x in fields]
    joined = b"".join(texts)
    cuts = data.draw(st.lists(st.integers(0, len(joined)), max_size=len(texts) + 1).map(sorted))
    ends = [*cuts, len(joined)]
    others = [joined[a:b] for a, b in zip([0, *cuts], ends, strict=True)]
    assert (seals.frame(*fields) == seals.frame(*others)) == (texts == others)


def test_without_a_roster_of_the_owner_nobody_begins(run):
    for damage in (run.anybody.put, roster.KEY, b"{}"), (run.anybody.delete, [roster.KEY]):
        damage[0](*damage[1:])
        before = run.anybody.names("")
        with pytest.raises(
            SwarmError, match=r"of number 1 or higher, but none signed by '.*owner.pub' is in"
        ):
            run.store("paris")
        assert run.anybody.names("") == before


def test_a_member_that_is_added_again_stays_one(run):
    again = roster.change(run.roster(), run.key("owner"), [run.key("paris").public])
    assert len(roster.parse(again, run.key("owner").public).members()) == 3


def test_who_is_taken_out_takes_no_part_from_the_next_step_on_and_others_go_on(run, monkeypatch):
    monkeypatch.setattr(steps, "ROSTER_SECONDS", 0.0)
    joined = run.members()
    everybody(joined, 0)
    run.change(without=["oslo"])
    paris, rome, oslo = joined
    result = everybody([paris, rome], 1)[0]
    assert roster.number_of(result.manifest.roster) == 2
    assert sorted(everybody([paris, rome], 2)[0].packets) == [0, 1]
    with pytest.raises(SwarmError, match="the key of oslo was taken out of the roster by number 2"):
        oslo.receive(1)
        exchange(oslo, 2)
    assert paris.store.members(1).keys() == {0, 1, 2} and paris.store.members(2).keys() == {0, 1}
    history = read_history(paris.store)
    assert history.left == {oslo.me} and "left: oslo after step 0" in status(history)
    run.make("lima")
    run.change("lima")
    lima = run.member("lima")
    assert lima.slot == 2
    for step in range(3):
        lima.receive(step)
    everybody([paris, rome], 3)  # the one that names the roster
    lima.receive(3), lima.announce(4)
    everybody([paris, rome, lima], 4)
    names = read_history(paris.store).names
    assert names[oslo.me] == "oslo" and names[lima.me] == "lima"


def test_a_file_that_is_no_public_line_is_refused(tmp_path):
    (tmp_path / "x").write_text("nothing")
    with pytest.raises(SwarmError, match="does not hold a public line"):
        seals.read_public(tmp_path / "x")


@pytest.mark.parametrize("name", ["", " x", f"{'0' * 64} x", "\x07"])
def test_no_key_has_a_name_with_which_it_could_not_be_read(tmp_path, name):
    with pytest.raises(SwarmError, match="a key needs a name"):
        seals.make_key(tmp_path / "x.key", name)
    assert not list(tmp_path.iterdir())


def test_a_key_that_others_may_read_is_told(tmp_path, caplog):
    path = tmp_path / "paris.key"
    seals.make_key(path, "paris")
    for mode, said in (0o600, []), (0o640, [f"others may read {path}: chmod 600 {path}"]):
        path.chmod(mode)
        seals.read_key(path)
        assert caplog.messages == said


def test_a_slot_above_the_limit_decides_nothing_and_ends_nobody(run):
    paris, oslo = run.member("paris", slots=2), run.member("oslo")
    assert exchange(oslo, 0).manifest.packets[-1].slot == 2
    assert oslo.manifest(0) is not None and paris.manifest(0) is None


def test_workers_train_with_equal_parameters_and_one_joins_from_an_attested_snapshot(tmp_path):
    run = numbered(tmp_path)
    workers = make_workers(run, 3, snapshot_every=2, min_workers=3)
    ends = swarms.all_take_steps(workers, 7, batches=slowly)
    assert ends[0][1] == ends[1][1] == ends[2][1] and len(ends[0][1]) == 7
    for worker in workers:
        worker._turns.close()
    store = run.store("worker-3")
    steps = snapshots.attested_steps(store, 100, 2)
    assert len(steps) == 2 and steps[-1] in (4, 6)
    newcomer = swarms.make_worker(swarms.DEMO_SCALED, store, 3, snapshot_every=2)
    params, _ = swarms.begin(newcomer)
    assert newcomer.number == 7
    assert swarms.digest(params) == ends[0][1][7]


def test_a_look_of_a_member_that_waits_asks_the_store_as_often_as_in_an_open_run(run, tmp_path):
    for is_open in True, False:
        counting = Counting(ObjectStore(str(tmp_path / "open")) if is_open else run.anybody)
        settings = dict(slots=8, deadline=30.0, min_workers=2)
        others = [
            Member(counting, name, **settings)
            if is_open
            else run.member(name, inner=counting, **settings)
            for name in ("paris", "rome")
        ]
        everybody(others, 0)
        waiting, looks = others[0], []
        read = waiting.manifest
        waiting.manifest = lambda step, read=read, looks=looks: looks.append(step) or read(step)
        waiting.send(1, b"paris in 1")
        counting.counts.clear()
        with ThreadPoolExecutor(1) as thread:
            left = thread.submit(waiting._agree, 1, waiting.manifest(0).members, 10, 1e9)
            time.sleep(1.0)
            waiting.leave()
            with pytest.raises(Left):
                left.result(timeout=20)
        assert sum(counting.counts.values()) == 2 * looks.count(1) > 2


def test_objects_of_earlier_rosters_are_deleted_too(run):
    keys = [f"packets/{step:08d}/000.packet" for step in range(20)]
    for half, name in (keys[:10], "oslo"), (keys[10:], "rome"):
        store = run.store("paris")
        for key in half:
            store.put(key, b"x")
        run.change(without=[name])
    assert len(physical(run, "packets")) == 20
    run.store("paris").delete(["packets/00000099/000.packet", *keys[1:]])
    assert len(physical(run, "packets")) == 1


def test_of_two_processes_with_one_key_the_older_one_ends(run, monkeypatch):
    paris, rome = run.members("paris", "rome", min_workers=2)
    everybody([paris, rome], 0)
    twin = run.member("paris", min_workers=2)
    assert twin.incarnation > paris.incarnation
    twin.receive(0)
    monkeypatch.setattr(steps, "LOOK_SECONDS", 0.0)
    with pytest.raises(SwarmError, match="another process uses the key of 'paris' now: stop one"):
        exchange(paris, 1)
    assert twin.me in everybody([twin, rome], 1)[0].manifest.members


def test_nobody_waits_for_who_was_taken_out(run, monkeypatch):
    monkeypatch.setattr(steps, "ROSTER_SECONDS", 0.0)
    paris, rome, oslo = run.members(deadline=60.0)
    everybody([paris, rome, oslo], 0)
    run.change(without=["rome"])
    rome.send(1, b"rome  in 1")
    everybody([paris, oslo], 1)
    started = time.monotonic()
    results = everybody([paris, oslo], 2)
    assert rome.me in paris.manifest(1).members and not any(x.late for x in results)
    assert time.monotonic() - started < 50


def test_who_has_not_seen_a_roster_yet_does_not_decide_again_what_names_it(run, monkeypatch):
    paris, rome = run.members("paris", "rome", deadline=30.0, min_workers=2)
    everybody([paris, rome], 0)
    before = run.anybody.get(roster.KEY)
    run.change(without=["oslo"])
    after = run.anybody.get(roster.KEY)
    rome.send(1, b"rome  in 1")
    paris.store.look_for_roster()
    manifest = exchange(paris, 1).manifest
    assert roster.number_of(manifest.roster) == 2
    run.anybody.put(roster.KEY, before)  # a list may show it later
    rome._read(1, manifest.packets)
    assert rome._propose(1, list(manifest.packets)) is None
    run.anybody.put(roster.KEY, after)
    assert exchange(rome, 1).manifest == manifest
    assert all(len(x.packets) == 2 for x in everybody([paris, rome], 2))


def test_a_new_member_takes_part_once_its_roster_holds(run, monkeypatch):
    monkeypatch.setattr(steps, "ROSTER_SECONDS", 0.0)
    paris = run.member("paris", deadline=0.3)
    exchange(paris, 0)
    run.make("lima")
    run.change("lima")
    lima = run.member("lima", deadline=0.3)
    lima.receive(0)
    assert not lima.may_send(1)  # roster 1 holds still
    result = exchange(paris, 1)
    assert sorted(result.packets) == [0] and roster.number_of(result.manifest.roster) == 2
    lima.receive(1)
    lima.announce(2)
    assert all(sorted(x.packets) == [0, 3] for x in everybody([paris, lima], 2))


def test_a_worker_without_a_key_founds_no_open_run_beside_one_for_members_only(run):
    before = run.anybody.names("")
    with pytest.raises(SwarmError, match="the run there is for members only: give this worker --k"):
        Member(run.anybody, "mallory")
    assert run.anybody.names("") == before


def test_claims_that_were_deleted_do_not_stop_a_member_that_comes_back(run):
    paris, rome = run.members("paris", "rome")
    everybody([paris, rome], 0)
    run.anybody.delete(physical(run, "slots"))
    again = run.member("rome")
    again.receive(0)
    assert again.incarnation >= rome.incarnation


def test_settings_change_for_all_once_those_in_the_place_are_deleted(run):
    before, after = ({"device": "cpu", "program": n} for n in "12")
    stores = [run.store(name) for name in NAMES]
    for store in stores:
        agreement.require(store, {"slots": 8}, before)
    for store in stores:
        with pytest.raises(SwarmError, match="program is 1 there and 2 here"):
            agreement.require(store, {"slots": 8}, after)
    run.anybody.delete(physical(run, "settings"))
    for store in stores:
        agreement.require(store, {"slots": 8}, after)
    with pytest.raises(SwarmError, match="program is 2 there and 1 here"):
        agreement.require(stores[0], {"slots": 8}, before)


def test_who_has_left_need_not_sign_a_snapshot(tmp_path):
    run = numbered(tmp_path)
    workers = make_workers(run, 3, snapshot_every=4, deadline=0.5)
    states = [swarms.begin(worker) for worker in workers]
    state = swarms.all_take_steps(workers, 2, states)[0][0]
    for worker in workers[1:]:
        worker.close()
    swarms.take_steps(workers[0], 6, state, slowly)
    workers[0].close()
    assert 4 in snapshots.attested_steps(run.store("worker-3"), 100)

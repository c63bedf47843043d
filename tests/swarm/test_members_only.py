"""A run for members only: what nobody of the roster has signed does not exist in it."""

import functools
import json
import os
import stat
import threading
import time

import hypothesis
import pytest
from hypothesis import strategies as st

from demo_optax._src.swarm import records, roster, seals, snapshots
from demo_optax._src.swarm.members_only import MembersOnly
from demo_optax._src.swarm.records import Manifest, PacketRef, SwarmError
from demo_optax.swarm import Member, ObjectStore
from tests import swarms
from tests.swarms import together

NAMES = "paris", "rome", "oslo"


class Run:
    """A folder with a store, the owner's key and those of members."""

    def __init__(self, folder, names=NAMES):
        self.folder, self.anybody = folder, ObjectStore(str(folder / "run"), patience=1.0)
        for name in ("owner", *names):
            self.make(name)
        self.change(*names)

    def make(self, name):
        public = seals.make_key(self.folder / f"{name}.key", name)
        (self.folder / f"{name}.pub").write_text(public.line + "\n")
        return public

    def key(self, name):
        return seals.read_key(self.folder / f"{name}.key")

    def roster(self):
        owner = seals.read_public(self.folder / "owner.pub")
        return roster.parse(self.anybody.get(roster.KEY), owner)

    def change(self, *added, without=(), owner="owner"):
        publics = [seals.read_public(self.folder / f"{name}.pub") for name in added]
        before = self.roster()
        self.anybody.put(roster.KEY, roster.change(before, self.key(owner), publics, without))

    def store(self, name, inner=None, **settings):
        files = self.folder / f"{name}.key", self.folder / "owner.pub"
        return MembersOnly(inner or self.anybody, *files, **settings)

    def member(self, name, **settings):
        settings = {"slots": 8, "deadline": 1.0} | settings
        inner = settings.pop("inner", None)
        return Member(self.store(name, inner), **settings)

    def members(self, *names, **settings):
        return [self.member(name, **settings) for name in names or NAMES]


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def exchange(member, step, payload=None):
    return member.exchange(step, payload or f"{member.worker:5} in {step}".encode())


def everybody(joined, step):
    if step == 0:
        for member in joined:
            member.announce(0)
    return together([functools.partial(exchange, member, step) for member in joined])


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
def test_no_two_lists_of_fields_have_the_same_frame(fields, data):
    texts = [x if isinstance(x, bytes) else str(x).encode() for x in fields]
    joined = b"".join(texts)
    cuts = data.draw(st.lists(st.integers(0, len(joined)), max_size=len(texts) + 1).map(sorted))
    ends = [*cuts, len(joined)]
    others = [joined[a:b] for a, b in zip([0, *cuts], ends, strict=True)]
    assert (seals.frame(*fields) == seals.frame(*others)) == (texts == others)


@hypothesis.given(st.binary(max_size=200), st.integers(0, 10**6), st.integers(0, 255))
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_a_signed_object_with_any_byte_changed_does_not_exist(run, body, place, change):
    store, key = run.store("paris"), "manifests/00000007"
    store.put(key, body)
    assert store.get(key) == body
    physical = store._name(key)
    data = bytearray(run.anybody.get(physical))
    data[place % len(data)] ^= change
    run.anybody.put(physical, bytes(data))
    assert store.get(key) == (body if change == 0 else None)


def test_members_exchange_and_all_get_the_packets_of_all(run):
    joined = run.members(min_workers=3)
    assert [member.me for member in joined] == [(0, 1), (1, 1), (2, 1)]
    for step in range(4):
        results = everybody(joined, step)
        assert all(x.manifest == results[0].manifest for x in results)
        expected = {n: f"{name:5} in {step}".encode() for n, name in enumerate(NAMES)}
        assert all(x.packets == expected for x in results)
        assert results[0].members == NAMES and not results[0].late
        assert results[0].manifest.roster == roster.named(run.roster())


def test_a_member_that_comes_back_has_its_slot_and_a_new_incarnation(run):
    joined = run.members(min_workers=3)
    everybody(joined, 0)
    again = run.member("rome", min_workers=3)
    assert again.me == (1, 2)
    again.receive(0)
    again.announce(1)
    everybody([joined[0], again, joined[2]], 1)
    with pytest.raises(SwarmError, match="another process is worker 'rome' now"):
        exchange(joined[1], 1)


def test_who_leaves_is_not_waited_for_and_who_comes_is(run):
    paris, rome = run.members("paris", "rome", deadline=20.0, min_workers=1)
    everybody([paris, rome], 0)
    rome.leave(1)
    began = time.monotonic()
    assert exchange(paris, 1).late == ()
    oslo = run.member("oslo", deadline=20.0)
    for step in range(2):
        oslo.receive(step)
    oslo.announce(2)
    later = threading.Timer(0.5, exchange, (oslo, 2))
    later.start()
    assert sorted(exchange(paris, 2).packets) == [0, 2]
    later.join()
    assert time.monotonic() - began < 15


def test_who_is_late_is_waited_for_once(run):
    paris, rome, oslo = joined = run.members(deadline=1.0)
    everybody(joined, 0)
    began = time.monotonic()
    results = everybody([paris, rome], 1)
    assert 1 <= time.monotonic() - began < 4
    assert all(sorted(x.packets) == [0, 1] and x.late == ("oslo",) for x in results)
    assert exchange(oslo, 1).own is None


def test_without_a_roster_of_the_owner_nobody_begins(run, tmp_path):
    with pytest.raises(SwarmError, match="of number 2 or higher, but number 1 that owner signed"):
        run.store("paris", at_least=2)
    run.make("lima")
    with pytest.raises(SwarmError, match="the key of lima is not in roster 1"):
        run.store("lima")
    run.anybody.put(roster.KEY, b"{}")
    with pytest.raises(SwarmError, match="of number 1 or higher, but none that owner signed"):
        run.store("paris")


def test_a_roster_that_another_owner_signed_does_not_exist(run):
    run.make("mallory")
    before = run.roster()
    public = seals.read_public(run.folder / "mallory.pub")
    forged = roster.change(before._replace(boxes={}, generations=()), run.key("mallory"), [public])
    joined = run.members()
    run.anybody.put(roster.KEY, forged)
    for member in joined:
        member.store.look_for_roster()
        assert member.store.roster == before


@pytest.mark.parametrize(
    ("added", "without", "said"),
    [
        ((), ("lima",), "lima cannot be taken out: give names of members, which are oslo, paris"),
        ((), NAMES, "a roster needs a member"),
    ],
)
def test_a_roster_names_members_and_has_some(run, added, without, said):
    with pytest.raises(SwarmError, match=said):
        run.change(*added, without=without)


def test_no_name_or_key_is_in_a_roster_twice(run):
    (run.folder / "second").mkdir()
    seals.make_key(run.folder / "second" / "paris.key", "paris")
    other = seals.read_key(run.folder / "second" / "paris.key").public
    with pytest.raises(SwarmError, match="paris has the name or the key of the member paris"):
        roster.change(run.roster(), run.key("owner"), [other])
    again = roster.change(run.roster(), run.key("owner"), [run.key("paris").public])
    assert len(roster.parse(again, run.key("owner").public).members()) == 3


def test_only_the_owner_that_made_the_secrets_changes_a_roster(run):
    run.make("mallory")
    with pytest.raises(SwarmError, match="this owner's key does not open the secrets"):
        roster.change(run.roster(), run.key("mallory"))


def test_who_is_taken_out_takes_no_part_from_the_next_step_on_and_others_go_on(run, monkeypatch):
    monkeypatch.setattr("demo_optax._src.swarm.member.ROSTER_SECONDS", 0.0)
    joined = run.members()
    everybody(joined, 0)
    run.change(without=["oslo"])
    paris, rome, oslo = joined
    result = everybody([paris, rome], 1)[0]
    assert result.manifest.roster.startswith("2 ")
    assert sorted(everybody([paris, rome], 2)[0].packets) == [0, 1]
    with pytest.raises(SwarmError, match="oslo is no member under roster 2"):
        oslo.receive(1)
        exchange(oslo, 2)
    assert paris.store.members(1).keys() == {0, 1, 2} and paris.store.members(2).keys() == {0, 1}
    run.make("lima")
    run.change("lima")
    lima = run.member("lima")
    assert lima.slot == 2


def test_a_slot_beyond_the_slots_of_the_run_is_refused(run):
    with pytest.raises(SwarmError, match="'oslo' has slot 2 of the roster, and slots=2: give all"):
        run.member("oslo", slots=2)


@pytest.mark.parametrize(
    ("content", "read", "said"),
    [
        ("nothing", seals.read_key, "does not hold a key"),
        ("nothing", seals.read_public, "does not hold a public line"),
        (f"{'0' * 64} \x07\n", seals.read_key, "a key needs a name"),
    ],
)
def test_a_file_that_is_no_key_is_refused_and_not_repeated(tmp_path, content, read, said):
    (tmp_path / "x").write_text(content)
    with pytest.raises(SwarmError, match=said):
        read(tmp_path / "x")


def make_workers(run, names=NAMES, **settings):
    """Workers that train, with the stores of members."""
    return [
        swarms.make_worker(swarms.DEMO_SCALED, run.store(name), number, **settings)
        for number, name in enumerate(names)
    ]


def numbered(run_folder):
    return Run(run_folder, [f"worker-{n}" for n in range(4)])


def test_workers_train_with_equal_parameters_and_one_joins_from_an_attested_snapshot(tmp_path):
    run = numbered(tmp_path)
    names = [f"worker-{n}" for n in range(3)]
    workers = make_workers(run, names, snapshot_every=2, min_workers=3)
    ends = together([functools.partial(swarms.take_steps, x, 7) for x in workers])
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
    for worker in [*workers, newcomer]:
        worker.close()

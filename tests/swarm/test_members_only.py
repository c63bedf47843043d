"""A run for members only: what nobody of the roster has signed does not exist in it."""

import functools
import os
import stat
import threading
import time

import hypothesis
import pytest
from hypothesis import strategies as st

from demo_optax._src.swarm import records, roster, seals, snapshots
from demo_optax._src.swarm.members_only import MembersOnly
from demo_optax._src.swarm.records import PacketRef, SwarmError
from demo_optax._src.swarm.slots import last_manifests
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
    assert [member.slot for member in joined] == [0, 1, 2]
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
    assert again.slot == 1 and again.incarnation > joined[1].incarnation
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
    for damage in (run.anybody.put, roster.KEY, b"{}"), (run.anybody.delete, [roster.KEY]):
        damage[0](*damage[1:])
        before = run.anybody.names("")
        with pytest.raises(SwarmError, match="of number 1 or higher, but none that owner signed"):
            run.store("paris")
        assert run.anybody.names("") == before


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
        ((), ("lima",), "'lima' cannot be taken out: give names of members, which are oslo, paris"),
        ((), NAMES, "roster 2 needs a member"),
    ],
)
def test_a_roster_names_members_and_has_some(run, added, without, said):
    with pytest.raises(SwarmError, match=said):
        run.change(*added, without=without)


def test_no_name_or_key_is_in_a_roster_twice(run):
    (run.folder / "second").mkdir()
    seals.make_key(run.folder / "second" / "paris.key", "paris")
    other = seals.read_key(run.folder / "second" / "paris.key").public
    with pytest.raises(SwarmError, match="'paris' has the name or the key of the member 'paris'"):
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


def slowly(*args):
    """A batch that takes longer than a comparison with a snapshot."""
    time.sleep(0.6)
    return swarms.batch_of(*args)


def test_a_slot_above_the_limit_decides_nothing_and_ends_nobody(run):
    paris, oslo = run.member("paris", slots=2), run.member("oslo")
    assert exchange(oslo, 0).manifest.packets[-1].slot == 2
    assert oslo.manifest(0) is not None and paris.manifest(0) is None


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
        assert (paris._steps._read(0, rome.slot) is not None) == is_read


def test_junk_in_place_of_a_roster_is_not_kept_in_memory(run, monkeypatch):
    verified = []
    monkeypatch.setattr(seals, "_verify", lambda *given: verified.append(given[2]) or False)
    assert roster.parse(b"9" * 1_000_000, run.key("owner").public) is None
    assert max(map(len, verified)) < 1000


def numbered(run_folder):
    return Run(run_folder, [f"worker-{n}" for n in range(4)])


def test_workers_train_with_equal_parameters_and_one_joins_from_an_attested_snapshot(tmp_path):
    run = numbered(tmp_path)
    names = [f"worker-{n}" for n in range(3)]
    workers = make_workers(run, names, snapshot_every=2, min_workers=3)
    ends = together([functools.partial(swarms.take_steps, x, 7, batches=slowly) for x in workers])
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


def signed_manifest(run, name, step, packets, previous, **changes):
    """The bytes of a manifest as a member signs them, and their physical name."""
    store = run.store(name)
    manifest = records.Manifest(
        step, tuple(packets), previous, time.time(), roster.named(run.roster())
    )
    key = records.step_key("manifests", step)
    return store._name(key), store._sealed(key, records.encode(manifest._replace(**changes)))


def physical(run, folder):
    return [f"{folder}/{name}" for name in run.anybody.names(folder)]


def test_whoever_has_the_store_and_no_key_is_believed_in_nothing(run):
    joined = run.members(min_workers=3, deadline=30.0)
    everybody(joined, 0)
    (run.folder / "other").mkdir()
    other = Run(run.folder / "other")
    for member in other.members(min_workers=3)[:1]:
        member.announce(0)
    tries = 0
    for step in range(1, 16):
        anybody, previous = run.anybody, joined[0].head(step - 1)
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
            (records.packet_key(step, ref), b"evil"),
            (f"packets/{step:08d}/{'2' * 32}.000.packet", forged + b"\nevil"),
            (records.mark_key(step, (0, 9), "left"), b""),
            (records.mark_key(step, (7, 9), "here"), b""),
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
        assert len({member.head(step) for member in joined}) == 1
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
    assert len({member.head(1) for member in joined}) == 1
    everybody(joined, 2)
    assert len({member.head(2) for member in joined}) == 1


def test_an_instant_proposer_that_lists_itself_alone_gains_nothing(run):
    paris, rome, oslo = joined = run.members(deadline=5.0)
    everybody(joined, 0)
    own = oslo.send(1, b"oslo  in 1")
    name, data = signed_manifest(run, "oslo", 1, [own], oslo.head(0))
    run.anybody.put(name, data)
    assert paris.manifest(1) is None and rome.manifest(1) is None
    results = together([functools.partial(exchange, x, 1) for x in (paris, rome)])
    assert all(sorted(x.packets) == [0, 1, 2] for x in results)
    assert paris.head(1) == rome.head(1)


def test_the_side_of_more_members_goes_on_and_the_other_one_goes_back(run):
    said = []
    paris, rome, oslo = joined = run.members(deadline=1.0)
    oslo.tell = said.append
    everybody(joined, 0)
    oslo._hashes[0] = "a" * 64  # it decided step 0 otherwise
    results = together([functools.partial(exchange, x, 1) for x in joined])
    assert [x.swept for x in results] == [False, False, True]
    assert sorted(results[0].packets) == [0, 1]
    assert "2 members go on from another step 0 than this worker, whose side has 1" in said[-1]
    assert paris.head(1) == rome.head(1) and oslo.astray


def test_a_packet_of_another_head_or_step_or_run_is_of_nobody(run):
    paris, rome = run.members("paris", "rome")
    everybody([paris, rome], 0)
    packet = PacketRef(1, 1, records.sha256(b"x"))
    signed = rome.store.sign(1, packet, rome.head(0))
    assert paris.store.is_signed(1, signed, rome.head(0))
    for step, changed, previous in [
        (2, signed, rome.head(0)),
        (1, signed, "0" * 64),
        (1, signed._replace(slot=0), rome.head(0)),
        (1, signed._replace(tokens=10**15), rome.head(0)),
        (1, signed._replace(steps=2), rome.head(0)),
        (1, signed._replace(incarnation=2), rome.head(0)),
        (1, signed._replace(sha256="0" * 64), rome.head(0)),
        (1, signed._replace(seal=""), rome.head(0)),
    ]:
        assert not paris.store.is_signed(step, changed, previous)
    rome.store.roster = rome.store.roster._replace(run="0" * 32)
    assert not paris.store.is_signed(1, rome.store.sign(1, packet, rome.head(0)), rome.head(0))


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


def test_what_belongs_to_a_slot_is_written_by_its_member_alone(run):
    rome, paris = run.store("rome"), run.store("paris")
    rome.put("slots/000/000009", b"{}")
    rome.put("attested/00000004/000", b"x")
    assert paris.get("slots/000/000009") is None and paris.get("attested/00000004/000") is None
    rome.put("slots/001/000009", b"{}")
    assert paris.get("slots/001/000009") == b"{}"


class Counting:
    """A store that counts what it is asked."""

    def __init__(self, store):
        self._store, self.counts, self.patience = store, {}, store.patience
        self._lock = threading.Lock()

    def __getattr__(self, name):
        if name not in ("get", "put", "create", "names", "delete"):
            raise AttributeError(name)

        def counted(*args):
            with self._lock:
                kind = {"create": "put"}.get(name, name)
                self.counts[kind] = self.counts.get(kind, 0) + 1
            return getattr(self._store, name)(*args)

        return counted


def test_a_step_of_16_members_asks_the_store_no_more_than_an_open_one(tmp_path):
    names, steps = [f"m{n}" for n in range(16)], 5
    (tmp_path / "closed").mkdir()
    closed = Run(tmp_path / "closed", names)
    settings = dict(slots=16, deadline=60.0, min_workers=16)
    counting = Counting(ObjectStore(str(tmp_path / "open")))
    open_members = [Member(counting, name, **settings) for name in names]
    counting_closed = Counting(closed.anybody)
    closed_members = [closed.member(name, inner=counting_closed, **settings) for name in names]
    found = []
    for joined, counts in (open_members, counting.counts), (closed_members, counting_closed.counts):
        everybody(joined, 0)
        counts.clear()
        for step in range(1, steps + 1):
            everybody(joined, step)
        found.append({name: counts.get(name, 0) / steps / 16 for name in ("get", "put", "names")})
    print("COUNTS", found)
    open_run, members_only = found
    assert members_only["names"] == 0 < open_run["names"]
    assert members_only["put"] <= open_run["put"] + 0.01
    asked = [sum(x.values()) for x in found]
    assert asked[1] <= asked[0]


def test_a_new_member_takes_part_once_its_roster_holds(run, monkeypatch):
    monkeypatch.setattr("demo_optax._src.swarm.member.ROSTER_SECONDS", 0.0)
    paris = run.member("paris", deadline=0.3)
    exchange(paris, 0)
    run.make("lima")
    run.change("lima")
    lima = run.member("lima", deadline=0.3)
    lima.receive(0)
    assert not lima.may_send(1)  # roster 1 holds still
    result = exchange(paris, 1)
    assert sorted(result.packets) == [0] and result.manifest.roster.startswith("2 ")
    lima.receive(1)
    lima.announce(2)
    assert all(sorted(x.packets) == [0, 3] for x in everybody([paris, lima], 2))


def test_a_forged_snapshot_of_one_member_is_passed_over(tmp_path):
    run = numbered(tmp_path)
    names = [f"worker-{n}" for n in range(3)]
    workers = make_workers(run, names, snapshot_every=4, min_workers=3)
    ends = together([functools.partial(swarms.take_steps, x, 10) for x in workers])
    for worker in workers:
        worker._turns.close()
    liar = workers[2].member
    leaves = snapshots.read_newest(liar.store, shared_of(workers[0], *ends[0][0]))[1]
    forged = [x + 1 if x.dtype.kind == "f" else x for x in leaves]
    chain = {"head": liar.head(9), "since": 9, "roster": roster.named(run.roster())}
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
    for worker in [*workers, newcomer]:
        worker.close()


def shared_of(worker, params, opt_state):
    from demo_optax._src.swarm.replicated_state import shared_leaves, to_host

    return list(map(to_host, shared_leaves(params, opt_state)))


def test_a_worker_on_the_smaller_side_goes_back_to_a_snapshot_and_has_equal_parameters(tmp_path):
    run = numbered(tmp_path)
    names = [f"worker-{n}" for n in range(3)]
    workers = make_workers(run, names, snapshot_every=2, min_workers=2, deadline=3.0)
    ends = together([functools.partial(swarms.take_steps, x, 5) for x in workers])
    astray = workers[2].member
    astray._hashes[4] = "a" * 64  # as if it had decided step 4 otherwise
    states = [end[0] for end in ends]
    later = together(
        [
            functools.partial(swarms.take_steps, x, 12, state)
            for x, state in zip(workers, states, strict=True)
        ]
    )
    assert later[0][1] == later[1][1]
    assert later[2][1][12] == later[0][1][12] and astray.astray is None
    for worker in workers:
        worker.close()


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


def test_nobody_is_left_out_half_by_half(run):
    for name in ("lima", "bonn"):
        run.make(name)
    run.change("lima", "bonn")
    names = (*NAMES, "lima", "bonn")
    joined = run.members(*names, deadline=30.0)
    everybody(joined, 0)
    refs = [x.send(1, f"{x.worker:5} in 1".encode()) for x in joined[:3]]
    name, data = signed_manifest(run, "oslo", 1, refs, joined[0].head(0))
    run.anybody.put(name, data)
    assert joined[0].manifest(1) is not None  # three of five
    head = joined[0].head(1)
    refs = [joined[2].store.sign(2, PacketRef(*joined[2].me, "0" * 64), head)]
    refs = [joined[1].store.sign(2, PacketRef(*joined[1].me, "0" * 64), head), *refs]
    name, data = signed_manifest(run, "oslo", 2, refs, head)
    run.anybody.put(name, data)
    assert joined[0].manifest(2) is None  # two of the three, but two of five lately


def test_a_mark_is_no_packet(run):
    paris, rome = run.members("paris", "rome")
    everybody([paris, rome], 0)
    rome._steps.say(1, rome.me, "left")
    left = paris._steps._read(1, 1).packet
    assert paris.store.is_signed(1, left, "", "left")
    assert not paris.store.is_signed(1, left, "")
    name, data = signed_manifest(run, "paris", 1, [left], "")
    run.anybody.put(name, data)
    assert paris.manifest(1) is None


def test_a_manifest_of_those_who_were_taken_out_is_not_believed(run):
    paris, oslo = run.members("paris", "oslo")
    everybody([paris, oslo], 0)
    ref = oslo.send(1, b"oslo  in 1")
    name, data = signed_manifest(run, "oslo", 1, [ref], oslo.head(0))
    run.change(without=["oslo"])
    run.anybody.put(name, data)
    late = run.member("rome")
    late.receive(0)
    late._since[0] = -1e9
    assert late.manifest(1) is None


def test_a_packet_that_most_could_not_read_counts_for_nobody_even_if_it_comes_back(run):
    said = []
    paris, rome, _ = joined = run.members(deadline=5.0, tell=said.append)
    everybody(joined, 0)
    refs = [x.send(1, f"{x.worker:5} in 1".encode()) for x in joined]
    name, data = signed_manifest(run, "oslo", 1, refs, paris.head(0))
    run.anybody.put(name, data)
    gone = paris.store._name(paris._steps.key(1, refs[2]))
    hidden = run.anybody.get(gone)
    run.anybody.delete([gone])
    results = together([functools.partial(x.receive, 1) for x in (paris, rome)])
    assert all(sorted(x.packets) == [0, 1] and not x.swept for x in results)
    assert "a packet that counts in step 1 cannot be read since 1 s" in said[-1]
    decided = together([functools.partial(exchange, x, 2) for x in (paris, rome)])[0].manifest
    assert decided.lost == (2,) and paris.head(2) == rome.head(2)
    run.anybody.put(gone, hidden)
    late = run.member("oslo")
    late.receive(0)
    assert sorted(late.receive(1).packets) == [0, 1]
    assert late.receive(2).manifest == decided and late.head(2) == paris.head(2)


def test_a_member_that_writes_each_snapshot_first_ends_only_its_own_turns(tmp_path):
    run = numbered(tmp_path)
    names = [f"worker-{n}" for n in range(3)]
    workers = make_workers(run, names, snapshot_every=2, min_workers=3)
    states = [swarms.begin(worker) for worker in workers]
    liar = workers[2].member.store
    for step in 2, 4:
        junk = records.SnapshotIndex(step, f"snapshots/{step:08d}/{'0' * 32}", 1, *2 * ["0" * 64])
        for name in "", ".001", ".002":
            liar.put(f"snapshots/{step:08d}{name}.json", records.encode(junk))
    together(
        [
            functools.partial(swarms.take_steps, x, 4, state, batches=slowly)
            for x, state in zip(workers, states, strict=True)
        ]
    )
    for worker in workers:
        worker._turns.close()
    assert snapshots.attested_steps(run.store("worker-3"), 100) == [0, 2]  # the turn of slot 1
    for worker in workers:
        worker.close()


def test_a_time_that_a_member_signs_decides_nothing(run):
    joined = run.members(deadline=2.0)
    everybody(joined, 0)
    first = joined[2].manifest(0)
    alone = [joined[2].send(1, b"oslo  in 1")]
    for step, packets, previous in (
        (0, first.packets, first.previous),
        (1, alone, joined[2].head(0)),
    ):
        name, data = signed_manifest(run, "oslo", step, packets, previous, time=0.0)
        run.anybody.put(name, data)
    late = run.member("rome", deadline=0.1)
    assert late.receive(0).manifest.time == 0 and late.head(0) == joined[2].head(0)
    assert late.manifest(1) is None
    time.sleep(0.6)  # five deadlines by its own clock
    assert late.manifest(1) is not None


def test_a_step_of_fewer_than_min_workers_is_not_there_for_readers_either(run):
    oslo, paris, rome = run.member("oslo"), run.member("paris", min_workers=2), run.member("rome")
    name, data = signed_manifest(run, "oslo", 0, [oslo.send(0, b"x")], oslo.head(-1))
    run.anybody.put(name, data)
    assert paris.manifest(0) is None and rome.manifest(0) is not None


def test_no_byte_of_a_packet_is_parsed_before_its_signature_was_verified(run, monkeypatch):
    paris, rome = run.members("paris", "rome")
    rome.send(0, b"x")
    (name,) = physical(run, "packets/00000000")
    genuine, parsed = run.anybody.get(name), []
    decode = records.decode
    monkeypatch.setattr(records, "decode", lambda *x: parsed.append(x[1]) or decode(*x))
    run.anybody.put(name, genuine.replace(b'"step": 0', b'"step":  0'))
    assert paris._steps._read(0, 1) is None and not any(parsed)
    run.anybody.put(name, genuine)
    assert paris._steps._read(0, 1).payload == b"x" and any(parsed)


def test_a_worker_whose_snapshots_nobody_signs_stops_until_the_owner_takes_the_others_out(tmp_path):
    run, said = numbered(tmp_path), []
    workers = make_workers(run, ["worker-0", "worker-1"], snapshot_every=2, deadline=0.2)
    states = [swarms.begin(worker) for worker in workers]
    both = [
        functools.partial(swarms.take_steps, x, 1, y) for x, y in zip(workers, states, strict=True)
    ]
    alone, state = workers[0], together(both)[0][0]  # the other one is gone without a word
    alone.member.tell = said.append
    going = threading.Thread(target=swarms.take_steps, args=(alone, 12, state, slowly))
    going.start()
    going.join(timeout=12)
    assert going.is_alive() and alone.member.is_unheard and alone.number < 10
    assert any("so this worker sends nothing until they do: let the owner take" in x for x in said)
    run.change(without=["worker-1"])
    going.join(timeout=30)
    assert not going.is_alive() and alone.number == 12
    for worker in workers:
        worker.close()


def test_who_has_left_need_not_sign_a_snapshot(tmp_path):
    run = numbered(tmp_path)
    names = [f"worker-{n}" for n in range(3)]
    workers = make_workers(run, names, snapshot_every=4, deadline=0.5)
    states = [swarms.begin(worker) for worker in workers]
    both = [
        functools.partial(swarms.take_steps, x, 2, y) for x, y in zip(workers, states, strict=True)
    ]
    state = together(both)[0][0]
    for worker in workers[1:]:
        worker.close()
    swarms.take_steps(workers[0], 6, state, slowly)
    workers[0].close()
    assert 4 in snapshots.attested_steps(run.store("worker-3"), 100)

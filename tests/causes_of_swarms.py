"""Causes for every ``raise`` of the swarm."""

import contextlib
import functools
import pathlib
import tempfile
from unittest import mock

import jax
import numpy as np
import optax

import demo_optax
from demo_optax._src.commands import main
from demo_optax._src.parallel import processes
from demo_optax._src.swarm import (
    agreement,
    history,
    picture,
    records,
    roster,
    seals,
    slots,
    snapshots,
)
from demo_optax._src.swarm.records import Claim, Manifest, PacketRef
from demo_optax._src.swarm.round_clock import RoundClock
from demo_optax.swarm import Member, ObjectStore
from tests import members, swarms
from tests.causes_in_common import import_without, without

HASH = "0" * 64


@contextlib.contextmanager
def store():
    with tempfile.TemporaryDirectory() as folder:
        yield ObjectStore(folder, patience=0.1)


def draw_without_matplotlib():
    nothing = history.History([], {}, frozenset(), [])
    without("matplotlib", lambda: picture.draw(nothing, "life.png"))


def other_settings():
    with store() as place:
        place.put("run.json", b'{"--topk": "8"}')
        agreement.require(place, {"--topk": 4}, {"device": "cpu", "optimizer": HASH})


def manifest_of(step, packets=((0, 1, HASH),), previous=""):
    return Manifest(step, tuple(PacketRef(*x) for x in packets), previous, 1.0)


def after(manifest, step=0):
    """A member that reads a manifest which is there already."""
    with store() as place:
        place.put(records.step_key("manifests", step), records.encode(manifest))
        Member(place, "paris", slots=2).exchange(step, b"a packet")


def manifest_that_cannot_be_read():
    with store() as place:
        place.put(records.step_key("manifests", 0), b"[1, 2]")
        Member(place, "paris").exchange(0, b"a packet")


def leaves_while_it_waits():
    with store() as place:
        member = Member(place, "paris", min_workers=2)
        member.leave()
        member.exchange(0, b"a packet")


def no_slot():
    tries = mock.patch.object(slots, "CLAIM_TRIES", 3)
    with tries, store() as place, mock.patch.object(place, "create", return_value=False):
        slots.claim(place, "paris", "nonce", 1)


def slots_taken():
    with store() as place:
        Member(place, "paris", slots=1)
        Member(place, "rome", slots=1)


def snapshot(break_it, read_as=None):
    """Writes a snapshot, breaks it, and reads it."""
    leaves = [np.arange(4.0, dtype=np.float32), np.ones((2, 2), np.float32)]
    with store() as place:
        snapshots.write(place, 8, leaves)
        index = snapshots.read_index(place, 8)
        index = break_it(place, index) or index
        snapshots.read(place, index, read_as or leaves)


def lose_file(place, index):
    place.put(f"{index.file}/000000", b"something else")


def lose_part(place, index):
    place.delete([f"{index.file}/000000"])


def other_step(place, index):
    place.put("snapshots/00000008.json", records.encode(index._replace(step=9, file=NINE)))
    snapshots.read_index(place, 8)


NINE = f"snapshots/00000009/{HASH[:32]}"


def no_snapshot_can_be_read():
    with store() as place:
        snapshots.write(place, 0, [np.ones(2, np.float32)])
        snapshots.read_newest(place, [np.ones(3, np.float32)])


def store_that_fails():
    with store() as place, mock.patch("obstore.get", side_effect=RuntimeError("no route to host")):
        place.get("run.json")


def object_that_is_too_large():
    with store() as place:
        place.put("run.json", b" " * 4_000_001)
        place.get("run.json")


def store_after_a_fork():
    with store() as place:
        place.names("slots")
        with mock.patch("os.getpid", return_value=0):
            place.names("slots")


def raised_by_the_first_process():
    def fail():
        raise ValueError("give more slots than 1.")

    with (
        mock.patch.object(jax, "process_count", return_value=2),
        mock.patch.object(processes.multihost_utils, "broadcast_one_to_all", lambda x: x),
    ):
        processes.by_lead(fail)


def with_worker(act, tx=swarms.DEMO_SCALED, **settings):
    with tempfile.TemporaryDirectory() as folder:
        act(swarms.make_worker(tx, ObjectStore(folder), 0, **settings))


def steps_after_an_error(made):
    params, opt_state = swarms.begin(made)
    for _ in range(2):
        with contextlib.suppress(OSError), mock.patch.object(made.member.store, "put", fails):
            made.step(params, opt_state, swarms.batch_of(0, 0))


def steps_after_it_has_left(made):
    state = swarms.begin(made)
    made.leave(*state)
    made.step(*state, swarms.batch_of(0, 0))


def fails(key, data):
    raise OSError(f"no space left for {key}")


def another_batch(made):
    made.step(*swarms.begin(made), swarms.batch_of(0, 0, rows=3))


def has_no_place():
    with (
        mock.patch("demo_optax._src.swarm.worker.is_lead", return_value=False),
        mock.patch("demo_optax._src.swarm.worker.by_lead", return_value=(2, 0, 1.0)),
    ):
        made = swarms.make_worker(swarms.DEMO_SCALED, None, 0)
    made.member.leave()


DELAYED = demo_optax.Delayed(demo_optax.AllGather())
RANDOM_BASIS = demo_optax.demo(1e-3, demo_optax.Compression(4, transform="random"))

ON_A_PLATEAU = demo_optax.demo(1e-3, precondition=optax.contrib.reduce_on_plateau())


def a_round_that_cannot_be_watched():
    failing = RuntimeError("cannot read the manifest of step 0: make sure that the store is well.")
    with store() as place, mock.patch.object(Member, "manifest", side_effect=failing):
        clock = RoundClock(Member(place, "paris"), 3, None)
        while True:
            clock.look(0, 1)


def two_workers_along_the_axis():
    with store() as place:
        member = Member(place, "paris")
        mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
        demo_optax.swarm.SwarmWorker(swarms.loss_fn, swarms.DEMO_SCALED, mesh, member)


def no_place_in_the_first_process():
    with store():
        swarms.make_worker(swarms.DEMO_SCALED, None, 0)


@contextlib.contextmanager
def owned(*names):
    with tempfile.TemporaryDirectory() as folder:
        run = members.Run(pathlib.Path(folder), names)
        run.make("mallory")
        yield run


def as_member(name="paris", slots=8, **settings):
    with owned("rome", "paris") as run:
        Member(run.store(name, **settings), slots=slots)


def change_roster(**changes):
    with owned("paris") as run:
        run.change(**changes)


def another_key_of_that_name():
    with owned("paris") as run:
        public = run.key("mallory").public._replace(name="paris")
        roster.change(run.roster(), run.key("owner"), [public])


def unsigned_snapshot():
    with owned("paris") as run:
        leaves = [np.ones(2, np.float32)]
        snapshots.write(run.store("paris"), 4, leaves)
        snapshots.read_newest(run.store("paris"), leaves)


def manifest_that_leads_elsewhere():
    with owned("paris") as run:
        store = run.store("paris")
        Member(store).exchange(0, b"a packet")
        index = snapshots.write(store, 1, [np.ones(2, np.float32)], slot=0, head=HASH)
        list(snapshots.counted_before(store, index))


def two_processes_with_one_key():
    with owned("paris") as run:
        older, _ = run.members("paris", "paris")
        older._steps._looked_for_itself = -np.inf
        older.exchange(0, b"a packet")


def member_without_a_key():
    with owned("paris") as run:
        Member(run.anybody, "paris")


def file_that_is_no_key(text="nothing"):
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/paris.key", "w") as file:
            file.write(text)
        seals.read_key(f"{folder}/paris.key")


def run_command(line, place="run"):
    with owned("paris") as run:
        if place == "open":
            ObjectStore(f"{run.folder}/open").create("slots/000/000001", b"{}")
        if place == "other":
            ObjectStore(f"{run.folder}/other").put(roster.KEY, b"{}")
        args = main.make_parser().parse_args(line.replace("FOLDER", str(run.folder)).split())
        args.run(args)


RAISED = [
    lambda: import_without("cryptography.exceptions", "swarm/seals.py"),
    ("does not hold a key", file_that_is_no_key),
    ("a key needs a name", lambda: file_that_is_no_key(f"{HASH} \x07")),
    lambda: roster.number_of("the newest"),
    (
        "'rome' cannot be taken out: give names of members, which are paris",
        lambda: change_roster(without=["rome"]),
    ),
    ("roster 2 needs a member", lambda: change_roster(without=["paris"])),
    ("'paris' has the name or the key of the member 'paris'", another_key_of_that_name),
    ("this owner's key does not open the secrets", lambda: change_roster(owner="mallory")),
    ("the key of mallory is in no roster, and number 1", lambda: as_member("mallory")),
    ("of number 2 or higher, but number 1 is in", lambda: as_member(at_least=2)),
    ("'paris' has slot 1 of the roster, and slots=1: give all", lambda: as_member(slots=1)),
    unsigned_snapshot,
    manifest_that_leads_elsewhere,
    two_processes_with_one_key,
    ("the run there is for members only: give this worker --k", member_without_a_key),
    ("is for members only: give --key", lambda: run_command("swarm FOLDER/run")),
    lambda: run_command(
        "roster FOLDER/open --owner FOLDER/owner.key --add FOLDER/paris.pub", "open"
    ),
    lambda: run_command("roster FOLDER/other --owner FOLDER/owner.key", "other"),
    (
        "new has no roster: give the place of one, or begin one",
        lambda: run_command("roster FOLDER/new --owner FOLDER/owner.key"),
    ),
    ("is no name of a worker: leave its folder out", lambda: run_command("key FOLDER/lima")),
    (
        "owner.pub is the owner's own line: leave",
        lambda: run_command("roster FOLDER/run --owner FOLDER/owner.key --add FOLDER/owner.pub"),
    ),
    lambda: run_command("key FOLDER/paris"),
    (
        "paris.key' holds a public line: .* the key, .*key",
        lambda: file_that_is_no_key(f"{HASH} {HASH} paris"),
    ),
    a_round_that_cannot_be_watched,
    lambda: import_without("obstore", "swarm/store.py"),
    draw_without_matplotlib,
    other_settings,
    lambda: Member(mock.Mock(), ""),
    lambda: Member(mock.Mock(), "paris", slots=2, min_workers=3),
    lambda: after(manifest_of(1)),
    lambda: after(manifest_of(0, [(0, 2, HASH)])),
    lambda: after(manifest_of(0, [(1, 1, HASH)])),
    manifest_that_cannot_be_read,
    leaves_while_it_waits,
    lambda: records.decode(Claim, b"{}"),
    no_slot,
    slots_taken,
    lambda: snapshot(lose_file),
    lambda: snapshot(lose_part),
    lambda: snapshot(other_step),
    lambda: snapshot(lambda place, index: index._replace(digest=HASH)),
    lambda: snapshot(lambda *_: None, [np.ones(4, np.float32)] * 3),
    lambda: snapshot(lambda place, index: index._replace(parts=2)),
    no_snapshot_can_be_read,
    lambda: ObjectStore("nonsense://bucket/run"),
    store_that_fails,
    object_that_is_too_large,
    store_after_a_fork,
    raised_by_the_first_process,
    lambda: with_worker(lambda made: made.step({}, (), ())),
    lambda: with_worker(steps_after_an_error),
    lambda: with_worker(steps_after_it_has_left),
    lambda: with_worker(another_batch),
    lambda: with_worker(swarms.begin, lambda exchange: swarms.DEMO_SCALED),
    *[
        (said, functools.partial(with_worker, swarms.begin, demo_optax.demo(1e-3, exchange=each)))
        for said, each in [
            ("leave the axis out", demo_optax.AllGather("data")),
            (r"SwarmWorker\(\.\.\., delay=1\)", DELAYED),
            ("has no halves", demo_optax.TwoPhase("data")),
        ]
    ],
    lambda: with_worker(swarms.begin, RANDOM_BASIS),
    lambda: with_worker(swarms.begin, ON_A_PLATEAU),
    lambda: swarms.make_worker(swarms.DEMO_SCALED, None, 0, round_seconds=60.0),
    two_workers_along_the_axis,
    no_place_in_the_first_process,
    has_no_place,
]

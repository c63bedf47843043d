"""A store in a folder: what it does about requests that fail, and how many a step needs."""

import concurrent.futures
import itertools
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import threading
from unittest import mock

import obstore
import pytest
from obstore.exceptions import (
    AlreadyExistsError,
    GenericError,
    PermissionDeniedError,
    PreconditionError,
)

from demo_optax._src.swarm import store as store_module
from demo_optax.swarm import Member, ObjectStore, Store, StoreError, SwarmError
from tests.members import Counting, Run, everybody


@pytest.fixture
def store(tmp_path):
    return ObjectStore(str(tmp_path), patience=5.0)


def test_a_folder_is_a_store(store, tmp_path):
    assert isinstance(store, Store)
    store.put("a/1", b"one")
    store.put("a/b/2", b"two")
    assert store.get("a/1") == b"one"
    assert store.get("a/3") is None
    assert store.names("a") == ["1", "b/2"]
    assert store.names("nothing") == []
    store.delete(["a/1", "a/never"])
    assert store.names("a") == ["b/2"]
    store.delete(["a/b/2"])
    assert list(tmp_path.iterdir()) == []  # not even empty folders
    store.put("a/b/1", b"again")
    assert store.get("a/b/1") == b"again"


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 30])
def test_large_objects_are_read_in_parts(store, monkeypatch, size):
    monkeypatch.setattr("demo_optax._src.swarm.store.PART", 8)
    data = random.Random(0).randbytes(size)
    store.put("x.packet", data)
    assert store.get("x.packet") == data


def test_objects_larger_than_a_run_can_have_are_not_read(store, tmp_path):
    for name in "000001", "a.packet":
        store.put(f"x/{name}", b"")
        os.truncate(tmp_path / "x" / name, 10**12)  # bytes, none of which takes room on a disk
    with pytest.raises(SwarmError, match=r"x/000001 in .* has 1,000,000,000,000 bytes"):
        store.get("x/000001")
    store.packet_bytes = 8
    with pytest.raises(SwarmError, match=r"x/a.packet in .* writes more than 8 there"):
        store.get("x/a.packet")
    store.put("x/b.packet", b"12345678")
    assert store.get("x/b.packet") == b"12345678"


def test_an_object_that_is_replaced_while_it_is_read_is_read_again(store, monkeypatch):
    monkeypatch.setattr("demo_optax._src.swarm.store.PART", 8)
    store.put("x.packet", bytes(30))
    get, answers = obstore.get, itertools.count()

    def replaces(*args, **named):
        if next(answers) == 2:
            store.put("x.packet", b"short")
        return get(*args, **named)

    monkeypatch.setattr(obstore, "get", replaces)
    assert store.get("x.packet") == b"short"


def test_what_no_worker_writes_is_not_listed(store, tmp_path):
    store.put("slots/000/000001", b"x")
    for name in b"a\nb", b"\xff", b"a b":
        (tmp_path / "slots" / os.fsdecode(name)).touch()
    os.mkfifo(tmp_path / "slots/pipe")
    (tmp_path / "slots/loop").symlink_to("loop")
    (tmp_path / "slots/self").symlink_to(".")
    assert store.names("slots") == ["000/000001"]


def test_what_is_no_file_is_no_object(store, tmp_path):
    (tmp_path / "slots").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    assert [store.get(x) for x in ("pipe", "loop", "loop/x", "slots/000")] == [None] * 4
    store.put("pipe", b"x")
    assert store.get("pipe") == b"x"


@pytest.mark.parametrize("write", ["put", "create"])
@pytest.mark.parametrize(
    ("obstacle", "make", "remove"),
    [
        ("packets/00000005", pathlib.Path.touch, pathlib.Path.unlink),
        ("packets/00000005/a", pathlib.Path.mkdir, pathlib.Path.rmdir),
    ],
)
def test_what_is_in_the_way_of_a_write_is_named_until_it_is_gone(
    write, obstacle, make, remove, tmp_path, monkeypatch, caplog
):
    store, pauses = ObjectStore(str(tmp_path), patience=0.0), itertools.count()
    path = tmp_path / obstacle
    path.parent.mkdir(parents=True)
    make(path)
    monkeypatch.setattr("time.sleep", lambda _: remove(path) if next(pauses) == 3 else None)
    getattr(store, write)("packets/00000005/a", b"x")
    assert store.get("packets/00000005/a") == b"x"
    assert [f"{path} is in the way" in x for x in caplog.messages] == [True] * 4


def test_a_folder_that_cannot_be_listed_is_asked_for_until_it_can(monkeypatch, caplog):
    store, found = ObjectStore("memory:///", patience=0.0), mock.MagicMock()
    store.put("slots/000/000001", b"")
    found.side_effect = [GenericError('invalid path: Path "slots//x"')] * 3 + [mock.DEFAULT]
    found.return_value = obstore.list(store._store, "slots")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(obstore, "list", found)
    assert store.names("slots") == ["000/000001"]
    assert ['"slots//x"' in x for x in caplog.messages] == [True] * 3


FORKED = """
import os, signal, sys
from demo_optax._src.swarm.store import in_parallel
from demo_optax.swarm import ObjectStore

store = ObjectStore(sys.argv[1], patience=5.0)

def in_a_fork(use):
    if (process := os.fork()) == 0:
        signal.alarm(60)
        try:
            print(use(), flush=True)
        except OSError as error:
            print(error, flush=True)
        os._exit(0)
    os.waitpid(process, 0)

in_a_fork(lambda: store.create("first", b""))
in_parallel(store.get, ["first"])
in_a_fork(lambda: in_parallel(str.upper, "ab"))
in_a_fork(lambda: store.get("first"))
in_a_fork(lambda: ObjectStore(sys.argv[1] + "/new").names("x"))
"""


def test_after_a_fork_a_store_that_was_used_is_an_error_and_waits_for_nobody(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", FORKED, str(tmp_path)], capture_output=True, text=True, timeout=100
    )
    before, threads, same, another = run.stdout.splitlines()
    assert (before, threads) == ("True", "['A', 'B']")
    for line, what in (same, "read first"), (another, "list x"):
        assert re.match(rf"cannot {what} in .* was forked from it.*spawn", line)


def test_a_url_and_a_path_are_the_same_place(tmp_path):
    ObjectStore(str(tmp_path / "my run")).put("x", b"1")
    assert ObjectStore((tmp_path / "my run").as_uri()).get("x") == b"1"


def test_of_many_at_once_one_creates(store):
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        won = list(pool.map(lambda n: store.create("decision", b"%d" % n), range(64)))
    assert sum(won) == 1
    assert store.get("decision") == b"%d" % won.index(True)


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_requests_that_fail_are_sent_again(store, share, monkeypatch):
    """Half of the failures come after the store did what it was asked."""
    drawn = random.Random(0)
    monkeypatch.setattr("time.sleep", lambda seconds: None)

    def unreliable(fn):
        def call(*args, **named):
            if drawn.random() < share / 2:
                raise ConnectionError("lost on its way")
            answer = fn(*args, **named)
            if drawn.random() < share / 2:
                raise ConnectionError("lost on its way back")
            return answer

        return call

    monkeypatch.setattr(store_module, "_files", unreliable(store_module._files))
    for name in "put", "get", "delete":
        monkeypatch.setattr(obstore, name, unreliable(getattr(obstore, name)))
    for number in range(30):
        store.put(f"x/{number:02d}", b"%d" % number)
        store.create(f"y/{number:02d}", b"%d" % number)
        assert not store.create(f"y/{number:02d}", b"of a second writer")
    assert len(store.names("x")) == 30
    assert [store.get(f"y/{number:02d}") for number in range(30)] == [b"%d" % n for n in range(30)]
    store.delete([f"x/{number:02d}" for number in range(30)])
    assert store.names("x") == []


@pytest.mark.parametrize("refusal", [AlreadyExistsError, PreconditionError])
def test_a_refusal_counts_only_where_there_is_an_object(store, monkeypatch, refusal):
    """Services answer a conflict between two writers in more than one way."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    put, refused = obstore.put, iter([True, False, True])

    def conflicts(*args, **named):
        if next(refused):
            raise refusal("conflict")
        return put(*args, **named)

    monkeypatch.setattr(obstore, "put", conflicts)
    assert store.create("decision", b"mine") and store.get("decision") == b"mine"
    assert not store.create("decision", b"yours") and store.get("decision") == b"mine"


def test_seconds_of_work_before_the_first_failure_are_not_counted(tmp_path, monkeypatch):
    clock = itertools.count(step=100.0)
    monkeypatch.setattr("demo_optax._src.swarm.store.time.monotonic", lambda: next(clock))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    store, answers = ObjectStore(str(tmp_path), patience=150.0), iter([ConnectionError(), None])

    def put(*args, **named):
        next(clock)  # a long upload
        if error := next(answers):
            raise error

    monkeypatch.setattr(obstore, "put", put)
    store.put("a/1", b"")


DENIED = """Generic error: Unable to create dir /r/slots: Permission denied (os error 13)

Debug source:
Generic { store: "LocalFileSystem", source: UnableToCreateDir { source: Os { code: 13 } } }"""
AT_ONCE = r"cannot write a/1 in .*, tried for 0 s: .*/r/slots: Permission denied .*this worker may"


@pytest.mark.parametrize(
    ("patience", "error", "message"),
    [
        (0.1, OSError("No space left on device"), r"cannot write a/1 .* No space left on device"),
        (600.0, GenericError(DENIED), AT_ONCE),
        (600.0, PermissionDeniedError(DENIED), AT_ONCE),
    ],
    ids=["stays away", "denied by a folder", "denied"],
)
def test_a_store_ends_after_a_while_or_without_permission_at_once(
    patience, error, message, tmp_path
):
    store = ObjectStore(str(tmp_path), patience=patience)
    with (
        mock.patch.object(obstore, "put", side_effect=error) as put,
        pytest.raises(StoreError, match=message) as ended,
    ):
        store.put("a/1", b"")
    assert (put.call_count == 1) == (patience > 1) and "Debug source" not in str(ended.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_ends_at_once(tmp_path):
    store = ObjectStore(str(tmp_path), patience=600.0)
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="Permission denied"):
        store.create("slots/000/000001", b"")


def test_a_step_of_16_members_asks_the_store_no_more_than_an_open_one(tmp_path, monkeypatch):
    """Once all have sent, so that it does not count how often a busy machine lets them look."""
    names, send, all_sent = [f"m{n}" for n in range(16)], Member.send, threading.Barrier(16)

    def together_with_all(*args):
        sent = send(*args)
        all_sent.wait(timeout=60)
        return sent

    monkeypatch.setattr(Member, "send", together_with_all)
    (tmp_path / "closed").mkdir()
    closed = Run(tmp_path / "closed", names)
    settings = dict(slots=16, deadline=60.0, min_workers=16)
    counting = Counting(ObjectStore(str(tmp_path / "open")))
    open_members = [Member(counting, name, **settings) for name in names]
    counting_closed = Counting(closed.anybody)
    closed_members = [closed.member(name, inner=counting_closed, **settings) for name in names]
    runs = (open_members, counting.counts), (closed_members, counting_closed.counts)
    found = [], []
    for step in range(8):
        for (joined, counts), each in zip(runs, found, strict=True):
            counts.clear()
            everybody(joined, step)
            each.append({name: counts.get(name, 0) / 16 for name in ("get", "put", "names")})

    def usual(each, *names):
        return statistics.median(sum(one[name] for name in names) for one in each[1:])

    open_run, members_only = found
    assert usual(members_only, "names") == 0 < usual(open_run, "names")
    assert usual(members_only, "put") <= usual(open_run, "put") + 0.01
    asked = [usual(each, "get", "put", "names") for each in found]
    assert asked[1] <= asked[0]


def test_requests_of_a_thread_for_requests_wait_for_no_other_one():
    found = store_module.in_parallel(lambda n: store_module.in_parallel(abs, [-n, n]), range(64))
    assert found == [[n, n] for n in range(64)]

"""A run for members only in a folder, with the owner's key and those of members."""

import functools
import threading
import time

from demo_optax._src.swarm import records, roster, seals
from demo_optax._src.swarm.members_only import MembersOnly
from demo_optax._src.swarm.replicated_state import shared_leaves, to_host
from demo_optax._src.swarm.steps import Steps
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


def exchange(member, step, payload=None):
    return member.exchange(step, payload or f"{member.worker:5} in {step}".encode())


def everybody(joined, step):
    if step == 0:
        for member in joined:
            member.announce(0)
    return together([functools.partial(exchange, member, step) for member in joined])


def know_otherwise(member, step, **changes):
    """Lets a member know a step that it has decided in another way."""
    member.chain._decided[step] = member.chain._decided[step]._replace(**changes)


def numbered(run_folder):
    return Run(run_folder, [f"worker-{n}" for n in range(4)])


def make_workers(run, number, **settings):
    """Workers that train, with the stores of members."""
    return [
        swarms.make_worker(swarms.DEMO_SCALED, run.store(f"worker-{n}"), n, **settings)
        for n in range(number)
    ]


def slowly(*args):
    """A batch that takes longer than a comparison with a snapshot."""
    time.sleep(0.6)
    return swarms.batch_of(*args)


def shared_of(worker, params, opt_state):
    return list(map(to_host, shared_leaves(params, opt_state)))


def signed_manifest(run, name, step, packets, previous, **changes):
    """The bytes of a manifest as a member signs them, and their physical name."""
    store = run.store(name)
    manifest = records.Manifest(step, tuple(packets), previous, time.time(), run.roster().name)
    key = records.step_key("manifests", step)
    return store._name(key), store._sealed(key, records.encode(manifest._replace(**changes)))


def put_manifest(run, *args, **changes):
    """Puts a manifest as a member signs it."""
    run.anybody.put(*signed_manifest(run, *args, **changes))


def put_packet(store, step, packet, data):
    """Sends a packet in an open run, whatever its reference says."""
    steps = Steps(store, 1000)
    store.put(steps.key(step, packet), steps._signed(step, packet, data))


def physical(run, folder):
    return [f"{folder}/{name}" for name in run.anybody.names(folder)]


class Counting:
    """A store that counts what it is asked, and keeps the keys and folders."""

    def __init__(self, store):
        self._store, self.counts, self.asked, self.patience = store, {}, [], store.patience
        self._lock = threading.Lock()

    def __getattr__(self, name):
        if name not in ("get", "put", "create", "names", "delete"):
            raise AttributeError(name)

        def counted(*args):
            with self._lock:
                self.asked.append(args[0])
                kind = {"create": "put"}.get(name, name)
                self.counts[kind] = self.counts.get(kind, 0) + 1
            return getattr(self._store, name)(*args)

        return counted

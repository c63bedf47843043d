"""Runs swarms in virtual time, with troubles that a seed decides, and checks what comes of them.

python -m tests.programs.simulate_swarm --seeds 0:1000 --closed
python -m tests.programs.simulate_swarm --seed 17 --closed --verbose

Members are `SwarmWorker`s whose parameters are a hash of all that they have applied. Their requests
take times from the seed, and so does what befalls them: processes are killed or stand still, links
fail, objects vanish or are overwritten, the roster changes. A packet must be applied to just those
parameters that it was made from, in its sender's place. When the troubles are over all members must
come together. If they cannot they must say why, and must once objects are back in place.
"""

import argparse
import functools
import hashlib
import heapq
import itertools
import logging
import os
import pathlib
import random
import re
import secrets
import sys
import tempfile
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

import demo_optax
from demo_optax._src import metrics
from demo_optax._src.swarm import agreement, roster, seals, store, worker
from demo_optax.swarm import Left, Member, MembersOnly, Store, StoreError, SwarmError, SwarmWorker
from tests import virtual_time
from tests.virtual_time import Process, Thread, World

TROUBLED, CALM, SOON = 90.0, 400.0, 5.0  # seconds with troubles, then until all must be together
PATIENCE, DEADLINE, STEP, LATENCY, SLOTS = 10.0, 3.0, 1.0, 0.05, 6
TOGETHER = 3  # steps that all must have taken alike
EPOCH = 1_790_000_000.0  # of all clocks
NAMES = [f"m{n}" for n in range(SLOTS)]
OPTIMIZER = demo_optax.demo_scaled(1e-2)
WORDS = 8  # of a packet: a hash
OF_OBJECTS = "delete", "delete all", "junk", "older", "another's"
OF_MEMBERS = "kill", "freeze", "leave", "cut off", "slow down"
OF_ALL = "restart all", "freeze all", "cut off all"


class Trouble(NamedTuple):
    """What happens at a time: to whom, or to which object, for how long, and then is put right."""

    at: float
    kind: str
    who: int
    seconds: float
    seed: int


class Held(np.ndarray):
    """An array as a device would hold it."""

    is_fully_addressable = True


ONE = np.ones(1, np.float32).view(Held)
STATE = metrics.init_metrics()
PARAMS = {"w": np.linspace(1, 2, 32, dtype=np.float32).view(Held)}


def digest(params) -> str:
    return hashlib.sha256(np.asarray(params["w"]).tobytes()).hexdigest()


class Objects(dict[str, bytes]):
    """What is in the place, with all that was ever there and the troubles that are left."""

    def __init__(self):
        self.versions: defaultdict[str, list[bytes]] = defaultdict(list)
        self.harmed: dict[str, tuple[bytes | None, bytes]] = {}  # what is there, and what should be

    def write(self, key: str, data: bytes) -> None:
        self[key] = data
        self.versions[key].append(data)

    def harm(self, key: str, data: bytes | None) -> None:
        self.harmed[key] = data, self.harmed.get(key, (None, self[key]))[1]
        self.pop(key) if data is None else self.update({key: data})

    def restore(self, key: str) -> bool:
        """Puts an object back unless somebody has written it again."""
        harmed, genuine = self.harmed.pop(key, (None, None))
        if genuine is None or self.get(key) != harmed:
            return False
        self[key] = genuine
        return True


class Link(Store):
    """The place as one process reaches it."""

    patience = PATIENCE

    def __init__(self, run: "Run", name: str):
        self._run, self._name = run, name

    def _ask(self, what: str, answer: Callable[[], Any]) -> Any:
        world, rng, started = self._run.world, self._run.rng, self._run.world.now
        while (until := self._run.cut_until[self._name]) > world.now:
            if world.now - started > PATIENCE:
                raise StoreError(f"cannot {what}")
            world.pause(min(until - world.now, 2.0))
        seconds = rng.expovariate(1 / LATENCY) * self._run.slowness[self._name]
        if rng.random() < 0.5:
            world.pause(seconds)
            return answer()
        found = answer()
        world.pause(seconds)
        return found

    def put(self, key: str, data: bytes) -> None:
        self._ask(f"write {key}", lambda: self._run.write(self._name, key, data))

    def create(self, key: str, data: bytes) -> bool:
        def attempt() -> bool:
            if key in self._run.objects:
                return False
            self._run.write(self._name, key, data)
            return self._run.rng.random() > 0.01  # an answer that was lost, and asked for again

        return self._ask(f"create {key}", attempt)

    def get(self, key: str) -> bytes | None:
        return self._ask(f"read {key}", lambda: self._run.objects.get(key))

    def names(self, folder: str) -> list[str]:
        def listed() -> list[str]:
            inside = f"{folder}/"
            return sorted(x[len(inside) :] for x in self._run.objects if x.startswith(inside))

        return self._ask(f"list {folder}", listed)

    def delete(self, keys: Sequence[str]) -> None:
        self._ask("delete", lambda: [self._run.objects.pop(key, None) for key in keys])


class Run:
    """A swarm in virtual time."""

    def __init__(self, options: argparse.Namespace, seed: int, keys: pathlib.Path):
        self.world, self.objects, self.rng = World(), Objects(), random.Random(seed)
        self.mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
        self.is_closed, self.keys, self.is_verbose = options.closed, keys, options.verbose
        number = options.members or self.rng.randint(2, 5)
        self.present = NAMES[:number]  # in the roster, or wanted in an open run
        self.least = self.rng.randint(1, 2)
        self.every = self.rng.choice((3, 6))
        self.rates = {x: self.rng.choice((1.0, 1.0, 0.8, 1.25)) for x in NAMES}
        self.paces = {x: self.rng.choice((0.3, 1.0, 1.0, 3.0)) for x in NAMES}
        kinds = self.rng.sample(self._kinds(), self.rng.randint(1, 4))
        self.troubles = sorted(
            Trouble(
                self.rng.uniform(5, TROUBLED),
                self.rng.choice(kinds),
                self.rng.randrange(number),
                self.rng.choice((1.0, 5.0, 15.0, 40.0, 1e9)),
                self.rng.getrandbits(32),
            )
            for _ in range(self.rng.randint(1, options.troubles))
        )
        if options.only is not None:
            self.troubles = [self.troubles[int(x)] for x in options.only.split(",")]
        self.processes: dict[str, Process] = {}
        self.every_process: list[Process] = []
        self.cut_until: defaultdict[str, float] = defaultdict(float)
        self.slowness: defaultdict[str, float] = defaultdict(lambda: 1.0)
        self.leaving: dict[str, float] = {}  # for how long
        self.agenda: list[tuple[float, int, Callable[[], object]]] = []
        self.count = itertools.count()
        self.sent: dict[bytes, tuple[str, int, str]] = {}  # name, slot, parameters
        self.held: defaultdict[str, dict[int, str]] = defaultdict(dict)  # since the calm, by step
        self.ever: defaultdict[int, dict[str, str]] = defaultdict(dict)  # by step and digest
        self.counted: set[str] = set()  # whose packets were applied since the calm
        self.spoke: defaultdict[str, float] = defaultdict(float)
        self.said: set[tuple[str, str]] = set()
        self.stepped: defaultdict[str, float] = defaultdict(float)
        self.trace: list[str] = []
        self.roster: roster.Roster | None = None
        self.fault = ""

    def _kinds(self) -> list[str]:
        kinds = [*OF_MEMBERS, *OF_ALL, "delete", "delete all"]
        return [*kinds, *OF_OBJECTS, "join", "take out"] if self.is_closed else kinds

    def say(self, who: str, what: str) -> None:
        """Notes what somebody says, or once if it repeats itself until the next trouble."""
        words = who, re.sub("[0-9]+", "", what)
        self.said = {words} if who == "!" else self.said
        if words not in self.said or who == "!" or self.is_verbose:
            self.trace.append(f"{self.world.now:8.2f} {who:5} {what}")
        self.spoke[who] = self.world.now
        self.said.add(words)

    def fail(self, what: str) -> None:
        self.fault = self.fault or what
        self.say(self.world.current.process.name, f"FAULT: {what}")

    def write(self, who: str, key: str, data: bytes) -> None:
        self.objects.write(key, data)
        if self.is_verbose:
            self.say(who, f"writes {key}")

    # What members do

    def start(self, name: str) -> None:
        if name not in self.present or name in self.processes:
            return
        process = Process(name, self.rates[name], self.rng.uniform(0, 1000))
        self.processes[name] = process
        self.every_process.append(process)
        Thread(self.world, lambda: self._live(process), process).start()

    def end(self, name: str) -> None:
        if (process := self.processes.pop(name, None)) is not None:
            self.world.kill(process)

    def _live(self, process: Process) -> None:
        try:
            self._train(process)
        except (SwarmError, OSError, Left) as error:
            self.say(process.name, f"{type(error).__name__}: {error}")
        except Exception as error:
            self.fail(f"{type(error).__name__}: {error}")
        self.world.kill(process)
        if self.processes.get(process.name) is process:
            del self.processes[process.name]
            self.later(self.leaving.pop(process.name, SOON), self.start, process.name)

    def _train(self, process: Process) -> None:
        name, tell = process.name, functools.partial(self.say, process.name)
        place: Store = Link(self, name)
        if self.is_closed:
            place = MembersOnly(place, self.keys / f"{name}.key", self.keys / "owner.pub")
        settings = dict(slots=SLOTS, deadline=DEADLINE, min_workers=self.least, tell=tell)
        member = Member(place, "" if self.is_closed else name, **settings)
        trainer = SwarmWorker(abs, OPTIMIZER, self.mesh, member, snapshot_every=self.every)
        params, state = trainer.begin(PARAMS, ())
        self._note(name, trainer.number, digest(params))
        while True:
            self.world.sleep(STEP * self.paces[name] * self.rng.uniform(0.5, 1.5))
            if name in self.leaving:
                trainer.leave(params, state)
                return trainer.close()
            params, state, _ = trainer.step(params, state, ())
            self._note(name, trainer.number, digest(params))

    def _note(self, name: str, number: int, held: str) -> None:
        self.stepped[name] = self.world.now
        others = {x: y for x, y in self.ever[number].items() if x != held}
        if others and not self.is_closed:
            self.fail(f"step {number}: {others} has other parameters")
        if others and held not in self.ever[number]:
            self.say(name, f"is apart in step {number} from {set(others.values())}")
        self.ever[number].setdefault(held, name)
        self.held[name][number] = held
        if self.is_verbose:
            self.trace.append(f"{self.world.now:8.2f} {name:5} step {number} {held[:6]}")

    def programs(self, *_) -> SimpleNamespace:
        """Stand for those that are compiled: parameters are a hash of what was applied."""
        name = self.world.current.process.name

        def send(params, state, _gradients, _norm, _weight, slot):
            packet = self.rng.randbytes(4 * WORDS)
            self.sent[packet] = name, int(slot), digest(params)
            packets = np.frombuffer(packet, np.uint32).reshape(1, 1, WORDS).view(Held)
            return SimpleNamespace(packets=packets, factor=ONE), state

        def apply(params, state, _outbox, packets, _slot):
            given = {n: x.tobytes() for n, x in enumerate(packets[0]) if x.any()}
            for slot, packet in given.items():
                sender, own, before = self.sent.get(packet, ("nobody", -1, ""))
                self.counted.add(sender)
                if own != slot or before != digest(params):
                    self.fail(f"applies a packet of {sender} for other parameters in slot {slot}")
            seed = hashlib.sha256(digest(params).encode() + packets.tobytes()).digest()
            new = np.float32(1) + np.frombuffer(seed, np.uint8).astype(np.float32) / 256
            state = state._replace(participants=np.array(len(given), np.int32).view(Held))
            return {"w": new.view(Held)}, state, state

        return SimpleNamespace(
            gradients=lambda *_: SimpleNamespace(gradients=(), gradient_norm=ONE, loss=ONE),
            send=send,
            apply=apply,
            init=lambda _: STATE,
            shardings=(None, None),
            shape=(1, SLOTS, WORDS),
            packet_bytes=4 * WORDS,
            empty_outbox=None,
            fingerprint={"device": "none", "optimizer": "none"},
            division="1",
        )

    # What befalls them

    def later(self, seconds: float, action: Callable, *args) -> None:
        at = self.world.now + seconds
        heapq.heappush(self.agenda, (at, next(self.count), functools.partial(action, *args)))

    def strike(self, trouble: Trouble) -> None:
        """Lets a trouble begin, and plans its end."""
        name, seconds = NAMES[trouble.who], min(trouble.seconds, 60.0)
        rng = random.Random(trouble.seed)
        self.say("!", f"{trouble.kind} {name}, {trouble.seconds:g} s")
        to_all = trouble.kind.endswith(" all") and trouble.kind not in OF_OBJECTS
        for who in list(self.present) if to_all else [name]:
            process = self.processes.get(who)
            match trouble.kind.removesuffix(" all") if to_all else trouble.kind:
                case "kill" | "restart":
                    self.end(who)
                    self.later(seconds, self.start, who)
                case "freeze" if process:
                    process.stands_until = self.world.now + seconds
                case "leave" if process:
                    self.leaving[who] = seconds
                case "cut off":
                    self.cut_until[who] = self.world.now + seconds
                case "slow down":
                    self.slowness[who] = 20.0
                    self.later(seconds, self.slowness.pop, who, None)
        if trouble.kind == "join" and len(self.present) < SLOTS:
            new = rng.choice([x for x in NAMES if x not in self.present])
            self.change_roster(added=[new])
            self.present = [*self.present, new]
            self.start(new)
        if trouble.kind == "take out" and len(self.present) > 2:
            gone = rng.choice(self.present)
            self.change_roster(without=[gone])
            self.present = [x for x in self.present if x != gone]
        if trouble.kind in OF_OBJECTS:
            self.harm(trouble, rng)

    def harm(self, trouble: Trouble, rng: random.Random) -> None:
        """Deletes or overwrites an object, more often one of the last."""
        folders = {x.partition("/")[0] for x in self.objects}
        folders &= folders if self.is_closed else {"packets", "snapshots"}
        if not folders:
            return
        folder = rng.choice(sorted(folders))
        keys = [x for x in self.objects if x.partition("/")[0] == folder]
        key = keys[-1 - int(len(keys) * rng.random() ** 3)]
        around = [x for x in keys if x.rpartition("/")[0] == key.rpartition("/")[0]]
        another = self.objects[rng.choice(keys)]
        for harmed in around if trouble.kind == "delete all" else [key]:
            data = {
                "junk": rng.randbytes(rng.choice((0, 10, 200))),
                "older": self.objects.versions[harmed][0],
                "another's": another,
            }.get(trouble.kind)
            self.objects.harm(harmed, data)
            self.later(trouble.seconds, self.objects.restore, harmed)
            self.say("!", f"{trouble.kind}: {harmed}")

    def change_roster(self, added: Sequence[str] = (), without: Sequence[str] = ()) -> None:
        publics = [seals.read_public(self.keys / f"{x}.pub") for x in added]
        owner = seals.read_key(self.keys / "owner.key")
        data = roster.change(self.roster, owner, publics, without)
        self.roster = roster.parse(data, owner.public)
        self.objects.write(roster.KEY, data)
        self.say("!", f"roster with {', '.join(added)} and without {', '.join(without)}")

    # How a run goes

    def go(self) -> str:
        """Returns what went wrong, or an empty text."""
        modules = [x for name, x in sys.modules.items() if name.startswith("demo_optax._src.swarm")]
        randomness = SimpleNamespace(
            token_bytes=self.rng.randbytes,
            uuid4=lambda: uuid.UUID(int=self.rng.getrandbits(128)),
            generate=lambda: X25519PrivateKey.from_private_bytes(self.rng.randbytes(32)),
            from_private_bytes=X25519PrivateKey.from_private_bytes,
        )
        stand_ins = [
            (time, virtual_time.time_of(self.world, EPOCH)),
            (threading, virtual_time.threading_of(self.world)),
            (ThreadPoolExecutor, functools.partial(virtual_time.Executor, self.world)),
            (wait, virtual_time.wait),
            *((x, randomness) for x in (secrets, uuid, X25519PrivateKey)),
            (store.in_parallel, self.in_parallel),
            (worker.compile_programs, self.programs),
            (agreement.facts_of, lambda *_: {}),
        ]
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda line: self.say(self.world.current.process.name, line.getMessage())
        store.log.addHandler(handler)
        with virtual_time.replaced(modules, stand_ins):
            try:
                self._go()
            finally:
                for process in self.every_process:
                    self.world.kill(process)
                while any(x.threads for x in self.every_process):
                    self.world.pause(0.0)
                store.log.removeHandler(handler)
        return self.fault

    def _go(self) -> None:
        if self.is_closed:
            self.change_roster(added=self.present)
        for name in self.present:
            self.later(self.rng.choice((0.0, 1.0, 20.0)), self.start, name)
        for trouble in self.troubles:
            self.later(trouble.at, self.strike, trouble)
        self._pass(TROUBLED)
        self._calm()
        if self._pass(CALM):
            return
        restored = [key for key in list(self.objects.harmed) if self.objects.restore(key)]
        self.say("!", f"put back: {', '.join(restored)}")
        lately = self.world.now - 60
        silent = {x for x in self.present if max(self.stepped[x], self.spoke[x]) < lately}
        if silent or not restored or not self._pass(CALM):
            self.fail(f"not together; silent for a minute: {', '.join(sorted(silent))}")

    def _calm(self) -> None:
        """Ends all troubles but those of objects."""
        self.say("!", "calm")
        self.agenda = []
        self.cut_until.clear()
        self.slowness.clear()
        self.leaving.clear()
        for process in self.processes.values():
            process.stands_until = 0.0
        for name in self.present:
            self.later(SOON, self.start, name)
        self.held.clear()
        self.counted.clear()

    def _pass(self, seconds: float) -> bool:
        """Lets time pass; returns whether all members are together, and then at once."""
        until, is_calm = self.world.now + seconds, seconds == CALM
        while self.world.now < until and not self.fault:
            after = min(until, self.world.now + 1.0, *(x[0] for x in self.agenda[:1]))
            self.world.pause(after - self.world.now)
            while self.agenda and self.agenda[0][0] <= self.world.now:
                heapq.heappop(self.agenda)[-1]()
            for error in self.world.errors:
                if not isinstance(error, SwarmError | OSError | Left):
                    self.fail(f"{type(error).__name__} in a thread: {error}")
            held = [set(self.held[x].items()) for x in self.present]
            are_together = len(set.intersection(*held)) >= TOGETHER
            if is_calm and are_together and self.counted.issuperset(self.present):
                return True
        return False

    def in_parallel(self, fn: Callable, keys) -> list:
        """Asks one after another, in an order of chance."""
        keys = list(keys)
        order = self.rng.sample(range(len(keys)), len(keys))
        found = {n: fn(keys[n]) for n in order}
        return [found[n] for n in range(len(keys))]


def write_keys(folder: pathlib.Path) -> None:
    for name in "owner", *NAMES:
        key = seals.Key(name, hashlib.sha256(name.encode()).digest())
        (folder / f"{name}.key").write_text(f"{key.seed.hex()} {name}\n")
        (folder / f"{name}.key").chmod(0o600)
        (folder / f"{name}.pub").write_text(f"{key.public.line}\n")


def simulate(options: argparse.Namespace, seed: int, keys: pathlib.Path) -> Run:
    """Runs a seed; if something goes wrong, again without the troubles that it does not need."""
    run = Run(options, seed, keys)
    if not run.go() or options.verbose:
        return run
    every = run.troubles
    for trouble in every:
        fewer = Run(options, seed, keys)
        fewer.troubles = [x for x in run.troubles if x != trouble]
        if fewer.go():
            run = fewer
    run.say("!", f"--seed {seed} --only {','.join(str(every.index(x)) for x in run.troubles)}")
    return run


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:100", help="the first one, and that after the last")
    parser.add_argument("--seed", type=int, help="one alone")
    parser.add_argument("--members", type=int, help="of each run; 2 to 5 by default")
    parser.add_argument("--troubles", type=int, default=6, help="at most, of a run")
    parser.add_argument("--only", help="the numbers of the troubles that happen, such as 0,2")
    parser.add_argument("--closed", action="store_true", help="members have keys")
    parser.add_argument("--verbose", action="store_true", help="with each step")
    options = parser.parse_args(words)
    first, last = map(int, options.seeds.split(":"))
    seeds = range(first, last) if options.seed is None else [options.seed]
    started, failed = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        write_keys(pathlib.Path(folder))
        for number, seed in enumerate(seeds, 1):
            run = simulate(options, seed, pathlib.Path(folder))
            if run.fault or options.verbose:
                print(f"\nseed {seed}: {run.fault or 'well'}", *run.trace, sep="\n", flush=True)
            failed += [seed] if run.fault else []
            seconds = time.monotonic() - started
            if number % 10 == 0 or seed == seeds[-1]:
                print(f"{number} runs, {len(failed)} failed, {number / seconds:.1f} a second")
    print(f"\nfailed: {failed}" if failed else "")
    return bool(failed)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is a chance, too
        environment = os.environ | {"PYTHONHASHSEED": "0", "JAX_PLATFORMS": "cpu"}
        os.execve(sys.executable, sys.orig_argv, environment)
    sys.exit(main())

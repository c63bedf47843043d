"""A swarm in virtual time: a place in memory, and `SwarmWorker`s whose parameters are a hash.

Nothing is compiled. The parameters are a hash of all that was applied to them, so that equal ones
have the same history. Requests take times from a seed.
"""

import functools
import hashlib
import logging
import pathlib
import random
import re
import secrets
import sys
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from cryptography.exceptions import InvalidTag

import demo_optax
from demo_optax._src import metrics
from demo_optax._src.swarm import agreement, roster, seals, store, worker
from demo_optax.swarm import Left, Member, MembersOnly, Store, StoreError, SwarmError, SwarmWorker
from tests import virtual_time
from tests.virtual_time import Process, Thread, World

SLOTS, WORDS = 6, 8  # of a swarm, and of a packet
PATIENCE, DEADLINE, LATENCY, RESTART = 10.0, 3.0, 0.05, 5.0  # seconds
EPOCH = 1_790_000_000.0  # when all clocks began
NAMES = [f"m{n}" for n in range(SLOTS)]
DOCUMENTED = SwarmError, OSError, Left  # what ends a worker, which its owner then starts again
OPTIMIZER = demo_optax.demo_scaled(1e-2)


def seal_of(key, about: bytes) -> bytes:
    return hashlib.sha256(key.public_bytes_raw() + about).digest()


def opened(box: bytes, seal: bytes) -> bytes:
    if not box.startswith(seal):
        raise InvalidTag
    return box.removeprefix(seal)


class Held(np.ndarray):
    """An array as a device would hold it."""

    is_fully_addressable = True


ONE = np.ones(1, np.float32).view(Held)
STATE = metrics.init_metrics()
PARAMS = {"w": np.linspace(1, 2, 32, dtype=np.float32).view(Held)}


def digest(params) -> str:
    return hashlib.sha256(np.asarray(params["w"]).tobytes()).hexdigest()


class Objects(dict[str, bytes]):
    """What is in the place, with all that was ever written, and what somebody did to it."""

    def __init__(self):
        self.versions: defaultdict[str, list[bytes]] = defaultdict(list)
        self.harmed: dict[str, tuple[bytes | None, bytes]] = {}  # what is there, and what should be

    def write(self, key: str, data: bytes) -> None:
        self[key] = data
        self.versions[key].append(data)

    def harm(self, key: str, data: bytes | None) -> None:
        there, genuine = self.harmed.get(key, (None, b""))
        self.harmed[key] = data, genuine if there == self[key] else self[key]
        self.pop(key) if data is None else self.update({key: data})

    def restore(self, key: str) -> bool:
        """Puts an object back unless somebody has written it again."""
        harmed, genuine = self.harmed.pop(key, (None, None))
        if genuine is None or self.get(key) != harmed:
            return False
        self[key] = genuine
        return True


class Link(Store):
    """The place as one member reaches it."""

    patience = PATIENCE

    def __init__(self, swarm: "Swarm", name: str):
        self._swarm, self._name, self._objects = swarm, name, swarm.objects

    def _ask(self, what: str, answer: Callable[[], Any]) -> Any:
        """Waits before or after the answer, or for a link that is cut."""
        world, rng, started = self._swarm.world, self._swarm.rng, self._swarm.world.now
        while (until := self._swarm.cut_until[self._name]) > world.now:
            if world.now - started > PATIENCE:
                raise StoreError(f"cannot {what}")
            world.pause(min(until - world.now, 2.0))
        seconds = rng.expovariate(1 / LATENCY) * self._swarm.slowness[self._name]
        if rng.random() < 0.5:
            world.pause(seconds)
            return answer()
        found = answer()
        world.pause(seconds)
        return found

    def _write(self, key: str, data: bytes) -> None:
        self._objects.write(key, data)
        self._swarm.note(self._name, f"writes {key}")

    def put(self, key: str, data: bytes) -> None:
        self._ask(f"write {key}", lambda: self._write(key, data))

    def create(self, key: str, data: bytes) -> bool:
        def attempt() -> bool:
            if key in self._objects:
                return False
            self._write(key, data)
            return self._swarm.rng.random() > 0.01  # else the answer is lost, and asked for again

        return self._ask(f"create {key}", attempt)

    def get(self, key: str) -> bytes | None:
        return self._ask(f"read {key}", lambda: self._objects.get(key))

    def names(self, folder: str) -> list[str]:
        inside = f"{folder}/"

        def listed() -> list[str]:
            return sorted(x.removeprefix(inside) for x in self._objects if x.startswith(inside))

        return self._ask(f"list {folder}", listed)

    def delete(self, keys: Sequence[str]) -> None:
        def remove() -> None:
            for key in filter(self._objects.__contains__, keys):
                del self._objects[key]
                self._swarm.note(self._name, f"deletes {key}")

        self._ask("delete", remove)


class Swarm:
    """Members in one place, what they said, and what was wrong.

    Attributes:
      present: the members in the roster, or those that are wanted in an open run.
      held: the parameters that each member had, by step; ``first`` has who was the first with them.
      counted: whose packets were applied.
      fault: what must never happen, if it did.
    """

    def __init__(
        self,
        rng: random.Random,
        number: int,
        keys: pathlib.Path | None,
        deadline: float | None = DEADLINE,
        verbose: bool = False,
    ):
        self.rng, self.keys, self.deadline, self.is_verbose = rng, keys, deadline, verbose
        self.world, self.objects, self.present = World(), Objects(), NAMES[:number]
        self.least, self.every = rng.randint(1, 2), rng.choice((3, 6))
        self.rates = {x: rng.choice((1.0, 1.0, 0.8, 1.25)) for x in NAMES}  # of clocks
        self.paces = {x: rng.choice((0.3, 1.0, 1.0, 1.5)) for x in NAMES}  # seconds of a gradient
        self.running: dict[str, Process] = {}
        self.processes: list[Process] = []
        self.leaving: dict[str, float] = {}  # for how long
        self.cut_until: defaultdict[str, float] = defaultdict(float)
        self.slowness: defaultdict[str, float] = defaultdict(lambda: 1.0)
        self.sent: dict[bytes, tuple[str, int, str]] = {}  # packets: name, slot, parameters
        self.held: defaultdict[str, dict[int, str]] = defaultdict(dict)
        self.first: defaultdict[int, dict[str, str]] = defaultdict(dict)
        self.counted: set[str] = set()
        self.active: defaultdict[str, float] = defaultdict(float)  # when somebody said something
        self.said: set[tuple[str, str]] = set()  # since the last trouble
        self.trace: list[str] = []
        self.roster: roster.Roster | None = None
        self.fault = ""
        self._mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])

    def say(self, who: str, what: str) -> None:
        """Adds a line to the trace, or nothing if it repeats one since the last trouble."""
        words = who, re.sub("[0-9]+", "", what)
        self.said = {words} if who == "!" else self.said
        if who == "!" or self.is_verbose or words not in self.said:
            self.trace.append(f"{self.world.now:8.2f} {who:5} {what}")
        self.said.add(words)
        self.active[who] = self.world.now

    def note(self, who: str, what: str) -> None:
        """Adds a line of which there are too many for most readers."""
        if self.is_verbose:
            self.trace.append(f"{self.world.now:8.2f} {who:5} {what}")

    def fail(self, what: str) -> None:
        self.fault = self.fault or what
        self.say(self.world.current.process.name, f"FAULT: {what}")

    def start(self, name: str) -> None:
        if name in self.present and name not in self.running:
            process = Process(name, self.rates[name], self.rng.uniform(0, 1000))
            self.running[name] = process
            self.processes.append(process)
            Thread(self.world, lambda: self._live(process), process).start()

    def kill(self, name: str) -> None:
        if (process := self.running.pop(name, None)) is not None:
            self.world.kill(process)

    def _live(self, process: Process) -> None:
        """Lets a process train until it ends, and starts it again, as its owner would."""
        try:
            self._train(process.name)
        except DOCUMENTED as error:
            self.say(process.name, f"{type(error).__name__}: {error}")
        except Exception as error:
            self.fail(f"{type(error).__name__}: {error}")
        self.world.kill(process)
        del self.running[process.name]
        away = self.leaving.pop(process.name, RESTART)
        self.world.later(away, lambda: self.start(process.name))

    def _train(self, name: str) -> None:
        place: Store = Link(self, name)
        if self.keys:
            place = MembersOnly(place, self.keys / f"{name}.key", self.keys / "owner.pub")
        settings: Any = dict(slots=SLOTS, deadline=self.deadline, min_workers=self.least)
        tell = functools.partial(self.say, name)
        member = Member(place, "" if self.keys else name, tell=tell, **settings)
        trainer = SwarmWorker(abs, OPTIMIZER, self._mesh, member, snapshot_every=self.every)
        params, state = trainer.begin(PARAMS, ())
        self._hold(name, trainer.number, params)
        while True:
            self.world.sleep(self.paces[name] * self.rng.uniform(0.5, 1.5))
            if name in self.leaving:
                trainer.leave(params, state)
                return trainer.close()
            params, state, _ = trainer.step(params, state, ())
            self._hold(name, trainer.number, params)

    def _hold(self, name: str, step: int, params) -> None:
        """Notes a member's parameters: in an open run there must be the same ones everywhere."""
        held, there = digest(params), self.first[step]
        if there and held not in there:
            self.say(name, f"is apart in step {step} from {', '.join(there.values())}")
            if not self.keys:
                self.fail(f"two have other parameters in step {step}")
        there.setdefault(held, name)
        self.held[name][step], self.active[name] = held, self.world.now
        self.note(name, f"step {step} {held[:6]}")

    def _programs(self, *_) -> SimpleNamespace:
        """Makes what stands for the compiled programs of the member that asks for them."""
        name = self.world.current.process.name

        def send(params, state, _gradients, _norm, _weight, slot):
            packet = self.rng.randbytes(4 * WORDS)
            self.sent[packet] = name, int(slot), digest(params)
            packets = np.frombuffer(packet, np.uint32).reshape(1, 1, WORDS).view(Held)
            return SimpleNamespace(packets=packets, factor=ONE), state

        def apply(params, state, _outbox, packets, _slot):
            given = {n: x.tobytes() for n, x in enumerate(packets[0]) if x.any()}
            before = digest(params)
            for slot, packet in given.items():
                sender, own, of = self.sent.get(packet, ("nobody", -1, ""))
                self.counted.add(sender)
                if (own, of) != (slot, before):
                    self.fail(f"applies a packet of {sender} in slot {slot} to other parameters")
            mixed = hashlib.sha256(before.encode() + packets.tobytes()).digest()
            new = np.float32(1) + np.frombuffer(mixed, np.uint8).astype(np.float32) / 256
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

    def change_roster(self, added: Sequence[str] = (), without: Sequence[str] = ()) -> None:
        """Signs a roster as the owner, whose own copy is always the newest one."""
        assert self.keys is not None
        publics = [seals.read_public(self.keys / f"{x}.pub") for x in added]
        owner = seals.read_key(self.keys / "owner.key")
        data = roster.change(self.roster, owner, publics, without)
        self.roster = roster.parse(data, owner.public)
        self.objects.write(roster.KEY, data)
        self.present = [x for x in [*self.present, *added] if x not in without]

    @contextmanager
    def in_virtual_time(self) -> Iterator[None]:
        """Lets the swarm's modules run in virtual time and by chances of the seed."""
        modules = [x for name, x in sys.modules.items() if name.startswith("demo_optax._src.swarm")]
        chance = SimpleNamespace(
            token_bytes=self.rng.randbytes,
            uuid4=lambda: uuid.UUID(int=self.rng.getrandbits(128)),
        )
        box = SimpleNamespace(  # whose bytes are the same each time
            encrypt=lambda content, to, about: seal_of(to, about) + content,
            decrypt=lambda box, own, about: opened(box, seal_of(own.public_key(), about)),
        )
        stand_ins = [
            *virtual_time.stand_ins(self.world, EPOCH),
            *((x, chance) for x in (secrets, uuid)),
            (seals.BOX, box),
            (store.in_parallel, self._in_turn),
            (worker.compile_programs, self._programs),
            (agreement.facts_of, lambda *_: {}),
        ]
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self.say(self.world.current.process.name, record.getMessage())
        store.log.addHandler(handler)
        with virtual_time.replaced(modules, stand_ins):
            try:
                yield
            finally:
                self.world.end(self.processes)
                store.log.removeHandler(handler)

    def _in_turn(self, fn: Callable, keys: Iterable) -> list:
        """Asks one after another what is asked in parallel, in an order of chance."""
        keys = list(keys)
        order = self.rng.sample(range(len(keys)), len(keys))
        found = {n: fn(keys[n]) for n in order}
        return [found[n] for n in range(len(keys))]


def write_keys(folder: pathlib.Path) -> None:
    """Writes the keys of the owner and of all members, the same ones each time."""
    for name in "owner", *NAMES:
        key = seals.Key(name, hashlib.sha256(name.encode()).digest())
        (folder / f"{name}.key").touch(0o600)
        (folder / f"{name}.key").write_text(f"{key.seed.hex()} {name}\n")
        (folder / f"{name}.pub").write_text(f"{key.public.line}\n")

"""Attacks a swarm for members only: with the whole store and no key, then with a member's key.

python -m tests.programs.attack_swarm --store s3 --tries 12

Three members train in threads. Another process holds nothing but the store: it lists, reads,
overwrites and deletes. After each kind of attack the members must take further steps, a newcomer
must join, and all parameters must be equal. A table says what came of it; the exit status is 1 if
anything of an attacker's was adopted, any two members had other parameters at the end of a kind, or
at any time while nobody with a key lied.
"""

import argparse
import functools
import hashlib
import itertools
import multiprocessing
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple, get_args

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import demo_optax
from benchmarks.chaos.stores import StoreName, served
from demo_optax._src.swarm import worker as worker_module
from demo_optax.swarm import Left, Member, MembersOnly, ObjectStore, SwarmError, SwarmWorker
from tests import swarms
from tests.programs import attack_kinds, attack_lies
from tests.programs.attack_kinds import HOLD, PAUSE

SETTINGS = {"slots": 5, "min_workers": 2, "deadline": 2.0}
PATIENCE, BACK = 20.0, 60.0  # seconds: of a store, above HOLD; in which members go on afterwards
NAMES = "paris", "rome", "oslo", "lima"  # oslo lies later on; lima joins after each kind
TRAINING = NAMES[:3]
TX = demo_optax.demo_scaled(1e-2, exchange=demo_optax.AllGather(norm_limit=10))
MOST_MOVED = 20.0  # medians of a step: a snapshot of other parameters moves them further


def run_command(folder: pathlib.Path, *words: str) -> None:
    command = str(pathlib.Path(sys.executable).with_name("demo-optax"))
    subprocess.run([command, *words], cwd=folder, check=True, capture_output=True)


class Ledger:
    """What members sent, applied and held, by step."""

    def __init__(self):
        self.sent: defaultdict[int, set[str]] = defaultdict(set)
        self.applied: defaultdict[int, set[str]] = defaultdict(set)
        self.digests: defaultdict[int, set[tuple[str, str]]] = defaultdict(set)
        self.counted: dict[int, tuple[str, ...]] = {}
        self.moves: dict[int, float] = {}
        self.expelled = 0  # packets of who was taken out

    def adopted(self) -> int:
        """How much was adopted that no member had sent in that step."""
        foreign = sum(len(x - self.sent[step]) for step, x in list(self.applied.items()))
        return foreign + self.expelled

    def different(self, names: Sequence[str], first: int = 0) -> list[int]:
        """Steps after which some of these members had other parameters."""
        held = {n: {x for name, x in y if name in names} for n, y in list(self.digests.items())}
        return [n for n, digests in held.items() if len(digests) > 1 and n >= first]


class Trainer(threading.Thread):
    """A member that trains; what ends with an error is started again, as its owner would."""

    def __init__(self, run: "Run", name: str, steps: int = sys.maxsize):
        super().__init__(name=name, daemon=True)
        self.run_, self.steps = run, steps
        self.ending, self.again = threading.Event(), threading.Event()
        self.times: list[float] = []  # when it had taken each step
        self.said: list[str] = []
        self.errors: list[str] = []
        self.be_honest()

    def be_honest(self) -> None:
        self.after_send: Callable[[Trainer, int, bytes], None] | None = None
        self.change_params: Callable = lambda params: params
        self.is_silent, self.is_lying, self.settings = False, False, {}

    def run(self) -> None:
        while not self.ending.is_set() and len(self.times) < self.steps:
            try:
                self.live()
            except (SwarmError, OSError, Left) as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                time.sleep(1)

    def live(self) -> None:
        self.again.clear()
        self.store = self.run_.store(self.name)
        self.member = member = Member(self.store, tell=self.said.append, **SETTINGS)
        self.watch(member)
        settings = {"snapshot_every": self.run_.every} | self.settings
        ledger, mesh = self.run_.ledger, swarms.mesh_of_worker(0)
        with SwarmWorker(swarms.loss_fn, TX, mesh, member, **settings) as worker:
            params, state = worker.begin(swarms.initial_params(), swarms.batch_of(0, 0))
            before, number = self.note(worker, params), worker.number
            while not (self.ending.is_set() or self.again.is_set()):
                time.sleep(self.run_.pause * (1 + member.slot))
                if self.is_silent:
                    member.announce(max(ledger.digests))
                    continue
                batch = swarms.batch_of(member.slot, worker.number)
                params, state, metrics = worker.step(self.change_params(params), state, batch)
                after = self.note(worker, params)
                moved = np.linalg.norm(after - before) / max(worker.number - number, 1)
                ledger.moves[worker.number] = 0.0 if self.is_liar else float(moved)
                ledger.counted[metrics.step] = metrics.members
                ledger.expelled += bool(set(self.run_.expelled) & set(metrics.members))
                before, number = after, worker.number
                self.times.append(time.monotonic())
                if len(self.times) == self.steps:
                    break

    @property
    def is_liar(self) -> bool:
        return bool(self.after_send or self.settings or self.name in self.run_.liars)

    def watch(self, member: Member) -> None:
        """Notes what the member sends and applies."""
        ledger, send = self.run_.ledger, member.send

        def sends(step, packet, *args):
            ledger.sent[step].add(hashlib.sha256(packet).hexdigest())
            sent = send(step, packet, *args)
            if (after_send := self.after_send) and not self.is_lying:
                self.is_lying = True  # it may send again
                after_send(self, step, packet)
                self.is_lying = False
            return sent

        def notes(fn, step, *args):
            result = fn(step, *args)
            found = {hashlib.sha256(x).hexdigest() for x in result.packets.values()}
            ledger.applied[step] |= found if not self.is_liar else set()
            return result

        member.send = sends
        member.exchange = functools.partial(notes, member.exchange)
        member.receive = functools.partial(notes, member.receive)

    def note(self, worker: SwarmWorker, params) -> np.ndarray:
        self.number = worker.number
        digest = hashlib.sha256(swarms.digest(params)).hexdigest()
        self.run_.ledger.digests[worker.number].add((self.name, digest))
        return np.concatenate([np.ravel(np.asarray(x)) for x in jax.tree.leaves(params)])


class Run:
    """A place with a roster, and its members."""

    def __init__(self, url: str, keys: pathlib.Path, owner: str, pause: float, every: int):
        self.url, self.keys, self.owner, self.pause, self.every = url, keys, owner, pause, every
        self.ledger, self.at_least = Ledger(), 1
        self.liars: tuple[str, ...] = ()
        self.expelled: tuple[str, ...] = ()
        self.command("key", owner)
        self.command(
            "roster", url, "--owner", f"{owner}.key", "--add", *(f"{x}.pub" for x in NAMES)
        )
        self.members = [Trainer(self, name) for name in TRAINING]
        for member in self.members:
            member.start()

    def command(self, *words: str) -> None:
        run_command(self.keys, *words)

    def store(self, name: str) -> MembersOnly:
        store = ObjectStore(self.url, patience=PATIENCE)
        files = self.keys / f"{name}.key", self.keys / f"{self.owner}.pub"
        return MembersOnly(store, *files, at_least=self.at_least)

    def wait(self, steps: int, seconds: float, names: Sequence[str] = TRAINING) -> set[str]:
        """Waits until all have taken more steps; returns the names of those who have not."""
        aims = {x: len(x.times) + steps for x in self.members if x.name in names}
        until = time.monotonic() + seconds
        while (late := {x.name for x, n in aims.items() if len(x.times) < n}) and (
            time.monotonic() < until
        ):
            time.sleep(0.05)
        return late

    def join(self) -> tuple[float, list[str], bool]:
        """Lets a newcomer take three steps: its seconds, its errors, and whether it took them."""
        newcomer, began = Trainer(self, NAMES[3], steps=3), time.monotonic()
        newcomer.start()
        newcomer.join(BACK)
        newcomer.ending.set()
        has_joined = len(newcomer.times) == 3
        said = [] if has_joined else newcomer.said
        said = [f"newcomer: {x}" for x in (*newcomer.errors, *said)]
        return time.monotonic() - began, said, has_joined

    def end(self) -> None:
        for member in self.members:
            member.ending.set()
        for member in self.members:
            member.join(BACK)


class Row(NamedTuple):
    """What came of one kind of attack."""

    kind: str
    tries: int
    adopted: int
    different: int  # steps after which two honest members had other parameters
    apart: int  # those of them after all had gone on, and members that did not, or joined not
    stopped: int  # members that took no step while it lasted
    resumed: int  # those of them that went on afterwards
    ended: int  # times that a member ended with an error, and was started again
    median: float  # seconds of a step meanwhile
    most: float
    join: float  # seconds in which a newcomer came and took three steps
    moved: float  # the longest step, in medians of those before
    said: str


def judge(run: Run, kind: str, tries: Callable[[], int], repair: Callable, honest=TRAINING) -> Row:
    """Lets an attack happen, then waits for the members and for a newcomer."""
    members = [x for x in run.members if x.name in honest]
    marks = [(len(x.said), len(x.errors), len(x.times)) for x in members]
    first, before = max(run.ledger.digests), run.ledger.adopted()
    usual = statistics.median(list(run.ledger.moves.values())[-40:])
    done = tries()
    stopped = {x.name for x in members if time.monotonic() - x.times[-1] > HOLD / 2}
    seconds = [np.diff(x.times[n - 1 :]) for x, (*_, n) in zip(members, marks, strict=True)]
    repair()
    late = run.wait(4, BACK, honest)
    moved = max([x for n, x in list(run.ledger.moves.items()) if n > first], default=0) / usual
    join, refused, has_joined = run.join()
    late |= run.wait(2, BACK, honest) | (set() if has_joined else {NAMES[3]})
    different = run.ledger.different((*honest, NAMES[3]), first)
    latest = max(run.ledger.digests) - 3
    errors = [x.errors[n:] for x, (_, n, _) in zip(members, marks, strict=True)]
    words = [*(f"STANDS STILL: {x}" for x in sorted(late)), *refused, *itertools.chain(*errors)]
    words += [y for x, (n, *_) in zip(members, marks, strict=True) for y in x.said[n:]]
    took = np.concatenate(seconds) if sum(map(len, seconds)) else np.array([np.inf])
    return Row(
        kind,
        done,
        run.ledger.adopted() - before + int(moved > MOST_MOVED),
        len(different),
        sum(n >= latest for n in different) + len(late),
        len(stopped),
        len(stopped - late),
        sum(map(len, errors)),
        float(np.median(took)),
        float(np.max(took)),
        join,
        moved,
        "\n    ".join(dict.fromkeys(words)),
    )


def lie(run: Run, kind: str, tries: int) -> Row:
    """Lets oslo lie with its key, which is honest again afterwards."""
    liar = run.members[2]
    run.liars = (liar.name,)

    def happens() -> int:
        for n in range(tries):
            attack_lies.LIES[kind](liar, n)
            time.sleep(2 * PAUSE)
        return tries

    def repair() -> None:
        liar.be_honest()
        liar.again.set()

    return judge(run, kind, happens, repair, TRAINING[:2])


def attack_all(run: Run, elsewhere: str, options: argparse.Namespace, show: Callable) -> None:
    context = multiprocessing.get_context("spawn")
    args = run.url, elsewhere, options.garbage
    with ProcessPoolExecutor(1, context, attack_kinds.prepare, args) as attacker:
        for kind in filter(functools.partial(re.search, options.only), attack_kinds.KINDS):
            attack = functools.partial(attacker.submit, attack_kinds.attack, kind, options.tries)
            repair = functools.partial(attacker.submit, attack_kinds.restore)
            show(judge(run, kind, lambda do=attack: do().result(), lambda do=repair: do().result()))
            attacker.submit(attack_kinds.clean).result()
    for kind in filter(functools.partial(re.search, options.only), attack_lies.LIES):
        show(lie(run, kind, options.tries))


def main(options: argparse.Namespace) -> int:
    console, rows = Console(width=options.width), []

    def show(row: Row) -> None:
        rows.append(row)
        numbers = ", ".join(f"{k} {v:.3g}" for k, v in row._asdict().items() if k[0] not in "ks")
        console.print(f"{row.kind}: {numbers}, {row.stopped} stopped", markup=False)
        console.print(f"    {row.said[: options.said]}", markup=False)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = pathlib.Path(temporary)
        with served(options.store, folder, 0) as place:
            os.environ.update(place.environment)
            for name in NAMES:
                run_command(folder, "key", name)
            other = Run((folder / "other").as_uri(), folder, "mallory", 0.0, every=1000)
            for _ in range(2):
                other.command("roster", other.url, "--owner", "mallory.key", "--add", "paris.pub")
            other.wait(60, BACK)
            other.end()
            run = Run(place.url, folder, "owner", PAUSE / 2, every=6)
            assert not run.wait(6, 2 * BACK), [x.errors for x in run.members]
            attack_all(run, other.url, options, show)
            run.end()
    table = Table(*Row._fields[:-1])
    for row in rows:
        table.add_row(*(f"{x:.3g}" if isinstance(x, float) else str(x) for x in row[:-1]))
    console.print(table)
    console.print(f"{sum(x.tries for x in rows)} tries of {len(rows)} kinds")
    honest = [x for x in rows if not x.kind.startswith("key: ")]
    return int(any(x.adopted or x.apart for x in rows) or any(x.different for x in honest))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--store", choices=get_args(StoreName), default="folder", help="Azurite is azure's")
    add("--tries", type=int, default=10, help="of each kind")
    add("--garbage", type=int, default=10**5, help="objects of junk, in ten tries together")
    add("--only", default="", help="the kinds that this pattern finds")
    add("--width", type=int, default=160, help="of the table")
    add("--said", type=int, default=1500, help="characters of what members said")
    return parser.parse_args()


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_disable_most_optimizations", True)  # it compiles sooner
    worker_module.compile_programs = swarms.compile_once
    sys.exit(main(parsed()))

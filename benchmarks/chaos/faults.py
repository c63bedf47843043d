"""What goes wrong: each fault is begun, lasts for some seconds, and is ended."""

import random
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from demo_optax.swarm import ObjectStore

from .fleet import Worker
from .stores import Served


class Fault(NamedTuple):
    """A fault that can happen now: what it is of, and a function that does it and ends it."""

    kind: str
    what: str
    happen: Callable[[], None]


PROCESS_KINDS = ("kill", "leave", "stop", "throttle", "kill all")
ENDING = ("kill", "leave", "kill all")  # for which all workers have to be there
STORE_KINDS = ("slow store", "failing store", "stale lists")


def kill(workers: list[Worker], pause: float) -> None:
    """The processes end without a word, and are started again."""
    for worker in workers:
        worker.send(signal.SIGKILL)
    for worker in workers:
        worker.wait(10)
    time.sleep(pause)
    for worker in workers:
        worker.start()


def leave(worker: Worker, pause: float) -> None:
    """SIGTERM; the process ends by itself, and is started again."""
    worker.send(signal.SIGTERM)
    if (status := worker.wait(60)) != 143:
        raise RuntimeError(f"{worker.name} left with status {status}: {worker.last_words()}")
    time.sleep(pause)
    worker.start()


def stop(worker: Worker, seconds: float) -> None:
    """The process stands still, and goes on."""
    worker.send(signal.SIGSTOP)
    time.sleep(seconds)
    worker.send(signal.SIGCONT)


def throttle(worker: Worker, seconds: float) -> None:
    """The process gets a third of the time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        stop(worker, 0.2)
        time.sleep(0.1)


def forge(store: ObjectStore, drawn: random.Random) -> None:
    """Somebody without a key copies objects to the names of open runs, and to guessed ones."""
    for folder in ("slots", "packets", "manifests", "snapshots", "attested"):
        names = store.names(folder)
        for genuine in drawn.sample(names, min(5, len(names))):
            data = store.get(f"{folder}/{genuine}") or b""  # it may have been swept
            for tag in "", f"{drawn.getrandbits(128):032x}.":
                store.put(f"{folder}/" + re.sub(r"[0-9a-f]{32}\.", tag, genuine), data)
    store.put("run.json", b"{}")


def draw(kind: str, workers: list[Worker], place: Served, drawn: random.Random) -> Fault:
    """A fault of a kind, of a worker that takes part."""
    if kind == "forge":
        store = ObjectStore(place.url)
        return Fault(kind, "junk and copies", lambda: forge(store, drawn))
    worker, seconds = drawn.choice([x for x in workers if x.joined]), drawn.uniform(0.5, 4.0)
    share = drawn.uniform(0.05, 0.5)
    if kind in STORE_KINDS:
        faults = place.faults
        assert faults is not None
        what, name = {
            "slow store": (f"{share:.2f} s a request, ", "delay"),
            "failing store": (f"{share:.0%} of requests, ", "failing"),
            "stale lists": ("", "stale"),
        }[kind]
        return Fault(kind, f"{what}{seconds:.1f} s", lambda: faults.last(name, share, seconds))
    if kind == "kill all":
        return Fault(kind, f"back after {seconds:.1f} s", lambda: kill(workers, seconds))
    after, does = {
        "kill": ("back after ", lambda: kill([worker], seconds)),
        "leave": ("back after ", lambda: leave(worker, seconds)),
        "stop": ("", lambda: stop(worker, seconds)),
        "throttle": ("", lambda: throttle(worker, seconds)),
    }[kind]
    return Fault(kind, f"{worker.name}, {after}{seconds:.1f} s", does)


def in_background(fault: Fault, errors: list[str]) -> threading.Thread:
    """Lets a fault happen beside others; what goes wrong with it is added to ``errors``."""

    def happen() -> None:
        try:
            fault.happen()
        except Exception as error:
            errors.append(f"{fault.kind}: {error}")

    thread = threading.Thread(target=happen, daemon=True)
    thread.start()
    return thread

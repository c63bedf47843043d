"""What goes wrong: each fault is begun, lasts for some seconds, and is ended."""

import random
import signal
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from .fleet import Worker
from .proxy import Faults


class Fault(NamedTuple):
    """A fault that can happen now: what it is of, and a function that does it and ends it."""

    kind: str
    what: str
    happen: Callable[[], None]


PROCESS_KINDS = ("kill", "leave", "stop", "throttle", "kill all")
ENDING = ("kill", "leave", "kill all")  # for which all workers have to be there
STORE_KINDS = ("slow store", "failing store", "stale lists")


def kill(worker: Worker, pause: float) -> None:
    """The process ends without a word, and is started again."""
    worker.send(signal.SIGKILL)
    worker.wait(10)
    time.sleep(pause)
    worker.start()


def kill_all(workers: list[Worker], pause: float) -> None:
    """All processes end without a word, and are started again."""
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
        worker.send(signal.SIGSTOP)
        time.sleep(0.2)
        worker.send(signal.SIGCONT)
        time.sleep(0.1)


def slow_store(faults: Faults, delay: float, seconds: float) -> None:
    faults.delay = delay
    time.sleep(seconds)
    faults.delay = 0.0


def failing_store(faults: Faults, probability: float, seconds: float) -> None:
    faults.failing = probability
    time.sleep(seconds)
    faults.failing = 0.0


def stale_lists(faults: Faults, seconds: float) -> None:
    faults.set_stale(True)
    time.sleep(seconds)
    faults.set_stale(False)


def draw(kind: str, workers: list[Worker], faults: Faults | None, drawn: random.Random) -> Fault:
    """A fault of a kind, of a worker that takes part."""
    worker, seconds = drawn.choice([x for x in workers if x.joined]), drawn.uniform(0.5, 4.0)
    if kind == "kill all":
        return Fault(kind, f"back after {seconds:.1f} s", lambda: kill_all(workers, seconds))
    if kind in ("kill", "leave"):
        what = f"{worker.name}, back after {seconds:.1f} s"
        does = kill if kind == "kill" else leave
        return Fault(kind, what, lambda: does(worker, seconds))
    if kind in ("stop", "throttle"):
        does = stop if kind == "stop" else throttle
        return Fault(kind, f"{worker.name}, {seconds:.1f} s", lambda: does(worker, seconds))
    assert faults is not None
    if kind == "slow store":
        delay = drawn.uniform(0.05, 0.5)
        what = f"{delay:.2f} s a request, {seconds:.1f} s"
        return Fault(kind, what, lambda: slow_store(faults, delay, seconds))
    if kind == "failing store":
        share = drawn.uniform(0.05, 0.5)
        what = f"{share:.0%} of requests, {seconds:.1f} s"
        return Fault(kind, what, lambda: failing_store(faults, share, seconds))
    return Fault(kind, f"{seconds:.1f} s", lambda: stale_lists(faults, seconds))


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

"""SIGTERM and SIGINT: the first saves and stops behind a step; a second SIGINT stops at once.

With several processes JAX's preemption service agrees on the step. It listens to SIGTERM itself,
so that SIGINT becomes one.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

import jax
from jax.experimental import multihost_utils

from .report import console

TERMINATED, INTERRUPTED = 143, 130  # exit statuses, of signals what a shell makes of them

_received: set[int] = set()


@contextlib.contextmanager
def listening(last_words: str) -> Iterator[None]:
    """Signals are from now on what `stopping_behind` tells; behind ``hosts.connect``.

    A thread follows them: Python's own handlers would wait for the end of a compilation, or of a
    collective that hangs.
    """
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    others = signal.set_wakeup_fd(sink, warn_on_full_buffer=False)
    own = [signal.SIGINT] if jax.distributed.is_initialized() else [signal.SIGINT, signal.SIGTERM]
    before = [(number, signal.signal(number, lambda *_: None)) for number in own]
    threading.Thread(target=_follow, args=(source, last_words), daemon=True).start()
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
        signal.set_wakeup_fd(others)
        os.close(sink)
        _received.clear()


def stopping_behind(start: int) -> Callable[[int], bool]:
    """What says behind each step, from ``start + 1`` on, whether to stop: the same everywhere.

    Steps have their numbers in the run, by which Orbax asks JAX as well, whenever it saves.
    """
    if not jax.distributed.is_initialized():
        return lambda step: bool(_received)
    reached = multihost_utils.reached_preemption_sync_point
    reached(start)

    def stopping(step: int) -> bool:
        # JAX answers a signal with the number behind the last that any process asked with, which
        # is 1 where none has come as far as `start` yet.
        before = step == start + 1 and reached(1)
        return reached(step) or before

    return stopping


def exit_status() -> int:
    return INTERRUPTED if signal.SIGINT in _received else TERMINATED


def _follow(source: int, last_words: str) -> None:
    with open(source, "rb", buffering=0) as numbers:
        while number := numbers.read(1):
            _receive(number[0], last_words)


def _receive(number: int, last_words: str) -> None:
    if number == signal.SIGINT and number in _received:
        console.show_cursor()
        print(f"Stopped at once. {last_words}", file=sys.stderr, flush=True)
        os._exit(INTERRUPTED)
    _received.add(number)
    if number == signal.SIGINT:
        console.print("Stops behind this step; interrupted once more, at once.")
        if jax.distributed.is_initialized():
            os.kill(os.getpid(), signal.SIGTERM)

"""SIGTERM and SIGINT: the first saves and stops behind a step; a second SIGINT stops at once.

Several processes stop behind the same step, whichever of them a signal came to. JAX has a service
for it, which Orbax uses as well: behind every save it tells it, from a thread, how many steps were
done when the save began, and the processes may then agree on a step that is over.
"""

import contextlib
import itertools
import os
import signal
import sys
import threading

import jax

from . import agreement
from .config import Config
from .report import console

TERMINATED, INTERRUPTED = 143, 130  # exit statuses, of signals what a shell makes of them
POLL_SECONDS = 1.0

_numbers = itertools.count()


class Signals:
    """Notes signals from ``with`` on, behind ``hosts.connect``; before it they end the process.

    A thread reads them: a handler in Python would wait for the end of a compilation, or of a
    collective that hangs. Where there are several processes, another asks whether any of them got
    one.

    Args:
      config: of the run.
      last_words: what to say at a second SIGINT.
    """

    def __init__(self, config: Config, last_words: str):
        self.timeout, self.last_words = config.peer_timeout, last_words
        self.place = f"signals/{next(_numbers)}"
        self.received: set[int] = set()
        self.ended = threading.Event()
        self.lock = threading.Lock()
        self.steps = 0  # that this process has done since it was started
        self.last: int | None = None  # the one to stop behind

    def stop_requested(self) -> bool:
        """Asked by all processes behind every step, it tells all of them the same."""
        if not jax.distributed.is_initialized():
            return bool(self.received)
        with self.lock:
            self.steps += 1
            return self.steps == self.last

    @property
    def exit_status(self) -> int:
        return INTERRUPTED if signal.SIGINT in self.received else TERMINATED

    def __enter__(self) -> "Signals":
        source, self.sink = os.pipe()
        os.set_blocking(self.sink, False)
        self.others = signal.set_wakeup_fd(self.sink, warn_on_full_buffer=False)
        self.before = {
            number: signal.signal(number, lambda *_: None)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        threading.Thread(target=self._read, args=(source,), daemon=True).start()
        if jax.distributed.is_initialized():
            threading.Thread(target=self._agree, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.ended.set()
        for number, handler in self.before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self.others)
        os.close(self.sink)

    def _read(self, source: int) -> None:
        with open(source, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                self._receive(number[0])

    def _receive(self, number: int) -> None:
        if number == signal.SIGINT and number in self.received:
            console.show_cursor()
            print(f"Stopped at once. {self.last_words}", file=sys.stderr, flush=True)
            os._exit(INTERRUPTED)
        self.received.add(number)
        if number == signal.SIGINT:
            console.print("Stops behind this step; interrupted once more, at once.")

    def _agree(self) -> None:
        """Waits for a signal to any process; the last step is then one that nobody has done."""
        heard = f"{self.place}/heard"
        # Where another is gone, the step that waits for it says so.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            while not self.received and not agreement.is_said(heard):
                if self.ended.wait(POLL_SECONDS):
                    return
            agreement.say(heard)
            with self.lock:
                done = agreement.gathered(f"{self.place}/steps", str(self.steps), self.timeout)
                self.last = 1 + max(map(int, done.values()))

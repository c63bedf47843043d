"""SIGTERM and SIGINT: the first saves and stops after a step; a second SIGINT stops at once.

Several processes stop after the same step, whichever of them a signal came to. JAX has a service
for it, which Orbax uses as well: after every save it tells it, from a thread, how many steps were
done when the save began, and the processes may then agree on a step that is over.
"""

import itertools
import os
import signal
import sys
import threading

import jax

from . import agreement
from .report import console

TERMINATED, INTERRUPTED = 143, 130  # exit statuses, of signals what a shell makes of them

# To ask after a step is to have read the loss of the one before, and for that parameters to which
# all processes had contributed two steps before: nobody can be further ahead than these two.
AHEAD = 2

_numbers = itertools.count()


class Signals:
    """Notes signals from ``with`` on, after ``hosts.connect``; before it they end the process.

    A thread reads them: a handler in Python would wait for the end of a compilation, or of a
    collective that hangs.

    Args:
      last_words: what to say at a second SIGINT.
      first_words: what to say at the first.
    """

    def __init__(
        self,
        last_words: str,
        first_words: str = "Saves and stops. A second Ctrl-C stops at once, without saving.",
    ):
        self.last_words, self.first_words = last_words, first_words
        self.place = f"signals/{next(_numbers)}"
        self.received: set[int] = set()
        self.steps = 0  # that this process has done since it was started
        self.last: int | None = None  # the one to stop after

    def stop_requested(self) -> bool:
        """Whether to stop now: all processes ask after every step, and get the same answer."""
        if jax.process_count() == 1:
            return bool(self.received)
        self.steps += 1
        if self.received and self.last is None:
            agreement.say_first(self.place, str(self.steps + AHEAD + 1))
        said = agreement.said(self.place)
        self.last = int(said) if said else None
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
        return self

    def __exit__(self, *_) -> None:
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
            console.print(self.first_words)

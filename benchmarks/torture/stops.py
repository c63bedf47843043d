"""One of two processes is stopped for longer than `--peer-timeout`, and goes on later.

A try survives where the other one gives up with exit status 75 and one line, the stopped one ends
as well once it goes on (JAX may abort it, since nobody has heard from it), and the next start goes
on from the newest checkpoint. Where the other one was about to save, JAX may abort it too.
"""

import os
import pathlib
import random
import signal
import time
from collections.abc import Iterator

from .outcomes import Try
from .processes import goes_on, last_words, newest, or_hangs, side_by_side, started, workplace

ROWS = ("processes that stop for a while",)
EACH = 4
TIMEOUT = ("--peer-timeout", 30)  # two processes on busy cores start at times as far apart
GIVEN_UP = os.EX_TEMPFAIL


def run(count: int, seed: int) -> Iterator[Try]:
    draws = random.Random(seed)
    with workplace() as place:
        runs = [(place / f"run{i}", i % 2, draws.uniform(0, 1)) for i in range(count)]
        yield from side_by_side(stopped_and_started_again, runs)


def stopped_and_started_again(folder: pathlib.Path, number: int, seconds: float) -> list[Try]:
    reason = or_hangs(stopped, folder, number, seconds) or or_hangs(goes_on, folder, 2, *TIMEOUT)
    return [Try(ROWS[0], reason and f"process {number}, {seconds:.2g} s: {reason}")]


def stopped(folder: pathlib.Path, number: int, seconds: float) -> str:
    with started(folder, 2, *TIMEOUT) as trainer:
        trainer.wait_until(lambda: newest(folder / "saved"))
        time.sleep(seconds)
        trainer.processes[number].send_signal(signal.SIGSTOP)
        try:
            trainer.wait_until(lambda: False)
        finally:
            trainer.processes[number].send_signal(signal.SIGCONT)
        statuses = trainer.wait()
        text = trainer.outputs[1 - number].read_text()
    if any(status not in (GIVEN_UP, -signal.SIGABRT) for status in statuses):
        return f"it ended with {statuses}: {last_words(text)}"
    lines = text.count("another process is gone or stuck")
    if lines != (statuses[1 - number] == GIVEN_UP) or "Traceback" in text:
        return f"it did not say so in a line: {last_words(text)}"
    return ""

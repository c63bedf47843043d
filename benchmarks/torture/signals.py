"""SIGTERM and SIGINT in each phase of a run, fresh or resumed, of one process or two.

A run gets a signal in one phase, is started again and gets it in the next. While a run prepares,
all of its processes get the signal, and later one of them. A try survives where those that got it
end with its exit status and the others with SIGTERM's, nothing prints a traceback, the step that
is said to be the last is the newest checkpoint's, and the next start goes on from there.
"""

import pathlib
import random
import re
import signal
import time
from collections.abc import Iterator
from typing import NamedTuple

from .outcomes import Try
from .processes import goes_on, last_words, newest, or_hangs, side_by_side, started, workplace

SIGNALS = (signal.SIGTERM, signal.SIGINT)
PREPARING, FIRST_STEP, LATER = PHASES = ("while it prepares", "at the first step", "later")
ROWS = tuple(which.name for which in SIGNALS)
EACH = 6
TERMINATED = 128 + signal.SIGTERM
PATIENT = ("--peer-timeout", 120)


class Sent(NamedTuple):
    """A signal to one process or all of them, so many seconds behind the start of a phase."""

    which: signal.Signals
    phase: str
    processes: int
    to: tuple[int, ...]
    seconds: float


def run(count: int, seed: int) -> Iterator[Try]:
    draws = random.Random(seed)
    runs = []
    with workplace() as place:
        for which in SIGNALS:
            for first in range(0, count, len(PHASES)):
                processes = 1 + first // len(PHASES) % 2
                phases = draws.sample(PHASES, len(PHASES))[: count - first]
                sent = [drawn(which, phase, processes, draws) for phase in phases]
                runs.append((place / f"{which.name}{first}", sent))
        yield from side_by_side(signalled_and_started_again, runs)


def drawn(which: signal.Signals, phase: str, processes: int, draws: random.Random) -> Sent:
    everybody = tuple(range(processes))
    to = everybody if phase == PREPARING else (draws.choice(everybody),)
    seconds = draws.uniform(0.5, 5.0) if phase == PREPARING else draws.uniform(0.0, 0.5)
    return Sent(which, phase, processes, to, seconds)


def signalled_and_started_again(folder: pathlib.Path, signals: list[Sent]) -> list[Try]:
    found = []
    for sent in signals:
        about = f"{sent} after step {newest(folder / 'saved')}"
        reason = or_hangs(signalled, folder, sent)
        reason = reason or or_hangs(goes_on, folder, sent.processes, *PATIENT)
        found.append(Try(sent.which.name, reason and f"{about}: {reason}"))
    return found


def signalled(folder: pathlib.Path, sent: Sent) -> str:
    """Starts a run, sends the signal, and says what is wrong with how it ended."""
    before = newest(folder / "saved")
    with started(folder, sent.processes, *PATIENT) as trainer:
        if sent.phase != PREPARING:
            trainer.wait_for("optimizer")
        if sent.phase == LATER:
            trainer.wait_until(lambda: newest(folder / "saved") > before)
        time.sleep(sent.seconds)
        for number in sent.to:
            trainer.processes[number].send_signal(sent.which)
        statuses = [128 - status if status < 0 else status for status in trainer.wait()]
        texts = [output.read_text(errors="replace") for output in trainer.outputs]
    expected = [
        128 + sent.which if number in sent.to else TERMINATED for number in range(sent.processes)
    ]
    if statuses != expected:
        return f"it ended with {statuses}, not {expected}: {last_words(' '.join(texts))}"
    if any("Traceback" in text for text in texts):
        return "it printed a traceback"
    said = re.search(r"Stopped after step (\d+)", texts[0])
    stopped = int(said[1]) if said else before
    if (saved := newest(folder / "saved")) != stopped:
        return f"it stopped after step {stopped}, and saved step {saved}"
    if sent.phase != PREPARING and not said:
        return f"it saved nothing: {last_words(texts[0])}"
    return ""

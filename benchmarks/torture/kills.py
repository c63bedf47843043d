"""SIGKILL at random moments and before each change that a save makes, the final rename included.

A run is killed and started again a few times, and then left alone. A kill is lost where the next
start does not go on from the newest finished checkpoint, or does not go on at all; all kills of a
run are lost where it does not end with the very parameters of one that nobody killed.
"""

import pathlib
import random
import re
import signal
import time
from collections.abc import Iterator
from typing import NamedTuple

from .outcomes import Try
from .processes import (
    Trainer,
    last_words,
    newest,
    or_hangs,
    parameters,
    side_by_side,
    went_on_after,
    workplace,
)

AT_RANDOM, IN_A_SAVE = ROWS = ("kills at random", "kills within a save")
EACH = 12
OF_A_RUN = 6
STEPS, EVERY = 200, 8
FINAL = re.compile(r"os\.rename \d+\.\S*tmp\S*$")


class Kill(NamedTuple):
    """When to kill: at a change of the folder, or some time behind a number of new checkpoints.

    Attributes:
      row: of the table.
      change: the number of it in a start, from 1; None for a moment.
      saves: new checkpoints to wait for; -1 for the time before the first step.
      seconds: to wait behind these.
    """

    row: str
    change: int | None = None
    saves: int = 0
    seconds: float = 0.0


def run(count: int, seed: int) -> Iterator[Try]:
    draws = random.Random(seed)
    with workplace() as place:
        expected, changes = uninterrupted(place)
        pairs = zip(at_random(count, draws), in_saves(count, changes, draws), strict=True)
        kills = [kill for pair in pairs for kill in pair]
        runs = [
            (place / f"run{i}", kills[i : i + OF_A_RUN], expected)
            for i in range(0, len(kills), OF_A_RUN)
        ]
        yield from side_by_side(killed_and_started_again, runs)


def at_random(count: int, draws: random.Random) -> list[Kill]:
    return [
        Kill(AT_RANDOM, None, saves, draws.uniform(0, 0.5 if saves >= 0 else 6.0))
        for saves in (draws.choice([-1, 0, 1, 2]) for _ in range(count))
    ]


def in_saves(count: int, changes: list[str], draws: random.Random) -> list[Kill]:
    """Before every final rename and the change behind it, and before others of the first saves."""
    finals = [i for i, change in enumerate(changes, 1) if FINAL.match(change)][:2]
    first = [i for final in finals for i in (final, final + 1)]
    rest = [i for i in range(1, finals[-1]) if i not in first]
    draws.shuffle(rest)
    numbers = (first + rest) * (count // (len(first) + len(rest)) + 1)
    return [Kill(IN_A_SAVE, number) for number in numbers[:count]]


def arguments(folder: pathlib.Path) -> list:
    saves = ["--checkpoint-dir", folder / "saved", "--checkpoint-every", EVERY]
    return ["--steps", STEPS, *saves]


def uninterrupted(place: pathlib.Path) -> tuple[dict[str, bytes], list[str]]:
    """The parameters at the end, and every change of the folder on the way there."""
    folder = place / "uninterrupted"
    folder.mkdir()
    recorded = folder / "changes.txt"
    own = ["--record", recorded, folder / "saved"]
    with Trainer(folder, [arguments(folder)], own) as trainer:
        if trainer.wait() != [0]:
            raise RuntimeError(f"a run that nobody kills fails: {trainer.text}")
    return parameters(folder / "saved"), recorded.read_text().splitlines()


def killed_and_started_again(
    folder: pathlib.Path, kills: list[Kill], expected: dict[str, bytes]
) -> list[Try]:
    """A try for each kill, for which the start behind it answers."""
    before, *behind = [or_hangs(started, folder, kill) for kill in [*kills, None]]
    if reason := before or differs(folder, expected):
        return [Try(kill.row, reason) for kill in kills]
    return [
        Try(kill.row, reason and f"{kill}: {reason}")
        for kill, reason in zip(kills, behind, strict=True)
    ]


def started(folder: pathlib.Path, kill: Kill | None) -> str:
    """Starts a run and kills it, or lets it end; says what is wrong with how it began or ended."""
    last = newest(folder / "saved")
    own = ["--kill-at", kill.change, folder / "saved"] if kill and kill.change else []
    with Trainer(folder, [arguments(folder)], own) as trainer:
        if kill is not None and kill.change is None:
            if kill.saves >= 0:
                wanted = last + EVERY * kill.saves
                trainer.wait_until(lambda: newest(folder / "saved") >= wanted)
            time.sleep(kill.seconds)
            trainer.kill()
        (status,) = trainer.wait()
        text = trainer.text
    if status != (0 if kill is None else -signal.SIGKILL):
        return f"it ended with status {status}: {last_words(text)}"
    # A start that was killed early has not said yet where it goes on.
    if (status == 0 or "going on" in text) and went_on_after(text) != last:
        return f"it went on after step {went_on_after(text)}, and step {last} was saved"
    return ""


def differs(folder: pathlib.Path, expected: dict[str, bytes]) -> str:
    try:
        found = parameters(folder / "saved")
    except Exception as error:
        return f"what it saved last cannot be read: {error}"
    return "" if found == expected else "it ended with other parameters than a run without kills"

"""The workers of a run: processes of the trainer, what is done to them, and what they log."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
JOINED = re.compile(
    r"joined before \w+ (\d+): ([\d.]+) s to prepare, ([\d.]+) s to compile, ([\d.]+) s to catch"
)


class Join(NamedTuple):
    """What a process printed when it joined: before which step or round, and seconds it took."""

    step: int
    prepare: float
    compiling: float
    catching_up: float


class Worker:
    """One name; one process after the other."""

    def __init__(self, name: str, folder: pathlib.Path, words: Sequence[str], environment):
        self.name, self.folder = name, folder / name
        self.words, self.environment = list(words), environment
        self.process: subprocess.Popen | None = None
        self.logged_before = 0  # this process
        self.starts: list[float] = []
        self.folder.mkdir()

    @property
    def log(self) -> pathlib.Path:
        return self.folder / "steps.jsonl"

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def joined(self) -> bool:
        """Whether it has taken a step since it was started."""
        return self.alive and self.logged > self.logged_before

    @property
    def logged(self) -> int:
        """Bytes of its log."""
        return self.log.stat().st_size if self.log.exists() else 0

    def start(self) -> None:
        self.logged_before = self.logged
        self.starts.append(time.time())
        words = [*self.words, "--worker", self.name, "--log-dir", str(self.folder)]
        with (self.folder / f"output{len(self.starts)}.txt").open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "examples" / "train_lm.py"), *words],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | self.environment | {"COLUMNS": "160"},
                cwd=self.folder,
            )

    def send(self, number: signal.Signals) -> None:
        if self.alive and self.process:
            self.process.send_signal(number)

    def wait(self, seconds: float) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds) if self.process else None

    def last_words(self) -> str:
        """The end of what the last process printed."""
        output = self.folder / f"output{len(self.starts)}.txt"
        return " ".join(output.read_text(errors="replace").split())[-300:]

    @property
    def joining_for(self) -> float:
        """Seconds since it was started, if it has taken no step yet."""
        waits = self.alive and not self.joined
        return time.time() - self.starts[-1] if waits else 0.0

    def joins(self) -> list[Join]:
        """Of each of its processes that joined, in order."""
        outputs = [self.folder / f"output{n + 1}.txt" for n in range(len(self.starts))]
        texts = [" ".join(output.read_text(errors="replace").split()) for output in outputs]
        joins = [match.groups() for match in map(JOINED.search, texts) if match]
        return [Join(int(step), *map(float, seconds)) for step, *seconds in joins]

    def records(self) -> Iterator[dict]:
        for line in self.log.read_text().splitlines() if self.log.exists() else ():
            with contextlib.suppress(ValueError):  # of a process that was killed while it wrote
                yield json.loads(line)

    def steps(self) -> list[dict]:
        """What it logged of each step."""
        return [record for record in self.records() if "loss" in record]

    def held_out(self) -> float | None:
        return next((x["held_out"] for x in self.records() if "held_out" in x), None)


def compare_steps(workers: Sequence[Worker]) -> tuple[int, list[int]]:
    """How many steps two workers logged, and after which of them their parameters differed."""
    by_step: dict[int, list[str]] = {}
    for worker in workers:
        for record in worker.steps():
            if record["parameters"]:
                by_step.setdefault(record["done"], []).append(record["parameters"])
    compared = {number: digests for number, digests in by_step.items() if len(digests) > 1}
    return len(compared), sorted(n for n, digests in compared.items() if len(set(digests)) > 1)


def lag(workers: Sequence[Worker]) -> float:
    """The most seconds since the last step of a worker that has joined, and has not ended."""
    times = [x.log.stat().st_mtime for x in workers if x.joined and x.held_out() is None]
    return time.time() - min(times, default=time.time())

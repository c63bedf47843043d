"""How fast a newcomer replays what the others trained without it.

    python benchmarks/swarm_replay.py --steps 1000

One worker trains, and no snapshot comes. Then a second one joins, and replays everything from the
first step on, while the first trains on.
"""

import pathlib
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass

import tyro

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.chaos.fleet import Worker  # noqa: E402


@dataclass(frozen=True)
class Options:
    preset: str = "tiny"
    """The trainer's preset."""
    batch_size: int = 32
    """Sequences of each worker."""
    steps: int = 1000
    """Steps that the newcomer is late."""


def main(options: Options) -> None:
    settings = {
        "--preset": options.preset,
        "--steps": 10**6,
        "--batch-size": options.batch_size,
        "--snapshot-every": 10**6,
        "--evaluate-every": 10**7,
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        words = [str(x) for pair in settings.items() for x in pair]
        words += ["--swarm", (folder / "store").as_uri()]
        first, second = (Worker(f"w{n}", folder, words, {}) for n in range(2))
        try:
            first.start()
            while first.alive and not any(x.step >= options.steps for x in first.lines()):
                time.sleep(1)
            own = statistics.median(x.seconds for x in first.lines())
            second.start()
            started = time.monotonic()
            while second.alive and not any(len(x.members) == 2 for x in second.lines()):
                time.sleep(0.2)
            there = time.monotonic() - started
        finally:
            for worker in (first, second):
                worker.send(signal.SIGKILL)
                worker.wait(10)
        if not second.joins():
            sys.exit(f"the newcomer failed: {second.last_words()}")
        ((steps, prepare, compiling, replaying),) = second.joins()
    print(f"{options.preset}: {own:.3f} s a step alone; the newcomer was {steps:.0f} steps late")
    print(f"{prepare:.1f} s to prepare, {compiling:.1f} s to compile, {replaying:.1f} s to replay")
    print(
        f"replay: {replaying / steps:.4f} s a step, {own * steps / replaying:.1f} times the run's"
    )
    print(f"{there:.0f} s from its start until it took part")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))

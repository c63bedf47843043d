"""The trainer in processes of its own, what they say, and what they leave behind."""

import contextlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

import numpy as np

from benchmarks.chaos.stores import free_port
from demo_optax import checkpoint

ROOT = pathlib.Path(__file__).parents[2]
AT_ONCE = 2  # tries
PATIENCE = 300.0  # seconds until whatever is waited for counts as hanging
BETWEEN_LOOKS = 0.02
NANO = (
    *("--preset", "nano", "--workers", "2", "--batch-size", "4", "--sequence-length", "16"),
    *("--text", str(ROOT / "demo_optax" / "_src" / "compression"), "--evaluate-every", "100000"),
)


class Hangs(Exception):
    """What was waited for has not come."""


class Trainer:
    """A trainer of one process or several; all that they print goes to a file each."""

    def __init__(self, folder: pathlib.Path, each: Sequence[Sequence], own: Sequence = ()):
        """Starts a process for each list of arguments; ``own`` are trainer.py's, of the last."""
        if len(each) > 1:
            address = f"127.0.0.1:{free_port()}"
            there = ["--coordinator", address, "--num-processes", len(each)]
            each = [[*args, *there, "--process-id", i] for i, args in enumerate(each)]
        self.outputs = [folder / f"output{i}.txt" for i in range(len(each))]
        self.processes = []
        for output, args in zip(self.outputs, each, strict=True):
            options = own if output == self.outputs[-1] else ()
            program = [sys.executable, "-m", "benchmarks.torture.trainer", *options]
            words = [*program, "--", *NANO, *args]
            with output.open("w") as file:
                self.processes.append(
                    subprocess.Popen(
                        list(map(str, words)),
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        stdin=subprocess.DEVNULL,
                        cwd=ROOT,
                        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"},
                    )
                )

    @property
    def text(self) -> str:
        return self.outputs[0].read_text(errors="replace")

    def wait(self) -> list[int]:
        """The exit statuses; negative where a signal ended a process."""
        deadline = time.monotonic() + PATIENCE
        try:
            return [p.wait(max(deadline - time.monotonic(), 0.1)) for p in self.processes]
        except subprocess.TimeoutExpired as error:
            raise Hangs("it does not end") from error

    def wait_until(self, ready: Callable[[], object]) -> None:
        """Until it is so, or a process has ended."""
        deadline = time.monotonic() + PATIENCE
        while not ready() and all(process.poll() is None for process in self.processes):
            if time.monotonic() > deadline:
                raise Hangs("it does not go on")
            time.sleep(BETWEEN_LOOKS)

    def wait_for(self, pattern: str) -> None:
        self.wait_until(lambda: re.search(pattern, self.text))

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_) -> None:
        self.kill()


def started(folder: pathlib.Path, processes: int, *args) -> Trainer:
    """A run without an end that saves to the folder."""
    words = ["--steps", 1_000_000, "--checkpoint-every", 50, *args]
    return Trainer(folder, [[*words, "--checkpoint-dir", folder / "saved"]] * processes)


def goes_on(folder: pathlib.Path, processes: int, *args) -> str:
    """Starts such a run again, and says where it does not go on from its newest checkpoint."""
    last = newest(folder / "saved")
    if not last:
        return ""
    with started(folder, processes, *args) as trainer:
        trainer.wait_for("going on after")
        found = went_on_after(trainer.text)
    return "" if found == last else f"it went on after {found}, not {last}"


def newest(folder: pathlib.Path) -> int:
    """The step of the newest finished checkpoint, 0 where there is none."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return max((int(name) for name in names if name.isdecimal()), default=0)


def went_on_after(text: str) -> int:
    """The step from which a trainer went on; 0 where it began anew."""
    found = re.search(r"going on after step (\d+)", text)
    return int(found[1]) if found else 0


def last_words(text: str) -> str:
    """The end of what was printed, in a line."""
    return " / ".join(line for line in text.splitlines()[-3:] if line.strip())[-200:]


def parameters(folder: pathlib.Path) -> dict[str, bytes]:
    """Those of the newest checkpoint, to the last bit."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = checkpoint.load_params(folder)
    return {name: np.asarray(x).tobytes() for name, x in found.items()}


@contextlib.contextmanager
def workplace() -> Iterator[pathlib.Path]:
    """A temporary folder, and programs that stay compiled from one process to the next."""
    with tempfile.TemporaryDirectory() as place:
        settings = {
            "JAX_COMPILATION_CACHE_DIR": str(pathlib.Path(place, "compiled")),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        before = dict(os.environ)
        os.environ.update(settings)
        try:
            yield pathlib.Path(place)
        finally:
            os.environ.clear()
            os.environ.update(before)


def or_hangs(function: Callable[..., str], *args) -> str:
    """What the function says, or what has not come."""
    try:
        return function(*args)
    except Hangs as error:
        return str(error)


def side_by_side(function: Callable, arguments: Sequence[tuple]) -> Iterator:
    """The results as they come, of some calls at once, each with a new folder as first argument."""
    for folder, *_ in arguments:
        folder.mkdir()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for done in as_completed([pool.submit(function, *each) for each in arguments]):
            yield from done.result()

"""Starts examples/train_lm.py with what a torture needs.

    --kill-at N FOLDER    SIGKILL before the Nth change of what lies in the folder, as Python's
                          audit events tell them: a file opened to write, a rename, a removal
    --record FILE FOLDER  a line for each of these changes, to know which there are
    --version PACKAGE V   another version of a package than there is

and behind `--` the arguments of train_lm.py.
"""

import os
import pathlib
import runpy
import signal
import sys
from collections.abc import Callable
from importlib import metadata

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


def watch_changes(folder: str, seen: Callable[[str], None]) -> None:
    """Calls ``seen`` with the event and the path in the folder, before each change of it."""
    prefix = os.path.abspath(folder) + os.sep

    def hook(event: str, args: tuple) -> None:
        if event not in CHANGES or not isinstance(args[0], str | os.PathLike):
            return
        path = os.fspath(args[0])
        writes = event != "open" or args[2] & (os.O_WRONLY | os.O_RDWR)
        if writes and isinstance(path, str) and path.startswith(prefix):
            seen(f"{event} {path.removeprefix(prefix)}")

    sys.addaudithook(hook)


def kill_at(number: str, folder: str) -> None:
    left = int(number)

    def seen(_: str) -> None:
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    watch_changes(folder, seen)


def record(file: str, folder: str) -> None:
    lines = open(file, "w", buffering=1)  # noqa: SIM115  # open as long as the process
    watch_changes(folder, lambda change: print(change, file=lines))


def pretend(package: str, version: str) -> None:
    there = metadata.version
    metadata.version = lambda name: version if name == package else there(name)


OPTIONS = {"--kill-at": kill_at, "--record": record, "--version": pretend}


def main() -> None:
    at = sys.argv.index("--")
    own, rest = sys.argv[1:at], sys.argv[at + 1 :]
    for i in range(0, len(own), 3):
        OPTIONS[own[i]](*own[i + 1 : i + 3])
    program = EXAMPLES / "train_lm.py"
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [str(program), *rest]
    runpy.run_path(str(program), run_name="__main__")


if __name__ == "__main__":
    main()

"""Starts several processes of the trainer on this machine, as on so many hosts.

    python examples/launch_local.py -n 4 -- --steps 100 --workers 4

What follows -- goes to train_lm.py, or to the script that it begins with. The output of all
processes is relayed; when one of them fails, the others are stopped.
"""

import pathlib
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import Annotated

import tyro

TRAINER = pathlib.Path(__file__).with_name("train_lm.py")


@dataclass(frozen=True)
class Launch:
    processes: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 2
    """Processes to start."""
    grace: float = 15.0
    """Seconds that the others have for their last words when one has failed."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(arguments: list[str], processes: int) -> list[subprocess.Popen]:
    """One process each, told where the others are."""
    if not arguments or arguments[0].startswith("-"):
        arguments = [str(TRAINER), *arguments]
    where = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", str(processes)]
    return [
        subprocess.Popen(
            [sys.executable, *arguments, *where, "--process-id", str(number)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        for number in range(processes)
    ]


def relay(number: int, process: subprocess.Popen) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        print(f"[{number}] {line}", end="", flush=True)


def wait(processes: list[subprocess.Popen], grace: float) -> int:
    """The exit status of the first process that fails, 0 where none does."""
    running = set(range(len(processes)))
    while running:
        for number in list(running):
            try:
                status = processes[number].wait(0.1)
            except subprocess.TimeoutExpired:
                continue
            running.discard(number)
            if status:
                print(f"process {number} {how_it_ended(status)}; stopping the others", flush=True)
                stop([processes[i] for i in running], grace)
                return status if status > 0 else 128 - status
    return 0


def stop(processes: list[subprocess.Popen], grace: float) -> None:
    for process in processes:
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            process.kill()  # JAX traps SIGTERM, and would go on waiting
            process.wait()


def how_it_ended(status: int) -> str:
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited {status}"


def main() -> None:
    own, rest = _split(sys.argv[1:])
    launch = tyro.cli(Launch, args=own, description=__doc__)
    processes = start(rest, launch.processes)

    def pass_on(*_):
        for process in processes:
            process.terminate()  # for the trainers, to save and stop

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    relays = [
        threading.Thread(target=relay, args=numbered, daemon=True)
        for numbered in enumerate(processes)
    ]
    for thread in relays:
        thread.start()
    status = wait(processes, launch.grace)
    for thread in relays:
        thread.join()
    sys.exit(status)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


if __name__ == "__main__":
    main()

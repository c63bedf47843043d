"""Starts several processes of the trainer on this machine, as if each were a host.

    python examples/launch_local.py -n 4 -- --steps 100 --workers 4
    python examples/launch_local.py -n 3 --swarm run -- --steps 100      workers of a swarm

The words after -- go to train_lm.py, or to another script if they begin with its path. This
prints the output of all processes. If one of them fails, it stops the others. In a swarm the
others go on.
"""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Annotated

import tyro

TRAINER = pathlib.Path(__file__).with_name("train_lm.py")


@dataclass(frozen=True)
class Launch:
    processes: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 2
    """Number of processes to start."""
    grace: float = 15.0
    """Seconds that the other processes get to end by themselves, after one has failed."""
    swarm: str | None = None
    """Place of a swarm, a folder or a URL. Each process is a worker of it, from worker-0 on."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(arguments: list[str], launch: Launch) -> list[subprocess.Popen]:
    """One process each, told where the others are."""
    if not arguments or arguments[0].startswith("-"):
        arguments = [str(TRAINER), *arguments]
    if launch.swarm:
        where, own = ["--swarm", launch.swarm, "--worker"], "worker-{}"
    else:
        where = ["--coordinator", f"127.0.0.1:{free_port()}"]
        where, own = [*where, "--num-processes", str(launch.processes), "--process-id"], "{}"
    return [
        subprocess.Popen(
            [sys.executable, *arguments, *where, own.format(number)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,  # a terminal's Ctrl-C comes to this launcher alone, which passes it on
        )
        for number in range(launch.processes)
    ]


def relay(number: int, process: subprocess.Popen) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if "[Gloo] Rank" not in line:  # which JAX's CPU backend prints for each group it makes
            print(f"[{number}] {line}", end="", flush=True)


def wait(processes: list[subprocess.Popen], grace: float) -> int:
    """Until all have ended; the exit status of the one that failed, 0 where none did."""
    while not any(process.poll() for process in processes):
        if all(process.poll() == 0 for process in processes):
            return 0
        time.sleep(0.1)
    deadline = time.monotonic() + grace
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    ended = [(number, process.poll()) for number, process in enumerate(processes)]
    failed = [(number, status) for number, status in ended if status]
    for process in processes:
        process.kill()  # at SIGTERM they would go on waiting
        process.wait()
    # Those that noticed end with a status of their own, or are aborted by JAX.
    noticed = os.EX_TEMPFAIL, -signal.SIGABRT
    number, status = next((one for one in failed if one[1] not in noticed), failed[0])
    print(f"process {number} {how_it_ended(status)}, and the others ended too", flush=True)
    return exit_status(status)


def wait_for_each(processes: list[subprocess.Popen]) -> int:
    """Until all have ended, whatever becomes of one; the exit status of the last that failed."""
    running, found = dict(enumerate(processes)), 0
    while running:
        for number, process in list(running.items()):
            if (status := process.poll()) is not None:
                del running[number]
                if status:
                    print(f"process {number} {how_it_ended(status)}", flush=True)
                    found = exit_status(status)
        time.sleep(0.1)
    return found


def exit_status(status: int) -> int:
    return status if status > 0 else 128 - status


def how_it_ended(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"exited with status {status}"


def main() -> None:
    own, rest = _split(sys.argv[1:])
    launch = tyro.cli(Launch, args=own, description=__doc__)
    if launch.swarm and any(word.partition("=")[0] == "--key" for word in rest):
        sys.exit(
            "error: --key is given to all processes, but each needs a key of its own: start each "
            "yourself, with train_lm.py --swarm."
        )
    processes = start(rest, launch)

    def pass_on(number, _):
        for process in processes:
            process.send_signal(number)  # for the trainers, to save and stop

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, pass_on)
    relays = [
        threading.Thread(target=relay, args=numbered, daemon=True)
        for numbered in enumerate(processes)
    ]
    for thread in relays:
        thread.start()
    status = wait_for_each(processes) if launch.swarm else wait(processes, launch.grace)
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

"""All processes find each other before JAX starts, so that a mistake in an address is one line.

``jax.distributed.initialize`` of JAX 0.10.2 leaves no exception to catch: where a process never
comes, it aborts with a stack trace; where the port is taken, it crashes; and processes that were
given different numbers of processes start all the same. So the first process listens where JAX's
coordinator will, and the others tell it who they are.
"""

import contextlib
import os
import re
import socket
import time
from collections.abc import Iterable

GREETING = re.compile(rb"demo_optax: process (\d+) of (\d+)\n")
WELCOME = b"demo_optax: all are here\n"
REFUSAL = b"demo_optax refuses: "
BETWEEN_TRIES = 0.2  # seconds
SLOWEST_ANSWER = 5.0  # seconds that a message may take


def meet(address: str, processes: int, number: int, timeout: float) -> None:
    """Returns when all processes are there.

    Args:
      address: HOST:PORT of the first process.
      processes: how many there are.
      number: of this process, from 0.
      timeout: seconds.

    Raises:
      OSError: the first process cannot listen, or somebody has not come in time.
      ValueError: the processes do not agree on how many they are.
    """
    deadline = time.monotonic() + timeout
    if number:
        _join(address, b"demo_optax: process %d of %d\n" % (number, processes), deadline)
    else:
        _gather(_split(address)[1], processes, deadline)


def _gather(port: int, processes: int, deadline: float) -> None:
    """Waits as the first process for the others, and tells them when all are there."""
    waiting: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as connections:
        try:
            with _listening(port) as server:
                while missing := set(range(1, processes)) - waiting.keys():
                    if time.monotonic() > deadline:
                        raise TimeoutError(
                            f"of --num-processes {processes}, those with --process-id "
                            f"{sorted(missing)} did not come: start them, or raise --peer-timeout."
                        )
                    with contextlib.suppress(TimeoutError, ConnectionError):
                        connection = connections.enter_context(server.accept()[0])
                        if said := GREETING.fullmatch(_line(connection, SLOWEST_ANSWER)):
                            number, counted = map(int, said.groups())
                            waiting[number] = connection
                            _require_same_count(number, counted, processes)
        except (TimeoutError, ValueError) as error:
            _tell(waiting.values(), REFUSAL + f"{error}\n".encode())
            raise
        _tell(waiting.values(), WELCOME)  # the port is free for JAX by now


def _join(address: str, greeting: bytes, deadline: float) -> None:
    """Tries as any other process until the first one says that all are there."""
    why = "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(_split(address), left) as connection:
                connection.sendall(greeting)
                # Whoever waits says at its own deadline who is missing.
                answer = _line(connection, left + SLOWEST_ANSWER)
        except OSError as error:
            why = error.strerror or str(error)
        else:
            if answer == WELCOME:
                return
            if answer.startswith(REFUSAL):
                raise ValueError(answer.removeprefix(REFUSAL).decode())
        time.sleep(BETWEEN_TRIES)
    raise TimeoutError(
        f"--coordinator {address} was not found ({why}): start process 0 there, "
        "correct the address, or raise --peer-timeout."
    )


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _listening(port: int) -> socket.socket:
    """A server on all of this host's addresses, like JAX's."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        server = socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise OSError(
            f"process 0 cannot listen on port {port} of --coordinator "
            f"({os.strerror(error.errno or 0)}): choose a free one, for all processes."
        ) from error
    server.settimeout(BETWEEN_TRIES)
    return server


def _line(connection: socket.socket, seconds: float) -> bytes:
    connection.settimeout(seconds)
    with connection.makefile("rb") as stream:
        return stream.readline(1000)


def _tell(connections: Iterable[socket.socket], message: bytes) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.sendall(message)


def _require_same_count(number: int, counted: int, processes: int) -> None:
    if counted != processes:
        raise ValueError(
            f"--num-processes is {processes} for process 0, and {counted} for process {number}: "
            "give every process the same number."
        )

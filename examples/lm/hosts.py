"""One process on each host: how they find each other, and notice that one is gone.

The engine is JAX's own. What it lacks is an end with one clear line: where another process dies,
a collective fails on some backends, and waits on others until JAX aborts without a word of advice.
"""

import contextlib
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import NoReturn

import jax
from jax.experimental import multihost_utils

from . import rendezvous
from .config import Config

PEER_LOST = os.EX_TEMPFAIL  # the exit status of failures that are worth another try

# What JAX's errors say where another process is the reason; out of memory, say, is not.
OF_OTHERS = re.compile("gloo|nccl|connection|peer|unavailable|deadline|coordination|barrier", re.I)

# How XLA's errors begin, whichever type JAX raises them as.
STATUS = re.compile("[A-Z_]+: ")


def connect(config: Config) -> None:
    """Joins the other processes, if there are any; before any other use of JAX."""
    # Its handler of SIGTERM would come before that of signals.py, which says why not to use it.
    jax.config.update("jax_enable_preemption_service", False)
    if not (config.coordinator or config.distributed) or jax.distributed.is_initialized():
        return
    if config.coordinator and config.num_processes and config.process_id is not None:
        rendezvous.meet(
            config.coordinator, config.num_processes, config.process_id, config.peer_timeout
        )
    try:
        jax.distributed.initialize(
            config.coordinator,
            config.num_processes,
            config.process_id,
            initialization_timeout=config.peer_timeout,
            # JAX aborts at this. The watch below, which can say how to go on, comes first, but for
            # a process that is lost during a pause of the watch.
            heartbeat_timeout_seconds=2 * config.peer_timeout,
        )
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"the processes cannot find each other ({error}): --distributed is for SLURM, "
            "Kubernetes and TPU pods; elsewhere give --coordinator, --num-processes and "
            "--process-id."
        ) from error


def is_first() -> bool:
    return jax.process_index() == 0


def meet(name: str) -> None:
    """Returns when all processes are here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def leave(line: str) -> NoReturn:
    """Ends this process with a line; an ordinary exit would wait for the others."""
    print(line, file=sys.stderr, flush=True)
    os._exit(PEER_LOST)


def messages_of(error: BaseException | None) -> Iterator[str]:
    """An error's message, and those of the errors that caused it."""
    while error is not None:
        yield str(error)
        error = error.__cause__


def is_of_others(message: str) -> bool:
    """Whether an error's message says that another process is the reason."""
    return bool(STATUS.match(message) and OF_OTHERS.search(message))


class Watch:
    """Ends this process when others seem to be gone: at an error, or without progress.

    Args:
      timeout: seconds without progress, after the first step, before it gives up.
      advice: how to continue, for the last line.
    """

    def __init__(self, timeout: float, advice: str):
        self.timeout, self.advice = timeout, advice
        self.step = 0
        self.last: float | None = None
        self.ended = threading.Event()
        self.several = jax.process_count() > 1

    def progress(self, step: int | None = None) -> None:
        """Says that this process goes on, and after which step."""
        self.step = self.step if step is None else step
        self.last = time.monotonic()

    @contextlib.contextmanager
    def paused(self):
        """For work of any length, during which only JAX notices that another process is gone."""
        self.last = None
        try:
            yield
        finally:
            self.progress()

    def __enter__(self) -> "Watch":
        if self.several:
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.ended.set()

    @contextlib.contextmanager
    def failures(self):
        """Ends the process at an error, without waiting for the others, which wait for it."""
        try:
            yield
        except Exception as error:
            if not self.several:
                raise
            reason = next(filter(is_of_others, messages_of(error)), None)
            if reason is None:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            reason = reason.strip().splitlines()[0]
            self._give_up(f"the exchange with the other processes failed ({reason[:200]})")

    def _watch(self) -> None:
        while not self.ended.wait(min(1.0, self.timeout / 4)):
            last = self.last
            if last is not None and time.monotonic() - last > self.timeout:
                self._give_up(f"there was no progress for {self.timeout:g} s")

    def _give_up(self, what: str) -> None:
        here = f"process {jax.process_index()} of {jax.process_count()}"
        leave(
            f"{here}, after step {self.step}: {what}: another process is gone or stuck. "
            f"{self.advice}"
        )

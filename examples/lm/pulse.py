"""A sign of life from each process, which goes on while the run itself takes its time.

JAX has one too, but aborts after it without any advice.
"""

import contextlib
import itertools
import threading
import time

import jax
from jax._src.distributed import global_state  # the service has no public interface

SIGNS = "alive"
LAST_WORDS = 5.0  # seconds
LEFT = "left"  # whoever has said so is missed no more


class Pulse:
    """Tells the others every few seconds that this process lives, and listens to them.

    Args:
      every: seconds between two signs.
    """

    def __init__(self, every: float):
        self.every = every
        self.ended = threading.Event()
        self.answered = time.monotonic()  # by JAX's service, in the first process
        self.heard: dict[str, tuple[str, float]] = {}  # a sign, and when it was new

    def silence(self) -> float:
        """Seconds for which a process was not heard, or the service did not answer."""
        signs = list(self.heard.values())
        return time.monotonic() - min([self.answered, *(at for sign, at in signs if sign != LEFT)])

    def start(self) -> None:
        self.thread = threading.Thread(target=self._beat, args=(global_state.client,), daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.ended.set()
        self.thread.join(LAST_WORDS)

    def _beat(self, client) -> None:
        own = f"{SIGNS}/{jax.process_index()}"
        for number in itertools.count():
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # which only counts as silence
                client.key_value_set(own, str(number), allow_overwrite=True)
                self._listen(dict(client.key_value_dir_get(f"{SIGNS}/")))
            if self.ended.wait(self.every):
                break
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            client.key_value_set(own, LEFT, allow_overwrite=True)

    def _listen(self, signs: dict[str, str]) -> None:
        now = self.answered = time.monotonic()
        for process, sign in signs.items():
            if self.heard.get(process, ("", now))[0] != sign:
                self.heard[process] = sign, now

"""Somebody with the whole store and without a key, who forges and copies objects all the time."""

import random
import threading
from collections import Counter

from demo_optax.swarm import ObjectStore

FOLDERS = "slots", "packets", "manifests", "snapshots", "attested"
PAUSE = 0.05  # seconds between two tries


class Attack:
    """Tries in a thread: junk under plain names, copies of genuine objects under other names."""

    def __init__(self, url: str, tries: int, seed: int):
        self._url, self._tries, self._drawn = url, tries, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(60)

    def _run(self) -> None:
        store = ObjectStore(self._url)
        while sum(self.counts.values()) < self._tries and not self._ended.wait(PAUSE):
            folder = self._drawn.choice(FOLDERS)
            names = [x for x in store.names(folder) if "/" not in x or folder != "snapshots"]
            if not names:
                continue
            genuine = f"{folder}/{self._drawn.choice(names)}"
            data = store.get(genuine) or b""
            place, step = genuine.rpartition("/")[0], len(store.names("manifests"))
            digits = f"{self._drawn.getrandbits(128):032x}"
            tries = {
                f"{folder}: junk in a step to come": (f"{folder}/{step + 1:08d}", b"junk"),
                f"{folder}: a copy under a guessed name": (f"{place}/{digits}.{step:08d}", data),
                f"{folder}: a copy under a plain name": (f"{folder}/{step:08d}", data),
                "a roster of a higher number": ("roster.json.2", data),
                "run.json": ("run.json", b"{}"),
            }
            kind = self._drawn.choice(list(tries))
            store.put(*tries[kind])
            self.counts[kind] += 1

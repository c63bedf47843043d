"""What somebody tries who has the whole store of a swarm, and no key: a function for each kind.

`attack_swarm.py` runs them in a process of their own, against members that train.
"""

import contextlib
import functools
import json
import os
import pathlib
import random
import re
import time
from collections.abc import Callable
from multiprocessing.pool import ThreadPool

from demo_optax._src.places import folder_of
from demo_optax.swarm import ObjectStore, SwarmError

HUGE = 10**9  # bytes
HOLD = 6.0  # seconds for which objects are gone
PAUSE = 0.2  # seconds between two tries, about a step
OBJECTS = {  # the folder of each kind of object, and what its names are like
    "manifest": ("manifests", r".*"),
    "packet": ("packets", r".*"),
    "claim": ("slots", r".*"),
    "index": ("snapshots", r".*\.json"),
    "snapshot": ("snapshots", r".*/\d{6}"),
    "attestation": ("attested", r".*"),
    "run.json": ("settings", r".*run\.json"),
    "programs": ("settings", r".*programs/.*"),
}
KEYS = {"roster": "roster.json"}


class Attacker:
    """Whoever has the whole store, and no key."""

    def __init__(self, url: str, elsewhere: str, garbage: int):
        self.store, self.elsewhere = ObjectStore(url, patience=60.0), ObjectStore(elsewhere)
        self.store.packet_bytes = 10**6  # it reads nothing larger
        self.url, self.garbage, self.drawn = url, garbage, random.Random(0)
        self.made: set[str] = set()  # keys of its own
        self.junk = {b""}  # what it wrote
        self.litter: list[str] = []  # what is in the way of lists
        self.odd: dict[str, Callable[[], object]] = {}  # how to undo it
        self.obstacles: list[pathlib.Path] = []  # what is in the way of writes
        self.replaced: dict[str, bytes] = {}  # what members wrote, and is gone

    def objects(self, kind: str, newest: int = 0) -> list[str]:
        """Physical keys of the members' objects of one kind, by step."""
        if kind in KEYS:
            return [KEYS[kind]]
        folder, pattern = OBJECTS[kind]
        names = [x for x in self.store.names(folder) if re.fullmatch(pattern, x)]
        found = {f"{folder}/{x}" for x in names} - self.made
        return sorted(found, key=lambda key: (step_in(key), key))[-newest:]

    def step(self) -> int:
        """The step in progress."""
        return max(map(step_in, self.objects("manifest")), default=-1) + 1

    def read(self, key: str) -> bytes | None:
        try:
            return self.store.get(key)
        except SwarmError:  # much too large
            return b""

    def wait(self) -> None:
        """Waits for the moment at which some packets of a step are there, and others are not."""
        until = time.monotonic() + 1
        while not self.store.names(f"packets/{self.step():08d}") and time.monotonic() < until:
            time.sleep(0.005)

    def make(self, key: str, data: bytes) -> None:
        """Writes an object of its own."""
        self.made.add(key)
        self.store.put(key, data)

    def forge(self, key: str, data: bytes) -> None:
        """Writes under the name of an open run, and under that of a guessed secret."""
        folder, _, name = key.rpartition("/")
        self.make(key, data)
        self.make(f"{folder}/{self.drawn.getrandbits(128):032x}.{name}".lstrip("/"), data)

    def keep(self, key: str) -> bool:
        data = self.read(key)
        if data is not None and data not in self.junk:
            self.replaced[key] = data
        return data is not None

    def put(self, key: str, data: bytes) -> None:
        """Writes over an object of the members."""
        self.keep(key)
        self.junk.add(data)
        self.store.put(key, data)

    def change(self, kind: str, newest: int, edit: Callable[[bytes], bytes]) -> None:
        """Changes genuine objects under the names that they have."""
        for key in self.objects(kind, newest):
            if (data := self.read(key)) is not None:
                self.put(key, edit(data))

    def restore(self) -> None:
        """Puts back what the members have not written anew, and takes away obstacles."""
        for key, data in self.replaced.items():
            if (there := self.read(key)) is None or there in self.junk:
                self.store.put(key, data)
        self.replaced.clear()
        for path in self.obstacles:
            path.unlink()
        self.obstacles.clear()


def step_in(key: str) -> int:
    return max([int(x) for x in re.findall(r"(?<![0-9a-f])(\d{8})(?![0-9a-f])", key)], default=-1)


def flipped(data: bytes) -> bytes:
    at = len(data) * 3 // 4
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if data else b"x"


def forged_claim(at: Attacker, n: int) -> None:
    claim = {"worker": "mallory", "nonce": "0", "time": time.time()}
    at.forge(f"slots/{n % 4:03d}/{990_000_000 + n:06d}", json.dumps(claim).encode())
    at.forge(f"slots/{n % 4:03d}/{990_000_000 + n:06d}.left", b"")
    for key in at.objects("claim", 3):
        at.make(key.rpartition(".")[0] + f".{990_000_000 + n}", at.read(key) or b"")


def forged_packet(at: Attacker, n: int) -> None:
    step = at.step()
    at.forge(f"packets/{step:08d}/{n % 3:03d}.packet", at.drawn.randbytes(3000))
    at.forge(f"packets/{step:08d}/000.000009.{'0' * 64}.1.1.packet", at.drawn.randbytes(3000))
    at.change("packet", 2, flipped)


def forged_mark(at: Attacker, n: int) -> None:
    for mark in "here", "left", "ends":
        at.forge(f"packets/{at.step() + n % 2:08d}/{n % 3:03d}.000009.{mark}", b"")
        at.change("packet", 1, lambda x, mark=mark: x.partition(b"\n")[0] + b"\n" + mark.encode())


def forged_manifest(at: Attacker, n: int, ahead: int) -> None:
    said = {"step": at.step() + ahead, "packets": [[0, 9, "0" * 64, 1, 1, "0" * 128]]}
    said |= {"previous": "0" * 64, "time": time.time(), "roster": "", "lost": []}
    at.forge(f"manifests/{said['step']:08d}", json.dumps(said).encode())
    if not ahead:
        at.change("manifest", 1, lambda data: data[:70] + json.dumps(said).encode())


def forged(kind: str, key: str) -> Callable[[Attacker, int], None]:
    def attack(at: Attacker, n: int) -> None:
        genuine = [at.read(x) for x in at.objects(kind, 1)]
        at.forge(key.format(step=at.step() + n, n=n), flipped((genuine or [b""])[0] or b"{}"))
        at.change(kind, 1, flipped)

    return attack


def forged_roster(at: Attacker, n: int) -> None:
    genuine, own = at.read("roster.json") or b"", at.elsewhere.get("roster.json") or b""
    higher = re.sub(rb'"number": \d+', b'"number": %d' % (50 + n), genuine)
    at.put("roster.json", (own, higher, genuine[:64] + own[64:], own[:64] + genuine[64:])[n % 4])


def packet_of_another_step(at: Attacker, n: int) -> None:
    *before, last = at.objects("packet", 8) or [""]
    for key in before[:3]:
        data = at.read(key) or b""
        at.make(re.sub(r"/\d{8}/", f"/{at.step():08d}/", key), data)
        at.put(last, data)


def packet_of_another_run(at: Attacker, n: int) -> None:
    step = at.step()
    for name in at.elsewhere.names(f"packets/{step:08d}"):
        data = at.elsewhere.get(f"packets/{step:08d}/{name}") or b""
        at.make(f"packets/{step:08d}/{name}", data)
        for key in at.objects("packet", 3):
            if key[-11:] == name[-11:]:  # of the same member
                at.put(key, data)


def manifest_with_one_reference_exchanged(at: Attacker, n: int) -> None:
    keys = at.objects("manifest", 2)
    if len(keys) == 2 and all(data := [at.read(x) or b"" for x in keys]):
        hashes = [re.findall(rb'"[0-9a-f]{64}"', x) for x in data]
        at.put(keys[1], data[1].replace(hashes[1][n % 2], hashes[0][n % 2]))
        at.make(keys[1].replace(f"{step_in(keys[1]):08d}", f"{at.step():08d}"), data[n % 2])


def garbage(at: Attacker, n: int) -> None:
    """Junk in all folders; a folder gets it without the store's detour."""
    step = at.step()
    for prefix in f"packets/{step + 3:08d}", "manifests", "snapshots", "slots":
        names = [f"{prefix}/{n:03d}{x:029d}.{step:08d}.json" for x in range(at.garbage // 40)]
        if folder := folder_of(at.url):
            (folder / prefix).mkdir(parents=True, exist_ok=True)
            for name in names:
                (folder / name).touch()
        else:
            with ThreadPool(16) as pool:
                pool.map(lambda name: at.store.put(name, b""), names)
        at.litter += names


def huge(at: Attacker, n: int) -> None:
    """A sparse file, or as much as a server in memory holds."""
    kind = ("packet", "manifest", "run.json", "claim", "index", "attestation", "roster")[n % 7]
    for key in at.objects(kind, 1):
        if folder := folder_of(at.url):
            at.put(key, b"")
            os.truncate(folder / key, HUGE)
        elif n < 7:
            at.put(key, bytes(HUGE // 20))


def odd_name(at: Attacker, n: int) -> None:
    """Names that the store's own list does not read: a line's end, bytes that are no text, //."""
    for folder in "snapshots", "slots", "manifests", "packets":
        if place := folder_of(at.url):
            for name in b"a\nb", b"\xff":
                path = place / folder / os.fsdecode(name)
                path.touch()
                at.odd[str(path)] = path.unlink
        elif at.url.startswith("s3:"):
            import boto3  # as moto needs it

            key = f"{at.url.partition('//')[2].partition('/')[2]}/{folder}//x"
            bucket = boto3.resource("s3", endpoint_url=os.environ["AWS_ENDPOINT"]).Bucket("chaos")
            at.odd[key] = bucket.put_object(Key=key, Body=b"x").delete


def file_for_a_folder(at: Attacker, n: int) -> None:
    """A file where the folder of a step to come has its place, as everybody can tell."""
    if place := folder_of(at.url):
        path = place / f"packets/{at.step() + 2:08d}"
        if not path.exists():
            path.touch()
            at.obstacles.append(path)


def deleted(at: Attacker, n: int, kind: str) -> None:
    at.store.delete([x for x in at.objects(kind, 0 if n % 9 == 0 else 9) if at.keep(x)])


def overwritten(at: Attacker, n: int, kind: str) -> None:
    junk = (b"", b"{}", at.drawn.randbytes(200), bytes(70) + b"{}")[n % 4]
    for key in at.objects(kind, 0 if n % 9 == 0 else 9):
        at.put(key, junk)


KINDS: dict[str, Callable[[Attacker, int], None]] = {
    "a packet of another run": packet_of_another_run,  # first: that run has few steps
    "forged claim": forged_claim,
    "forged packet": forged_packet,
    "forged mark": forged_mark,
    "forged manifest to come": functools.partial(forged_manifest, ahead=1),
    "forged manifest in progress": functools.partial(forged_manifest, ahead=0),
    "forged index": forged("index", "snapshots/{step:08d}.000.json"),
    "forged snapshot": forged("snapshot", "snapshots/{step:08d}/" + "0" * 32 + "/000000"),
    "forged attestation": forged("attestation", "attested/{step:08d}/000"),
    "forged run.json": forged("run.json", "settings/001/run.json"),
    "forged programs": forged("programs", "settings/001/programs/{n:016d}.json"),
    "roster of a higher number": forged_roster,
    "a packet of another step": packet_of_another_step,
    "a reference exchanged": manifest_with_one_reference_exchanged,
    "an object of 1 GB": huge,
    **{f"deleted: {x}": functools.partial(deleted, kind=x) for x in (*OBJECTS, *KEYS)},
    **{f"overwritten: {x}": functools.partial(overwritten, kind=x) for x in (*OBJECTS, *KEYS)},
    "100,000 objects of garbage": garbage,
    "a file for a folder to come": file_for_a_folder,
    "an odd name": odd_name,
}


def attack(kind: str, tries: int) -> int:
    """Runs in the attacker's process; deletes and overwrites for as long as a run may stop."""
    lasts = kind.startswith(("deleted", "overwritten"))
    ended, done = time.monotonic() + HOLD * lasts, 0
    while done < tries or time.monotonic() < ended:
        if not lasts and not ATTACKERS[0].odd:  # then it could not list either
            ATTACKERS[0].wait()
        KINDS[kind](ATTACKERS[0], done)
        done += 1
        time.sleep(0.02 if lasts else PAUSE * ATTACKERS[0].drawn.uniform(0.2, 2))
    return done


def restore() -> None:
    ATTACKERS[0].restore()


def clean() -> None:
    """Takes away what is in the way of lists."""
    at = ATTACKERS[0]
    for undo in at.odd.values():
        with contextlib.suppress(OSError):
            undo()
    for first in range(0, len(at.litter), 1000):  # a store has a minute for each request
        at.store.delete(at.litter[first : first + 1000])
    at.litter, at.odd = [], {}


ATTACKERS: list[Attacker] = []


def prepare(*args) -> None:
    ATTACKERS.append(Attacker(*args))

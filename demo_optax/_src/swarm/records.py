"""What lies in a swarm's store: names and JSON of claims, manifests and snapshots.

    run.json                                   what all workers must have in common
    slots/003/000002                           slot 3's second incarnation, and whose it is
    packets/00000042/003.000002.here           wait for it: it will send a packet in this step
    packets/00000042/003.000002.left           do not wait for it
    packets/00000042/003.000002.SHA256.packet  its packet
    manifests/00000042                         which packets count: the first that is written
    snapshots/00000040.json                    which file is the snapshot before step 40
    snapshots/00000040/NONCE.npz               its arrays

Manifests stay for good: were one deleted, a worker that wakes up late could decide its step anew.
Nothing that is read from there is executed. JSON is checked, packets and files by their hashes.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

FORMAT = 2  # of the store's objects and of packets; workers of different ones do not mix


class Damaged(ValueError):
    """An object in the store is not what a worker of this version writes."""


class Packet(NamedTuple):
    """A packet that counts.

    Attributes:
      slot: of its sender.
      incarnation: of its sender, which has a new one each time that it joins.
      sha256: of its bytes.
    """

    slot: int
    incarnation: int
    sha256: str

    @property
    def member(self) -> tuple[int, int]:
        """Its sender."""
        return self.slot, self.incarnation


class Manifest(NamedTuple):
    """Which packets count in a step, by slot.

    Attributes:
      step: that they were sealed in.
      packets: in the order of their slots, one of each slot at most.
      previous: SHA-256 of the manifest of the step before; "" for the first.
      time: seconds since 1970, by the clock of whoever proposed it.
    """

    step: int
    packets: tuple[Packet, ...]
    previous: str
    time: float

    @property
    def members(self) -> frozenset[tuple[int, int]]:
        """Slots and incarnations of the senders."""
        return frozenset(packet.member for packet in self.packets)

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps(self._asdict()).encode()

    @classmethod
    def decode(cls, data: bytes) -> "Manifest":
        """From JSON.

        Raises:
          Damaged: it is none.
        """
        step, packets, previous, seconds = _values(data, cls._fields)
        _require(isinstance(packets, list) and len(packets) > 0, data)
        _require(all(isinstance(x, list) and len(x) == 3 for x in packets), data)
        named = tuple(Packet(*x) for x in packets)
        for slot, incarnation, digest in named:
            _require(_is_count(slot) and _is_count(incarnation) and _is_hash(digest), data)
        slots = [packet.slot for packet in named]
        _require(slots == sorted(set(slots)), data)
        _require(_is_count(step) and (previous == "" or _is_hash(previous)), data)
        _require(_is_time(seconds), data)
        return cls(step, named, previous, float(seconds))


class Claim(NamedTuple):
    """Who has a slot.

    Attributes:
      worker: name.
      nonce: of the process that claims it.
      time: seconds since 1970.
    """

    worker: str
    nonce: str
    time: float


class SnapshotIndex(NamedTuple):
    """Where a snapshot is.

    Attributes:
      step: the first step that comes after it.
      file: the key of its arrays.
      sha256: of that file's bytes.
      digest: SHA-256 of parameters and shared state.
    """

    step: int
    file: str
    sha256: str
    digest: str


def to_json(record: Claim | SnapshotIndex) -> bytes:
    """A record as JSON."""
    return json.dumps(record._asdict()).encode()


def read_claim(data: bytes) -> Claim:
    """A claim, from JSON.

    Raises:
      Damaged: it is none.
    """
    worker, nonce, seconds = _values(data, Claim._fields)
    _require(isinstance(worker, str) and isinstance(nonce, str) and _is_time(seconds), data)
    return Claim(worker, nonce, seconds)


def read_index(data: bytes) -> SnapshotIndex:
    """The index of a snapshot, from JSON.

    Raises:
      Damaged: it is none.
    """
    step, file, hashed, digest = _values(data, SnapshotIndex._fields)
    _require(_is_count(step) and _is_hash(hashed) and _is_hash(digest), data)
    _require(isinstance(file, str) and file.startswith(f"snapshots/{step:08d}/"), data)
    return SnapshotIndex(step, file, hashed, digest)


def parsed(data: bytes) -> dict[str, Any]:
    """A JSON object.

    Raises:
      Damaged: it is none.
    """
    try:
        found: Any = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    _require(isinstance(found, dict), data)
    return found


def _values(data: bytes, names: Sequence[str]) -> list[Any]:
    found = parsed(data)
    return [found.get(name) for name in names]


def _require(holds: bool, data: bytes) -> None:
    if not holds:
        raise Damaged(
            f"{data[:80]!r} in the store was not written by a worker of this version: use a place "
            "of its own for each run."
        )


def _is_count(x: Any) -> bool:
    return type(x) is int and 0 <= x < 2**31


def _is_hash(x: Any) -> bool:
    return isinstance(x, str) and _HASH.fullmatch(x) is not None


def _is_time(x: Any) -> bool:
    return type(x) in (int, float) and 0 <= x < 2**53


_HASH = re.compile("[0-9a-f]{64}")


def sha256(data: bytes) -> str:
    """Of the bytes, in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def claim_key(member: tuple[int, int]) -> str:
    """The key of a claim, by slot and incarnation."""
    return f"slots/{member[0]:03d}/{member[1]:06d}"


def step_folder(step: int) -> str:
    """The folder of a step's packets."""
    return f"packets/{step:08d}"


def manifest_key(step: int) -> str:
    """The key of a step's manifest."""
    return f"manifests/{step:08d}"


def snapshot_key(step: int) -> str:
    """The key of a snapshot's index."""
    return f"snapshots/{step:08d}.json"


def member_name(member: tuple[int, int]) -> str:
    """How a step's folder names a worker."""
    return f"{member[0]:03d}.{member[1]:06d}"


def mark_key(step: int, member: tuple[int, int], mark: str) -> str:
    """The key by which a worker says that it is ``here`` for a step, or has ``left``."""
    return f"{step_folder(step)}/{member_name(member)}.{mark}"


def packet_key(step: int, packet: Packet) -> str:
    """The key of a packet."""
    return f"{step_folder(step)}/{member_name(packet.member)}.{packet.sha256}.packet"


class Present(NamedTuple):
    """What a step's folder holds.

    Attributes:
      packets: the newest incarnation's, by slot.
      here: who will send one.
      left: who will not.
    """

    packets: dict[int, Packet]
    here: frozenset[tuple[int, int]]
    left: frozenset[tuple[int, int]]


def step_of(name: str) -> int | None:
    """The step that the first part of a name is of: ``00000042/…``; None for other names."""
    found = re.match(r"(\d{8,})(?:[/.]|$)", name)
    return int(found[1]) if found else None


_NAME = re.compile(r"(\d{3,})\.(\d{6,})\.(?:(here|left)|([0-9a-f]{64})\.packet)")


def read_folder(names: Sequence[str], slots: int | None = None) -> Present:
    """What the names in a step's folder say. Other names are ignored, and so are other slots."""
    packets: dict[int, Packet] = {}
    marks: Mapping[str, set] = {"here": set(), "left": set()}
    for found in filter(None, map(_NAME.fullmatch, sorted(names))):
        slot, incarnation, mark, digest = found.groups()
        member = int(slot), int(incarnation)
        if slots is not None and member[0] >= slots:
            continue
        if mark:
            marks[mark].add(member)
        else:
            packets[member[0]] = Packet(*member, digest)
    return Present(packets, frozenset(marks["here"]), frozenset(marks["left"]))

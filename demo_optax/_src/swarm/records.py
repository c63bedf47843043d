"""Keys and records of the objects in a swarm's store, which docs/reference/packet.md lists.

Manifests are never deleted: otherwise a worker that wakes up late could decide their steps anew.
Nothing in a store is ever executed. JSON is checked field by field, packets and files by hashes.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

FORMAT = 10  # of the store's objects and of packets; all workers of a run have the same

MOST_TOKENS = 10**16 - 1  # of a packet

MemberId = tuple[int, int]  # a slot, and its owner's incarnation: a new one at each joining


class SwarmError(RuntimeError):
    """A worker cannot go on with the others."""


class Damaged(SwarmError):
    """An object in the store was not written by a worker of this version."""


class PacketRef(NamedTuple):
    """Refers to a packet by its sender and its hash, and says how much training is in it."""

    slot: int
    incarnation: int
    sha256: str
    steps: int = 1  # that count; several with rounds, 0 if none had a finite gradient
    tokens: float = 1  # the weight of the message
    seal: str = ""  # its sender's signature, in a run for members only

    @property
    def member(self) -> MemberId:
        return self.slot, self.incarnation


class Manifest(NamedTuple):
    """Says which packets count in a step."""

    step: int  # in which the packets were built
    packets: tuple[PacketRef, ...]  # in the order of their slots, at most one per slot
    previous: str  # `head` of the step before; "" in the first one of an open run
    time: float  # seconds since 1970, by the clock of the worker that wrote it
    roster: str = ""  # the name of that which holds from the next step on
    lost: tuple[int, ...] = ()  # slots whose packets of the step before nobody applies

    @property
    def members(self) -> frozenset[MemberId]:
        return frozenset(packet.member for packet in self.packets)


class Claim(NamedTuple):
    """Says which worker owns a slot, and since when; each process has a nonce of its own."""

    worker: str
    nonce: str
    time: float


class SnapshotIndex(NamedTuple):
    """Locates a snapshot."""

    step: int  # the first one after the snapshot
    file: str  # the folder of its parts
    parts: int
    digest: str  # of the arrays
    head: str = ""  # of the step before
    since: int = 0  # the step of the last snapshot that was attested
    roster: str = ""  # the name of that which holds in the step
    lost: tuple[int, ...] = ()  # slots whose packets of the step before nobody applied


R = TypeVar("R", bound=Manifest | Claim | SnapshotIndex)

_COUNT, _TEXT, _HASH = r"\d{1,10}", '".*"', '"[0-9a-f]{64}"'
_TOKENS = r"\d{1,16}(?:\.\d{1,20})?(?:e-\d{1,2})?"  # as `tokens_of` gives them
_PACKET = rf'\[{_COUNT}, {_COUNT}, {_HASH}, {_COUNT}, {_TOKENS}, "(?:[0-9a-f]{{128}})?"\]'
ROSTER = "[0-9a-f]{32} [1-9][0-9]{0,7} [0-9a-f]{64} [0-9a-f]{128}"  # run, number, hash, signature
_PATTERNS = {  # of the JSON of each field
    "step": _COUNT,
    "packets": rf"\[{_PACKET}(, {_PACKET})*\]",
    "previous": f'""|{_HASH}',
    "lost": rf"\[(?:{_COUNT}(?:, {_COUNT})*)?\]",
    "time": r"\d{1,11}(\.\d+)?(e-\d+)?",  # to the year 5138
    "worker": _TEXT,
    "nonce": _TEXT,
    "file": r'"snapshots/\d{8,10}/[0-9a-f]{32}"',
    "parts": _COUNT,
    "digest": _HASH,
    "head": f'""|{_HASH}',
    "since": _COUNT,
    "roster": f'""|"{ROSTER}"',
}


def encode(record: Manifest | Claim | SnapshotIndex) -> bytes:
    return json.dumps(record._asdict()).encode()


def decode(kind: type[R], data: bytes | None, key: str = "an object") -> R:
    """Decodes a record; raises `Damaged`, with its key, where it is missing or not valid."""
    values = parse(data, kind._fields, key)
    if "lost" in kind._fields:
        values["lost"] = tuple(values["lost"])
    if kind is Manifest:
        values["packets"] = tuple(PacketRef(*x) for x in values["packets"])
    return kind(**{name: values[name] for name in kind._fields})


def parse(data: bytes | None, fields: Iterable[str] = (), key: str = "an object") -> dict[str, Any]:
    """Parses a JSON object; raises `Damaged` where it is missing, or a field is not valid."""
    with contextlib.suppress(ValueError, RecursionError):
        values = json.loads(data or b"")
        json.dumps(values, ensure_ascii=False).encode()  # no text has half of a surrogate pair
        if isinstance(values, dict) and all(_is_valid(x, values.get(x)) for x in fields):
            return values
    raise Damaged(
        f"{key} in the store holds {(data or b'')[:80]!r}, which no worker of this version wrote: "
        "use a place of its own for each run."
    )


def _is_valid(field: str, value: Any) -> bool:
    if not re.fullmatch(_PATTERNS[field], json.dumps(value)):
        return False
    if field == "worker" and not value.isprintable():  # others print it on their terminals
        return False
    slots = [slot for slot, *_ in value] if field == "packets" else []
    return slots == sorted(set(slots))


def sha256(data: bytes) -> str:
    """Returns the SHA-256 digest in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def head(manifest: Manifest, without: Iterable[int] = ()) -> str:
    """Returns the SHA-256 of what a step decided, which the next one names.

    It leaves out when that was written, and has the slots whose packets could not be read. The more
    these are, the smaller it is, so that of two equal sides the one that lacks more goes on: the
    other one can do without a packet, but nobody can do with one that is gone.
    """
    lost = sorted(without)
    digest = sha256(encode(manifest._replace(time=0.0)) + json.dumps(lost).encode())
    return f"{max(255 - len(lost), 0):02x}{digest[2:]}"


def claim_key(member: MemberId) -> str:
    return f"slots/{member[0]:03d}/{member[1]:06d}"


def left_key(member: MemberId) -> str:
    """Returns the key by which a worker says for good that it has left."""
    return f"{claim_key(member)}.left"


def step_key(folder: str, step: int) -> str:
    """Returns a step's key in one of the folders ``packets``, ``manifests`` and ``snapshots``."""
    return f"{folder}/{step:08d}"


def tokens_of(weight: float) -> float:
    """Returns a weight as a number that manifests hold, with 12 digits."""
    tokens = min(float(f"{weight:.12g}"), MOST_TOKENS)
    return int(tokens) if tokens == int(tokens) else tokens


def step_of(name: str) -> int | None:
    """Returns the step of a name such as ``00000042/…``, or None for other names."""
    match = re.match(r"(\d{8,})(?:[/.]|$)", name)
    return int(match[1]) if match else None


def step_in(key: str) -> int | None:
    """Returns the step that an object belongs to, if it belongs to one."""
    folder, _, name = key.partition("/")
    return step_of(name) if folder in ("packets", "manifests", "snapshots", "attested") else None


def steps_of(names: Iterable[str]) -> list[int]:
    """Returns the steps of all names that have one, in order."""
    return sorted(step for step in map(step_of, names) if step is not None)

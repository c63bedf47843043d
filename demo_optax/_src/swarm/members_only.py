"""The store of a run for members only: what no member has signed does not exist in it.

It is a `Store` itself, so that the rest of the swarm knows nothing of signatures. Its objects have
names that nobody without the run's secret can tell in advance.
"""

import contextlib
import os
import re
import time
from collections.abc import Sequence
from typing import NoReturn

from demo_optax._src.swarm import records, roster, seals
from demo_optax._src.swarm.records import Damaged, PacketRef, SwarmError
from demo_optax._src.swarm.roster import Roster
from demo_optax._src.swarm.seals import SIGNATURE_BYTES
from demo_optax._src.swarm.store import Store, in_parallel, log

HEAD = SIGNATURE_BYTES + 6  # of a sealed object: the signature, the roster's number, the slot

_SETTINGS = re.compile(r"run\.json|programs/[0-9a-f]{16}\.json")
_OWN = re.compile(  # written by this slot alone
    r"(?:(?:slots|settings)/|(?:attested|packets)/\d{8,10}/|snapshots/\d{8,10}\.)"
    r"(\d{3,9})(?:[/.]|$)"
)
_PART = re.compile(r"snapshots/\d{8,10}/[0-9a-f]{32}/\d{6}")  # an index has its hash
_TAGGED = re.compile(r"(.*/)?([0-9a-f]{32})\.([^/]+)", re.DOTALL)


class MembersOnly(Store):
    """A store in which only what members of the owner's roster have signed exists.

    Args:
      store: the store, to which anybody may write.
      key: the file of this member's key, or of the owner's, which can only read.
      owner: the file of the owner's public line.
      at_least: the lowest number of a roster to believe, as the owner says.

    Raises:
      SwarmError: there is no such roster, or the key is not in it.

    Example:
      >>> import os, pathlib, tempfile
      >>> from demo_optax._src.swarm import roster, seals
      >>> from demo_optax.swarm import ObjectStore
      >>> folder = tempfile.TemporaryDirectory()
      >>> keys = {name: os.path.join(folder.name, name) for name in ("owner", "paris")}
      >>> publics = {name: seals.make_key(f"{file}.key", name) for name, file in keys.items()}
      >>> for name, file in keys.items():
      ...     _ = pathlib.Path(f"{file}.pub").write_text(publics[name].line)
      >>> anybody = ObjectStore(os.path.join(folder.name, "run"))
      >>> owner = seals.read_key(f"{keys['owner']}.key")
      >>> anybody.put("roster.json", roster.change(None, owner, [publics["paris"]]))
      >>> store = MembersOnly(anybody, f"{keys['paris']}.key", f"{keys['owner']}.pub")
      >>> store.create("manifests/00000000", b"signed"), store.get("manifests/00000000")
      (True, b'signed')
      >>> anybody.get("manifests/00000000") is None
      True
      >>> folder.cleanup()
    """

    def __init__(
        self,
        store: Store,
        key: str | os.PathLike,
        owner: str | os.PathLike,
        *,
        at_least: int = 0,
    ):
        self.inner, self.key, self.owner = store, seals.read_key(key), seals.read_public(owner)
        self.patience = getattr(store, "patience", 60.0)
        self._holds: list[tuple[int, int]] = []  # steps from which rosters hold, and their numbers
        self._proven = 0  # the highest number that the owner has signed for all that is known
        self.known_since = time.monotonic()  # the roster
        self.min_workers = self.every = 1  # of the run, as its members know
        found = self._read_roster()
        if found is None or found.number < at_least:
            seen = f"number {found.number}" if found else f"none signed by {os.fspath(owner)!r}"
            raise SwarmError(
                f"the owner's roster is needed, of number {max(at_least, 1)} or higher, but {seen} "
                f"is in {self.url}: give --owner the public line of this run's owner, who writes "
                "its rosters by `demo-optax roster`."
            )
        self.roster, self._secrets = found, found.secrets(self.key)
        if not self._secrets:
            self._end_without_a_place()

    @property
    def url(self) -> str:
        return getattr(self.inner, "url", "")

    @property
    def slot(self) -> int:
        """This member's slot; raises SwarmError where it has none any more."""
        signs = self.key.public.signs
        for slot, public in self.roster.members().items():
            if public.signs == signs:
                return slot
        self._end_without_a_place()

    def _end_without_a_place(self) -> NoReturn:
        name, roster = self.key.name, self.roster
        were = [x.last for x in roster.entries if x.public.signs == self.key.public.signs]
        why = f"was taken out of the roster by number {were[-1] + 1}" if were else "is in no roster"
        raise SwarmError(
            f"the key of {name} {why}, and number {roster.number} is there: let the owner add its "
            "public line, or use the key of a member."
        )

    def members(self, step: int) -> dict[int, seals.Public]:
        """Returns the members by slot that may take part in a step."""
        return self.roster.members(self.number_at(step) or self.roster.number)

    def number_at(self, step: int | None) -> int:
        """Returns the number of the roster that holds in a step, or 0 where this is not known."""
        if step is None:
            return 0
        return max((number for first, number in self._holds if first <= step), default=0)

    def begin(self, step: int, named: str) -> None:
        """Says which roster holds from a snapshot on."""
        self._holds = [(step, roster.number_of(named))]

    def knows(self, step: int, named: str) -> bool:
        """Tells whether a roster is there that may hold from a step on: numbers never fall.

        A name proves that there is a roster, and then this member goes on with no earlier one.
        """
        number = roster.number_of(named)
        if number > self.roster.number and roster.is_proven(named, self.owner):
            if named.startswith(self.roster.run):
                self._proven = max(self._proven, number)
            self.look_for_roster()
        is_there = number > 0 and named == self.roster.named(number)
        return is_there and number >= self.number_at(step)

    @property
    def missing(self) -> str:
        """What is to be put back before this member decides anything, or an empty text."""
        if self._proven <= self.roster.number:
            return ""
        return (
            f"{roster.KEY} holds roster {self.roster.number}, but the owner has signed number "
            f"{self._proven}: put that one back"
        )

    def hold(self, step: int, named: str) -> None:
        """Lets a roster hold from a step on."""
        if (number := roster.number_of(named)) > self.number_at(step):
            self._holds = [*self._holds, (step, number)]

    def look_for_roster(self) -> None:
        """Takes over a roster of a higher number, if there is one."""
        found = self._read_roster()
        if found is not None and self.roster.name in found.earlier:
            self._secrets = found.secrets(self.key) or self._secrets
            self.roster, self.known_since = found, time.monotonic()

    def sign(self, step: int, packet: PacketRef, previous: str, kind: str = "packet") -> PacketRef:
        """Returns a reference with this member's signature."""
        said = self._said(kind, step, packet, previous)
        return packet._replace(seal=self.key.sign(*said).hex())

    def is_signed(self, step: int, packet: PacketRef, previous: str, kind: str = "packet") -> bool:
        """Tells whether a member has signed a packet that follows this head.

        Where it is not known which roster held, anybody who ever was one is a member.
        """
        number, said = self.number_at(step), self._said(kind, step, packet, previous)
        rosters = [number] if number else range(1, self.roster.number + 1)
        publics = {self.roster.members(n).get(packet.slot) for n in rosters} - {None}
        seal = bytes.fromhex(packet.seal)
        return any(x is not None and seals.is_signed(x.signs, seal, *said) for x in publics)

    def signer(self, step: int, packet: PacketRef, previous: str) -> str:
        """Returns the name of the member that signed a packet, whoever has its slot now."""
        said, seal = self._said("packet", step, packet, previous), bytes.fromhex(packet.seal)
        of_slot = (x.public for x in self.roster.entries if x.slot == packet.slot)
        signers = (x.name for x in of_slot if seals.is_signed(x.signs, seal, *said))
        return next(signers, f"slot {packet.slot}")

    def _said(self, kind: str, step: int, packet: PacketRef, previous: str) -> tuple:
        fields = (str(x) for x in packet[:-1])
        return kind, self.roster.run, step, *fields, previous

    def put(self, key: str, data: bytes) -> None:
        name = self._name(key)  # which another thread may change
        self.inner.put(name, self._sealed(key, data))
        if _OWN.match(key) and records.step_in(key) is not None:  # what it said there before
            names = {self._name(key, number) for number in self._numbers(key)}
            if others := names - {name}:
                self.inner.delete(sorted(others))

    def create(self, key: str, data: bytes) -> bool:
        """Writes an object unless a valid one exists; what is not valid is overwritten.

        Each member has settings of its own, and none that differ from those of the others.
        """
        if _SETTINGS.fullmatch(key):
            if is_agreed := self.get(key) in (None, data):
                self.put(f"settings/{self.slot:03d}/{key}", data)
            return is_agreed
        sealed = self._sealed(key, data)
        for write in self.inner.create, self.inner.put:
            if self.get(key) is not None:
                return False
            if write(self._name(key), sealed):
                return True
        return self.get(key) == data  # others may have done the same

    def get(self, key: str) -> bytes | None:
        if _SETTINGS.fullmatch(key):
            return self._settings_of_others(key)
        for number in self._numbers(key):
            with contextlib.suppress(Damaged):  # much too large
                data = self.inner.get(self._name(key, number))
                body = data if _PART.fullmatch(key) else self._opened(key, data)
                if body is not None:
                    return body
        return None

    def _settings_of_others(self, key: str) -> bytes | None:
        """Returns the settings of most other members, or this member's if no other has any."""
        members, own = sorted(self.roster.members().items()), self.key.public.signs
        found = in_parallel(self.get, [f"settings/{slot:03d}/{key}" for slot, _ in members])
        pairs = zip(members, found, strict=True)
        votes = [(public.signs == own, data) for (_, public), data in pairs if data is not None]
        counted = [x for is_own, x in votes if not is_own] or [x for _, x in votes]
        return max(counted, key=counted.count, default=None)  # of the lowest slot at a tie

    def names(self, folder: str) -> list[str]:
        return sorted(filter(None, (self._plain(folder, x) for x in self.inner.names(folder))))

    def delete(self, keys: Sequence[str]) -> None:
        every = range(1, len(self._secrets) + 1)
        self.inner.delete(sorted({self._name(key, n) for key in keys for n in every}))

    def _read_roster(self) -> Roster | None:
        with contextlib.suppress(Damaged):
            return roster.parse(self.inner.get(roster.KEY), self.owner)
        return None

    def _number_for(self, key: str) -> int:
        """Returns the number of the roster under which this member writes an object."""
        newest = self._holds[-1][1] if self._holds else self.roster.number
        return self.number_at(records.step_in(key)) or newest

    def _numbers(self, key: str) -> Sequence[int]:
        """Returns the numbers of rosters under which an object may be, the likeliest first."""
        step, newest = records.step_in(key), len(self._secrets)
        if not (held := self.number_at(step)):
            return range(newest, 0, -1)
        # For others a later one may hold there, or still the one of the step before.
        before = (self.number_at(step - 1) or held) if step else held
        return [*range(held, newest + 1), *range(before, held)]

    def _name(self, key: str, number: int = 0) -> str:
        """Returns the name of an object under a roster; who was taken out knows earlier ones."""
        if _PART.fullmatch(key):
            return key
        secret = self._secrets[: number or self._number_for(key)][-1]
        folder, slash, name = key.rpartition("/")
        tag = seals.tag(secret, "name", self.roster.run, key)[:16].hex()
        return f"{folder}{slash}{tag}.{name}"

    def _plain(self, folder: str, name: str) -> str | None:
        """Returns the name of an object without its tag, or None if the tag is wrong."""
        if _PART.fullmatch(f"{folder}/{name}"):
            return name
        if (match := _TAGGED.fullmatch(name)) is None:
            return None
        plain = (match[1] or "") + match[3]
        key = f"{folder}/{plain}"
        names = {self._name(key, n) for n in range(1, len(self._secrets) + 1)}
        return plain if f"{folder}/{name}" in names else None

    def _sealed(self, key: str, body: bytes) -> bytes:
        if _PART.fullmatch(key):
            return body
        about = self._number_for(key).to_bytes(4, "big") + self.slot.to_bytes(2, "big")
        digest = records.sha256(body)
        return self.key.sign("object", self.roster.run, key, about, digest) + about + body

    def _opened(self, key: str, data: bytes | None) -> bytes | None:
        """Returns what a member has signed under this key, else None."""
        if data is None or len(data) < HEAD:
            return None
        signature, about, body = data[:SIGNATURE_BYTES], data[SIGNATURE_BYTES:HEAD], data[HEAD:]
        number, slot = int.from_bytes(about[:4], "big"), int.from_bytes(about[4:], "big")
        step, own = records.step_in(key), _OWN.match(key)
        held = self.number_at(step)
        public = self.roster.members(number).get(slot)
        if step is None and public not in self.roster.members().values():
            public = None  # who was taken out says nothing more of the run
        is_foreign = own is not None and int(own[1]) != slot
        if public is None or not 0 < number <= self.roster.number or is_foreign:
            log.info("%s is of no member", key)
            return None
        if held and public != self.roster.members(held).get(slot):
            return None
        said = "object", self.roster.run, key, about, records.sha256(body)
        return body if seals.is_signed(public.signs, signature, *said) else None

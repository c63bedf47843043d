"""Keys, and all that is signed or sealed in a run for members only.

A key is a seed of 32 bytes. Two private keys follow from it: one signs (Ed25519), the other one
opens what was sealed for its owner (X25519). Nothing else in this library signs or verifies.
"""

import contextlib
import dataclasses
import functools
import hmac
import os
import pathlib
import re
import secrets
from typing import NamedTuple

from demo_optax._src.swarm.records import SwarmError
from demo_optax._src.swarm.store import log

try:
    from cryptography.exceptions import InvalidSignature, InvalidTag
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
except ImportError as error:
    needed = "keys need cryptography: in the source folder, pip install '.[swarm]'."
    raise ImportError(needed) from error

DOMAIN = "demo_optax/1"
SIGNATURE_BYTES = 64
BOX = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)  # RFC 9180
_NUMBER = "([0-9a-f]{64}) "
_NAME = r"((?![0-9a-f]{64} )\S.*)"  # otherwise a public line could be a key


def frame(*fields: bytes | str | int) -> bytes:
    """Joins fields, each behind its length, so that no two lists of fields give the same bytes."""
    parts = [x if isinstance(x, bytes) else str(x).encode() for x in (DOMAIN, *fields)]
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


class Public(NamedTuple):
    """What everybody may know of a key."""

    name: str
    signs: str  # the Ed25519 public key, in hexadecimal
    opens: str  # the X25519 public key, in hexadecimal

    @property
    def line(self) -> str:
        return f"{self.signs} {self.opens} {self.name}"


@dataclasses.dataclass(frozen=True, repr=False)
class Key:
    """A private key and its name; it is never printed."""

    name: str
    seed: bytes

    @functools.cached_property
    def _signs(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(tag(self.seed, "signs"))

    @functools.cached_property
    def _opens(self) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(tag(self.seed, "opens"))

    @functools.cached_property
    def public(self) -> Public:
        publics = self._signs.public_key(), self._opens.public_key()
        return Public(self.name, *(x.public_bytes_raw().hex() for x in publics))

    def sign(self, *fields: bytes | str | int) -> bytes:
        return self._signs.sign(frame(*fields))

    def open_box(self, box: bytes, *about: bytes | str | int) -> bytes | None:
        """Opens what `close_box` sealed for this key, or returns None for anything else."""
        with contextlib.suppress(InvalidTag):
            return BOX.decrypt(box, self._opens, frame(*about))
        return None


def close_box(public: Public, content: bytes, *about: bytes | str | int) -> bytes:
    """Seals bytes so that one key alone opens them, and only as what they are about."""
    opens = X25519PublicKey.from_public_bytes(bytes.fromhex(public.opens))
    return BOX.encrypt(content, opens, frame(*about))


@functools.lru_cache(maxsize=4096)
def _verify(signs: str, signature: bytes, message: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(signs)).verify(signature, message)
    except (ValueError, InvalidSignature):
        return False
    return True


def is_signed(signs: str, signature: bytes, *fields: bytes | str | int) -> bool:
    """Tells whether the owner of a public key has signed these fields."""
    return _verify(signs, signature, frame(*fields))


def tag(secret: bytes, *fields: bytes | str | int) -> bytes:
    """Returns 32 bytes that nobody without the secret can tell for these fields."""
    return hmac.digest(secret, frame(*fields), "sha256")


def make_key(path: str | os.PathLike, name: str) -> Public:
    """Writes a new key for its owner alone, and never over another file."""
    _require_name(name)
    key = Key(name, secrets.token_bytes(32))
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{key.seed.hex()} {name}\n")
    return key.public


def read_key(path: str | os.PathLike) -> Key:
    seed, name = _words(path, "a key as `demo-optax key` writes it", 1)
    if os.name == "posix" and os.stat(path).st_mode & 0o044:
        log.warning("others may read %s: chmod 600 %s", path, path)
    return Key(name, bytes.fromhex(seed))


def read_public(path: str | os.PathLike) -> Public:
    signs, opens, name = _words(path, "a public line as `demo-optax key` prints it", 2)
    return Public(name, signs, opens)


def _words(path: str | os.PathLike, what: str, numbers: int) -> list[str]:
    """Reads a line of hexadecimal numbers and a name; no message repeats what it holds."""
    with open(path, encoding="utf-8", errors="replace") as file:
        text = file.read(2000)
    if match := re.fullmatch(f"{_NUMBER * numbers}{_NAME}\n?", text):
        _require_name(match.groups()[-1])
        return list(match.groups())
    if re.fullmatch(f"{_NUMBER * 2}{_NAME}\n?", text):
        key = pathlib.Path(path).with_suffix(".key")
        raise SwarmError(
            f"{os.fspath(path)!r} holds a public line: give the file of the key, {key}."
        )
    raise SwarmError(f"{os.fspath(path)!r} does not hold {what}: give its file.")


def _require_name(name: str) -> None:
    if not re.fullmatch(_NAME, name) or not name.isprintable():
        raise SwarmError(
            "a key needs a name of characters that can be printed, without a space or a key in "
            f"front, not {name!r}."
        )

"""What a program prints, where that must not end it."""

import contextlib
import errno
import io
import sys
from collections.abc import Iterator
from typing import TextIO, cast

FULL = errno.ENOSPC, errno.EDQUOT
"""The errors of a disk that is full."""


class Printed:
    """A stream that drops what a full disk does not take, and escapes what it cannot encode."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str):
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with _unless_full():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with _unless_full():
            self._stream.flush()


def end_no_training() -> None:
    """Lets nothing that this process prints end it."""
    sys.stdout, sys.stderr = (cast(TextIO, Printed(x)) for x in (sys.stdout, sys.stderr))


@contextlib.contextmanager
def _unless_full() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise

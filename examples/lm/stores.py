"""Places that may be on a disk or in a store, such as ``gs://bucket/file``."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec

from demo_optax.checkpoint import folder_of


def exists(place: str) -> bool:
    store, path = _opened(place)
    return store.exists(path)


def read(place: str) -> bytes:
    store, path = _opened(place)
    store.invalidate_cache()  # another process may have written it
    return store.cat_file(path)


def write(place: str, content: bytes) -> None:
    """Writes a file, whole or not at all, and makes the folders that it is in."""
    store, path = _opened(place)
    folder, _, name = path.rpartition("/")
    store.makedirs(folder, exist_ok=True)
    unfinished = f"{folder}/.{name}.{os.getpid()}"
    store.pipe_file(unfinished, content)
    store.mv(unfinished, path)


@contextlib.contextmanager
def on_disk(place: str) -> Iterator[Path]:
    """The path of a file or folder; for a URL, the path of a temporary copy.

    Raises:
      FileNotFoundError: there is nothing at that place.
    """
    if (own := folder_of(place)) is not None:
        yield own
        return
    store, path = _opened(place)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.rstrip("/").rpartition("/")[2]
        store.get(path, str(copy), recursive=True)
        yield copy


def _opened(place: str) -> tuple[Any, str]:
    return fsspec.url_to_fs(str(folder_of(place) or place))

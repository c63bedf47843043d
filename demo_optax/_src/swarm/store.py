"""The store of a swarm: any object store, through obstore, or a folder.

Objects are written once and never change, so readers may keep them.
"""

import contextlib
import functools
import logging
import math
import os
import pathlib
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar, runtime_checkable

from demo_optax._src.places import folder_of
from demo_optax._src.swarm.records import Damaged

try:
    import obstore
    from obstore import exceptions
    from obstore.store import from_url
except ImportError as error:
    needed = "a swarm needs obstore: in the source folder, pip install '.[swarm]'."
    raise ImportError(needed) from error

K = TypeVar("K")
T = TypeVar("T")

log = logging.getLogger("demo_optax.swarm")

NO_RETRIES = {"retry_config": {"max_retries": 0}}  # of obstore: this module retries by itself
EXISTING = exceptions.AlreadyExistsError, exceptions.PreconditionError
MISSING = exceptions.NotFoundError, FileNotFoundError, exceptions.PreconditionError
# obstore ends each request after 30 seconds, so that large objects need several.
LEAVING = 5.0  # seconds for which a worker that leaves tries
PART = 4_000_000  # bytes that a request reads; only packets may have more
MAX_UPLOADS = 2  # parts of 5 MB that are written in parallel
_NAME = re.compile(r"[0-9A-Za-z._-]+(?:/[0-9A-Za-z._-]+)*")  # what workers write


class StoreError(OSError):
    """A store did not do what it was asked, however often it was asked."""


@runtime_checkable
class Store(Protocol):
    """What a swarm needs of a store. All methods may be called from several threads."""

    def put(self, key: str, data: bytes) -> None:
        """Writes an object."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Writes an object unless it exists; of several writers exactly one gets True."""
        ...

    def get(self, key: str) -> bytes | None:
        """Reads an object, or returns None where there is none."""
        ...

    def names(self, folder: str) -> list[str]:
        """Lists the objects in a folder and its subfolders, without the folder's own name."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Deletes objects, and ignores those that do not exist."""
        ...


class ObjectStore(Store):
    """A `Store` on S3, GCS, Azure or a local folder.

    Failed requests are sent again after growing pauses, until they have failed for ``patience``
    seconds, or for as long as something is in the way that no worker wrote, such as a file in place
    of a folder, which the log names. Packets may be large, and are read and written in parts. Other
    objects of a swarm have at most 4 MB, and a larger one is not read, whoever wrote it. A folder's
    objects are its files.

    After a fork the store works only in the process that used it first. Start processes that use a
    store of their own by ``spawn`` or ``forkserver``.

    Args:
      url: ``file:///folder``, ``s3://bucket/run``, ``gs://bucket/run``, ``az://container/run``, or
        a path. A URL must be a string, since `pathlib.Path` makes a folder's name of it.
      patience: seconds for which a failing request is tried again.
      options: options of the store, such as endpoint, region and keys; see obstore's ``from_url``.
        What they leave out comes from the environment.

    Attributes:
      packet_bytes: the most bytes that a packet may have, or None for any number. A `SwarmWorker`
        sets it, since it knows how large its own packets are.
      is_leaving: whether the worker is about to end, so that nothing is tried for more than five
        seconds. `Member.leave` sets it.

    Raises:
      StoreError: the store does not work, or was used before this process was forked.
      SwarmError: an object has more bytes than it may have.

    Example:
      >>> import tempfile
      >>> folder = tempfile.TemporaryDirectory()
      >>> store = ObjectStore(folder.name)
      >>> store.create("steps/7", b"mine"), store.create("steps/7", b"yours")
      (True, False)
      >>> store.get("steps/7"), store.names("steps")
      (b'mine', ['7'])
      >>> folder.cleanup()
    """

    def __init__(
        self,
        url: str | os.PathLike,
        *,
        patience: float = 60.0,
        options: Mapping[str, Any] | None = None,
    ):
        self.url, self.patience = str(url), patience
        self.packet_bytes: int | None = None
        self.is_leaving = False
        self._folder: pathlib.Path | None = None
        try:
            if folder := folder_of(self.url):
                folder.mkdir(parents=True, exist_ok=True)
                self._folder = folder.absolute()
                self._store = from_url(self._folder.as_uri(), automatic_cleanup=True)
            else:
                open_any: Callable[..., Any] = from_url  # its overloads want each store's options
                self._store = open_any(self.url, **(NO_RETRIES | dict(options or {})))
        except Exception as error:
            raise StoreError(f"{self.url} is no store that can be opened: {error}") from error

    def put(self, key: str, data: bytes) -> None:
        put = functools.partial(obstore.put, self._store, key, data, max_concurrency=MAX_UPLOADS)
        self._persist(f"write {key}", put, key)

    def create(self, key: str, data: bytes) -> bool:
        def attempt() -> bool:
            try:
                obstore.put(self._store, key, data, mode="create")
            except EXISTING:
                if self._obstacle(key):
                    raise
                obstore.head(self._store, key)  # raises if it does not exist: try again
                return False
            return True

        return bool(self._persist(f"create {key}", attempt, key))

    def get(self, key: str) -> bytes | None:
        what, data = f"read {key}", bytearray()
        most = self.packet_bytes if key.endswith(".packet") else PART

        def read(meta: Any = None) -> Any:
            """Begins, or reads the next part of an object that has not changed since."""
            if self._obstacle(key):  # a named pipe would keep this thread for good
                return None
            part: Any = meta and {"range": (len(data), len(data) + PART), "if_match": meta["e_tag"]}
            answer = obstore.get(self._store, key, options=part)
            if meta is None:
                data.clear()
            if meta or answer.meta["size"] <= PART:
                data.extend(bytes(answer.bytes()))
            return answer.meta

        while meta := self._persist(what, read):
            if most is not None and meta["size"] > most:
                raise Damaged(
                    f"{key} in {self.url} has {meta['size']:,} bytes, and no worker of this run "
                    f"writes more than {most:,} there: use a place of its own for each run."
                )
            following = functools.partial(read, meta)
            while len(data) < meta["size"] and self._persist(what, following):
                pass
            if len(data) == meta["size"]:
                return bytes(data)
        return None

    def names(self, folder: str) -> list[str]:
        def attempt() -> list[str]:
            if self._folder:
                return _files(self._folder / folder)
            # Names begin with a digit or a letter. S3 leaves out those before, such as //x.
            listing = obstore.list(self._store, folder, offset=f"{folder}/0").collect()
            return [str(x["path"]).removeprefix(f"{folder}/") for x in listing]

        found = self._persist(f"list {folder}", attempt) or ()
        return sorted(filter(_NAME.fullmatch, found))

    def delete(self, keys: Sequence[str]) -> None:
        def attempt() -> None:
            try:
                obstore.delete(self._store, list(keys))
            except MISSING:  # at which a folder's store stops
                for key in keys:
                    with contextlib.suppress(*MISSING):
                        obstore.delete(self._store, key)

        if keys:
            self._persist(f"delete {len(keys)} objects", attempt)

    def _obstacle(self, key: str) -> pathlib.Path | None:
        """Returns what a folder has in place of an object, or of a folder that the object is in."""
        if not (self._folder and key):
            return None
        path = self._folder / key
        folders = path.parents[: key.count("/")]
        checked = [*((x, x.is_dir()) for x in folders), (path, path.is_file())]
        return next((x for x, is_right in checked if not is_right and os.path.lexists(x)), None)

    def _persist(self, what: str, attempt: Callable[[], T], written: str = "") -> T | None:
        """Tries until it works; returns None where an object is missing, or read and changed.

        A lost answer does no harm: the next try finds what was created meanwhile, and whoever
        creates an object reads what stands.
        """
        if (first := _first_process()) != os.getpid():
            raise StoreError(
                f"cannot {what} in {self.url}: process {first} had used a store before this one, "
                f"{os.getpid()}, was forked from it, and the threads of the store are not here. "
                'Start processes by multiprocessing.get_context("spawn"), or use stores only after '
                "the fork."
            )
        first_failure, pause = None, 0.05
        while True:
            try:
                return attempt()
            except Exception as error:
                if not written and isinstance(error, MISSING):
                    return None
                # obstore's own representation follows after an empty line.
                reason = " ".join(str(error).partition("\n\n")[0].split())[:300]
                if obstacle := self._obstacle(written):
                    reason = f"{obstacle} is in the way, and no worker wrote it: take it away"
                # obstore cannot list a folder with another's object that has an invalid path.
                is_blocked, now = bool(obstacle) or "invalid path" in reason, time.monotonic()
                first_failure = first_failure or now
                patience = math.inf if is_blocked else self.patience
                patience, failing = (
                    min(patience, LEAVING) if self.is_leaving else patience,
                    now - first_failure,
                )
                if failing > patience or _is_denied(error):
                    raise StoreError(
                        f"cannot {what} in {self.url}, tried for {failing:.0f} s: {reason}. Make "
                        "sure that the store can be reached, and that this worker may read, list, "
                        "write and delete there."
                    ) from error
                log.warning("cannot %s, tries again: %s", what, reason)
                time.sleep(pause)
                pause = min(2 * pause, 5.0)


def _files(folder: str | os.PathLike, prefix: str = "") -> list[str]:
    """Returns the names of all files in a folder and its subfolders; links are none."""
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                found += _files(entry.path, f"{prefix}{entry.name}/")
            elif entry.is_file(follow_symlinks=False):
                found.append(prefix + entry.name)
    return found


def _is_denied(error: Exception) -> bool:
    """Tells whether permission is missing, which obstore says of folders only in the text."""
    is_denied = isinstance(error, exceptions.PermissionDeniedError | PermissionError)
    return is_denied or "Permission denied (os error 13)" in str(error)


@functools.cache
def _first_process() -> int:
    """Returns the process that sent the first request: obstore's threads do not survive a fork."""
    return os.getpid()


REQUESTS = "requests"  # what threads for these are called


@functools.cache
def _requests(process: int) -> ThreadPoolExecutor:
    """Returns the threads of a process, since a forked one has none of its parent's."""
    return ThreadPoolExecutor(16, REQUESTS)


def in_parallel(fn: Callable[[K], T], keys: Iterable[K]) -> list[T]:
    """Maps a function over keys, many at the same time, but not in one of the threads for this."""
    if threading.current_thread().name.startswith(REQUESTS):
        return list(map(fn, keys))
    return list(_requests(os.getpid()).map(fn, keys))

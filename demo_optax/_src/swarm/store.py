"""Where a swarm's packets and decisions lie: any object store, by obstore, or a folder.

A key's object is written once and never changed, so that whoever reads it may keep it.
"""

import contextlib
import functools
import logging
import pathlib
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar, runtime_checkable

try:
    import obstore
    from obstore.exceptions import (
        AlreadyExistsError,
        NotFoundError,
        PermissionDeniedError,
        PreconditionError,
    )
    from obstore.store import from_url
except ImportError as error:
    raise ImportError("a swarm needs obstore: pip install 'demo_optax[swarm]'.") from error

K = TypeVar("K")
T = TypeVar("T")

log = logging.getLogger("demo_optax.swarm")

ONE_TRY = {"retry_config": {"max_retries": 0}}  # this module tries again
AT_ONCE = 16  # requests under way
# Each request has obstore's 30 seconds, so a large object is written and read in several.
PART = 4_000_000  # bytes that a request reads
WRITTEN_AT_ONCE = 2  # parts of 5 MB


class StoreError(OSError):
    """A store did not do what it was asked, however often it was asked."""


@runtime_checkable
class Store(Protocol):
    """What a swarm asks of a store. Every method may be called from several threads."""

    def put(self, key: str, data: bytes) -> None:
        """Writes an object."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Writes an object unless there is one: among all workers, the first wins."""
        ...

    def get(self, key: str) -> bytes | None:
        """Reads an object; None where there is none."""
        ...

    def names(self, folder: str) -> list[str]:
        """Names of the objects in a folder and its subfolders, without the folder's own."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Deletes objects; those that are gone already do not matter."""
        ...


class ObjectStore:
    """A `Store` on S3, GCS, Azure or a local folder.

    A request that fails is sent again, with growing pauses, until it has failed for ``patience``
    seconds. Large objects are read and written in parts.

    Args:
      url: ``file:///folder``, ``s3://bucket/run``, ``gs://bucket/run``, ``az://container/run``, or
        a path.
      patience: seconds.
      options: for the store: endpoint, region, keys; see obstore's ``from_url``. What is left out
        comes from the environment.

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
        self, url: str, *, patience: float = 60.0, options: Mapping[str, Any] | None = None
    ):
        self.url, self.patience = str(url), patience
        local = "://" not in self.url or self.url.startswith("file://")
        try:
            if local:
                path = pathlib.Path(_path_of(self.url)).absolute()
                path.mkdir(parents=True, exist_ok=True)
                self._store = from_url(path.as_uri())
            else:
                made: Callable[..., Any] = from_url  # whose overloads know each store's options
                self._store = made(self.url, **(ONE_TRY | dict(options or {})))
        except Exception as error:
            raise StoreError(f"{self.url} is no store that can be opened: {error}") from error

    def put(self, key: str, data: bytes) -> None:
        """Writes an object."""
        self._persist(
            f"write {key}",
            lambda: obstore.put(self._store, key, data, max_concurrency=WRITTEN_AT_ONCE),
        )

    def create(self, key: str, data: bytes) -> bool:
        """Writes an object unless there is one."""

        def attempt() -> bool:
            try:
                obstore.put(self._store, key, data, mode="create")
            except (AlreadyExistsError, PreconditionError):
                obstore.head(self._store, key)  # where it is not there, the next try may win
                return False
            return True

        return self._persist(f"create {key}", attempt)

    def get(self, key: str) -> bytes | None:
        """Reads an object; None where there is none."""
        what, read = f"read {key}", bytearray()
        found = self._persist(what, lambda: self._whole(key))
        if not isinstance(found, int):
            return found
        while len(read) < found:
            part = self._persist(what, functools.partial(self._part, key, len(read)))
            if part is None:
                return None
            read += part
        return bytes(read)

    def names(self, folder: str) -> list[str]:
        """Names of the objects in a folder and its subfolders."""

        def attempt() -> list[str]:
            try:
                found = obstore.list(self._store, folder).collect()
            except (NotFoundError, FileNotFoundError):
                return []
            return sorted(str(x["path"]).removeprefix(f"{folder}/") for x in found)

        return self._persist(f"list {folder}", attempt)

    def delete(self, keys: Sequence[str]) -> None:
        """Deletes objects."""

        def attempt() -> None:
            with contextlib.suppress(NotFoundError, FileNotFoundError):
                obstore.delete(self._store, list(keys))

        if keys:
            self._persist(f"delete {len(keys)} objects", attempt)

    def _whole(self, key: str) -> bytes | int | None:
        """An object; of one with more bytes than a part their number."""
        try:
            found = obstore.get(self._store, key)
            size = found.meta["size"]
            return size if size > PART else bytes(found.bytes())
        except (NotFoundError, FileNotFoundError):
            return None

    def _part(self, key: str, first: int) -> bytes | None:
        try:
            return bytes(obstore.get_range(self._store, key, start=first, length=PART))
        except (NotFoundError, FileNotFoundError):
            return None

    def _persist(self, what: str, attempt: Callable[[], T]) -> T:
        """Tries until it works.

        A lost answer does no harm: what was created meanwhile is found by the next try, and
        whoever created anything reads what stands.
        """
        first_failure, pause = None, 0.05
        while True:
            try:
                return attempt()
            except Exception as error:
                reason = " ".join(str(error).split())[:300]
                first_failure = first_failure or time.monotonic()
                failing = time.monotonic() - first_failure
                if isinstance(error, PermissionDeniedError) or failing > self.patience:
                    raise StoreError(
                        f"cannot {what} in {self.url}, tried for {failing:.0f} s: {reason}. Make "
                        "sure that the store can be reached, and that every worker may read, list, "
                        "write and delete there."
                    ) from error
                log.warning("cannot %s, tries again: %s", what, reason)
                time.sleep(pause)
                pause = min(2 * pause, 5.0)


def _path_of(url: str) -> str:
    if not url.startswith("file://"):
        return url
    return urllib.request.url2pathname(urllib.parse.urlparse(url).path)


def in_parallel(fn: Callable[[K], T], keys: Iterable[K]) -> list[T]:
    """``fn`` of each key, several at once."""
    keys = list(keys)
    if len(keys) < 2:
        return list(map(fn, keys))
    with ThreadPoolExecutor(min(AT_ONCE, len(keys))) as pool:
        return list(pool.map(fn, keys))

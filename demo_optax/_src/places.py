"""Places that a user names: a path, or the URL of a folder or of a store."""

import os
import pathlib
import re
import urllib.request

_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]+:"  # two characters at least, since C: is a drive


def folder_of(place: str | os.PathLike) -> pathlib.Path | None:
    """Returns the path that a path or a ``file://`` URL names, or None for other URLs.

    Raises:
      ValueError: the place is empty, the URL has gone through `pathlib.Path`, or it names a folder
        on another host.

    Example:
      >>> folder_of("file:///data/run").as_posix(), folder_of("s3://bucket/run")
      ('/data/run', None)
    """
    path = str(place)
    if not path:
        raise ValueError("'' names no place, as if a variable was not set: give a path or a URL.")
    if re.match(f"{_SCHEME}//", path):
        scheme, _, rest = path.partition("://")
        if scheme.lower() != "file":
            return None
        host, slash, path = rest.partition("/")
        if host.lower() not in ("", "localhost") or not slash:
            raise ValueError(
                f"{str(place)!r} names a folder on the host {host!r}, and only those of this host "
                "can be used: give file:///path, or the path alone."
            )
        path = urllib.request.url2pathname(f"/{path}")
    if found := [part for part in pathlib.Path(path).parts if re.fullmatch(_SCHEME, part)]:
        raise ValueError(
            f"{str(place)!r} has a folder {found[0]!r}, as if a URL had gone through pathlib.Path: "
            f"give the URL as a string that begins with '{found[0]}//', or rename the folder."
        )
    return pathlib.Path(path)

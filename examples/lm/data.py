"""Text: where it comes from, what is held out, and the windows that are read from it.

A document is a file, a record of an ArrayRecord file, or a row of a Hugging Face dataset.
"""

import hashlib
import sys
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import grain
import numpy as np

from . import stores
from .tokens import Tokens

HELD_OUT = 0.05  # share of the documents
LEAST_HELD_OUT, MOST_HELD_OUT = 0.01, 0.2  # shares of the text; else its end is held out


class Text(NamedTuple):
    """Documents to train on, and held-out ones."""

    train: list[str]
    held_out: list[str]


class Corpus(NamedTuple):
    """Tokens to train on and held-out ones, unsigned integers; bytes of text to a token."""

    train: np.ndarray
    held_out: np.ndarray
    bytes_per_token: float

    @property
    def checksum(self) -> int:
        """Checksum of the tokens to train on."""
        return zlib.crc32(self.train.tobytes())


def read(places: Sequence[str] = ()) -> Text:
    """Reads documents, by default the sources of Python's standard library.

    A place is a path or a URL; what a URL names is copied to a temporary folder and read there.

    Whole documents are held out, chosen by a hash of their name, which is a file's path or the
    number of a record or row: the choice is the same on every machine. Where that holds out too
    much or too little, as with a single file, the end of the whole text is held out instead.

    Raises:
      ValueError: a place does not exist, cannot be read, or holds no text.
    """
    sources: Sequence[str | None] = places or [None]
    named = [item for place in sources for item in _named(place)]
    if not named:
        raise ValueError(
            f"no text found in {', '.join(places) or 'the standard library'}: --text "
            "takes files or folders of UTF-8 text, *.arrayrecord files of such text, or a folder "
            "that datasets' save_to_disk wrote, with a column `text`."
        )
    text = Text(
        [content for name, content in named if _hash(name) >= HELD_OUT],
        [content for name, content in named if _hash(name) < HELD_OUT],
    )
    sizes = [sum(map(len, part)) for part in text]
    if LEAST_HELD_OUT <= sizes[1] / sum(sizes) <= MOST_HELD_OUT:
        return text
    whole = "\n".join(content for _, content in named)
    cut = int(len(whole) * (1 - HELD_OUT))
    return Text([whole[:cut]], [whole[cut:]])


def _named(place: str | None) -> list[tuple[str, str]]:
    """All documents at a place, or a ValueError that names it."""
    try:
        if place is None:
            return list(_files(Path(sysconfig.get_path("stdlib")), "*.py", {"site-packages"}))
        with stores.on_disk(place) as path:
            return list(documents(path))
    except Exception as error:  # the formats' libraries have errors of many types
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"--text {place or 'by default'} cannot be read ({what})") from error


def documents(path: Path) -> Iterable[tuple[str, str]]:
    """Names and texts of all documents at a path, in a fixed order."""
    if not path.exists():
        raise FileNotFoundError("there is no such file or folder.")
    if (path / "dataset_dict.json").exists():
        splits = sorted(inside.name for inside in path.iterdir() if inside.is_dir())
        raise ValueError(
            "it is a dataset of several splits: give one of them, as in "
            f"{'/'.join([path.name, *splits[:1]])}."
        )
    if (path / "dataset_info.json").exists():
        rows: Any = datasets.load_from_disk(str(path))
        if "text" not in rows.column_names:
            columns = ", ".join(rows.column_names)
            raise ValueError(f"the dataset has columns {columns}, but no `text`.")
        return ((f"row {i}", row["text"]) for i, row in enumerate(rows) if row["text"])
    shards = sorted(path.glob("*.arrayrecord")) if path.is_dir() else [path]
    if shards and shards[0].suffix == ".arrayrecord":
        records: Any = grain.sources.ArrayRecordDataSource(list(map(str, shards)))
        return ((f"{path.name}:{i}", records[i].decode()) for i in range(len(records)))
    return _files(path, "*", set())


def _files(root: Path, pattern: str, without: set[str]) -> Iterator[tuple[str, str]]:
    inside = root.rglob(pattern) if root.is_dir() else [root]
    left_out, has_text = [], False
    for path in sorted(inside):
        name = path.relative_to(root if root.is_dir() else root.parent)
        hidden = any(part.startswith(".") for part in name.parts)
        if path.is_file() and not hidden and not without & set(name.parts):
            try:
                content = path.read_bytes().decode()
            except UnicodeDecodeError:
                content = "\0"
            if "\0" in content:
                left_out.append(path)
            elif content:
                has_text = True
                yield name.as_posix(), content
    if left_out and has_text and pattern == "*":
        size = sum(path.stat().st_size for path in left_out)
        print(
            f"warning: {len(left_out)} files of {size:,} bytes are no UTF-8 text and are left out, "
            f"such as {left_out[0]}",
            file=sys.stderr,
        )


def _hash(name: str) -> float:
    """A number in [0, 1) for a name, the same on every machine."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) / 2**64


def encode(text: Text, tokens: Tokens, length: int) -> Corpus:
    """Raises ValueError where a side has fewer than ``length + 1`` tokens."""
    train, held_out = tokens.encode(text.train), tokens.encode(text.held_out)
    if min(train.size, held_out.size) < length + 1:
        raise ValueError(
            f"the text is too short: {train.size:,} tokens to train on and {held_out.size:,} held "
            f"out, of which {length + 1:,} are read at a time. Give more text, or a smaller "
            "--sequence-length."
        )
    held_out_bytes = sum(len(document.encode()) + 1 for document in text.held_out)
    return Corpus(train, held_out, held_out_bytes / held_out.size)


def batches(
    tokens: np.ndarray,
    shape: tuple[int, int],
    seed: int,
    start: int,
    process: int,
    processes: int,
) -> Iterator[np.ndarray]:
    """One process's rows of batches ``(batch, length + 1)``, from the window ``start`` on.

    Windows come in an order that is shuffled anew for each pass over the text. Each process reads
    as many rows of every batch, ahead of time, and together they read them in that order.
    """
    batch, length = shape
    places = grain.MapDataset.range(0, tokens.size - length, length).seed(seed).shuffle().repeat()
    parts = places[start:].batch(batch // processes)[process::processes]
    windows = parts.map(lambda at: _windows(tokens, at, length))
    return iter(windows.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))


def even_windows(tokens: np.ndarray, length: int, total: int) -> np.ndarray:
    """Windows ``(count, length + 1)`` of so many tokens together, evenly spread over the text."""
    count = max(min(total, tokens.size) // length, 1)
    starts = np.linspace(0, tokens.size - length - 1, count).astype(int)
    return _windows(tokens, starts, length)


def _windows(tokens: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    return tokens[starts[:, None] + np.arange(length + 1)]


def bigram_entropy(corpus: Corpus) -> float:
    """Nats per held-out byte, given the byte before, for bigrams counted on the training text."""
    pairs = corpus.train[:-1].astype(np.int32) * 256 + corpus.train[1:]
    counts = np.bincount(pairs, minlength=256 * 256).reshape(256, 256) + 0.01
    log_probability = np.log(counts / counts.sum(axis=1, keepdims=True))
    return -float(log_probability[corpus.held_out[:-1], corpus.held_out[1:]].mean())

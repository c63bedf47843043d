"""Text as bytes: where it comes from, what is held out, and the windows that are read from it."""

import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

HELD_OUT = 0.05  # share of the files
END_OF_FILE = b"\0"


class Text(NamedTuple):
    """Training and held-out text, uint8 each, and the number of files that they are made of."""

    train: np.ndarray
    held_out: np.ndarray
    train_files: int
    held_out_files: int


def read(paths: Sequence[Path] = (), length: int = 1) -> Text:
    """Reads files and folders, by default the sources of Python's standard library.

    Whole files are held out, chosen by a hash of their path in the folder: the choice depends
    neither on the machine nor on the other files. Where that leaves one side empty, as with a
    single file, the end of the whole text is held out instead.

    Raises:
      FileNotFoundError: a path does not exist.
      ValueError: there is no text, or a side has fewer than ``length + 1`` bytes.
    """
    files = list(_files(paths))
    if not files:
        raise ValueError(f"no text found in {', '.join(map(str, paths)) or 'the standard library'}")
    held_out = [content for name, content in files if _hash(name) < HELD_OUT]
    train = [content for name, content in files if _hash(name) >= HELD_OUT]
    if held_out and train:
        text = Text(_join(train), _join(held_out), len(train), len(held_out))
    else:
        whole = _join([content for _, content in files])
        train_part, held_out_part = np.split(whole, [int(whole.size * (1 - HELD_OUT))])
        text = Text(train_part, held_out_part, len(files), 0)
    shortest = min(text.train.size, text.held_out.size)
    if shortest < length + 1:
        raise ValueError(
            f"the text is too short: {text.train.size:,} bytes to train on and "
            f"{text.held_out.size:,} held out, of which {length + 1:,} are read at a time. "
            "Give more text, or a smaller sequence length."
        )
    return text


def _files(paths: Sequence[Path]) -> Iterator[tuple[str, bytes]]:
    """Relative paths and contents of all files that are text, in the order of their names."""
    library = Path(sysconfig.get_path("stdlib"))
    for root in paths or [library]:
        if not root.exists():
            raise FileNotFoundError(f"there is no file or folder {root}")
        inside = root.rglob("*" if paths else "*.py") if root.is_dir() else [root]
        for path in sorted(inside):
            name = path.relative_to(root if root.is_dir() else root.parent)
            hidden = any(part.startswith(".") for part in name.parts)
            installed = not paths and {"site-packages", "dist-packages"} & set(name.parts)
            if path.is_file() and not hidden and not installed:
                content = path.read_bytes()
                if content and _is_text(content):
                    yield name.as_posix(), content


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return END_OF_FILE not in content


def _hash(name: str) -> float:
    """A number in [0, 1) for a path, the same on every machine."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) / 2**64


def _join(contents: list[bytes]) -> np.ndarray:
    return np.frombuffer(END_OF_FILE.join(contents), np.uint8)


def random_windows(text: np.ndarray, shape: tuple[int, int], seed: int, step: int):
    """The batch ``(batch, length + 1)`` of a step, from random places, as a function of its rows.

    Every process knows all places and reads those of its own rows, and a run that goes on at some
    step needs no more than the number of that step.
    """
    generator = np.random.default_rng([seed, step])
    starts = generator.integers(0, text.size - shape[1], shape[0])
    return lambda rows: _windows(text, starts[rows], shape[1])


def even_windows(text: np.ndarray, shape: tuple[int, int], batches: int) -> list[np.ndarray]:
    """Batches ``(batch, length + 1)`` that lie evenly in the text, always the same."""
    starts = np.linspace(0, text.size - shape[1] - 1, batches * shape[0]).astype(int)
    # Each batch holds windows from everywhere, so that fewer batches are a sample of more.
    return [_windows(text, starts[i::batches], shape[1]) for i in range(batches)]


def _windows(text: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    return text[starts[:, None] + np.arange(length + 1)]


def bigram_entropy(text: Text) -> float:
    """Nats per held-out byte, given the byte before, for bigrams counted on the training text."""
    pairs = text.train[:-1].astype(np.int32) * 256 + text.train[1:]
    counts = np.bincount(pairs, minlength=256 * 256).reshape(256, 256) + 0.01
    log_probability = np.log(counts / counts.sum(axis=1, keepdims=True))
    return -float(log_probability[text.held_out[:-1], text.held_out[1:]].mean())

"""Numbers that stand for settings in a state, which holds arrays alone.

A momentum means nothing without the transform, the blocks and the seed that it was made with, and a
message that is kept means nothing without its selection. A state holds the *word* of these
settings, a checksum of their text. `known` returns the settings of a word that this process has
made, for descriptions and messages.
"""

import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

_KNOWN: dict[int, Any] = {}


def word_of(settings: Any) -> np.uint32:
    """Returns the word of settings, which must have the same ``repr`` in every process."""
    word = zlib.crc32(repr(settings).encode())
    _KNOWN[word] = settings
    return np.uint32(word)


def known(word: Any) -> Any:
    """Returns the settings of a word, or None if this process has made no state of theirs."""
    return _KNOWN.get(int(np.ravel(word)[0]))


def of_text(text: str) -> Any:
    """Returns the settings whose ``repr`` this is, or None if this process has made none."""
    return _KNOWN.get(zlib.crc32(text.encode()))


def require(what: str, words: Mapping[str, Any], settings: Mapping[str, Any], remedy: str) -> None:
    """Refuses words other than those of the settings, where they are known.

    ``what`` begins the message and ``remedy`` ends it; both mappings are by the leaves' names.
    """
    for name, wanted in settings.items():
        given = words[name]
        if isinstance(given, (Tracer, jax.ShapeDtypeStruct)):
            continue
        if np.any(np.asarray(given) != word_of(wanted)):
            made = known(given) or "settings that this process does not know"
            raise ValueError(
                f"{what} was made for {made}, but {wanted} is needed: go back to the old settings. "
                f"{remedy}"
            )

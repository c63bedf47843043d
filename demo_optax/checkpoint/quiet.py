"""Orbax where reading or writing fails: an error in a line, in place of hundreds on stderr.

Orbax logs a traceback for each of the futures that wait for one another, and closes an event loop
whose tasks are still being called back. What failed is raised or warned of by this package.
"""

import contextlib
import gc
import logging
import os
import sys
import traceback
import warnings

_ORBAX = f"{os.sep}orbax{os.sep}"


def in_a_line(error: BaseException) -> str:
    """What went wrong at first, without the source locations that only its authors can use."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = (lines[0] if lines else type(error).__name__).split(" [source locations=")[0]
    return text if len(text) <= 240 else f"{text[:80]} ... {text[-150:]}"


@contextlib.contextmanager
def unawaited():
    """For as long as Orbax may drop coroutines, since one of them has failed."""
    logging.getLogger("asyncio").addFilter(_is_retrieved)
    with warnings.catch_warnings():
        _ignore_unawaited()
        yield


def sweep() -> None:
    """Collects the tasks of a failed read or write, and has nothing said of those still to fail."""
    _ignore_unawaited()
    with unawaited():
        gc.collect()


def _ignore_unawaited() -> None:
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    return _ORBAX not in record.pathname


def _is_retrieved(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return "exception was never retrieved" not in message and "was destroyed" not in message


def _unraisable(unraisable, previous=sys.unraisablehook) -> None:
    """Leaves out what Orbax's coroutines, and TensorStore's callbacks, fail of when they end."""
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(unraisable.exc_traceback))
    message = str(unraisable.exc_value)
    of_loops = "Event loop is closed" in message or "was never awaited" in message
    if not (of_loops or any(_ORBAX in file for file in files)):
        previous(unraisable)


logging.getLogger("absl").addFilter(_is_not_of_orbax)
sys.unraisablehook = _unraisable

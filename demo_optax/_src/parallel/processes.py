"""Runs a function in the first process only, and gives its result or error to all processes."""

import contextlib
import pickle
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from demo_optax._src.parallel.shards import no_context_mesh

T = TypeVar("T")

_SMALLEST, _LARGEST = 2**10, 2**28  # bytes per broadcast; each size compiles a program


def is_lead() -> bool:
    return jax.process_index() == 0


def by_lead(fn: Callable[[], T]) -> T:
    """Returns or raises, in all processes, the result or the error of a function in the first.

    All processes must call this. Whatever the function raises, even an interrupt, is raised in the
    others too, so that none of them waits for one that failed. There an error that cannot be
    pickled becomes a RuntimeError with the same text.
    """
    if jax.process_count() == 1:
        return fn()
    data, raised = b"", None
    if is_lead():
        try:
            data = pickle.dumps((fn(), None))
        except BaseException as error:
            raised, data = error, pickle.dumps((None, _picklable(error)))
    # These bytes come from this job's own first process. Nothing from a store is unpickled.
    found, told = pickle.loads(_from_lead(data))
    error = told if raised is None else raised
    if error is not None:
        raise error
    return found


def _picklable(error: BaseException) -> BaseException:
    """Returns the error if pickle restores it unchanged, or else one with its name and its text.

    The other processes must learn of the error even if its own methods raise or are interrupted.
    """
    text = type(error).__name__
    with contextlib.suppress(BaseException):
        text += f": {error}"
        restored = pickle.loads(pickle.dumps(error))
        if (repr(restored), str(restored)) == (repr(error), str(error)):
            return error
    return RuntimeError(text)


@no_context_mesh()
def _from_lead(data: bytes) -> bytes:
    """Broadcasts the first process's data in pieces, padded so that few programs are compiled."""
    words = np.array(divmod(len(data), 2**32), np.uint32)
    high, low = map(int, multihost_utils.broadcast_one_to_all(words))
    size, received = high * 2**32 + low, []
    for at in range(0, size, _LARGEST):
        length = min(_LARGEST, size - at)
        padded = max(1 << (length - 1).bit_length(), _SMALLEST)
        # The other processes have no data, and give zeros.
        sent = np.frombuffer(data[at : at + length].ljust(padded, b"\0"), np.uint8)
        told = np.asarray(multihost_utils.broadcast_one_to_all(sent))
        received.append(told[:length].tobytes())
    return b"".join(received)

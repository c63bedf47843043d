"""Reading what was stored, and believing it only if its digests say that it is what was saved."""

import contextlib
import dataclasses
import errno
import functools
import gc
import logging
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import SingleDeviceSharding

from demo_optax.checkpoint.description import FORMAT, by_path, from_paths
from demo_optax.checkpoint.digests import digests, is_sealed, like

try:
    from etils import epath
    from orbax.checkpoint import v1 as orbax
    from orbax.checkpoint.utils import TMP_DIR_SUFFIX
except ImportError as error:
    raise ImportError("checkpoints need Orbax: pip install 'demo_optax[checkpoint]'.") from error

T = TypeVar("T")

_OF_MACHINE = "RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "PERMISSION_DENIED"
_NUMBERS = "ENOMEM", "EMFILE", "ENFILE", "EACCES", "EPERM", "ESTALE", "ETIMEDOUT"
_ERRNO_OF_MACHINE = {getattr(errno, name) for name in _NUMBERS}
_ORBAX = f"{os.sep}orbax{os.sep}"


class DamagedCheckpoint(ValueError):
    """A stored checkpoint cannot be read, or is not what was saved.

    Example:
      >>> str(DamagedCheckpoint("step 3: params['w'] holds other bits than were saved"))
      "step 3: params['w'] holds other bits than were saved"
    """


def absolute(directory: str | os.PathLike) -> str:
    return str(directory) if "://" in str(directory) else os.path.abspath(directory)


def steps_in(directory: str) -> list[int]:
    """The steps of the checkpoints in a folder; whatever else lies there is none."""
    folder = epath.Path(directory)
    if not folder.is_dir():
        return []
    names = [path.name for path in folder.iterdir() if path.is_dir()]
    return sorted(int(name) for name in names if re.fullmatch(r"0|[1-9]\d*", name))


def clear_up(directory: str, damaged: Iterable[int]) -> None:
    """Sets damaged steps aside and removes what failed saves left; one process does, for all.

    Raises:
      OSError: it could not be done, on whichever process.
    """
    reason = ""
    if jax.process_index() == 0:
        try:
            for step in damaged:
                _set_aside(directory, step)
            _remove_unfinished(directory)
        except Exception as error:
            reason = in_a_line(error)
    if _worst(int(bool(reason))):
        raise OSError(
            f"the first process could not clear up {directory}: {reason or 'it says why'}. Make "
            "the folder writable for it."
        )


def _set_aside(directory: str, step: int) -> None:
    """Renames a step's folder, so that it is none; what it holds is left to be looked at."""
    folder = epath.Path(directory)
    aside = folder / f"{step}.damaged"
    if not (folder / str(step)).exists():
        return
    if aside.exists():
        aside.rmtree()
    (folder / str(step)).rename(aside)


def _remove_unfinished(directory: str) -> None:
    """Removes what failed saves left, out of which TensorStore may still be taking files."""
    for _ in range(50):
        try:
            for path in epath.Path(directory).glob(f"*{TMP_DIR_SUFFIX}*"):
                path.rmtree()
            return
        except OSError:
            time.sleep(0.1)


def newest_intact(directory: str, steps: list[int], read: Callable[[int], T]) -> tuple[T, dict]:
    """What is read of the newest checkpoint that is intact, and why each newer one is not.

    Raises:
      DamagedCheckpoint: none is intact.
    """
    damaged: dict[int, str] = {}
    for step in sorted(steps, reverse=True):
        try:
            found = read(step)
        except DamagedCheckpoint as error:
            damaged[step] = str(error)
            continue
        if damaged:
            warnings.warn(
                f"{directory}: took the checkpoint of step {step}, since newer ones are damaged: "
                f"{'; '.join(damaged.values())}.",
                stacklevel=3,
            )
        return found, damaged
    raise DamagedCheckpoint(
        f"{directory} holds no checkpoint of {steps} that is intact: "
        f"{'; '.join(damaged.values())}. Restore it from a copy, or start the run anew in another "
        "folder."
    )


def description_of(directory: str, step: int) -> dict:
    """What was saved beside the leaves of a step.

    Raises:
      ValueError: another version of the library has written it in another format.
    """
    saved: Any = _read(step, lambda: _metadata(directory, step)) or {}
    found = saved.get("format", FORMAT)
    is_other = found != FORMAT and (is_sealed(saved) or "seal" not in saved)  # older ones had none
    is_intact = is_other or is_sealed(saved)
    _agree(step, "" if is_intact else "its description must be the one that was saved, and is not")
    if is_other:
        raise ValueError(
            f"the checkpoint is of format {found}, which stores the state in another way, and this "
            f"version of demo_optax reads format {FORMAT}. Restore it with the version that saved it."
        )
    return saved


def load(directory: str, step: int, wanted: dict[str, dict], saved: dict[str, dict]) -> dict:
    """The leaves of a step, each what its digest says.

    Args:
      directory: the run's folder.
      step: which checkpoint.
      wanted: for each part what Orbax is to make of its leaves, of the dtypes that were saved.
      saved: for each part the digests of its leaves.

    Raises:
      DamagedCheckpoint: they cannot be read, or are not what was saved.
    """
    loaded = _read(step, lambda: _load(directory, step, wanted))
    _agree(step, _difference(loaded, saved))
    return loaded


def load_params(directory: str | os.PathLike, params=None, *, step: int | None = None):
    """The parameters alone of a run's checkpoint, for evaluation: no optimizer, no mesh.

    Args:
      directory: the run's folder.
      params: arrays or shapes of the parameters; those with a sharding are placed so, others on
        the default device. Without them, a dict of NumPy arrays by their paths.
      step: which checkpoint; the latest that is intact by default.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      DamagedCheckpoint: that of the step is damaged, or all are. A ValueError.
      UserWarning: newer ones are damaged.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, demo_optax
      >>> from demo_optax.checkpoint import Checkpointer
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> tx = demo_optax.demo(1e-3, axis_name="data")
      >>> params = {"w": jnp.ones((4, 4))}
      >>> folder = tempfile.TemporaryDirectory()
      >>> with Checkpointer(folder.name, tx, mesh) as checkpointer:
      ...     checkpointer.save(7, params, demo_optax.init_opt_state(tx, params, mesh))
      >>> load_params(folder.name, params)["w"].sum()
      Array(16., dtype=float32)
      >>> folder.cleanup()
    """
    folder = absolute(directory)
    steps = steps_in(folder)
    if not steps or (step is not None and step not in steps):
        none = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        there = f"those of {steps}" if steps else "none at all"
        raise FileNotFoundError(
            f"{directory} holds {none}, but {there}. Give the folder that Checkpointer saves "
            "to, and leave out step to load the latest."
        )
    wanted = steps if step is None else [step]
    return newest_intact(folder, wanted, lambda step: _params(folder, step, params))[0]


def stored_as(placed: dict, saved: dict) -> dict:
    """Shapes with their shardings, of the dtypes that were saved."""

    def stored(name, x):
        described: Any = like(saved[name])
        return jax.ShapeDtypeStruct(x.shape, described.dtype, sharding=x.sharding)

    return {name: stored(name, x) for name, x in placed.items()}


def require_same(what: str, wanted: dict, saved: dict, shapes: bool = True) -> None:
    """Refuses a checkpoint whose leaves, by their paths, are not those that are expected."""
    missing, unknown = sorted(wanted.keys() - saved.keys()), sorted(saved.keys() - wanted.keys())
    if missing or unknown:
        raise ValueError(
            f"the leaves of the checkpoint's {what} are not those that are expected: it lacks "
            f"{missing[:3] or 'nothing'} and holds {unknown[:3] or 'nothing'} beside them. Restore "
            "it with the model, the optimizer and an extra of the structure that it was saved "
            "with; for the parameters alone use demo_optax.checkpoint.load_params."
        )
    for name in wanted if shapes else ():
        given, held = np.shape(wanted[name]), np.shape(like(saved[name]))
        if given != held:
            raise ValueError(
                f"of the checkpoint's {what}, {name} has shape {held}, where {given} is expected. "
                "Restore it with the model and the optimizer that it was saved with."
            )


def _params(directory: str, step: int, params) -> Any:
    saved = description_of(directory, step)["leaves"]
    if params is None:
        wanted = {name: like(digest) for name, digest in saved["params"].items()}
        return load(directory, step, {"params": wanted}, saved)["params"]
    here = SingleDeviceSharding(jax.local_devices()[0])

    def place(x):
        sharding = getattr(x, "sharding", None) or here
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    placed = jax.tree.map(place, params)
    require_same("parameters", by_path(placed), saved["params"])
    wanted = stored_as(by_path(placed), saved["params"])
    return from_paths(load(directory, step, {"params": wanted}, saved)["params"], placed)


def _metadata(directory: str, step: int):
    return orbax.checkpointables_metadata(epath.Path(directory) / str(step)).custom_metadata


def _load(directory: str, step: int, wanted: dict) -> dict:
    """Each process reads alone: it would wait minutes for another that cannot read its part."""
    own = jax.process_index()
    alone = orbax.options.MultiprocessingOptions(
        primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"process_{own}"
    )
    with orbax.Context(multiprocessing_options=alone):
        return orbax.load_checkpointables(epath.Path(directory) / str(step), wanted)


def _difference(loaded: dict, saved: dict[str, dict]) -> str:
    """What is not as it was saved, or nothing."""
    digested = {part: digests(leaves) for part, leaves in loaded.items()}
    for part, leaves in digested.items():
        for name, found in leaves.items():
            for what, value in saved[part][name].items():
                if found[what] != value:
                    return f"{part}{name} must have {what} {value}, but has {found[what]}"
    return ""


def _read(step: int, read: Callable[[], T]) -> T:
    """What is read, if every process can.

    Raises:
      OSError: a process has no memory, no permission or no connection, whatever the file holds.
      DamagedCheckpoint: what was read makes no sense, or is not there.
    """
    result = []
    with caught() as failure:
        result.append(read())
    _agree(step, failure.reason, failure.of_machine)
    return result[0]


def _agree(step: int, reason: str, of_machine: bool = False) -> None:
    """Raises on every process if any reports a failure."""
    worst = _worst(2 if of_machine else int(bool(reason)))
    if worst == 2:
        raise OSError(
            f"step {step} could not be read: {reason or 'another process says why'}. The "
            "checkpoint may be intact, and stays as it is. Repair the cause and restore again."
        )
    if worst:
        raise DamagedCheckpoint(f"step {step}: {reason or 'another process cannot read it'}")


def _worst(code: int) -> int:
    """The largest code of all processes."""
    return int(np.max(multihost_utils.process_allgather(np.array(code))))


def _is_of_machine(error: BaseException | None) -> bool:
    while error is not None:
        states = any(state in str(error) for state in _OF_MACHINE)
        number = getattr(error, "errno", None)
        if states or isinstance(error, MemoryError) or number in _ERRNO_OF_MACHINE:
            return True
        error = error.__cause__ or error.__context__
    return False


@dataclasses.dataclass
class Failure:
    """Why a call of Orbax failed, in one line, and whether the machine was the cause."""

    reason: str = ""
    of_machine: bool = False


@contextlib.contextmanager
def caught() -> Iterator[Failure]:
    """Catches what Orbax raises, for the caller to raise in one line, and hides its tracebacks.

    After a failure they stay hidden, since Orbax's threads and callbacks go on failing for seconds.
    """
    failure = Failure()
    hide_tracebacks()
    try:
        yield failure
    except Exception as error:
        failure.reason, failure.of_machine = in_a_line(error), _is_of_machine(error)
    if failure.reason:
        collect_tasks()
        _failures.append(failure)
    if not _failures:
        _show_tracebacks()


_failures: list[Failure] = []


def collect_tasks() -> None:
    """Collects the coroutines that a failed call never awaited, without a warning of each."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        gc.collect()


def hide_tracebacks() -> None:
    """Hides what Orbax logs of each future that fails, and errors in callbacks of closed loops."""
    for name, hides in _FILTERS.items():
        logging.getLogger(name).addFilter(hides)
    if not _is_ours(sys.unraisablehook):
        sys.unraisablehook = functools.partial(_unraisable, sys.unraisablehook)


def _show_tracebacks() -> None:
    for name, hides in _FILTERS.items():
        logging.getLogger(name).removeFilter(hides)
    if _is_ours(sys.unraisablehook):
        (sys.unraisablehook,) = sys.unraisablehook.args


def _is_ours(hook) -> bool:
    return isinstance(hook, functools.partial) and hook.func is _unraisable


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    return _ORBAX not in record.pathname


def _is_retrieved(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return "exception was never retrieved" not in message and "was destroyed" not in message


_FILTERS = {"absl": _is_not_of_orbax, "asyncio": _is_retrieved}


def _unraisable(previous: Callable, unraisable) -> None:
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(unraisable.exc_traceback))
    message = str(unraisable.exc_value)
    of_loops = "Event loop is closed" in message or "was never awaited" in message
    if not (of_loops or any(_ORBAX in file for file in files)):
        previous(unraisable)


def in_a_line(error: BaseException) -> str:
    """What went wrong at first, without the source locations that only its authors can use."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = (lines[0] if lines else type(error).__name__).split(" [source locations=")[0]
    return text if len(text) <= 240 else f"{text[:80]} ... {text[-150:]}"

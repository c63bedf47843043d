"""The files of checkpoints: reading them, verifying their digests, and failures of Orbax."""

import contextlib
import errno
import operator
import os
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import SingleDeviceSharding

from demo_optax._src.checkpoint import description
from demo_optax._src.checkpoint.digests import digests, seal, template
from demo_optax._src.parallel.processes import by_lead
from demo_optax._src.parallel.shards import no_context_mesh

try:
    from etils import epath
    from orbax.checkpoint import v1 as orbax
    from orbax.checkpoint.utils import TMP_DIR_SUFFIX
except ImportError as error:
    raise ImportError("checkpoints need Orbax: pip install 'demo_optax[checkpoint]'.") from error

T = TypeVar("T")

TRACEBACKS = " [source locations="
"""What stands before the source locations that TensorStore appends to a message."""

_MACHINE_STATES = "RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "PERMISSION_DENIED"
_MACHINE_ERRORS = "ENOMEM", "EMFILE", "ENFILE", "EACCES", "EPERM", "ESTALE", "ETIMEDOUT"


class DamagedCheckpoint(ValueError):
    """A stored checkpoint cannot be read, or is not what was saved.

    Example:
      >>> str(DamagedCheckpoint("step 3: params['w'] holds other bits than were saved"))
      "step 3: params['w'] holds other bits than were saved"
    """


def absolute(directory: str | os.PathLike) -> str:
    return str(directory) if "://" in str(directory) else os.path.abspath(directory)


def step_number(step) -> int:
    """The number of a step, as a Python integer."""
    if isinstance(step, bool) or not hasattr(step, "__index__") or step < 0:
        raise ValueError(
            f"step must be an integer from 0 on, the number of updates done so far, not {step!r}."
        )
    return operator.index(step)


def steps_in(directory: str) -> list[int]:
    """The steps of the checkpoints in a folder, as the first process lists them."""
    return on_first(f"list {directory}", lambda: listed_steps(directory))


def listed_steps(directory: str) -> list[int]:
    """The steps that this process lists in a folder; ignores everything else there."""
    folder = epath.Path(directory)
    if not folder.is_dir():
        return []
    names = [path.name for path in folder.iterdir() if path.is_dir()]
    return sorted(int(name) for name in names if re.fullmatch(r"0|[1-9]\d*", name))


def on_first(what: str, fn: Callable[[], T]) -> T:
    """What a function returns on the first process, on all of them; all raise where it fails.

    A disk that hosts share may show each of them another list of files, since they cache it.

    Args:
      what: says in a message what the function does.
      fn: called by the first process alone.
    """
    try:
        return by_lead(fn)
    except Exception as error:
        raise OSError(
            f"the first process could not {what}: {in_a_line(error)}. Make the folder readable and "
            "writable for it."
        ) from error


def clear_up(directory: str, damaged: Iterable[int]) -> None:
    """Renames damaged steps and removes what failed saves left, on the first process alone."""

    def rename_and_remove() -> None:
        for step in damaged:
            _set_aside(epath.Path(directory), step)
        for _ in range(50):  # TensorStore may still be removing its own files
            with contextlib.suppress(OSError):
                for path in epath.Path(directory).glob(f"*{TMP_DIR_SUFFIX}*"):
                    path.rmtree()
                return
            time.sleep(0.1)

    on_first(f"clear up {directory}", rename_and_remove)


def _set_aside(folder, step: int) -> None:
    """Renames a step's folder, which stays there to be looked at."""
    aside = folder / f"{step}.damaged"
    if (folder / str(step)).exists():
        if aside.exists():
            aside.rmtree()
        (folder / str(step)).rename(aside)


def newest_intact(directory: str, steps: list[int], read: Callable[[int], T]) -> tuple[T, dict]:
    """Reads the newest checkpoint that is intact; also returns why each newer one is not."""
    damaged: dict[int, str] = {}
    for step in sorted(steps, reverse=True):
        try:
            result = read(step)
        except DamagedCheckpoint as error:
            damaged[step] = str(error)
            continue
        if damaged:
            warnings.warn(
                f"{directory}: took the checkpoint of step {step}, since newer ones are damaged: "
                f"{'; '.join(damaged.values())}.",
                stacklevel=3,
            )
        return result, damaged
    raise DamagedCheckpoint(
        f"{directory} holds no checkpoint of {steps} that is intact: "
        f"{'; '.join(damaged.values())}. Restore it from a copy, or start the run again in another "
        "folder."
    )


def description_of(directory: str, step: int) -> dict:
    """The description that was saved with a step. Refuses formats of other library versions."""
    saved: Any = _read(step, lambda: _metadata(directory, step)) or {}
    found, expected = saved.get("format", 1), description.FORMAT
    from_before_seals = saved and found != expected and "seal" not in saved
    is_intact = from_before_seals or saved.get("seal") == seal(saved)
    _agree(step, "" if is_intact else "its description must be the one that was saved, and is not")
    if found != expected:
        raise ValueError(
            f"the checkpoint is of format {found}, and this version of demo_optax reads format "
            f"{expected}, which stores the state in another way. Restore it with the version that "
            "saved it."
        )
    return saved


def load(directory: str, step: int, saved: dict[str, dict], **wanted: dict) -> dict:
    """Some parts of a step, verified by their digests, in the dtypes that were saved.

    Args:
      directory: the run's folder.
      step: which checkpoint.
      saved: digests of the leaves of each part, by their paths.
      wanted: for each part to load, arrays or shapes whose shardings its leaves get. Leaves that
        are not among them go into the host's memory.
    """
    targets = {
        part: {
            name: template(digest, getattr(placed.get(name), "sharding", None))
            for name, digest in saved[part].items()
        }
        for part, placed in wanted.items()
    }
    stored = {part: x for part, x in targets.items() if x}  # Orbax stores no empty parts
    loaded = {part: {} for part in targets} | _read(step, lambda: _load(directory, step, stored))
    _agree(step, _difference(loaded, saved))
    return loaded


@no_context_mesh()
def load_params(directory: str | os.PathLike, params=None, *, step: int | None = None):
    """The parameters alone of a run's checkpoint, for evaluation: no optimizer, no mesh.

    Args:
      directory: the run's folder.
      params: arrays or shapes of the parameters. A leaf without a sharding is placed on the default
        device. If None, the result is a dict of NumPy arrays by their paths.
      step: which checkpoint; the latest that is intact by default.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      DamagedCheckpoint: the step's checkpoint is damaged, or all are. A ValueError.
      UserWarning: newer checkpoints are damaged.

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
    step = None if step is None else step_number(step)
    steps = steps_in(folder)
    if not steps or (step is not None and step not in steps):
        none = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        there = f"those of {steps}" if steps else "none at all"
        raise FileNotFoundError(
            f"{directory} holds {none}, but {there}. Give the folder that Checkpointer saves "
            "to, and leave out step to load the latest."
        )

    def read(step: int) -> Any:
        saved = description_of(folder, step)["leaves"]
        if params is None:
            return load(folder, step, saved, params={})["params"]
        here = SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda x: getattr(x, "sharding", None) or here, params)
        wanted = description.with_shardings(params, shardings)
        leaves = description.by_path(wanted)
        description.require_same("parameters", leaves, saved["params"])
        loaded = load(folder, step, saved, params=leaves)["params"]
        return description.from_paths(loaded, wanted)

    return newest_intact(folder, steps if step is None else [step], read)[0]


def _metadata(directory: str, step: int):
    folder = epath.Path(directory) / str(step)
    if not folder.is_dir():
        reason = "the first process lists it, but this one does not see it: give both one disk"
        raise OSError(errno.ESTALE, reason, str(folder))
    return orbax.checkpointables_metadata(folder).custom_metadata


def _load(directory: str, step: int, wanted: dict) -> dict:
    """Each process reads alone: it would wait minutes for another that cannot read its part."""
    own = jax.process_index()
    alone = orbax.Context()
    alone.multiprocessing.primary_host = own
    alone.multiprocessing.active_processes = {own}
    alone.multiprocessing.barrier_sync_key_prefix = f"process_{own}"
    with alone:
        return orbax.load_checkpointables(epath.Path(directory) / str(step), wanted)


def _difference(loaded: dict, saved: dict[str, dict]) -> str:
    """What differs from what was saved, or nothing."""
    digested = {part: digests(leaves) for part, leaves in loaded.items()}
    for part, leaves in digested.items():
        for name, digest in leaves.items():
            for what, value in saved[part][name].items():
                if digest[what] != value:
                    return f"{part}{name} must have {what} {value}, but has {digest[what]}"
    return ""


def _read(step: int, read: Callable[[], T]) -> T:
    """What ``read`` returns, if it succeeds on every process."""
    result: Any = None
    reason, of_machine = "", False
    try:
        result = read()
    except Exception as error:
        reason, of_machine = in_a_line(error), is_of_machine(error)
    except BaseException:  # an interrupt: the other processes must not wait for this one
        _worst(2)
        raise
    _agree(step, reason, of_machine)
    return result


def _agree(step: int, reason: str, of_machine: bool = False) -> None:
    """Raises on every process if any reports a failure, a DamagedCheckpoint or an OSError."""
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


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and what it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def in_a_line(error: BaseException) -> str:
    """The first cause of an error, without Orbax's source locations."""
    *_, first = _causes(error)
    lines = [line.strip() for line in str(first).splitlines() if line.strip()]
    text = (lines[0] if lines else type(first).__name__).split(TRACEBACKS)[0]
    return text if len(text) <= 240 else f"{text[:80]} ... {text[-150:]}"


def is_of_machine(error: BaseException) -> bool:
    """Whether memory, permission or connection is missing, which is no damage."""
    return any(
        isinstance(cause, MemoryError)
        or any(state in str(cause) for state in _MACHINE_STATES)
        or errno.errorcode.get(getattr(cause, "errno", None) or 0) in _MACHINE_ERRORS
        for cause in _causes(error)
    )


def is_of_files(error: BaseException) -> bool:
    """Whether the file system refused something; TensorStore says so in its text alone."""
    return any(isinstance(e, OSError) or "os_error_code" in str(e) for e in _causes(error))

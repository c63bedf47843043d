"""Reading and verifying the files of checkpoints, and handling failures of Orbax."""

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
from demo_optax._src.places import folder_of

try:
    import tensorstore
    from etils import epath
    from orbax.checkpoint import v1 as orbax
    from orbax.checkpoint.utils import TMP_DIR_SUFFIX
except ImportError as error:
    needed = "checkpoints need Orbax: in the source folder, pip install '.[checkpoint]'."
    raise ImportError(needed) from error

T = TypeVar("T")

_SOURCES = " [source locations="  # TensorStore appends them to a message
_MACHINE_STATES = "RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "PERMISSION_DENIED"
_MACHINE_ERRORS = "ENOMEM", "EMFILE", "ENFILE", "EACCES", "EPERM", "ESTALE", "ETIMEDOUT"


class DamagedCheckpoint(ValueError):
    """A stored checkpoint cannot be read, or is not what was saved.

    Example:
      >>> str(DamagedCheckpoint("step 3: params['w'] holds other bits than were saved"))
      "step 3: params['w'] holds other bits than were saved"
    """


def absolute(directory: str | os.PathLike) -> str:
    if (folder := folder_of(directory)) is not None:
        return os.path.abspath(folder)
    try:
        return str(epath.Path(directory))
    except KeyError:  # an unknown scheme
        raise ValueError(
            f"checkpoints cannot be kept at {directory}: give a folder, or a URL that begins with "
            "gs://, s3:// or az://."
        ) from None


def step_number(step) -> int:
    if isinstance(step, bool) or not hasattr(step, "__index__") or step < 0:
        raise ValueError(
            f"step must be an integer from 0 on, the number of updates done so far, not {step!r}."
        )
    return operator.index(step)


def steps_in(directory: str, step: int | None = None) -> tuple[list[int], list[int]]:
    """Returns the steps that the first process lists in a folder, and those to be restored."""
    wanted = None if step is None else step_number(step)
    steps = on_first(f"list {directory}", lambda: listed_steps(directory))
    return steps, [number for number in steps if wanted in (None, number)]


def listed_steps(directory: str) -> list[int]:
    """Returns the steps that this process lists in a folder, and ignores everything else there."""
    folder = epath.Path(directory)
    names = [x.name for x in folder.iterdir() if x.is_dir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if re.fullmatch(r"0|[1-9]\d*", name))


def require_storable(part: str, leaves: dict) -> None:
    """Refuses dtypes that JAX knows and the files do not, such as ``uint4``."""
    arrays = {name: x for name, x in leaves.items() if not isinstance(x, str)}
    for name, x in arrays.items():
        try:
            tensorstore.dtype(x.dtype)
        except ValueError:
            where = name.removeprefix("['tree']")
            raise TypeError(
                f"{part}{where} is of dtype {x.dtype}, which cannot be stored: give it in a dtype "
                "that holds its values, such as x.astype('uint8') or x.astype('bfloat16'). A "
                "restore returns the dtypes of the tree that it is given."
            ) from None


def on_first(what: str, fn: Callable[[], T]) -> T:
    """Returns the first process's result of a function on all processes; all raise if it fails.

    Hosts that share a disk may see different lists of files, since they cache them.
    """
    try:
        return by_lead(fn)
    except Exception as error:
        raise OSError(
            f"the first process could not {what}: {in_a_line(error)}. Make the folder readable and "
            "writable for it."
        ) from error


def on_all(step: int, fn: Callable[[], T]) -> T:
    """Returns this process's result of a function; all processes raise if it fails on any."""
    result: Any = None
    reason, failure = "", 2
    try:
        result, failure = fn(), 0
    except Exception as error:
        reason, failure = in_a_line(error), 2 if is_of_machine(error) else 1
    finally:  # after an interrupt too, since the other processes wait here
        worst = int(np.max(multihost_utils.process_allgather(np.array(failure))))
    if worst == 2:
        raise OSError(
            f"step {step} could not be read: {reason or 'another process says why'}. The "
            "checkpoint may be intact, and stays as it is. Repair the cause and restore again."
        )
    if worst:
        raise DamagedCheckpoint(f"step {step}: {reason or 'another process cannot read it'}")
    return result


def clear_up(directory: str, damaged: Iterable[int]) -> None:
    """Renames damaged steps and removes the remains of failed saves, on the first process only."""

    def rename_and_remove() -> None:
        folder = epath.Path(directory)
        for step in damaged:
            aside = folder / f"{step}.damaged"
            if (folder / str(step)).exists():
                if aside.exists():
                    aside.rmtree()
                (folder / str(step)).rename(aside)
        for _ in range(50):  # TensorStore may still be removing its own files
            with contextlib.suppress(OSError):
                for path in folder.glob(f"*{TMP_DIR_SUFFIX}*"):
                    path.rmtree()
                return
            time.sleep(0.1)

    on_first(f"clear up {directory}", rename_and_remove)


def newest_intact(directory: str, steps: list[int], read: Callable[[int], T]) -> tuple[T, dict]:
    """Reads the newest intact checkpoint and also returns why each newer one is damaged."""
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
    """Returns the description that was saved with a step, if this version can read it."""
    saved = on_all(step, lambda: _metadata(directory, step))
    if (found := saved.get("format", 1)) != description.FORMAT:
        raise ValueError(
            f"the checkpoint is of format {found}, and this version of demo_optax reads format "
            f"{description.FORMAT}, which stores the state in another way. Restore it with the "
            "version that saved it."
        )
    return saved


def load(directory: str, step: int, saved: dict[str, dict], trees: dict[str, Any]) -> dict:
    """Returns some parts of a step, verified by their digests, as trees like the given ones.

    Where a given tree has shapes with shardings, the leaves are placed on devices, otherwise in the
    host's memory. If a tree is None, NumPy arrays by their paths are returned.
    """
    targets: dict[str, dict] = {part: {} for part in trees}
    for part, tree in trees.items():
        shape_at = {} if tree is None else description.by_path(tree, part)
        for name, digest in saved[part].items():
            x = shape_at.get(name)
            sharding = x.sharding if isinstance(x, jax.ShapeDtypeStruct) else None
            targets[part][name] = template(digest, sharding)
    stored = {part: x for part, x in targets.items() if x}  # Orbax stores no empty parts
    loaded = targets | on_all(step, lambda: _load(directory, step, stored))
    on_all(step, lambda: _verify(loaded, saved))
    return {
        part: leaves if trees[part] is None else description.from_paths(leaves, trees[part])
        for part, leaves in loaded.items()
    }


@no_context_mesh()
def load_params(directory: str | os.PathLike, params=None, *, step: int | None = None):
    """Loads only the parameters of a run's checkpoint, without an optimizer or a mesh.

    Args:
      directory: the run's folder, or its URL as a string.
      params: arrays or shapes of the parameters. A leaf without a sharding is placed on the default
        device. If None, the result is a dict of NumPy arrays by their paths.
      step: step of the checkpoint; by default the latest that is intact.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      DamagedCheckpoint: the step's checkpoint is damaged, or all are. This is a ValueError.
      UserWarning: newer checkpoints are damaged.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, demo_optax
      >>> from demo_optax.checkpoint import Checkpointer
      >>> mesh, params = jax.make_mesh((1,), ("data",)), {"w": jnp.ones((4, 4))}
      >>> tx = demo_optax.demo(1e-3, axis_name="data")
      >>> opt_state = demo_optax.init_opt_state(tx, params, mesh)
      >>> with tempfile.TemporaryDirectory() as folder, Checkpointer(folder, tx, mesh) as run:
      ...     run.save(7, params, opt_state, wait=True)
      ...     load_params(folder, params)["w"].sum()
      Array(16., dtype=float32)
    """
    folder = absolute(directory)
    steps, wanted_steps = steps_in(folder, step)
    if not wanted_steps:
        one = "checkpoint" if step is None else f"checkpoint of step {step}"
        raise FileNotFoundError(
            f"{directory} holds no {one}; its steps are {steps}. Give the folder that Checkpointer "
            "saves to, and leave out step to load the latest."
        )

    here = SingleDeviceSharding(jax.local_devices()[0])

    def shape(x):
        return description.with_sharding(x, getattr(x, "sharding", None) or here)

    def read(step: int) -> Any:
        saved = description_of(folder, step)["leaves"]
        if params is not None:
            description.require_same("parameters", params, saved["params"])
        wanted = None if params is None else jax.tree.map(shape, params)
        return load(folder, step, saved, {"params": wanted})["params"]

    return newest_intact(folder, wanted_steps, read)[0]


def _metadata(directory: str, step: int) -> dict:
    folder = epath.Path(directory) / str(step)
    if not folder.is_dir():
        reason = "the first process lists it, but this one does not see it: give both one disk"
        raise OSError(errno.ESTALE, reason, str(folder))
    saved: Any = orbax.checkpointables_metadata(folder).custom_metadata or {}
    is_older = saved and "seal" not in saved and saved.get("format") != description.FORMAT
    if not is_older and saved.get("seal") != seal(saved):
        raise DamagedCheckpoint("the folder must hold the description that was saved, and does not")
    return saved


def _load(directory: str, step: int, wanted: dict) -> dict:
    """Reads alone, since a process would wait minutes for another that cannot read its part."""
    own = jax.process_index()
    alone = orbax.Context()
    alone.multiprocessing.primary_host = own
    alone.multiprocessing.active_processes = {own}
    alone.multiprocessing.barrier_sync_key_prefix = f"process_{own}"
    with alone:
        return orbax.load_checkpointables(epath.Path(directory) / str(step), wanted)


def _verify(loaded: dict[str, dict], saved: dict[str, dict]) -> None:
    found = {part: digests(leaves) for part, leaves in loaded.items()}  # by all processes together
    for part, leaves in found.items():
        for name, digest in leaves.items():
            for what, value in saved[part][name].items():
                if digest[what] != value:
                    raise DamagedCheckpoint(
                        f"{part}{name} must have {what} {value}, but has {digest[what]}"
                    )


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and the errors from which it was raised."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def in_a_line(error: BaseException) -> str:
    """Returns the first cause of an error, without Orbax's source locations."""
    *_, first = causes_of(error)
    lines = [line.strip() for line in str(first).splitlines() if line.strip()]
    text = (lines[0] if lines else type(first).__name__).split(_SOURCES)[0]
    return text if len(text) <= 240 else f"{text[:80]} ... {text[-150:]}"


def is_of_machine(error: BaseException) -> bool:
    """Tells whether memory, permission or connection is missing, which is not damage."""
    return any(
        isinstance(cause, MemoryError)
        or any(state in str(cause) for state in _MACHINE_STATES)
        or errno.errorcode.get(getattr(cause, "errno", None) or 0) in _MACHINE_ERRORS
        for cause in causes_of(error)
    )

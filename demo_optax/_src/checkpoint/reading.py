"""Finding, reading and verifying checkpoints."""

import errno
import hashlib
import json
import operator
import os
import re
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint import v1 as orbax

from demo_optax._src.checkpoint import description
from demo_optax._src.checkpoint.digests import digests, template
from demo_optax._src.parallel.processes import by_lead
from demo_optax._src.parallel.shards import no_context_mesh
from demo_optax._src.places import folder_of

T = TypeVar("T")

_MACHINE_STATES = "RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "PERMISSION_DENIED"
_MACHINE_ERRORS = errno.ENOMEM, errno.EMFILE, errno.EACCES, errno.ESTALE, errno.ETIMEDOUT


class DamagedCheckpoint(ValueError):
    """A stored checkpoint cannot be read, or is not what was saved.

    Example:
      >>> str(DamagedCheckpoint("step 3: params['w'] must hold the bits that were saved"))
      "step 3: params['w'] must hold the bits that were saved"
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


def listed_steps(directory: str) -> list[int]:
    """Returns the steps that this process lists in a folder, and ignores everything else there."""
    folder = epath.Path(directory)
    names = [x.name for x in folder.iterdir() if x.is_dir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if re.fullmatch(r"0|[1-9]\d*", name))


def steps_to_read(directory: str, step: int | None) -> list[int]:
    """Returns the steps that the first process lists, or the one that is asked for.

    Hosts that share a disk may see different lists of files, since they cache them.
    """
    wanted = None if step is None else operator.index(step)
    steps = by_lead(lambda: listed_steps(directory))
    if steps and wanted not in (None, *steps):
        raise FileNotFoundError(
            f"{directory} holds no checkpoint of step {wanted}; its steps are {steps}. Leave out "
            "step to read the latest."
        )
    return [number for number in steps if wanted in (None, number)]


def newest_intact(directory: str, steps: list[int], read: Callable[[int], T]) -> tuple[T, set[int]]:
    """Reads the newest intact checkpoint and also returns the newer steps, which are damaged."""
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
        return result, set(damaged)
    raise DamagedCheckpoint(
        f"{directory} holds no checkpoint of {steps} that is intact: "
        f"{'; '.join(damaged.values())}. Restore what is damaged from a copy, and another "
        "format with the version that saved it, or start the run again in another folder."
    )


def on_all(step: int, fn: Callable[[], T]) -> T:
    """Returns this process's result of a function; all processes raise if it fails on any."""
    result: Any = None
    reason, failure = "another process says why", 2
    try:
        result, failure = fn(), 0
    except Exception as error:
        cause = first_cause(error)
        reason, failure = in_a_line(cause), 2 if _is_of_machine(cause) else 1
    finally:  # after an interrupt too, since the other processes wait here
        worst = int(np.max(multihost_utils.process_allgather(np.array(failure))))
    if worst == 2:
        raise OSError(
            f"step {step} could not be read: {reason}. The checkpoint may be intact: repair the "
            "cause and restore again, or restore an older step."
        )
    if worst:
        raise DamagedCheckpoint(f"step {step}: {reason}")
    return result


def sealed(described: dict) -> dict:
    """Returns a description as it is stored, with a hash of it."""
    text = json.dumps(described)
    seal = hashlib.sha256(text.encode()).hexdigest()
    return {"format": description.FORMAT, "description": text, "seal": seal}


def described(metadata: Any) -> dict:
    """Returns the description in a step's metadata."""
    saved = metadata.custom_metadata or {}
    found = json.loads(saved.get("description", "{}"))
    if saved != sealed(found):
        raise DamagedCheckpoint(
            f"the description must be of format {description.FORMAT}, but it is damaged, or of the "
            f"format {saved.get('format')} of another version of demo_optax"
        )
    return found


def description_of(directory: str, step: int) -> dict:
    """Returns the description that was saved with a step, on all processes."""
    folder = epath.Path(directory) / str(step)
    return on_all(step, lambda: described(orbax.checkpointables_metadata(folder)))


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
    here = SingleDeviceSharding(jax.local_devices()[0])

    def shape(x):
        sharding = getattr(x, "sharding", None) or here
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def read(folder: str, step: int) -> Any:
        saved = description_of(folder, step)["leaves"]
        if params is not None:
            description.require_same("parameters", params, saved["params"])
        wanted = None if params is None else jax.tree.map(shape, params)
        return load(folder, step, saved, {"params": wanted})["params"]

    return _read_newest(directory, step, read)


@no_context_mesh()
def load_extra(directory: str | os.PathLike, extra, *, step: int | None = None):
    """Loads only what `Checkpointer.save` got as ``extra``, such as a mean of the parameters.

    Args:
      directory: the run's folder, or its URL as a string.
      extra: a tree like the one that was saved. Arrays are placed on the default device, and
        ``jax.ShapeDtypeStruct`` where its sharding says.
      step: step of the checkpoint; by default the latest that is intact.

    Raises:
      ValueError: the checkpoint has an ``extra`` of another structure, or of other shapes.

    The other errors are those of `load_params`.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, demo_optax
      >>> from demo_optax.checkpoint import Checkpointer
      >>> mesh, params = jax.make_mesh((1,), ("data",)), {"w": jnp.ones((4, 4))}
      >>> tx, extra = demo_optax.demo(1e-3, axis_name="data"), {"ema": params, "seed": 3}
      >>> opt_state = demo_optax.init_opt_state(tx, params, mesh)
      >>> with tempfile.TemporaryDirectory() as folder, Checkpointer(folder, tx, mesh) as run:
      ...     run.save(7, params, opt_state, extra, wait=True)
      ...     load_extra(folder, extra)["seed"]
      3
    """

    def read(folder: str, step: int) -> Any:
        saved, wanted = description_of(folder, step)["leaves"], {"step": step, "tree": extra}
        description.require_same("extra", wanted, saved["extra"])
        return load(folder, step, saved, {"extra": wanted})["extra"]["tree"]

    return _read_newest(directory, step, read)


def _read_newest(
    directory: str | os.PathLike, step: int | None, read: Callable[[str, int], T]
) -> T:
    folder = absolute(directory)
    if not (steps := steps_to_read(folder, step)):
        raise FileNotFoundError(
            f"{directory} holds no checkpoint: give the folder that Checkpointer saves to."
        )
    return newest_intact(folder, steps, lambda step: read(folder, step))[0]


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
    wrong = [
        f"{part}{name}"
        for part, leaves in loaded.items()
        for name, x in leaves.items()
        if any(digest != saved[part][name] for digest in digests(x))
    ]
    if wrong:
        raise DamagedCheckpoint(f"{wrong[0]} must hold the bits that were saved, and does not")


def first_cause(error: BaseException) -> BaseException:
    """Returns the error in which Orbax or TensorStore says what is wrong, and in which file."""
    context = None if error.__suppress_context__ else error.__context__
    before = error.__cause__ or context
    return first_cause(before) if before else error


def in_a_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0][:400]


def _is_of_machine(error: BaseException) -> bool:
    """Tells whether memory, permission or connection is missing, which is not damage."""
    return (
        isinstance(error, MemoryError)
        or str(error).startswith(_MACHINE_STATES)
        or getattr(error, "errno", None) in _MACHINE_ERRORS
    )

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
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as orbax

from demo_optax._src.checkpoint import description
from demo_optax._src.checkpoint.digests import digests
from demo_optax._src.parallel.processes import by_lead
from demo_optax._src.parallel.shards import no_context_mesh
from demo_optax._src.places import folder_of

T = TypeVar("T")

BY_PATH = object()
"""In place of a tree, this stands for NumPy arrays by their paths."""

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


def newest_intact(
    directory: str, step: int | None, read: Callable[[int], T]
) -> tuple[T, set[int]] | None:
    """Reads a step or the newest that is intact, and also returns newer ones, which are damaged.

    It returns None if the first process lists no steps: hosts that share a disk may see different
    lists of files, since they cache them.
    """
    wanted = None if step is None else operator.index(step)
    steps = by_lead(lambda: listed_steps(directory))
    if steps and wanted not in (None, *steps):
        raise FileNotFoundError(
            f"{directory} holds no checkpoint of step {wanted}; its steps are {steps}. Leave out "
            "step to read the latest."
        )
    damaged: dict[int, str] = {}
    for number in [x for x in reversed(steps) if wanted in (None, x)]:
        try:
            result = read(number)
        except DamagedCheckpoint as error:
            damaged[number] = str(error)
            continue
        if damaged:
            warnings.warn(
                f"{directory}: took the checkpoint of step {number}, since newer ones are damaged: "
                f"{'; '.join(damaged.values())}.",
                stacklevel=3,
            )
        return result, set(damaged)
    if not steps:
        return None
    raise DamagedCheckpoint(
        f"{directory} holds no checkpoint of {sorted(damaged)} that is intact: "
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
        reason, failure = cause_of(error), 2 if _is_of_machine(first_cause(error)) else 1
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
    host's memory.
    """
    likes, targets = {part: {} for part in trees}, {}
    for part, tree in trees.items():
        arrays = {name: x for name, x in saved[part].items() if isinstance(x, dict)}
        if tree is not BY_PATH:
            likes[part] = description.by_path(tree, part)
            shapes = {k: x["shape"] if k in arrays else () for k, x in saved[part].items()}
            needed = [f"{k} of shape {np.shape(x)}" for k, x in likes[part].items()]
            held = [f"{k} of shape {tuple(shape)}" for k, shape in shapes.items()]
            description.require_same(part, needed, held)
        if arrays:  # Orbax stores no empty parts
            targets[part] = {k: _target(x, likes[part].get(k)) for k, x in arrays.items()}
    found = on_all(step, lambda: _load(directory, step, targets) if targets else {})
    on_all(step, lambda: _verify(found, saved))
    loaded = {part: saved[part] | found.get(part, {}) for part in trees}
    return {
        part: loaded[part] if tree is BY_PATH else description.from_paths(loaded[part], tree)
        for part, tree in trees.items()
    }


def _target(digest: dict, like: Any) -> Any:
    """Returns what Orbax restores a leaf to: an array on devices, or one of NumPy."""
    x = jax.ShapeDtypeStruct(digest["shape"], jnp.dtype(digest["dtype"]))
    if isinstance(like, jax.ShapeDtypeStruct) and like.sharding:
        return x.update(sharding=like.sharding)
    return np.empty(x.shape, x.dtype)


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

    def shape(x):
        sharding = getattr(x, "sharding", None)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    tree = BY_PATH if params is None else jax.tree.map(shape, params)
    return _load_part(directory, "params", tree, step)


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
      >>> tx = demo_optax.demo(1e-3, axis_name="data")
      >>> opt_state = demo_optax.init_opt_state(tx, params, mesh)
      >>> with tempfile.TemporaryDirectory() as folder, Checkpointer(folder, tx, mesh) as run:
      ...     run.save(7, params, opt_state, extra={"ema": params, "seed": 3}, wait=True)
      ...     load_extra(folder, {"ema": params, "seed": 0})["seed"]
      3
    """
    return _load_part(directory, "extra", extra, step)


def _load_part(directory: str | os.PathLike, part: str, tree: Any, step: int | None) -> Any:
    folder = absolute(directory)

    def read(step: int) -> Any:
        saved = description_of(folder, step)["leaves"]
        return load(folder, step, saved, {part: tree})[part]

    if (found := newest_intact(folder, step, read)) is None:
        raise FileNotFoundError(
            f"{directory} holds no checkpoint: give the folder that Checkpointer saves to."
        )
    return found[0]


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


def cause_of(error: BaseException) -> str:
    """Returns the first line of what the first cause says."""
    cause = first_cause(error)
    return (str(cause) or type(cause).__name__).partition("\n")[0][:400]


def _is_of_machine(error: BaseException) -> bool:
    """Tells whether memory, permission or connection is missing, which is not damage."""
    return (
        isinstance(error, MemoryError)
        or str(error).startswith(_MACHINE_STATES)
        or getattr(error, "errno", None) in _MACHINE_ERRORS
    )

"""Finding, reading and verifying checkpoints, whose leaves must hold the bits that were saved.

The checksum of a leaf sums the hashes of its elements at their places in the whole array, so that
it is the same on any mesh.
"""

import json
import operator
import os
import re
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint import v1 as orbax

from demo_optax._src.checkpoint import description
from demo_optax._src.compression.bits import checksum, hashed, to_words
from demo_optax._src.parallel.processes import by_lead
from demo_optax._src.parallel.shards import no_context_mesh
from demo_optax._src.places import folder_of

T = TypeVar("T")


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


def step_to_read(directory: str, step: int | None) -> int | None:
    """Returns the latest step that the first process lists, or the one that is asked for.

    Hosts that share a disk may see different lists of files, since they cache them.
    """
    wanted = None if step is None else operator.index(step)
    steps = by_lead(lambda: listed_steps(directory))
    if wanted not in (None, *steps):
        raise FileNotFoundError(
            f"{directory} holds no checkpoint of step {wanted}; its steps are {steps}. Leave out "
            "step to read the latest."
        )
    return max(steps, default=None) if wanted is None else wanted


def on_all(directory: str, step: int, fn: Callable[[], T]) -> T:
    """Returns this process's result of a function; all processes raise if it fails on any."""
    result: Any = None
    cause, failed = None, True
    try:
        result, failed = fn(), False
    except Exception as error:
        cause = error
    finally:  # after an interrupt too, since the other processes wait here
        failed = bool(np.any(multihost_utils.process_allgather(np.array(failed))))
    if failed:
        raise DamagedCheckpoint(
            f"the checkpoint of step {step} in {directory} could not be read: "
            f"{first_line(cause) if cause else 'another process says why'}. Repair the cause and "
            "restore again. If the files are damaged, give an older step=..., or move the folder "
            f"{step} away to go on from the checkpoint before it."
        ) from cause
    return result


def first_line(error: BaseException) -> str:
    """Returns the line in which Orbax or TensorStore says what is wrong, and in which file."""
    while before := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = before
    return (str(error) or type(error).__name__).partition("\n")[0][:400]


def stored(description_text: str) -> dict:
    """Returns a description as it is stored, with its format and a checksum."""
    checked = zlib.crc32(description_text.encode())
    return {"format": description.FORMAT, "description": description_text, "checksum": checked}


def description_of(directory: str, step: int) -> dict:
    """Returns the description that was saved with a step, on all processes."""
    folder = epath.Path(directory) / str(step)
    read = orbax.checkpointables_metadata
    saved: Any = on_all(directory, step, lambda: read(folder).custom_metadata) or {}
    text = saved.get("description", "")
    if saved != stored(text):
        raise DamagedCheckpoint(
            f"the description of the checkpoint in {folder} must be of format "
            f"{description.FORMAT}, but it is damaged, or of the format "
            f"{saved.get('format')} of another version of demo_optax. Restore it with that "
            f"version, give an older step=..., or move the folder {step} away."
        )
    return json.loads(text)


def digests(x) -> list[dict]:
    """Returns dtype, shape and checksum of each copy of a leaf that this process holds, for JSON.

    All processes digest an array together, but each digests NumPy arrays for itself.
    """
    if isinstance(x, jax.Array):
        checksums = [int(copy.data) for copy in _checksum(x).addressable_shards]
    else:
        checksums = [_checksum_on_host(x)]
    return [{"dtype": x.dtype.name, "shape": [*x.shape], "checksum": one} for one in checksums]


@jax.jit
def _checksum(x):
    return checksum(to_words(x))


def _checksum_on_host(x) -> int:
    """Returns the same checksum for a value on the host, which may have 64 bits."""
    x = np.asarray(x)
    x = np.stack([np.real(x), np.imag(x)]) if np.iscomplexobj(x) else x
    words = np.ascontiguousarray(x).reshape(-1).view(f"uint{min(8 * x.dtype.itemsize, 32)}")
    places = np.arange(len(words), dtype=np.uint32)
    return int(np.sum(hashed(words.astype(np.uint32), places), dtype=np.uint32))


def load(directory: str, step: int, saved: dict[str, dict], trees: dict[str, Any]) -> dict:
    """Returns the leaves of some parts of a step by their paths, verified by their digests.

    Where a part's tree has a shape with a sharding, the leaf is placed on devices, otherwise in the
    host's memory.
    """
    targets: dict[str, dict] = {}
    for part, tree in trees.items():
        like = description.by_path(tree, part)
        targets[part] = {name: _target(x, like.get(name)) for name, x in saved[part].items()}
    loaded = targets | on_all(directory, step, lambda: _load(directory, step, targets))
    on_all(directory, step, lambda: _verify(loaded, saved))
    return loaded


def _target(digest: dict, like: Any):
    """Returns the target of a leaf for Orbax, on devices if ``like`` is a shape with a sharding."""
    dtype = jnp.dtype(digest["dtype"])
    if isinstance(like, jax.ShapeDtypeStruct) and like.sharding is not None:
        return jax.ShapeDtypeStruct(digest["shape"], dtype, sharding=like.sharding)
    return np.empty(digest["shape"], dtype)


def _load(directory: str, step: int, targets: dict[str, dict]) -> dict:
    """Reads alone, since a process would wait minutes for another that cannot read its part."""
    own = jax.process_index()
    alone = orbax.Context()
    alone.multiprocessing.primary_host = own
    alone.multiprocessing.active_processes = {own}
    alone.multiprocessing.barrier_sync_key_prefix = f"process_{own}"
    stored_parts = {part: x for part, x in targets.items() if x}  # Orbax stores no empty ones
    with alone:
        return orbax.load_checkpointables(epath.Path(directory) / str(step), stored_parts)


def _verify(loaded: dict[str, dict], saved: dict[str, dict]) -> None:
    wrong = [
        f"{part}{name}"
        for part, leaves in loaded.items()
        for name, x in leaves.items()
        if any(digest != saved[part][name] for digest in digests(x))
    ]
    if wrong:
        raise DamagedCheckpoint(f"{wrong[0]} must hold the bits that were saved, and does not")


@no_context_mesh()
def load_params(directory: str | os.PathLike, params=None, *, step: int | None = None):
    """Loads only the parameters of a run's checkpoint, without an optimizer or a mesh.

    Args:
      directory: the run's folder, or its URL as a string.
      params: arrays or shapes of the parameters. A leaf without a sharding is placed on the default
        device. If None, the result is a dict of NumPy arrays by their paths.
      step: step of the checkpoint; by default the latest.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      ValueError: the checkpoint has other parameters.
      DamagedCheckpoint: it cannot be read, or is not what was saved. This is a ValueError.

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

    wanted = None if params is None else jax.tree.map(shape, params)
    return _load_part(directory, "params", wanted, step)


@no_context_mesh()
def load_extra(directory: str | os.PathLike, extra, *, step: int | None = None):
    """Loads only what `Checkpointer.save` got as ``extra``, such as a mean of the parameters.

    The arguments and errors are those of `load_params`, but for ``extra``: a tree like the one that
    was saved. Arrays are placed on the default device, and ``jax.ShapeDtypeStruct`` where its
    sharding says.

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
    return _load_part(directory, "extra", extra, step)


def _load_part(directory: str | os.PathLike, part: str, tree, step: int | None):
    folder = absolute(directory)
    step = step_to_read(folder, step)
    if step is None:
        raise FileNotFoundError(
            f"{directory} holds no checkpoint: give the folder that Checkpointer saves to."
        )
    saved = description_of(folder, step)["leaves"]
    if tree is not None:
        description.require_same(part, tree, saved[part])
    leaves = load(folder, step, saved, {part: tree})[part]
    return leaves if tree is None else description.from_paths(leaves, tree)

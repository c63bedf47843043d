"""Saving and restoring a whole run with Orbax.

A checkpoint holds each worker's own momentum, the parameters, the rest of the optimizer state and
whatever else the run needs. The module `elastic` fits it to other workers or settings.
"""

import contextlib
import os
import warnings
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from demo_optax._src import checks
from demo_optax._src.axes import AxisName
from demo_optax._src.checkpoint import description, reading
from demo_optax._src.checkpoint.digests import digests, seal
from demo_optax._src.checkpoint.elastic import convert
from demo_optax._src.checkpoint.reading import causes_of, epath, orbax
from demo_optax._src.parallel import layout, shards, worker_axis


class Checkpoint(NamedTuple):
    """The result of `Checkpointer.restore`.

    Attributes:
      step: int, the number of updates that were done when it was saved.
      params: the parameters, on the mesh.
      opt_state: the optimizer state for this mesh's workers.
      extra: the tree that was saved with them.

    Example:
      >>> Checkpoint(step=7, params={}, opt_state=(), extra={"seed": 1}).extra["seed"]
      1
    """

    step: int
    params: Any
    opt_state: optax.OptState
    extra: Any


class Checkpointer:
    """Saves and restores one run in a folder.

    With several processes, all of them must call every method and `latest` together, from their
    main threads.

    Args:
      directory: the run's folder, which is made if it does not exist, or a URL such as
        ``gs://...`` or ``file:///...``, as a string: `pathlib.Path` makes a folder's name of it.
        All hosts must see it.
      tx: the run's optimizer, not wrapped by `demo_optax.stack_workers`.
      mesh: the workers' mesh.
      axis_name: the workers' axis or axes, or None for a worker with a transport of its own.
      param_specs: PartitionSpecs of the parameters inside a worker.
      keep: number of the latest checkpoints to keep, at least one.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, demo_optax
      >>> from demo_optax.checkpoint import Checkpointer
      >>> mesh, params = jax.make_mesh((1,), ("data",)), {"w": jnp.ones((4, 4))}
      >>> tx, extra = demo_optax.demo(1e-3, axis_name="data"), {"key": jax.random.key(0)}
      >>> opt_state = demo_optax.init_opt_state(tx, params, mesh)
      >>> with tempfile.TemporaryDirectory() as folder, Checkpointer(folder, tx, mesh) as run:
      ...     run.save(7, params, opt_state, extra)
      ...     run.restore(params, extra).step
      7
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        tx: optax.GradientTransformation,
        mesh: Mesh | AbstractMesh,
        axis_name: AxisName = "data",
        param_specs=None,
        *,
        keep: int = 3,
    ):
        checks.require_unwrapped(tx)
        checks.static_integer("keep", keep, at_least=1)
        shards.num_workers(mesh, axis_name or ())  # refuses unknown axes
        exchange = getattr(tx, "exchange", None)
        if axis_name and exchange is not None and exchange.axis_name is None:
            raise ValueError(
                f"axis_name is {axis_name!r}, but the optimizer exchanges over no axis. For a "
                "worker with a transport of its own give Checkpointer axis_name=None, and for "
                f"workers along {axis_name!r} give the optimizer axis_name={axis_name!r}."
            )
        self._tx, self._where = tx, (mesh, axis_name or (), param_specs)
        self._directory, self._keep = reading.absolute(directory), keep
        self._damaged: set[int] = set()
        self._orbax: orbax.training.Checkpointer | None = None
        self._pending: int | None = None
        self._last: int | None = None
        try:
            epath.Path(self._directory).mkdir(parents=True, exist_ok=True)
            reading.listed_steps(self._directory)
        except Exception as error:  # each store's package has errors of its own
            raise OSError(
                f"checkpoints cannot be kept in {self._directory}: {reading.in_a_line(error)}. "
                "Give a folder that every process can read and write."
            ) from error

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        try:
            self.close()
        except OSError as error:
            if kind is None:
                raise
            warnings.warn(str(error), stacklevel=2)

    def close(self) -> None:
        """Waits until everything is on disk.

        Raises:
          OSError: the last save failed.
        """
        try:
            _raise([self._finish()])
        finally:
            writer, self._orbax = self._orbax, None
            if writer is not None:
                writer.close()

    @property
    def latest(self) -> int | None:
        """The step of the latest checkpoint that is not known to be damaged, or None without one.

        The first process looks for it and tells the others.
        """

        def newest() -> int | None:
            steps = set(reading.listed_steps(self._directory)) - self._damaged
            return max(steps, default=None) if self._pending is None else self._pending

        return reading.on_first(f"list {self._directory}", newest)

    @shards.no_context_mesh()
    def save(self, step: int, params, opt_state, extra=None, *, wait: bool = False) -> None:
        """Saves in the background, so that the arrays may be donated to the next step at once.

        Args:
          step: number of updates so far, which numbers the checkpoint. The step that was saved or
            restored last is not saved again.
          params: the parameters as the train step returned them.
          opt_state: the optimizer state as the train step returned it, with its worker axis.
          extra: a tree of arrays, random keys, numbers, strings and bytes, the same on all
            processes, such as the position in the data, a generator's state or a log.
          wait: whether to return only when the checkpoint is on disk.

        Raises:
          ValueError: the folder holds a checkpoint of this step or a later one, which would stay
            the latest; or ``step`` is not a nonnegative integer.
          TypeError: a leaf cannot be stored.
          OSError: this step, or the previous one in the background, could not be written. The run
            can go on and save later steps. If only the previous one failed, this one is still being
            written.
        """
        step, reasons = reading.step_number(step), []
        if self._last != step:
            # Orbax warns of a tree without arrays, so the step is stored with ``extra``.
            trees = {
                "params": params,
                "opt_state": opt_state,
                "extra": {"step": step, "tree": extra},
            }
            leaves = {part: description.by_path(tree, part) for part, tree in trees.items()}
            for part, named in leaves.items():
                reading.require_storable(part, named)
            leaves["extra"] = jax.device_get(leaves["extra"])
            reasons.append(self._finish())
            latest = self.latest
            if latest is not None and latest >= step:
                raise ValueError(
                    f"{self._directory} holds a checkpoint of step {latest} already, so that one "
                    f"of step {step} would never be the latest: save this run to another folder, "
                    "or remove the later checkpoints."
                )
            placement = layout.find_layout(self._tx, params, *self._where)
            meaning = description.describe(placement, opt_state)
            meaning["leaves"] = {part: digests(x) for part, x in leaves.items()}
            meaning["seal"] = seal(meaning)
            stored = {part: x for part, x in leaves.items() if x}  # Orbax refuses empty ones
            try:
                self._orbax = self._orbax or self._writer()
                self._orbax.save_checkpointables_async(
                    step, stored, force=True, custom_metadata=meaning
                )
                self._last = self._pending = step
            except Exception as error:
                reasons.append(self._failed(step, error))
        if wait:
            reasons.append(self._finish())
        _raise(reasons)

    def _writer(self) -> orbax.training.Checkpointer:
        """Makes Orbax's writer, in a folder without damaged steps and remains of failed saves."""
        reading.clear_up(self._directory, self._damaged)
        self._damaged.clear()
        latest: Any = orbax.training.preservation_policies.LatestN(self._keep)
        return orbax.training.Checkpointer(
            self._directory, preservation_policy=latest, cleanup_tmp_directories=True
        )

    def _finish(self) -> str:
        """Waits for the save in progress and returns why it failed, or an empty string."""
        step, self._pending = self._pending, None
        if self._orbax is None or step is None:
            return ""
        try:
            self._orbax.wait()
            # The first process gives the folder its final name, which others may not see yet.
            if jax.process_index() == 0 and step not in reading.listed_steps(self._directory):
                return self._failed(step, Exception("it is not in the folder"))
        except Exception as error:
            return self._failed(step, error)
        return ""

    def _failed(self, step: int, error: Exception) -> str:
        """Forgets a save so that it can be tried again, and returns an error message."""
        writer, self._orbax, self._last = self._orbax, None, None
        with contextlib.suppress(Exception):
            if writer is not None:
                writer.close()
        reason, advice = reading.in_a_line(error), ""
        # Only the text of TensorStore's errors says that the file system refused something.
        if any(isinstance(x, OSError) or "os_error_code" in str(x) for x in causes_of(error)):
            advice = " Make room there, or let this process write there."
        return (
            f"step {step} could not be saved in {self._directory}: {reason}.{advice} The run can "
            "go on: until a save succeeds, a restart begins from the one before."
        )

    @shards.no_context_mesh()
    def restore(self, params, extra=None, *, step: int | None = None) -> Checkpoint | None:
        """Reads the latest checkpoint or that of a step, and returns None if there are none.

        Args:
          params: arrays or shapes of the parameters, as a tree of the same structure.
          extra: a tree like the one that was saved.
          step: step of the checkpoint; by default the latest that is intact.

        Returns:
          A `Checkpoint`, placed on the mesh. With the workers and the settings that saved it, it is
          equal to the last bit. On a different number of workers, the arrays that differ between
          workers keep their mean (see `redistribute`).

        Raises:
          ValueError: the checkpoint has a different model, optimizer or ``extra``, or momenta in
            other blocks; or there are checkpoints, but none of this step.
          DamagedCheckpoint: the step's checkpoint is damaged, or all are. This is a ValueError.
          OSError: a process could not read it for lack of memory, permission or connection.
          UserWarning: newer checkpoints are damaged; the next save renames them to
            ``<step>.damaged``.
        """
        _raise([self._finish()])
        steps, wanted = reading.steps_in(self._directory, step)
        if not steps:
            return None
        if not wanted:
            raise ValueError(
                f"there is no checkpoint of step {step}; there are those of {steps}. Leave out "
                "step to restore the latest."
            )
        checkpoint, damaged = reading.newest_intact(
            self._directory, wanted, lambda step: self._read(step, params, extra)
        )
        self._damaged |= set(damaged)
        if damaged:
            self.close()  # the next writer renames them
        self._last = checkpoint.step
        return checkpoint

    def _read(self, step, params, extra) -> Checkpoint:
        """Reads and verifies one checkpoint and converts it for this mesh."""
        mesh, axis_name, _ = self._where
        saved = reading.description_of(self._directory, step)
        placement = layout.find_layout(self._tx, params, *self._where)
        state = jax.eval_shape(
            lambda x: worker_axis.init_opt_state(self._tx, x, *self._where), params
        )
        meaning = description.describe(placement, state)
        params, state = (
            jax.tree.map(description.with_sharding, tree, shards.shardings(mesh, specs))
            for tree, specs in ((params, placement.params), (state, placement.state))
        )
        held, trees = saved["leaves"], {"params": params, "extra": {"step": step, "tree": extra}}
        exact = all(saved[key] == value for key, value in meaning.items())
        kept = description.names_kept(saved) | description.names_kept(meaning)
        description.require_same("parameters", params, held["params"])
        description.require_same("extra", trees["extra"], held["extra"])
        description.require_same("optimizer state", state, held["opt_state"], kept, exact)

        trees["opt_state"] = state if exact else None  # to be converted in the host's memory
        found = reading.load(self._directory, step, held, trees)
        opt_state = found["opt_state"]
        if not exact:
            opt_state = convert(opt_state, saved, state, meaning, axis_name)
        return Checkpoint(step, found["params"], opt_state, found["extra"]["tree"])


def _raise(reasons: list[str]) -> None:
    if any(reasons):
        raise OSError(" ".join(filter(None, reasons)))

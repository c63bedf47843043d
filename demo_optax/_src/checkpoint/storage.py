"""Saving and restoring a whole run with Orbax.

A checkpoint holds each worker's own momentum, the parameters, the rest of the optimizer state and
whatever else the run needs. The module `elastic` fits it to other workers or settings.
"""

import contextlib
import operator
import os
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import optax
from etils import epath
from jax.sharding import AbstractMesh, Mesh
from orbax.checkpoint import v1 as orbax

from demo_optax._src import checks
from demo_optax._src.axes import AxisName
from demo_optax._src.checkpoint import description, reading
from demo_optax._src.checkpoint.digests import digests
from demo_optax._src.checkpoint.elastic import convert
from demo_optax._src.parallel import shards, worker_axis
from demo_optax._src.parallel.processes import by_lead


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
        self._tx, self._where = tx, (mesh, axis_name or (), param_specs)
        self._directory, self._keep = reading.absolute(directory), keep
        self._damaged: set[int] = set()
        self._last: int | None = None  # the step that was saved or restored last
        self._writer: Any = None  # while a save is in progress
        epath.Path(self._directory).mkdir(parents=True, exist_ok=True)

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
        if self._writer is not None:
            with self._one_line(self._last):
                self._writer.close()
            self._writer = None

    @property
    def latest(self) -> int | None:
        """The step of the latest checkpoint that is not known to be damaged, or None without one.

        The first process looks for it and tells the others.
        """
        if self._writer is not None:
            return self._last
        steps = by_lead(lambda: reading.listed_steps(self._directory))
        return max(set(steps) - self._damaged, default=None)

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
            the latest; or ``step`` is negative.
          TypeError: a leaf cannot be stored, or ``step`` is no integer.
          OSError: this step, or the previous one in the background, could not be written. The run
            can go on and save later steps. If only the previous one failed, this one is still being
            written.
        """
        step = operator.index(step)
        checks.static_integer("step", step, at_least=0)
        trees = {"params": params, "opt_state": opt_state, "extra": extra}
        leaves = {part: description.by_path(tree, part) for part, tree in trees.items()}
        try:
            if self._last != step:
                self.close()
        finally:
            if self._last != step:
                self._begin(step, leaves, params, opt_state)
            if wait:
                self.close()

    def _begin(self, step: int, leaves: dict[str, dict], params, opt_state) -> None:
        """Begins to save in the background."""
        if (latest := self.latest) is not None and latest >= step:
            raise ValueError(
                f"{self._directory} holds a checkpoint of step {latest} already, so that one "
                f"of step {step} would never be the latest: save this run to another folder, "
                "or remove the later checkpoints."
            )
        leaves["extra"] = jax.device_get(leaves["extra"])
        placement = worker_axis.find_layout(self._tx, params, *self._where)
        worker_axis.require_state(opt_state, placement)
        described, arrays = description.describe(placement, opt_state), {}
        described["leaves"] = leaves
        for part, named in leaves.items():
            if own := {k: x for k, x in named.items() if not isinstance(x, description.PLAIN)}:
                arrays[part] = own  # Orbax refuses an empty part
            leaves[part] = named | {name: digests(x)[0] for name, x in own.items()}
        with self._one_line(step):
            kept: Any = orbax.training.preservation_policies.LatestN(self._keep)
            writer = orbax.training.Checkpointer(
                self._directory, preservation_policy=kept, cleanup_tmp_directories=True
            )
            with contextlib.ExitStack() as unless_it_begins:
                unless_it_begins.callback(writer.close)
                writer.save_checkpointables_async(
                    step,
                    arrays,
                    force=True,
                    overwrite=step in self._damaged,
                    custom_metadata=reading.sealed(described),
                )
                unless_it_begins.pop_all()
            self._writer, self._last = writer, step
        self._damaged.discard(step)

    @contextlib.contextmanager
    def _one_line(self, step: int | None) -> Iterator[None]:
        """Forgets a save that fails, so that it can be tried again, and says why it failed."""
        try:
            yield
        except Exception as error:
            writer, self._writer, self._last = self._writer, None, None
            with contextlib.suppress(Exception):
                writer.close()
            raise OSError(
                f"step {step} could not be saved in {self._directory}: {reading.cause_of(error)}. "
                "The run can go on: until a save succeeds, a restart begins from the one before."
            ) from error

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
            other blocks.
          FileNotFoundError: there are checkpoints, but none of this step.
          DamagedCheckpoint: the step's checkpoint is damaged, or all are. This is a ValueError.
          OSError: a process could not read it for lack of memory, permission or connection.
          UserWarning: newer checkpoints are damaged. They stay until later saves replace them.
        """
        self.close()
        found = reading.newest_intact(
            self._directory, step, lambda step: self._read(step, params, extra)
        )
        if found is None:
            return None
        self._damaged |= found[1]
        self._last = found[0].step
        return found[0]

    def _read(self, step: int, params, extra) -> Checkpoint:
        """Reads and verifies one checkpoint and converts it for this mesh."""
        mesh, tx = self._where[0], self._tx
        saved = reading.description_of(self._directory, step)
        placement = worker_axis.find_layout(tx, params, *self._where)
        state = jax.eval_shape(lambda x: worker_axis.init_opt_state(tx, x, *self._where), params)
        needed = description.describe(placement, state)
        params, state = (
            jax.tree.map(
                lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
                tree,
                shards.shardings(mesh, specs),
            )
            for tree, specs in ((params, placement.params), (state, placement.state))
        )
        exact = all(saved[key] == value for key, value in needed.items())
        # What is to be converted is read into the host's memory.
        trees = {"params": params, "opt_state": state if exact else reading.BY_PATH, "extra": extra}
        found = reading.load(self._directory, step, saved["leaves"], trees)
        if not exact:
            found["opt_state"] = convert(found["opt_state"], saved, state, needed)
        return Checkpoint(step, **found)

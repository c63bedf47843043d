"""Checkpoints of a whole run with Orbax: exact on the same workers, elastic on others.

A checkpoint holds each worker's own momentum, the parameters, the rest of the optimizer state and
whatever else the run needs. On another number of workers a restore merges or copies the momenta, so
that their mean stays the same. In other blocks, shards or under another transform it carries them
over through parameter space. Messages that are still pending go back into the momenta.
"""

import contextlib
import gc
import os
import warnings
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh

from demo_optax import checks
from demo_optax.axes import AxisName
from demo_optax.checkpoint import reading
from demo_optax.checkpoint.description import (
    by_path,
    describe,
    extra_by_path,
    from_paths,
    names_kept,
    placed,
    require_same,
    stored_as,
)
from demo_optax.checkpoint.digests import digests, like, sealed
from demo_optax.checkpoint.elastic import convert
from demo_optax.checkpoint.reading import epath, orbax
from demo_optax.parallel import layout, shards, worker_axis


class Checkpoint(NamedTuple):
    """What `Checkpointer.restore` gives back.

    Attributes:
      step: int, updates that were done when it was saved.
      params: the parameters, on the mesh.
      opt_state: the optimizer state for this mesh's workers.
      extra: what was saved beside them.

    Example:
      >>> found = Checkpoint(step=7, params={}, opt_state=(), extra={"seed": 1})
      >>> f"going on after step {found.step} with seed {found.extra['seed']}"
      'going on after step 7 with seed 1'
    """

    step: int
    params: Any
    opt_state: optax.OptState
    extra: Any


class Checkpointer:
    """Saves and restores one run in a folder.

    Args:
      directory: the run's folder, made if it does not exist, or a URL such as ``gs://...``. With
        several hosts one that all of them see.
      tx: the run's optimizer, not wrapped by `demo_optax.stack_workers`.
      mesh: the workers' mesh.
      axis_name: the workers' axis, or axes.
      param_specs: PartitionSpecs of the parameters inside a worker.
      keep: how many checkpoints to keep, the latest; at least one.

    With several processes every method is called by all of them together, from their main thread.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, demo_optax
      >>> from demo_optax.checkpoint import Checkpointer
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> tx = demo_optax.demo(1e-3, axis_name="data")
      >>> params = {"w": jnp.ones((4, 4))}
      >>> folder = tempfile.TemporaryDirectory()
      >>> with Checkpointer(folder.name, tx, mesh) as checkpointer:
      ...     opt_state = demo_optax.init_opt_state(tx, params, mesh)
      ...     checkpointer.save(7, params, opt_state, extra={"key": jax.random.key(0)})
      >>> with Checkpointer(folder.name, tx, mesh) as checkpointer:
      ...     checkpointer.restore(params, extra={"key": jax.random.key(0)}).step
      7
      >>> folder.cleanup()
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        tx: optax.GradientTransformation,
        mesh: Mesh,
        axis_name: AxisName = "data",
        param_specs=None,
        *,
        keep: int = 3,
    ):
        layout.require_plain(tx)
        checks.static_integer("keep", keep, at_least=1)
        shards.num_workers(mesh, axis_name)  # which refuses a name that is none of an axis
        self._tx, self._where = tx, (mesh, axis_name, param_specs)
        self._directory, self._keep = reading.absolute(directory), keep
        self._damaged: set[int] = set()
        self._orbax: orbax.training.Checkpointer | None = None
        self._pending: int | None = None
        self._last: int | None = None
        try:
            epath.Path(self._directory).mkdir(parents=True, exist_ok=True)
            reading.steps_in(self._directory)
        except OSError as error:
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
        """The step of the latest checkpoint that is not known to be damaged, None without any."""
        if self._orbax is not None and self._pending is not None:
            return self._pending
        steps = set(reading.steps_in(self._directory)) - self._damaged
        return max(steps, default=None)

    def save(self, step: int, params, opt_state, extra=None, *, wait: bool = False) -> None:
        """Saves in the background; the next step may be given the arrays to reuse at once.

        Args:
          step: updates done so far, which numbers the checkpoint. If it is the step that was saved
            or restored last, nothing is done.
          params: the parameters, as the train step returned them.
          opt_state: the optimizer state, likewise, with its worker axis.
          extra: a tree of arrays, random keys, numbers and strings, the same on all processes:
            the position in the data, keys, what was logged.
          wait: whether to return only when it is on disk.

        Raises:
          ValueError: the folder holds a checkpoint of this step or a later one, of another run or
            from before an older step was restored, which would stay the latest.
          OSError: this step, or the one before it in the background, could not be written. The
            run can go on and save later steps. If only the one before failed, this one is still
            being written.
        """
        reasons = []
        if self._last != step:
            reasons.append(self._finish())
            self._require_later(step)
            reasons.append(self._begin(step, params, opt_state, extra))
        if wait:
            reasons.append(self._finish())
        _raise(reasons)

    def _require_later(self, step):
        if self.latest is not None and self.latest >= step:
            raise ValueError(
                f"{self._directory} holds a checkpoint of step {self.latest} already, so that "
                f"one of step {step} would never be the latest: save this run to another "
                "folder, or remove the later checkpoints."
            )

    def _begin(self, step, params, opt_state, extra) -> str:
        """Starts to write in the background; returns why it cannot, or nothing."""
        leaves = {
            "params": by_path(params),
            "opt_state": by_path(opt_state),
            "extra": extra_by_path(step, extra),
        }
        described = {part: digests(x) for part, x in leaves.items()}
        meaning = describe(self._tx, params, opt_state, *self._where) | {"leaves": described}
        started = True
        with reading.caught() as failure:
            if self._orbax is None:
                self._orbax = self._writer()
            started = self._orbax.save_checkpointables_async(
                step, leaves, force=True, custom_metadata=sealed(meaning)
            )
        if reason := failure.reason or ("" if started else "the folder is read-only"):
            return self._failed(step, reason)
        reading.TRACEBACKS.hide()  # while it is written
        self._last = self._pending = step
        return ""

    def _writer(self) -> orbax.training.Checkpointer:
        """Orbax's writer, after what failed saves left and damaged steps are out of its way."""
        reading.clear_up(self._directory, self._damaged)
        self._damaged.clear()
        latest: Any = orbax.training.preservation_policies.LatestN(self._keep)
        return orbax.training.Checkpointer(
            self._directory, preservation_policy=latest, cleanup_tmp_directories=True
        )

    def _finish(self) -> str:
        """Waits for what is being written; returns why it could not be, or nothing."""
        step, self._pending = self._pending, None
        if self._orbax is None or step is None:
            return ""
        with reading.caught() as failure:
            self._orbax.wait()
        there = step in reading.steps_in(self._directory)
        reason = failure.reason or ("" if there else "it is not in the folder")
        return self._failed(step, reason) if reason else ""

    def _failed(self, step: int, reason: str) -> str:
        """Forgets a save, so that it can be tried again."""
        writer, self._orbax, self._last = self._orbax, None, None
        with reading.caught():
            with contextlib.suppress(Exception):
                if writer is not None:
                    writer.close()
            del writer
            gc.collect()  # what the failed call never awaited
        return (
            f"step {step} could not be saved in {self._directory}: {reason}. The run can go "
            "on. Make room there: until a save succeeds, a restart begins from the one before."
        )

    def restore(self, params, extra=None, *, step: int | None = None) -> Checkpoint | None:
        """The latest checkpoint, or that of a step; None if there are no checkpoints.

        Args:
          params: arrays or shapes of the parameters, as a tree of the same structure.
          extra: a tree like the one that was saved.
          step: which checkpoint; the latest that is intact by default.

        Returns:
          A `Checkpoint`, placed on the mesh. On as many workers as saved it, with the same
          settings, it is equal to the last bit. On another number of workers, what differs between
          workers keeps its mean: `redistribute` says how.

        Raises:
          ValueError: the checkpoint is not one of this model, optimizer or ``extra``; there are
            checkpoints, but none of this step.
          DamagedCheckpoint: that of the step is damaged, or all are. A ValueError.
          OSError: a process could not read it, for want of memory, permission or connection.
          UserWarning: newer checkpoints are damaged; the next save renames them to
            ``<step>.damaged``. Or a momentum was carried over to other blocks, another transform
            or other shards.
        """
        _raise([self._finish()])
        steps = reading.steps_in(self._directory)
        if not steps:
            return None
        if step is not None and step not in steps:
            raise ValueError(
                f"there is no checkpoint of step {step}; there are those of {steps}. Leave out "
                "step to restore the latest."
            )
        found, damaged = reading.newest_intact(
            self._directory,
            steps if step is None else [step],
            lambda step: self._read(step, params, extra),
        )
        self._damaged |= set(damaged)
        if damaged:
            self.close()  # a new writer sets them aside
        self._last = found.step
        return found

    def _read(self, step, params, extra) -> Checkpoint:
        """Reads and verifies one checkpoint, and converts it to what this mesh needs."""
        saved = reading.description_of(self._directory, step)
        held = saved["leaves"]
        require_same("parameters", by_path(params), held["params"])
        require_same("extra", extra_by_path(step, extra), held["extra"])

        mesh, axis_name, param_specs = self._where
        wanted = jax.eval_shape(worker_axis.stack_workers(self._tx, *self._where).init, params)
        meaning = describe(self._tx, params, wanted, *self._where)
        exact = all(saved[key] == value for key, value in meaning.items())
        specs = shards.leaf_specs(params, param_specs, mesh, axis_name)
        params = placed(params, shards.shardings(mesh, specs))
        wanted = placed(wanted, layout.state_shardings(self._tx, params, *self._where))
        needed, there = by_path(wanted), held["opt_state"]
        kept = set() if exact else names_kept(saved) | names_kept(meaning)
        require_same(
            "optimizer state",
            {name: x for name, x in needed.items() if name not in kept},
            {name: x for name, x in there.items() if name not in kept},
            shapes=exact,
        )
        targets = {
            part: {name: like(digest) for name, digest in held[part].items()} for part in held
        }
        targets["params"] = stored_as(by_path(params), held["params"])
        if exact:
            targets["opt_state"] = stored_as(needed, there)
        loaded = reading.load(self._directory, step, targets, held)
        state = loaded["opt_state"]
        if not exact:
            state = convert(state, saved, needed, meaning, axis_name)
        return Checkpoint(
            step,
            from_paths(loaded["params"], params),
            from_paths(state, wanted),
            from_paths(loaded["extra"], {"tree": extra, "step": step})["tree"],
        )


def _raise(reasons: list[str]) -> None:
    if any(reasons):
        raise OSError(" ".join(filter(None, reasons)))

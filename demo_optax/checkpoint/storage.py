"""Checkpoints of a whole run with Orbax: exact on the same workers, elastic on others.

Each worker's momentum is saved as its own, beside parameters, the rest of the optimizer state and
whatever else the run needs. On another number of workers the momenta are merged or copied so that
their mean stays what it was; in other blocks, under another transform or in other shards they are
carried over through parameter space. Nothing is ever filled with zeros or cut off.
"""

import dataclasses
import os
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.tree_util import keystr

from demo_optax import checks
from demo_optax._decoupled_momentum import DecoupledMomentumState
from demo_optax.axes import AxisName
from demo_optax.boxes import unboxed
from demo_optax.checkpoint.elastic import converted
from demo_optax.checkpoint.leaves import beside, by_path, from_paths, in_memory
from demo_optax.parallel import layout, shards, worker_axis

try:
    from orbax.checkpoint import v1 as orbax
except ImportError as error:
    raise ImportError("checkpoints need Orbax: pip install 'demo_optax[checkpoint]'.") from error


FORMAT = 3
"""Of what is saved; another one for each change of what the numbers of a state mean."""


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
        self._tx, self._mesh, self._axis_name = tx, mesh, axis_name
        self._param_specs = param_specs
        self._workers = shards.num_workers(mesh, axis_name)
        self._directory, self._keep = _absolute(directory), keep
        self._orbax = self._open(cleanup=False)
        self._writes = False
        self._last: int | None = None

    def _open(self, cleanup: bool) -> orbax.training.Checkpointer:
        latest: Any = orbax.training.preservation_policies.LatestN(self._keep)
        return orbax.training.Checkpointer(
            self._directory,
            preservation_policy=latest,
            cleanup_tmp_directories=cleanup,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self) -> None:
        """Waits until everything is on disk."""
        self._orbax.close()

    @property
    def latest(self) -> int | None:
        """The step of the latest checkpoint, None where there is none."""
        return None if self._orbax.latest is None else self._orbax.latest.step

    def save(self, step: int, params, opt_state, extra=None, *, wait: bool = False) -> None:
        """Saves in the background; what is given may be donated to the next step at once.

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
            from before an older step was restored. It would be taken for the latest.
        """
        if self._last != step:
            self._require_later(step)
        try:
            if self._last != step:
                self._start(step, params, opt_state, extra)
                self._last = step
            if wait:
                self._orbax.wait()
        except BaseException:
            if self._last == step and self.latest != step:
                self._last = None  # so that the same step can be saved again
            raise

    def _require_later(self, step):
        if self.latest is not None and self.latest >= step:
            raise ValueError(
                f"{self._directory} holds a checkpoint of step {self.latest} already, so that "
                f"one of step {step} would never be the latest: save this run to another "
                "folder, or remove the later checkpoints."
            )

    def _start(self, step, params, opt_state, extra):
        if not self._writes:
            # What a killed run left half written; whoever only reads leaves it alone.
            self._orbax.close()
            self._orbax, self._writes = self._open(cleanup=True), True
        self._orbax.save_checkpointables_async(
            step,
            {
                "params": by_path(params),
                "opt_state": by_path(opt_state),
                "extra": beside(step, extra),
            },
            force=True,
            custom_metadata=self._description(params, opt_state),
        )

    def restore(self, params, extra=None, *, step: int | None = None) -> Checkpoint | None:
        """The latest checkpoint, or that of a step; None where there is none at all.

        Args:
          params: arrays or shapes of the parameters, as a tree of the same structure.
          extra: a tree like the one that was saved.
          step: which checkpoint; the latest by default.

        Returns:
          A `Checkpoint`, placed on the mesh. On as many workers as saved it, in the same blocks, it
          is equal to the last bit. On another number of workers, for whatever differs between
          them: where the old number is a multiple of the new, the mean of as many neighbours;
          where the new is a multiple of the old, copies; else the mean of all. The mean over the
          workers stays the same.

        Raises:
          ValueError: the checkpoint is not one of this model, optimizer or ``extra``; there are
            checkpoints, but none of this step.
          UserWarning: a momentum is carried over to other blocks, another transform or other
            shards.
        """
        self._orbax.wait()
        if self._orbax.latest is None:
            return None
        steps = [checkpoint.step for checkpoint in self._orbax.checkpoints]
        step = steps[-1] if step is None else step
        if step not in steps:
            raise ValueError(
                f"there is no checkpoint of step {step}; there are those of {steps}. Leave out "
                "step to restore the latest."
            )
        metadata = self._orbax.checkpointables_metadata(step)
        saved: Any = metadata.custom_metadata
        held = metadata.metadata
        _require_format(saved)
        extra_leaves = beside(step, extra)
        _require_same("parameters", by_path(params), held["params"])
        _require_same("extra", extra_leaves, held["extra"])

        stacked = worker_axis.stack_workers(
            self._tx, self._mesh, self._axis_name, self._param_specs
        )
        wanted = jax.eval_shape(stacked.init, params)
        of_state = layout.state_specs(
            self._tx, params, self._mesh, self._axis_name, self._param_specs
        )
        placed_state = by_path(self._placed(wanted, of_state))
        description = self._description(params, wanted)
        exact = saved == description
        _require_same("optimizer state", placed_state, held["opt_state"], shapes=exact)
        specs = shards.leaf_specs(params, self._param_specs, self._mesh, self._axis_name)
        loaded = self._orbax.load_checkpointables(
            step,
            {
                "params": by_path(self._placed(params, specs)),
                "opt_state": (
                    placed_state if exact else jax.tree.map(in_memory, held["opt_state"])
                ),
                "extra": extra_leaves,
            },
        )
        state = loaded["opt_state"]
        if not exact:
            state = converted(state, saved, placed_state, description, self._axis_name)
        self._last = step
        return Checkpoint(
            step,
            from_paths(loaded["params"], self._placed(params, specs)),
            from_paths(state, self._placed(wanted, of_state)),
            from_paths(loaded["extra"], {"tree": extra, "step": step})["tree"],
        )

    def _placed(self, tree, specs):
        """Shapes, dtypes and shardings on the mesh."""

        def place(x, spec):
            sharding = NamedSharding(self._mesh, spec)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        return jax.tree.map(place, tree, specs)

    def _description(self, params, opt_state) -> dict:
        """What a momentum's numbers mean, in JSON."""
        specs = shards.leaf_specs(params, self._param_specs, self._mesh, self._axis_name)
        tensors = {
            path: (x.shape, shards.counts(x.shape, spec, self._mesh))
            for (path, x), spec in zip(
                jax.tree.leaves_with_path(unboxed(params)), jax.tree.leaves(specs), strict=True
            )
        }
        momenta = {}
        for path, node in jax.tree.leaves_with_path(opt_state, is_leaf=_is_momentum):
            if _is_momentum(node):
                for inside, _ in jax.tree.leaves_with_path(node.momentum):
                    if inside not in tensors:  # as where optax.flatten made one vector of all
                        continue
                    shape, counts = tensors[inside]
                    momenta[f"{keystr(path)}.momentum{keystr(inside)}"] = {
                        "coordinates": dataclasses.asdict(node.coordinates),
                        "shape": list(shape),
                        "shards": list(counts),
                        "count": f"{keystr(path)}.count",
                    }
        return {"format": FORMAT, "workers": self._workers, "momenta": momenta}


def load_params(directory: str | os.PathLike, params=None, *, step: int | None = None):
    """The parameters alone of a run's checkpoint, for evaluation: no optimizer, no mesh.

    Args:
      directory: the run's folder.
      params: arrays or shapes of the parameters; those with a sharding are placed so, others on
        the default device. Without them, a dict of NumPy arrays by their paths.
      step: which checkpoint; the latest by default.

    Raises:
      FileNotFoundError: there is no such checkpoint.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, demo_optax
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
    with orbax.training.Checkpointer(_absolute(directory)) as checkpointer:
        steps = [checkpoint.step for checkpoint in checkpointer.checkpoints]
        step = max(steps, default=None) if step is None else step
        if step not in steps:
            wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            there = f"those of {steps}" if steps else "none at all"
            raise FileNotFoundError(
                f"{directory} holds {wanted}, but {there}. Give the folder that Checkpointer saves "
                "to, and leave out step to load the latest."
            )
        here = SingleDeviceSharding(jax.local_devices()[0])

        def place(x):
            sharding = getattr(x, "sharding", None) or here
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        saved = checkpointer.checkpointables_metadata(step).metadata["params"]
        if params is None:
            wanted = jax.tree.map(in_memory, saved)
            return checkpointer.load_checkpointables(step, {"params": wanted})["params"]
        placed = jax.tree.map(place, params)
        _require_same("parameters", by_path(placed), saved)
        loaded = checkpointer.load_checkpointables(step, {"params": by_path(placed)})
        return from_paths(loaded["params"], placed)


def _require_format(saved: dict) -> None:
    """Refuses what another version of the library has written."""
    found = saved.get("format", 1)
    if found != FORMAT:
        raise ValueError(
            f"the checkpoint is of format {found}, and this version of demo_optax reads format "
            f"{FORMAT}, which stores the state in another way. Restore it with the version that "
            "saved it, or take its parameters alone with demo_optax.checkpoint.load_params."
        )


def _require_same(what: str, wanted: dict, saved: dict, shapes: bool = True) -> None:
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
        given, held = np.shape(wanted[name]), tuple(getattr(saved[name], "shape", ()))
        if given != held:
            raise ValueError(
                f"of the checkpoint's {what}, {name} has shape {held}, where {given} is expected. "
                "Restore it with the model and the optimizer that it was saved with."
            )


def _is_momentum(x) -> bool:
    return isinstance(x, DecoupledMomentumState)


def _absolute(directory: str | os.PathLike) -> str:
    return str(directory) if "://" in str(directory) else os.path.abspath(directory)

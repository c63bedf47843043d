"""Causes for every ``raise`` of the checkpoints."""

import dataclasses
import importlib.util
import pathlib
import tempfile
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax import checkpoint
from demo_optax._src.checkpoint import description, elastic, reading, storage
from tests import model
from tests.causes_in_common import DEMO, LIBRARY, state_of, two, without

OWED = {"[0].exchange.residual[0]": np.ones((2, 1, 4))}
LEAF = {"name": "[0].exchange.residual[0]", "axes": [], "shape": [2, 1, 4]}
BY_OWNERS = {"states": {"[0]": {"momenta": [], "kept": {".residual[0]": LEAF}}}}


def residuals_of(momenta):
    """Restores residuals for other momenta; None stands for an exchange that keeps none."""
    kept = {} if momenta is None else {".residual[0]": LEAF}
    wanted = {"states": {"[0]": {"momenta": momenta, "kept": kept, "outbox": {}}}}
    elastic.divide_residuals(OWED, BY_OWNERS, OWED, wanted)


def save_twice():
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            with checkpoint.Checkpointer(folder, DEMO, two()) as checkpointer:
                checkpointer.save(3, model.init(), state_of(2))


def restore(params=None, tx=DEMO, **arguments):
    with tempfile.TemporaryDirectory() as folder:
        with checkpoint.Checkpointer(folder, DEMO, two()) as checkpointer:
            checkpointer.save(3, model.init(), state_of(2))
        with checkpoint.Checkpointer(folder, tx, two()) as checkpointer:
            checkpointer.restore(params or model.init(), **arguments)


def read_another_format(read):
    with tempfile.TemporaryDirectory() as folder:
        with (
            mock.patch.object(description, "FORMAT", 5),
            checkpoint.Checkpointer(folder, DEMO, two()) as checkpointer,
        ):
            checkpointer.save(3, model.init(), state_of(2))
        read(folder)


def restore_another_preconditioner(block_side):
    """Another preconditioner of the same tree, with leaves of another shape."""

    def scale(size):
        return optax.GradientTransformation(
            lambda params: jnp.zeros(size), lambda g, s, p=None: (g, s)
        )

    tx = [
        demo_optax.demo(
            1.0, demo_optax.Compression(block_side=side), axis_name="data", precondition=scale(size)
        )
        for side, size in ((8, 2), (block_side, 3))
    ]
    with tempfile.TemporaryDirectory() as folder:
        params = {"w": np.ones((8, 8), np.float32)}
        with checkpoint.Checkpointer(folder, tx[0], two()) as checkpointer:
            checkpointer.save(3, params, demo_optax.init_opt_state(tx[0], params, two()))
        with checkpoint.Checkpointer(folder, tx[1], two()) as checkpointer:
            checkpointer.restore(params)


def restore_damaged(restore):
    with tempfile.TemporaryDirectory() as folder:
        with checkpoint.Checkpointer(folder, DEMO, two()) as checkpointer:
            checkpointer.save(3, model.init(), state_of(2), extra="abc")
        pathlib.Path(folder, "3", "extra", "_strings.json").write_text('{"[\'tree\']":"abd"}')
        with checkpoint.Checkpointer(folder, DEMO, two()) as checkpointer:
            restore(checkpointer)


def save(step=3, extra=None):
    with (
        tempfile.TemporaryDirectory() as folder,
        checkpoint.Checkpointer(folder, DEMO, two()) as checkpointer,
    ):
        checkpointer.save(step, model.init(), state_of(2), extra)


def read_without_memory():
    with mock.patch.object(reading, "_metadata", side_effect=MemoryError("not today")):
        reading.description_of("run", 3)


def clear_up_without_rights():
    with mock.patch.object(reading.epath, "Path", side_effect=PermissionError(13, "not here")):
        reading.clear_up("run", [3])


def read_another_description():
    with mock.patch.object(reading, "seal", return_value="another"):
        restore_damaged(lambda checkpointer: reading._metadata(checkpointer._directory, 3))


def restore_a_flat_vector_elsewhere():
    formats = (demo_optax.Compression(transform=x).momentum_format for x in ("dct", "identity"))
    old, new = (
        {"shape": [9], "shards": [1], "coordinates": dataclasses.asdict(x)} for x in formats
    )
    elastic._require_same_blocks("[0].momentum", old, new)


def checkpoints_in_a_file():
    with tempfile.NamedTemporaryFile() as file:
        checkpoint.Checkpointer(file.name, DEMO, two())


def save_where_a_file_is(wait):
    with tempfile.TemporaryDirectory() as folder:
        checkpointer = checkpoint.Checkpointer(f"{folder}/run", DEMO, two())
        pathlib.Path(folder, "run").rmdir()
        pathlib.Path(folder, "run").touch()
        with mock.patch.object(checkpointer, "_writer", unchecked(folder)):
            checkpointer.save(4, model.init(), state_of(2), wait=wait)
        checkpointer.close()


def unchecked(folder):
    """Orbax for a folder that is gone by the time it writes in the background."""

    def writer():
        found = storage.orbax.training.Checkpointer(f"{folder}/other")
        return mock.Mock(wraps=found, wait=mock.Mock(side_effect=OSError("full")))

    return writer


def load_params_of_no_run():
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.load_params(folder)


def import_checkpoint():
    path = LIBRARY / "_src" / "checkpoint" / "reading.py"
    spec = importlib.util.spec_from_file_location("without_orbax", path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def convert_a_leaf_of_another_shape():
    target = jax.ShapeDtypeStruct((4,), np.float32, sharding=NamedSharding(two(), P()))
    described = {"states": {}, "workers": 2}
    elastic.convert({"['x']": np.ones(3)}, described, {"x": target}, described, "data")


def restore_a_float_as_an_integer():
    description.from_paths({"['loss']": np.float32(1.5)}, {"loss": 0})


RAISED = [
    lambda: reading.require_storable("extra", {"['x']": np.zeros(2, jnp.uint4)}),
    convert_a_leaf_of_another_shape,
    restore_a_float_as_an_integer,
    lambda: elastic.convert(
        {}, {"states": {"[0]": {"fragments": {"count": 4}}}}, {}, {"states": {"[0]": {}}}, "data"
    ),
    lambda: residuals_of(None),
    lambda: residuals_of([{"shards": [2]}]),
    lambda: checkpoint.Checkpointer("there", demo_optax.demo(1e-3), two()),
    save_twice,
    lambda: save(step=-1),
    lambda: save(extra={"position": {3}}),
    lambda: restore(step=2),
    lambda: restore(tx=optax.chain(optax.trace(0.9), DEMO)),
    lambda: restore(model.init() | {"bias": jnp.ones(7)}),
    lambda: read_another_format(checkpoint.load_params),
    lambda: restore_another_preconditioner(8),
    lambda: restore_another_preconditioner(4),
    load_params_of_no_run,
    lambda: checkpoint.load_params("hdfs://cluster/run"),
    lambda: checkpoint.load_params(""),
    lambda: checkpoint.load_params(pathlib.Path("s3://bucket/run")),
    lambda: checkpoint.load_params("file://another.host/run"),
    lambda: restore_damaged(lambda checkpointer: checkpointer.restore(model.init(), "")),
    lambda: restore_damaged(lambda checkpointer: checkpointer._read(3, model.init(), "")),
    read_without_memory,
    clear_up_without_rights,
    read_another_description,
    lambda: reading._verify({"extra": {"['x']": np.ones(2)}}, {"extra": {"['x']": {"shape": [3]}}}),
    lambda: reading._metadata("run", 3),
    restore_a_flat_vector_elsewhere,
    checkpoints_in_a_file,
    lambda: save_where_a_file_is(wait=True),
    lambda: save_where_a_file_is(wait=False),
    lambda: without("orbax.checkpoint", import_checkpoint),
]

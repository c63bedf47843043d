"""Causes for every ``raise`` of the checkpoints."""

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
from demo_optax._src.checkpoint import description, elastic, reading
from tests import model
from tests.causes_in_common import DEMO, import_without, state_of, two


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
        described = pathlib.Path(folder, "3", "_CHECKPOINT_METADATA")
        described.write_text(described.read_text().replace("abc", "abd"))
        with checkpoint.Checkpointer(folder, DEMO, two()) as checkpointer:
            restore(checkpointer)


def save(step=3, extra=None, opt_state=None):
    with (
        tempfile.TemporaryDirectory() as folder,
        checkpoint.Checkpointer(folder, DEMO, two()) as checkpointer,
    ):
        checkpointer.save(step, model.init(), opt_state or state_of(2), extra)


def save_in_a_folder_that_becomes_a_file():
    with tempfile.TemporaryDirectory() as folder:
        checkpointer = checkpoint.Checkpointer(f"{folder}/run", DEMO, two())
        pathlib.Path(folder, "run").rmdir()
        pathlib.Path(folder, "run").touch()
        checkpointer.save(4, model.init(), state_of(2))


def load_params_of_no_run():
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.load_params(folder)


def convert_a_leaf_of_another_shape():
    target = jax.ShapeDtypeStruct((4,), np.float32, sharding=NamedSharding(two(), P()))
    described = {"states": {}, "sizes": [2], "over": {"['x']": []}, "words": {}}
    elastic.convert({"['x']": np.ones(3)}, described, {"x": target}, described)


def restore_a_float_as_an_integer():
    description.from_paths({"['loss']": np.float32(1.5)}, {"loss": 0})


RAISED = [
    convert_a_leaf_of_another_shape,
    restore_a_float_as_an_integer,
    save_twice,
    lambda: save(step=-1),
    lambda: save(extra={"position": {3}}),
    lambda: restore(step=2),
    ("opt_state are not those", lambda: restore(tx=optax.chain(optax.trace(0.9), DEMO))),
    (r"bias.*shape \(16,\)", lambda: restore(model.init() | {"bias": jnp.ones(7)})),
    ("params are not those", lambda: restore(model.one_matrix())),
    ("extra are not those", lambda: restore(extra={"a": 1})),
    ("init_opt_state", lambda: save(opt_state=DEMO.init(model.init()))),
    lambda: restore_another_preconditioner(8),
    lambda: restore_another_preconditioner(4),
    load_params_of_no_run,
    (
        "checkpoints cannot be kept at hdfs://cluster/run: give a folder",
        lambda: checkpoint.load_params("hdfs://cluster/run"),
    ),
    lambda: checkpoint.load_params(""),
    lambda: checkpoint.load_params(pathlib.Path("s3://bucket/run")),
    lambda: checkpoint.load_params("file://another.host/run"),
    lambda: restore_damaged(lambda checkpointer: checkpointer.restore(model.init(), "")),
    lambda: restore_damaged(lambda checkpointer: checkpointer._read(3, model.init(), "")),
    lambda: reading._verify({"extra": {"['x']": np.ones(2)}}, {"extra": {"['x']": {}}}),
    lambda: reading.on_all(3, mock.Mock(side_effect=MemoryError("not today"))),
    lambda: reading.described(mock.Mock(custom_metadata={"format": 5})),
    (r"^step 4 could not be saved in .*: [^\n]*$", save_in_a_folder_that_becomes_a_file),
    lambda: import_without("orbax.checkpoint", "checkpoint/__init__.py"),
]

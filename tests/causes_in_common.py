"""What causes of errors have in common."""

import importlib.util
import pathlib
import sys
from unittest import mock

import demo_optax
from tests import workers

LIBRARY = pathlib.Path(demo_optax.__file__).parent
DEMO = demo_optax.demo(1e-3, demo_optax.Compression(2, 4), axis_name="data")


def two():
    return workers.mesh_of(2)


def state_of(workers_number):
    return workers.initial(DEMO, workers.mesh_of(workers_number))[1]


def without(name, action):
    """Does something while a module cannot be imported."""
    with mock.patch.dict(sys.modules, {name: None}):
        action()


def import_without(name, file):
    """Imports a file of the library anew while another module cannot be imported."""
    spec = importlib.util.spec_from_file_location("anew", LIBRARY / "_src" / file)
    without(name, lambda: spec.loader.exec_module(importlib.util.module_from_spec(spec)))

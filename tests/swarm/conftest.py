"""Workers with equal programs compile them once, and are closed at the end."""

import pytest

from demo_optax._src.swarm import worker
from demo_optax.swarm import ObjectStore
from tests import members, swarms


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch):
    monkeypatch.setattr(worker, "compile_programs", swarms.compile_once)


@pytest.fixture
def store(tmp_path):
    swarms.OPEN.clear()
    yield ObjectStore(str(tmp_path), patience=10.0)
    while swarms.OPEN:
        swarms.OPEN.pop().close()


@pytest.fixture
def run(tmp_path):
    return members.Run(tmp_path)

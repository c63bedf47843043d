"""Workers with equal programs compile them once."""

import pytest

from demo_optax._src.swarm import worker
from tests import members, swarms


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch):
    monkeypatch.setattr(worker, "compile_programs", swarms.compile_once)


@pytest.fixture
def run(tmp_path):
    return members.Run(tmp_path)

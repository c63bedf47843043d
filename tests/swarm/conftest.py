"""Workers with equal programs compile them once."""

import pytest

from tests import swarms


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch):
    monkeypatch.setattr("demo_optax._src.swarm.worker.compile_programs", swarms.compile_once)

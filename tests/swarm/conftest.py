"""Workers with equal programs compile them once, and are closed at the end."""

import sys
import time

import pytest

from demo_optax._src.swarm import store as stores
from demo_optax._src.swarm import worker
from demo_optax.swarm import ObjectStore, SwarmWorker
from tests import members, swarms, virtual_time

REQUEST, STEP = 0.0005, 0.01  # seconds


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch):
    monkeypatch.setattr(worker, "compile_programs", swarms.compile_once)


@pytest.fixture
def virtual_waits(request, monkeypatch):
    """The test and the swarm wait in virtual time, some of which requests and steps take."""
    world = virtual_time.World()

    def delay(kind, name, seconds):
        method = getattr(kind, name)

        def later(*args):
            world.pause(seconds)
            return method(*args)

        monkeypatch.setattr(kind, name, later)

    def in_turn(fn, keys):
        return [fn(key) for key in keys]

    delay(ObjectStore, "_persist", REQUEST)
    delay(SwarmWorker, "step", STEP)
    of_swarms = [x for name, x in sys.modules.items() if name.startswith("demo_optax._src.swarm")]
    stand_ins = [*virtual_time.stand_ins(world, time.time()), (stores.in_parallel, in_turn)]
    swarms.OPEN.clear()
    with virtual_time.replaced([*of_swarms, request.module, members, swarms], stand_ins):
        yield
        while swarms.OPEN:
            swarms.OPEN.pop().close()
        world.leave_all()


@pytest.fixture
def store(tmp_path):
    return ObjectStore(str(tmp_path), patience=10.0)


@pytest.fixture
def run(tmp_path):
    return members.Run(tmp_path)

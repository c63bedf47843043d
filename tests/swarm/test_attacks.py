"""Somebody attacks a run for members only: with the whole store and no key, then with a key."""

import pathlib
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest

from benchmarks.chaos.stores import AZURITE
from demo_optax._src.swarm.round_clock import RoundClock
from tests import members

ROOT = pathlib.Path(__file__).parents[2]
NEEDS_MOTO = pytest.mark.skipif(not find_spec("moto"), reason="make chaos installs moto")
NEEDS_AZURITE = pytest.mark.skipif(not AZURITE.exists(), reason="make chaos installs Azurite")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("store", "garbage"),
    [
        ("folder", 10**5),
        pytest.param("s3", 10**4, marks=NEEDS_MOTO),
        pytest.param("azure", 2000, marks=NEEDS_AZURITE),
    ],
)
def test_nothing_of_an_attackers_is_adopted_and_members_have_equal_parameters(store, garbage):
    words = ["--store", store, "--garbage", str(garbage)]
    command = [sys.executable, "-m", "tests.programs.attack_swarm", *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert int(ended.stdout.rpartition(" tries of ")[0].split()[-1]) >= 300


@pytest.mark.usefixtures("virtual_waits")
def test_no_member_ends_the_round_of_another_before_half_of_its_seconds(tmp_path):
    paris, oslo = members.Run(tmp_path).members("paris", "oslo")
    clock, seconds = RoundClock(paris, 100, 40.0), 40.0
    assert clock.look(0, 1) == "open"
    oslo._steps.say(0, oslo.me, "ends")
    while not (clock._seen and clock._seen[2]):
        time.sleep(0.01)
    clock._began = time.monotonic() - 0.4 * seconds
    assert clock.look(0, 1) == "open"
    clock._began = time.monotonic() - 0.5 * seconds
    assert clock.look(0, 1) == "over"
    clock.close()

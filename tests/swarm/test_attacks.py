"""Somebody attacks a run for members only: with the whole store and no key, then with a key."""

import functools
import pathlib
import subprocess
import sys
import threading
import time
from importlib.util import find_spec

import pytest

from benchmarks.chaos.stores import AZURITE
from tests import members, swarms

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


def test_a_member_that_ends_rounds_at_once_ends_none_before_half_of_a_median_one(tmp_path):
    paris, oslo = members.Run(tmp_path).members("paris", "oslo")
    for step in range(4):
        time.sleep(0.6)
        rounds = [functools.partial(x.exchange, step, b"12345", 2) for x in (paris, oslo)]
        swarms.together(rounds)
    began = time.monotonic()
    lies = threading.Thread(target=oslo.exchange, args=(4, b"12345", 2, 1, True))
    lies.start()
    while not paris.others_ended(4):
        time.sleep(0.01)
    assert 0.25 < time.monotonic() - began < 5
    paris.exchange(4, b"12345", 2)
    lies.join()

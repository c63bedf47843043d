"""Swarms in virtual time come together after troubles; the program tries thousands of seeds."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("words", [["--closed"], []], ids=["closed", "open"])
def test_members_come_together_after_troubles(words):
    command = [sys.executable, "-m", "tests.programs.simulate_swarm", "--seeds", "20:26", *words]
    environment = os.environ | {"PYTHONHASHSEED": "0", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

"""Swarms in virtual time come together after troubles; the program tries thousands of seeds."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = """
import shlex, sys
from tests.programs.simulate_swarm import main
sys.exit(sum([main(shlex.split(words)) for words in sys.argv[1:]]))
"""
CASES = (
    "--closed --seeds 20:26",
    "--seeds 20:26",
    # A packet that counts was written over, by whoever came back or had gone back.
    "--closed --members 2 --seeds 33:34 41:42 69:70 114:115",
    # Sides parted, and went on in steps in which they did not see each other.
    "--closed --seeds 38:39 122:123 197:198",
    # Some were behind what others did under a newer roster, or before they were all killed.
    "--closed --seeds 81:82 133:134",
    # Who came back trailed the other for ever, by the time for which it waited in each step.
    "--closed --members 2 --kinds kill freeze 'kill all' --seeds 60:61 82:83 135:136",
    # Most of those who had decided some steps were taken out, and another one was cut off.
    "--closed --seeds 1574:1575",
    # All stand still in the first steps while the roster changes, and wait as long as by default.
    "--closed --deadline 0 --seeds 81:82",
)


def test_members_come_together_after_troubles():
    command = [sys.executable, "-c", PROGRAM, *CASES]
    environment = os.environ | {"PYTHONHASHSEED": "0", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

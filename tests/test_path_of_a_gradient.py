"""How long the way of one gradient through the library is. It may only become shorter."""

import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
PROGRAM = ROOT / "tests" / "programs" / "count_path.py"
MODULES, FUNCTIONS = 25, 263


def test_one_gradient_passes_no_more_modules_and_functions_than_before():
    run = subprocess.run(
        [sys.executable, str(PROGRAM)], capture_output=True, text=True, timeout=120, check=True
    )
    counted = json.loads(run.stdout)
    assert counted["modules"] <= MODULES
    assert counted["functions"] <= FUNCTIONS

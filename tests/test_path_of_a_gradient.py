"""How long the way of one gradient through the library is. It may only become shorter."""

import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
PROGRAM = ROOT / "tests" / "programs" / "count_path.py"
MODULES, FUNCTIONS = 29, 288
LINES_OF_A_FILE = 400


def test_one_gradient_passes_no_more_modules_and_functions_than_before():
    run = subprocess.run(
        [sys.executable, str(PROGRAM)], capture_output=True, text=True, timeout=120, check=True
    )
    counted = json.loads(run.stdout)
    assert counted["modules"] <= MODULES
    assert counted["functions"] <= FUNCTIONS


def test_files_of_the_library_are_short():
    lines = {
        path.relative_to(ROOT): len(path.read_text().splitlines())
        for path in (ROOT / "demo_optax").rglob("*.py")
    }
    assert [path for path, count in lines.items() if count > LINES_OF_A_FILE] == []

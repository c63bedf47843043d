"""Two processes on one machine: what they exchange crosses a real network interface."""

import json
import pathlib
import subprocess
import sys

from tests.ports import free_port
from tests.sweeps import sweep

PROGRAMS = pathlib.Path(__file__).parent / "programs"


def results_of(program, *arguments):
    """What each of two processes prints last, in JSON."""
    address = f"127.0.0.1:{free_port()}"
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAMS / program), address, str(i), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    outputs = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


def test_both_restore_the_step_that_the_first_one_lists_and_repair_the_same_replica(tmp_path):
    """Although the second one does not see it in its list, as on a disk that it caches."""
    first, second = results_of("restore_and_repair.py", tmp_path / "run")
    assert (first.pop("steps"), second.pop("steps")) == ([[1, 2, 3], 2, 2, 3], [[1], 2, 2, 3])
    assert first == second == {"drifted": [2], "left": [], "mended": [[1.0, 2.0, 3.0]] * 2}


@sweep("int4", values=["float32", "int4"])
def test_two_processes_move_the_bytes_that_are_accounted_for(values):
    results = results_of("count_wire_bytes.py", values)
    assert results[0]["parameters"] == results[1]["parameters"]
    # In the end the second process has no finite gradient: the first goes on, and both follow.
    assert [result["momentum_kept"] for result in results] == [False, True]
    for result in results:
        assert result["participants"] == 2
        assert result["participants_at_last"] == 1
        assert result["finite"]
        both = 2 * result["packet"]  # each sends its packet to the other
        assert both <= result["seen"] <= 1.1 * both + 4096

"""Two processes on one machine: what they exchange crosses a real network interface."""

import json
import pathlib
import subprocess
import sys

from tests.ports import free_port
from tests.sweeps import sweep

PROGRAM = pathlib.Path(__file__).parent / "programs" / "count_wire_bytes.py"


@sweep("int4", values=["float32", "int4"])
def test_two_processes_move_the_bytes_that_are_accounted_for(values):
    address = f"127.0.0.1:{free_port()}"
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), address, str(i), values],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    outputs = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    results = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    assert results[0]["parameters"] == results[1]["parameters"]
    # In the end the second process has no finite gradient: the first goes on, and both follow.
    assert [result["momentum_kept"] for result in results] == [False, True]
    for result in results:
        assert result["participants"] == 2
        assert result["participants_at_last"] == 1
        assert result["finite"]
        both = 2 * result["packet"]  # each sends its packet to the other
        assert both <= result["seen"] <= 1.1 * both + 4096

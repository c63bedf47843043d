"""Workers as processes, two of a worker are one JAX job."""

import json
import pathlib
import subprocess
import sys

import pytest

from tests.ports import free_port

PROGRAM = pathlib.Path(__file__).parents[1] / "programs" / "swarm_worker.py"


@pytest.mark.slow
@pytest.mark.parametrize("delay", ["0", "1"])
def test_two_workers_of_two_processes_each(tmp_path, delay):
    places = {name: f"127.0.0.1:{free_port()}" for name in ("paris", "saigon")}
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(tmp_path), name, delay, "12", address, process],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, address in places.items()
        for process in ("0", "1")
    ]
    outputs = [process.communicate(timeout=100) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    results = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    assert all(x["digests"] == results[0]["digests"] for x in results)
    assert len(results[0]["digests"]) == 12
    assert all(sorted(x["members"]) == ["paris", "saigon"] for x in results)

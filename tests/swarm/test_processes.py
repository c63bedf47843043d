"""Workers as processes, two of a worker are one JAX job."""

import json
import pathlib
import subprocess
import sys

import pytest

from tests.ports import free_port
from tests.sweeps import slow

PROGRAM = pathlib.Path(__file__).parents[1] / "programs" / "swarm_worker.py"


def run_together(*options):
    """The results of processes with these options, each a list of strings."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for arguments in options
    ]
    try:
        outputs = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(options), outputs
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


@pytest.mark.parametrize("delay", [slow("0"), "1"])
def test_two_workers_of_two_processes_each(tmp_path, delay):
    places = {name: f"127.0.0.1:{free_port()}" for name in ("paris", "saigon")}
    results = run_together(
        *[
            (str(tmp_path), name, delay, "12", address, process)
            for name, address in places.items()
            for process in ("0", "1")
        ]
    )
    assert all(x["digests"] == results[0]["digests"] for x in results)
    # With a delay no result has come when the first step ends.
    assert list(map(int, results[0]["digests"])) == list(range(1 - int(delay), 13))
    assert all(sorted(x["members"]) == ["paris", "saigon"] for x in results)


@pytest.mark.slow
@pytest.mark.parametrize("delay", ["0", "1"])
def test_all_processes_of_a_worker_that_was_late_catch_up(tmp_path, delay):
    pauses = {"paris": "0.3", "saigon": "0.1,0.1,0.1,8,0"}
    places = {name: f"127.0.0.1:{free_port()}" for name in pauses}
    first, second, *late = run_together(
        *[
            (str(tmp_path), name, delay, "120", places[name], process, pauses[name])
            for name in pauses
            for process in ("0", "1")
        ]
    )
    assert first == second and late[0] == late[1]
    taken = sorted(map(int, late[0]["digests"]))
    assert len(taken) < taken[-1] - taken[0]  # it caught up with some
    steps = first["digests"].keys() & late[0]["digests"].keys()
    assert len(steps) > 10
    assert all(first["digests"][step] == late[0]["digests"][step] for step in steps)

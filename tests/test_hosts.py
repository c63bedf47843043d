"""The example as several processes: equal to one, and none the worse for being killed."""

import functools
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from demo_optax import checkpoint
from demo_optax.swarm import ObjectStore, read_history
from lm import hosts
from tests.sweeps import slow

ROOT = pathlib.Path(__file__).parents[1]
LAUNCH = [sys.executable, str(ROOT / "examples" / "launch_local.py")]
EVERY = 50
TEXT = ["--text", str(ROOT / "demo_optax")]
NANO = ["--preset", "nano", *TEXT, "--batch-size", "12", "--warmup-steps", "2"]
ENDLESS = ["--steps", "1000000", "--evaluate-every", "1000000", "--checkpoint-every", str(EVERY)]


@pytest.fixture
def start():
    """Starts the launcher, with its output going to a file; nothing of it outlives the test."""
    runs = []

    def start(processes, *arguments, log, launch=()):
        command = [*LAUNCH, "-n", str(processes), *launch, "--", *NANO, *map(str, arguments)]
        with log.open("w") as output:
            runs.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT))
        return runs[-1]

    yield start
    for run in runs:
        if run.poll() is None:
            subprocess.run(["pkill", "-KILL", "-P", str(run.pid)], check=False)
            run.kill()
            run.wait()


def wait_for(found, log, process, seconds=120):
    """What ``found()`` returns, once that is something."""
    deadline = time.monotonic() + seconds
    while not (result := found()):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
    return result


def saved(folder):
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit())


def find(pattern, log):
    return re.search(pattern, log.read_text())


def send(which, folder, number):
    """A signal to one of the trainers that save to a folder, or that are a swarm there."""
    pattern = f"(checkpoint-dir {folder} .*--process-id |swarm {folder} --worker worker-){number}$"
    pid = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True, check=True)
    os.kill(int(pid.stdout.split()[-1]), which)


def parameters(folder):
    """The parameters that were saved last, as a flat vector."""
    return np.concatenate([x.ravel() for x in jax.tree.leaves(checkpoint.load_params(folder))])


def test_a_lost_process_is_found_behind_the_error_that_it_caused():
    lost = ValueError("UNKNOWN: Gloo all-reduce failed: Connection reset by peer")
    for cause, found in (lost, [str(lost)]), (ValueError("RESOURCE_EXHAUSTED: memory"), []):
        error = OSError("the first process could not list run")
        error.__cause__ = cause
        assert list(filter(hosts.is_of_others, hosts.messages_of(error))) == found


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["demo-sgd", "demo-scaled"])
def test_the_same_run_on_one_process_or_four(start, optimizer, tmp_path):
    common = ["--optimizer", optimizer, "--value-coding", "float32", "--workers", 4, "--steps", 6]
    results = []
    for processes in (1, 2, 4):
        folder, log = tmp_path / f"{processes}", tmp_path / f"{processes}.log"
        run = start(processes, *common, "--checkpoint-dir", folder, log=log)
        assert run.wait(200) == 0, log.read_text()
        assert "parameters on 4 devices: bit-identical" in log.read_text()
        assert f"in {processes} processes" in log.read_text()
        results.append(parameters(folder))
    for other in results[1:]:
        close = np.isclose(other, results[0], rtol=1e-5, atol=1e-7)
        # A sign may turn where an update is within rounding of zero.
        assert close.mean() > (0.999 if optimizer == "demo-scaled" else 1.0 - 1e-12)


@pytest.mark.parametrize("processes", [1, slow(2)])
def test_a_second_interrupt_stops_at_once(start, processes, tmp_path):
    """While the first step is compiled."""
    folder, log = tmp_path / "run", tmp_path / "log"
    run = start(processes, "--workers", 2, *ENDLESS, "--checkpoint-dir", folder, log=log)
    for shown in ("optimizer", "Saves and stops"):
        wait_for(functools.partial(find, shown, log), log, run)
        run.send_signal(signal.SIGINT)
    assert run.wait(10) == 130, log.read_text()
    assert log.read_text().count("Stopped at once. Start the same command again") == processes
    assert "Traceback" not in log.read_text()
    assert saved(folder) == []


@pytest.mark.slow
def test_one_of_four_is_killed_and_three_go_on(start, tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    arguments = [*ENDLESS, "--peer-timeout", 20, "--checkpoint-dir", folder]
    run = start(4, "--workers", 4, *arguments, log=log)
    wait_for(lambda: saved(folder), log, run)
    send(signal.SIGKILL, folder, 2)
    assert run.wait(60) == 137, log.read_text()
    text = log.read_text()
    assert "process 2 was killed by SIGKILL, and the others ended too" in text
    for number in (0, 1, 3):
        (line,) = [x for x in text.splitlines() if f"process {number} of 4, after step" in x]
        assert "another process is gone or stuck. Start the same command again" in line

    last = saved(folder)[-1]
    arguments[1] = last + 20
    run = start(3, "--workers", 3, *arguments, log=log)
    assert run.wait(100) == 0, log.read_text()
    assert f"going on after step {last}" in log.read_text()
    assert "parameters on 3 devices: bit-identical" in log.read_text()


@pytest.mark.parametrize("key", [["--key", "paris.key"], ["--key=paris.key"]])
def test_a_launcher_gives_no_key_to_several_processes(key):
    line = [*LAUNCH, "--swarm", "run", "--", *key, "--owner", "owner.pub"]
    ended = subprocess.run(line, capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and not ended.stdout
    assert re.fullmatch(r"error: --key .* a key of its own: start each yourself.*\n", ended.stderr)


@pytest.mark.slow
def test_one_of_a_swarm_is_killed_and_the_others_go_on(start, tmp_path):
    place, log = tmp_path / "place", tmp_path / "log"

    def newest_members():
        history = read_history(ObjectStore(str(place)), 1)
        return sorted(history.members(-1)) if history.manifests else []

    arguments = ["--steps", 400, "--evaluate-every", 1000, "--deadline", 5]
    run = start(3, *arguments, log=log, launch=["--swarm", str(place)])
    wait_for(lambda: len(newest_members()) == 3, log, run)
    send(signal.SIGKILL, place, 1)
    wait_for(lambda: newest_members() == ["worker-0", "worker-2"], log, run)
    assert run.wait(200) == 137, log.read_text()
    assert "process 1 was killed by SIGKILL" in log.read_text()
    ends = re.findall(r"\[(\d)\] held-out text.*; parameters (\w+)", log.read_text())
    assert sorted(number for number, _ in ends) == ["0", "2"], log.read_text()
    assert len({parameters for _, parameters in ends}) == 1


@pytest.mark.slow
def test_a_worker_that_is_stopped_while_it_joins_leaves(start, tmp_path):
    place, log = tmp_path / "place", tmp_path / "log"
    run = start(1, *ENDLESS[:4], log=log, launch=["--swarm", str(place)])
    wait_for(lambda: "compiles and joins" in log.read_text(), log, run)
    send(signal.SIGTERM, place, 0)
    assert run.wait(100) == 143, log.read_text()
    assert "Left. It sent no packet." in log.read_text() and "Traceback" not in log.read_text()


@pytest.mark.slow
def test_parameters_of_a_swarm_are_saved_and_evaluated(start, tmp_path):
    log, saved_to, logs = tmp_path / "log", tmp_path / "saved", tmp_path / "logs"
    arguments = ["--steps", 6, "--checkpoint-dir", saved_to, "--log-dir", logs]
    run = start(1, *arguments, log=log, launch=["--swarm", str(tmp_path / "place")])
    assert run.wait(200) == 0, log.read_text()
    (loss,) = re.findall(r"held-out text: ([\d.]+) nats", log.read_text())
    words = ["--config", str(logs / "config.yaml")]
    evaluate = [sys.executable, str(ROOT / "examples" / "evaluate.py"), *words]
    found = subprocess.run(evaluate, capture_output=True, text=True, check=True)
    assert f"loss on held-out text: {loss} nats per byte" in found.stdout

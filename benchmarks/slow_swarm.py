"""What a slow link costs a swarm: rounds of local steps, each worker behind a link of its own.

    python benchmarks/slow_swarm.py --seconds 240
    python benchmarks/slow_swarm.py --runs sparseloco "sparseloco, at once" --bandwidth 10
    python benchmarks/slow_swarm.py --runs "rounds of 8 s" alone --links none --throttled

Four processes of the trainer exchange over moto's S3 server. Between each and the server stands a
proxy, which waits 100 ms before each answer and carries so many Mbit a second in each direction.
Each run is made without limits, too. With ``--throttled`` one of the workers gets a third of the
time, by SIGSTOP and SIGCONT in turn. A line for each says the mean seconds of a step, snapshots
included; the share of the time in which workers computed, which is the median step inside a round
times the number of steps, by the time; and the steps that counted. Times say something on idle
cores only. It needs the group `chaos` (`make chaos`).
"""

import contextlib
import itertools
import json
import os
import pathlib
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import tyro

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.chaos import proxy  # noqa: E402
from benchmarks.chaos.faults import throttle  # noqa: E402
from benchmarks.chaos.fleet import Worker  # noqa: E402
from benchmarks.chaos.stores import Served, served  # noqa: E402
from demo_optax.swarm import ObjectStore, read_history  # noqa: E402

STEPS = 1_000_020
SPARSE = "--optimizer sparseloco --topk 64 --value-coding int2 --local-steps 30"
DENSE = "--optimizer diloco --local-steps 30"
RUNS = {
    "sparseloco": SPARSE,
    "sparseloco, at once": f"{SPARSE} --delay 0",
    "diloco": DENSE,
    "diloco, at once": f"{DENSE} --delay 0",
    "rounds of 8 s": f"{SPARSE} --round-seconds 8",
    "alone": f"--optimizer sparseloco --local-steps {STEPS}",
    "every step": "--optimizer demo-scaled",
    "every step, delayed": "--optimizer demo-scaled --delay 1",
}


@dataclass(frozen=True)
class Options:
    runs: tuple[str, ...] = tuple(RUNS)
    """Which of the runs to make."""
    bandwidth: float = 10.0
    """Mbit a second in each direction."""
    latency: float = 0.1
    """Seconds before each answer."""
    workers: int = 4
    """Processes."""
    preset: str = "small"
    """The trainer's preset."""
    batch_size: int = 4
    """Sequences of each worker."""
    seconds: float = 240.0
    """Seconds of each run, once all workers have taken a step."""
    snapshot_every: int = 90
    """Steps between two snapshots."""
    throttled: bool = False
    """Whether one worker gets a third of the time."""
    links: Literal["both", "limited", "none"] = "both"
    """Whether to make each run with limits, without, or both."""


@contextlib.contextmanager
def links(options: Options, server: Served, limited: bool) -> Iterator[list[dict[str, str]]]:
    """The environments of workers that each have a link of their own."""
    upstream = server.environment["AWS_ENDPOINT"].removeprefix("http://").split(":")
    environments, proxies = [], []
    for number in range(options.workers):
        faults = proxy.Faults(number)
        if limited:
            faults.delay, faults.bandwidth = options.latency, options.bandwidth * 1e6 / 8
        proxies.append(proxy.serve((upstream[0], int(upstream[1])), faults))
        endpoint = f"http://127.0.0.1:{proxies[-1].server_port}"
        environments.append(server.environment | {"AWS_ENDPOINT": endpoint})
    try:
        yield environments
    finally:
        for one in proxies:
            one.shutdown()


def measure(options: Options, run: str, limited: bool) -> dict:
    words = f"{RUNS[run]} --preset {options.preset} --batch-size {options.batch_size}"
    words += f" --steps {STEPS} --evaluate-every {STEPS} --min-workers {options.workers}"
    words += f" --snapshot-every {options.snapshot_every} --swarm"
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = pathlib.Path(temporary)
        server = stack.enter_context(served("s3", folder, 0))
        environments = stack.enter_context(links(options, server, limited))
        url = f"{server.url}-{time.time():.0f}"
        workers = [
            Worker(f"worker-{n}", folder, [*words.split(), url], environment)
            for n, environment in enumerate(environments)
        ]
        for worker in workers:
            worker.start()
        while not all(len(worker.steps()) > 3 for worker in workers):
            if not all(worker.alive for worker in workers):
                sys.exit(next(x.last_words() for x in workers if not x.alive))
            time.sleep(0.2)
        began = time.time()
        if options.throttled:
            throttle(workers[-1], options.seconds)
        else:
            time.sleep(options.seconds)
        ended = time.time()
        for worker in workers:
            worker.send(signal.SIGTERM)
        for worker in workers:
            worker.wait(60)
        os.environ.update(server.environment)
        store = ObjectStore(url)
        manifests = [m for m in read_history(store).manifests if began < m.time < ended]
        snapshots = [x for x in store.names("snapshots") if x.endswith(".json")]
        steps = [x for worker in workers for x in worker.steps() if began < x["time"] < ended]
    inside = [x["seconds"] for x in steps if not x["round_steps"] and not x["members"]]
    total = sum(x["seconds"] for x in steps)
    each = total / len(steps)
    return {
        "run": run,
        "Mbit/s": options.bandwidth if limited else None,
        "steps": len(steps),
        "counted": sum(packet.steps for m in manifests for packet in m.packets),
        "seconds a step": round(each, 4),
        "computing": round(statistics.median(inside) / each, 4) if inside else None,
        "waiting": round(sum(x["waited"] for x in steps) / total, 4),
        "exchanges": len(manifests),
        "MB sent a step": round(sum(x["packet_bytes"] for x in steps) / 1e6 / len(steps), 4),
        "snapshots": len(snapshots),
    }


def main(options: Options) -> None:
    seconds = {}
    kinds = {"both": (False, True), "limited": (True,), "none": (False,)}[options.links]
    for run, limited in itertools.product(options.runs, kinds):
        found = measure(options, run, limited)
        print(json.dumps(found), flush=True)
        seconds[run, limited] = found["seconds a step"]
    for run in options.runs if options.links == "both" else ():
        ratio = seconds[run, True] / seconds[run, False]
        print(f"{run}: a step takes {ratio:.3f} times as long at {options.bandwidth:g} Mbit/s")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))

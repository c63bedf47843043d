"""What a slow link costs a swarm: rounds of local steps, each worker behind a link of its own.

    python benchmarks/slow_swarm.py --runs sparseloco "sparseloco, at once" --bandwidth 10
    python benchmarks/slow_swarm.py --runs "rounds of 8 s" alone --links none --turns 1 --throttled

Four processes of the trainer exchange over moto's S3 server. Between each and the server stands a
proxy, which waits 100 ms before each answer and carries so many Mbit a second in each direction.
Limits are lifted and set in turn, since machines are faster at one time than at another. With
``--throttled`` one of the workers gets a third of the time, by SIGSTOP and SIGCONT in turn. A line
says the mean seconds of a step, snapshots included; the share of the time in which workers
computed, which is the median step inside a round times the number of steps, by the time; and the
steps that counted. Times are right on idle cores only. It needs the group `chaos` (`make chaos`).
"""

import argparse
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
from collections.abc import Callable, Iterator

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.chaos import proxy  # noqa: E402
from benchmarks.chaos.faults import throttle  # noqa: E402
from benchmarks.chaos.fleet import Worker  # noqa: E402
from benchmarks.chaos.stores import Served, served  # noqa: E402
from demo_optax.swarm import ObjectStore, read_history  # noqa: E402

STEPS = 1_000_020
KINDS = {"both": (False, True), "limited": (True,), "none": (False,)}
SPARSE = "--optimizer sparseloco --topk 64 --value-coding int2 --local-steps 30"
DENSE = "--optimizer diloco --local-steps 30"
RUNS = {
    "sparseloco": SPARSE,
    "sparseloco, at once": f"{SPARSE} --delay 0",
    "diloco": DENSE,
    "diloco, at once": f"{DENSE} --delay 0",
    "rounds of 8 s": f"{SPARSE} --round-seconds 8",
    "rounds of 60 s": f"{SPARSE} --round-seconds 60",
    "alone": f"--optimizer sparseloco --local-steps {STEPS}",
    "every step": "--optimizer demo-scaled",
    "every step, delayed": "--optimizer demo-scaled --delay 1",
}


def links(options: argparse.Namespace, server: Served) -> tuple[list, Callable]:
    """The environments of workers that each have a link, and what sets or lifts all limits."""
    upstream = server.environment["AWS_ENDPOINT"].removeprefix("http://").split(":")
    faults = [proxy.Faults(number) for number in range(options.workers)]
    proxies = [proxy.serve((upstream[0], int(upstream[1])), one) for one in faults]

    def limit(limited: bool) -> None:
        for one in faults:
            one.delay = options.latency if limited else 0.0
            one.bandwidth = options.bandwidth * 1e6 / 8 if limited else float("inf")

    endpoints = [f"http://127.0.0.1:{one.server_port}" for one in proxies]
    return [server.environment | {"AWS_ENDPOINT": x} for x in endpoints], limit


def measure(options: argparse.Namespace, run: str) -> Iterator[dict]:
    words = f"{RUNS[run]} --preset small --batch-size {options.batch_size} --snapshot-every 90"
    words += f" --steps {STEPS} --evaluate-every {STEPS} --min-workers {options.workers} --swarm"
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = pathlib.Path(temporary)
        server = stack.enter_context(served("s3", folder, 0))
        environments, limit = links(options, server)
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
        kinds, periods = KINDS[options.links], []
        for limited in kinds * options.turns:
            limit(limited)
            began = time.time()
            wait = (lambda x: throttle(workers[-1], x)) if options.throttled else time.sleep
            wait(options.seconds)
            periods.append((began, time.time(), limited))
        for worker in workers:
            worker.send(signal.SIGTERM)
        for worker in workers:
            worker.wait(60)
        os.environ.update(server.environment)
        manifests = read_history(ObjectStore(url)).manifests
        all_steps = [x for worker in workers for x in worker.steps()]
    for limited in kinds:
        own = [period[:2] for period in periods if period[2] == limited]
        turns = [[x for x in all_steps if a < x["time"] < b] for a, b in own]
        steps = list(itertools.chain(*turns))
        each = statistics.fmean(x["seconds"] for x in steps)
        alone = [x["seconds"] for x in steps if not x["round_steps"] and not x["members"]]
        counted = [m for m in manifests if any(a < m.time < b for a, b in own)]
        yield {
            "run": run,
            "Mbit/s": options.bandwidth if limited else None,
            "steps": len(steps),
            "counted": sum(packet.steps for m in counted for packet in m.packets),
            "exchanges": len(counted),
            "seconds a step": round(each, 4),
            "of each turn": [round(statistics.fmean(x["seconds"] for x in y), 4) for y in turns],
            "computing": round(statistics.median(alone) / each, 4) if alone else None,
            "waiting": round(statistics.fmean(x["waited"] for x in steps) / each, 4),
            "MB sent a step": round(statistics.fmean(x["packet_bytes"] for x in steps) / 1e6, 4),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--runs", nargs="+", choices=RUNS, default=list(RUNS), help="which of the runs to make")
    add("--bandwidth", type=float, default=10.0, help="Mbit a second in each direction")
    add("--latency", type=float, default=0.1, help="seconds before each answer")
    add("--workers", type=int, default=4, help="processes")
    add("--batch-size", type=int, default=4, help="sequences a step of each worker")
    add("--seconds", type=float, default=90.0, help="of each turn, once all have taken a step")
    add("--turns", type=int, default=4, help="turns with limits, and as many without")
    add("--throttled", action="store_true", help="one worker gets a third of the time")
    add("--links", choices=KINDS, default="both", help="turns with limits, without, or both")
    options = parser.parse_args()
    for run in options.runs:
        for result in measure(options, run):
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

"""Seconds of a step of two processes over a slow link: DeMo, DeMo with a delay, AdamW.

    sudo .venv/bin/python benchmarks/slow_link.py [--steps 100] [--round-trip 50] [--keep]

Each process has a network namespace and a CPU core of its own. The link between them is first as
fast as the machine, and then has each rate and the round trip: a process of this script carries
every packet from one TUN device to the other, in order and so much later, and `tc tbf` limits the
rate. AdamW, whose steps are the long ones, takes a fifth of the steps. Needs root and iproute2.
With --keep the figures go to results/slow_link.jsonl.
"""

import argparse
import contextlib
import ctypes
import errno
import fcntl
import itertools
import json
import multiprocessing
import os
import pathlib
import select
import shlex
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from importlib.metadata import version

from tools import kept

ENDS = [f"slow-link-{os.getpid()}-{side}" for side in "ab"]
DEVICE = "slow0"
WARM_UP = 3  # steps
DEMO = "--optimizer demo-scaled --selection topk --topk 8 --value-coding int4"
RUNS = {
    "adamw": "--optimizer adamw",
    "demo_scaled": DEMO,
    "demo_scaled, delayed": f"{DEMO} --delay 1",
}
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
LARGEST_PACKET = 2**16 + 10  # with the header that IFF_VNET_HDR prepends
LONGEST_QUEUE = 2**14  # packets; while one is full, the kernel keeps and then drops what follows


def run(words: str) -> None:
    subprocess.run(shlex.split(words), check=True)


def make_device(namespace: str) -> int:
    """Moves this process into the namespace and returns a descriptor of a new TUN device."""
    with open(f"/run/netns/{namespace}") as entered:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(entered.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), flags))
    # The kernel then leaves TCP's 64 KB bundles whole: few packets per second, little to do here.
    fcntl.ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    return device


def forward(delay: float, laid) -> None:
    """Every packet comes out of the other end ``delay`` seconds later."""
    one, other = map(make_device, ENDS)
    laid.set()
    # Packets leave on time even where all cores compute.
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    lines = [(one, other, deque()), (other, one, deque())]
    while True:
        now = time.monotonic()
        for _, sink, line in lines:
            while line and line[0][0] <= now:
                try:
                    os.write(sink, line.popleft()[1])
                except OSError as error:
                    if error.errno != errno.EIO:  # the device is down: what comes is lost
                        raise
        listening = [source for source, _, line in lines if len(line) < LONGEST_QUEUE]
        waits = [max(line[0][0] - time.monotonic(), 0) for _, _, line in lines if line]
        ready, _, _ = select.select(listening, [], [], min(waits, default=None))
        due = time.monotonic() + delay
        for source, _, line in lines:
            if source in ready:
                line.append((due, os.read(source, LARGEST_PACKET)))


@contextlib.contextmanager
def link(rate: str | None, round_trip: float) -> Iterator[None]:
    """Both ends and what joins them; all of it is removed, and what runs there is killed."""
    with contextlib.ExitStack() as stack:
        for number, end in enumerate(ENDS, 1):
            run(f"ip netns add {end}")
            stack.callback(remove, end)
            # gloo binds to the address of the host name.
            hosts = pathlib.Path("/etc/netns", end, "hosts")
            hosts.parent.mkdir(parents=True)
            hosts.write_text(f"127.0.0.1 localhost\n10.99.0.{number} {socket.gethostname()}\n")
            run(f"ip -n {end} link set lo up")
            for way in "rw":  # room for many round trips' bytes: TCP must be able to fill the link
                size = f"net.ipv4.tcp_{way}mem=4096 131072 67108864"
                run(f"ip netns exec {end} sysctl -qw '{size}'")
        if rate is None:
            run(f"ip -n {ENDS[0]} link add {DEVICE} type veth peer name {DEVICE} netns {ENDS[1]}")
        else:
            fork = multiprocessing.get_context("fork")
            laid = fork.Event()
            carrier = fork.Process(target=forward, args=(round_trip / 2000, laid), daemon=True)
            carrier.start()
            stack.callback(carrier.kill)
            if not laid.wait(10):
                sys.exit("slow_link.py: the link was not laid")
        for number, end in enumerate(ENDS, 1):
            run(f"ip -n {end} address add 10.99.0.{number}/24 dev {DEVICE}")
            run(f"ip -n {end} link set {DEVICE} up")
            if rate is not None:
                # The burst holds TCP's 64 KB bundles; the queue, as in a router, a round trip's.
                limit = f"tbf rate {rate} burst 128kb latency {round_trip}ms"
                run(f"tc -n {end} qdisc add dev {DEVICE} root {limit}")
        yield


def remove(end: str) -> None:
    there = subprocess.run(["ip", "netns", "pids", end], capture_output=True, text=True).stdout
    for process in there.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)  # JAX would survive a TERM
    run(f"ip netns delete {end}")
    folder = pathlib.Path("/etc/netns", end)
    (folder / "hosts").unlink(missing_ok=True)
    folder.rmdir()


def train(name: str, steps: int, folder: pathlib.Path) -> tuple[float, float, int]:
    """Median seconds of a step; bytes of a step, by the kernel's count and by the accounting's."""
    os.mkfifo(folder / "steps.jsonl")
    lines = os.open(folder / "steps.jsonl", os.O_RDWR)
    last = WARM_UP + steps + 2
    words = f"examples/train_lm.py --preset small --workers 2 --steps {last} {RUNS[name]}"
    words += f" --evaluate-every {last} --coordinator 10.99.0.1:9911 --num-processes 2"
    outputs = [folder / f"output{number}.txt" for number in range(2)]
    processes = []
    for number, (end, output) in enumerate(zip(ENDS, outputs, strict=True)):
        command = f"ip netns exec {end} taskset -c {number} {sys.executable} {words}"
        command += f" --process-id {number}" + f" --log-dir {folder}" * (number == 0)
        own = dict(stdout=output.open("w"), stderr=subprocess.STDOUT, cwd=kept.ROOT)
        processes.append(subprocess.Popen(shlex.split(command), **own))
    times, sent, text = [], [], b""
    while len(times) < WARM_UP + steps:
        if select.select([lines], [], [], 1.0)[0]:
            text += os.read(lines, 2**16)
            for _ in range(text.count(b"\n") - len(times)):
                times.append(time.time())
                devices = pathlib.Path(f"/proc/{processes[0].pid}/net/dev").read_text()
                sent.append(int(devices.split(f"{DEVICE}:")[1].split()[8]))
        elif any(process.poll() is not None for process in processes):
            said = " ".join(output.read_text() for output in outputs)
            sys.exit(f"slow_link.py: the training ended early: {said[-2000:]}")
    os.close(lines)
    times, sent = times[WARM_UP - 1 :], sent[WARM_UP - 1 :]
    seconds = statistics.median(after - before for before, after in itertools.pairwise(times))
    counted = json.loads(text.splitlines()[-1])["packet_bytes"]
    return seconds, (sent[-1] - sent[0]) / steps, counted


def end(*_) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # while what was made is removed
    sys.exit(143)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--round-trip", type=float, default=50.0, help="milliseconds")
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"], help="as tc has them")
    parser.add_argument("--keep", action="store_true", help="append the figures to results/")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, end)
    seconds = {}
    for rate in (None, *args.rates):
        where = "unlimited" if rate is None else f"{rate}, {args.round_trip:g} ms"
        for name in RUNS:
            steps = -(-args.steps // 5) if name == "adamw" else args.steps
            with tempfile.TemporaryDirectory() as folder, link(rate, args.round_trip):
                each, sent, counted = train(name, steps, pathlib.Path(folder))
            seconds[rate, name] = each
            figures = {
                "seconds per step": float(f"{each:.3g}"),
                "MB sent, by the kernel": float(f"{sent / 1e6:.4g}"),
                "MB sent, by the accounting": float(f"{counted / 1e6:.4g}"),
                "of its speed without a limit": f"{seconds[None, name] / each:.1%}",
                "times the speed of adamw": round(seconds[rate, "adamw"] / each, 2),
            }
            print(f"{where}, {name}: {figures}", flush=True)
            if args.keep:
                own = dict(name=name, model="small, 9.9M parameters", where=where)
                kept.append("slow_link", **own, version=f"jax {version('jax')}", figures=figures)


if __name__ == "__main__":
    main()

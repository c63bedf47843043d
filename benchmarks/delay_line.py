"""Joins two network namespaces by a cable of a given delay, for kernels that lack `tc netem`.

    python benchmarks/delay_line.py SECONDS DEVICE NAMESPACE NAMESPACE

In each namespace it makes the TUN device of that name. Every packet comes out of the other one,
in order, SECONDS later. Bandwidth is not its business: give the devices a `tc tbf`.
"""

import ctypes
import errno
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
LARGEST_PACKET = 2**16 + 10  # with the header that IFF_VNET_HDR prepends
LONGEST_QUEUE = 2**14  # packets; while one is full, the kernel keeps and then drops what follows


def make_device(name: str, namespace: str) -> int:
    """Moves this process into the namespace and returns a descriptor of a new TUN device."""
    with open(f"/run/netns/{namespace}") as entered:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(entered.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    # The kernel then leaves TCP's 64 KB bundles whole: few packets per second, little to do here.
    fcntl.ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    return device


def forward(one: int, other: int, delay: float) -> None:
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


def main() -> None:
    seconds, device, *namespaces = sys.argv[1:]
    one, other = (make_device(device, namespace) for namespace in namespaces)
    # Packets leave on time even where all cores compute.
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    forward(one, other, float(seconds))


if __name__ == "__main__":
    main()

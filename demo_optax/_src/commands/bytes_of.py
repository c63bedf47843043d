"""Prints the bytes of a model's packets, and the seconds of a step over a link.

demo-optax bytes --preset 300m --topk 8 --workers 64 --bandwidth 1Gbit
"""

import argparse
import dataclasses

from demo_optax._src.accounting import traffic
from demo_optax._src.commands.quantities import bandwidth, duration
from demo_optax._src.commands.tables import megabytes, print_table
from demo_optax._src.compression import Compression
from demo_optax._src.compression.blocks import BLOCK_RULES
from demo_optax._src.compression.selection import SELECTIONS
from demo_optax._src.compression.values import VALUE_CODINGS
from demo_optax._src.exchange import AllGather, Delayed, TwoPhase

TOPKS = (1, 2, 4, 8, 16, 32, 64)


ONE, NUMBER = dict(default=1, type=int), dict(default=None, type=int)
EXCHANGES = dict(default="all-gather", choices=("all-gather", "two-phase"))
ARGUMENTS = {
    "--preset": (dict(choices=traffic.PRESETS, required=True), "a model of the paper"),
    "--topk": (dict(default=32, type=int), "coefficients that are sent of each block"),
    "--value-coding": (dict(default="float32", choices=VALUE_CODINGS), "coding of the values"),
    "--selection": (dict(default="topk", choices=SELECTIONS), "which coefficients are sent"),
    "--block-side": (dict(default=64, type=int), "elements per side of a block"),
    "--block-rule": (dict(default="pad", choices=BLOCK_RULES), "blocks at the edges of a tensor"),
    "--workers": (dict(default=64, type=int), "number of workers"),
    "--bandwidth": (dict(default="1Gbit", type=bandwidth), "of each worker's link, per second"),
    "--latency": (dict(default="1ms", type=duration), "latency of one round of the exchange"),
    "--compute-time": (dict(default="1s", type=duration), "time of a step without its exchange"),
    "--exchange": (EXCHANGES, "how the packets travel"),
    "--topk-back": (NUMBER, "coefficients that owners send back; None: 4 times --topk"),
    "--delay": (dict(default=0, type=int, choices=(0, 1)), "delay of the exchange, in steps"),
    "--local-steps": (ONE, "steps of each worker for one exchange"),
    "--fragments": (NUMBER, "fragments of a round, in turn; None: all at once"),
}


def run(args: argparse.Namespace) -> None:
    if args.topk_back is not None and args.exchange != "two-phase":
        raise ValueError(
            f"--topk-back {args.topk_back} is for --exchange two-phase: leave it out, or add that."
        )
    params = traffic.preset_shapes(args.preset)
    fields = "topk", "value_coding", "selection", "block_side", "block_rule"
    compression = Compression(**{field: getattr(args, field) for field in fields})
    two_phase = args.exchange == "two-phase"
    exchange = TwoPhase("data", topk_back=args.topk_back) if two_phase else AllGather("data")
    exchange = Delayed(exchange) if args.delay else exchange
    method = "DeMo" if args.local_steps == 1 else "SparseLoCo"
    name = f"{method}, k={args.topk}, {args.value_coding}"
    link = args.workers, args.bandwidth, args.latency, args.compute_time, args.local_steps
    settings = {name: (compression, exchange)}
    times = traffic.step_times(params, settings, *link, fragments=args.fragments)

    tensors, dense = len(params), traffic.dense_bytes(params)
    print(f"{args.preset}: {dense // 4:,} parameters in {tensors} tensors\n")
    _print_bytes(params, compression)
    print_table(
        f"Seconds per step with {args.workers} workers in a ring, {args.compute_time:g} s of them "
        "compute; hidden from: Mbit/s at which the exchange takes as long as the compute",
        ("", "MB sent", "transfer", "latency", "step", "hidden from"),
        *[(row, *_cells(time)) for row, time in times.items()],
    )
    packet, fragments = times[name].packet, args.fragments or 1
    sent = packet * fragments / args.local_steps
    if args.local_steps > 1:
        each = f"{fragments} packet(s) of {packet:,} bytes"
        print(f"Means over a round of {args.local_steps} steps, in which a worker sends {each}.")
    print(
        f"k={args.topk} with {args.value_coding} values: {sent:,.0f} bytes a step, "
        f"{dense / sent:.0f} times less than a dense float32 gradient. "
        f"Each of {args.workers} workers gets {times[name].wire:,} bytes a step."
    )


def _cells(time: traffic.StepTime) -> list[str]:
    seconds = [f"{s:.3f}" for s in (time.transfer, time.waiting, time.step)]
    return [megabytes(time.wire), *seconds, f"{time.hiding_bandwidth / 1e6:,.1f}"]


def _print_bytes(params, compression: Compression) -> None:
    reference = [traffic.reference_bytes(params, k, compression.block_side) for k in TOPKS]
    settings = [dataclasses.replace(compression, topk=k) for k in TOPKS]
    packets = [traffic.packet_bytes(setting, params) for setting in settings]
    print_table(
        "MB per step and worker (MB = 10^6 bytes)",
        ("k", *TOPKS),
        ("published code's count, 12 bytes each", *map(megabytes, reference)),
        (f"packet with {compression.value_coding} values, to everybody", *map(megabytes, packets)),
    )
    two, four = (megabytes(traffic.dense_bytes(params, size)) for size in (2, 4))
    print(f"  Dense gradient: {two} MB at 2 bytes per parameter, {four} MB at 4.\n")

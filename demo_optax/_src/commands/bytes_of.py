"""Prints the bytes of a model's packets, and the seconds of a step over a link.

demo-optax bytes --preset 300m --topk 8 --workers 64 --bandwidth 1Gbit
"""

import argparse
import dataclasses
from collections.abc import Callable

from demo_optax._src.accounting import traffic
from demo_optax._src.commands.quantities import bandwidth, duration
from demo_optax._src.commands.tables import megabytes, print_table
from demo_optax._src.compression import Compression
from demo_optax._src.compression.blocks import BLOCK_RULES
from demo_optax._src.compression.selection import SELECTIONS
from demo_optax._src.compression.values import VALUE_CODINGS
from demo_optax._src.exchange import AllGather, Delayed, TwoPhase

TOPKS = (1, 2, 4, 8, 16, 32, 64)


def add_arguments(add: Callable[..., None]) -> None:
    add("--preset", "a model of the paper", choices=traffic.PRESETS, required=True)
    add("--topk", "coefficients that are sent of each block", 32, type=int)
    add("--value-coding", "coding of the values in a packet", "float32", choices=VALUE_CODINGS)
    add("--selection", "which coefficients are sent", "topk", choices=SELECTIONS)
    add("--block-side", "elements per side of a block", 64, type=int)
    add("--block-rule", "blocks at the edges of a tensor", "pad", choices=BLOCK_RULES)
    add("--workers", "number of workers", 64, type=int)
    add("--bandwidth", "of each worker's link, per second", "1Gbit", type=bandwidth)
    add("--latency", "latency of one round of the exchange", "1ms", type=duration)
    add("--compute-time", "time of a step without its exchange", "1s", type=duration)
    add("--exchange", "how the packets travel", "all-gather", choices=("all-gather", "two-phase"))
    add("--topk-back", "coefficients that owners send back; None: 4 times --topk", None, type=int)
    add("--delay", "delay of the exchange, in steps", 0, type=int, choices=(0, 1))
    add("--local-steps", "steps of each worker for one exchange", 1, type=int)
    add("--fragments", "fragments of a round, in turn; None: all at once", None, type=int)


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

"""Prints the bytes of a model's packets, and the seconds of a step over a link.

demo-optax bytes --preset 300m --topk 8 --workers 64 --bandwidth 1Gbit
"""

import argparse
import dataclasses
import math

import jax

from demo_optax._src.accounting import traffic
from demo_optax._src.commands.quantities import bandwidth, duration
from demo_optax._src.commands.tables import megabytes, print_table
from demo_optax._src.compression import Compression
from demo_optax._src.compression.blocks import BLOCK_RULES
from demo_optax._src.compression.selection import SELECTIONS
from demo_optax._src.compression.values import VALUE_CODINGS
from demo_optax._src.exchange import AllGather, Delayed, TwoPhase

TOPKS = (1, 2, 4, 8, 16, 32, 64)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def add(name: str, default, meaning: str, **options) -> None:
        parser.add_argument(f"--{name}", default=default, help=meaning, **options)

    add("preset", None, "a model of the paper", choices=traffic.PRESETS, required=True)
    add("topk", 32, "coefficients that are sent of each block", type=int)
    add("value-coding", "float32", "coding of the values in a packet", choices=VALUE_CODINGS)
    add("selection", "topk", "which coefficients are sent", choices=SELECTIONS)
    add("block-side", 64, "elements per side of a block", type=int)
    add("block-rule", "pad", "blocks at the edges of a tensor", choices=BLOCK_RULES)
    add("workers", 64, "number of workers", type=int)
    add("bandwidth", "1Gbit", "of each worker's link, per second", type=bandwidth)
    add("latency", "1ms", "latency of one round of the exchange", type=duration)
    add("compute-time", "1s", "time of a step without its exchange", type=duration)
    add("exchange", "all-gather", "how the packets travel", choices=("all-gather", "two-phase"))
    add("topk-back", None, "coefficients that owners send back; None: 4 times --topk", type=int)
    add("delay", 0, "delay of the exchange, in steps", type=int, choices=(0, 1))
    add("local-steps", 1, "steps of each worker for one exchange", type=int)
    add("fragments", None, "fragments of a round, one after another; None: all at once", type=int)


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

    sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(params)]
    print(f"{args.preset}: {sum(sizes):,} parameters in {len(sizes)} tensors\n")
    _print_bytes(params, compression)
    rows = []
    for row, time in times.items():
        seconds = [f"{s:.3f}" for s in (time.transfer, time.waiting, time.step)]
        rows.append((row, megabytes(time.wire), *seconds, f"{time.hiding_bandwidth / 1e6:,.1f}"))
    print_table(
        f"Seconds per step with {args.workers} workers in a ring, {args.compute_time:g} s of them "
        "compute; hidden from: Mbit/s at which the exchange takes as long as the compute",
        ("", "MB sent", "transfer", "latency", "step", "hidden from"),
        *rows,
    )
    packet, steps = times[name].packet, args.local_steps // (args.fragments or 1)
    sent = packet / steps
    if args.local_steps > 1:
        print(
            f"Means over a round of {args.local_steps} steps. Each worker sends {packet:,} bytes "
            + ("for each of its fragments." if args.fragments else "at its end.")
        )
    print(
        f"k={args.topk} with {args.value_coding} values: {sent:,.0f} bytes a step, "
        f"{traffic.dense_bytes(params) / sent:.0f} times less than a dense float32 gradient. "
        f"Each of {args.workers} workers gets {times[name].wire:,} bytes a step."
    )


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
    dense = [megabytes(traffic.dense_bytes(params, size)) for size in (2, 4)]
    print(f"  Dense gradient: {dense[0]} MB at 2 bytes per parameter, {dense[1]} MB at 4.\n")
    if compression.selection == "topk":
        size = compression.block_side**2
        costs = {k: traffic.index_cost(size, k) for k in TOPKS if k < size}
        print_table(
            f"Bits per index in blocks of {size} coefficients",
            ("k", "coding", "bits", "entropy bound", "ratio"),
            *[
                (k, x.coding, f"{x.bits:.3f}", f"{x.bound:.3f}", f"{x.bits / x.bound:.3f}")
                for k, x in costs.items()
            ],
        )

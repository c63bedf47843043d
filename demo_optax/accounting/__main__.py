"""Bytes and seconds per step of a model over a link, as tables.

python -m demo_optax.accounting --preset 300m --topk 8 --workers 64 --bandwidth 1Gbit
"""

import argparse
import math
import re
import sys

import jax

from demo_optax.accounting import (
    dense_bytes,
    index_cost,
    packet_bytes,
    received_bytes,
    reference_bytes,
    step_times,
)
from demo_optax.accounting.models import PRESETS, checkpoint_shapes, preset_shapes
from demo_optax.compression import Compression
from demo_optax.compression.blocks import BLOCK_RULES
from demo_optax.compression.selection import SELECTIONS
from demo_optax.compression.values import VALUE_CODINGS
from demo_optax.exchange import AllGather, Delayed, Exchange, TwoPhase

TOPKS = (1, 2, 4, 8, 16, 32, 64)
UNITS = {
    "bandwidth": {"bit": 1.0, "kbit": 1e3, "Mbit": 1e6, "Gbit": 1e9, "Tbit": 1e12},
    "time": {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0},
}
EXAMPLES = {"bandwidth": "1Gbit", "time": "50ms"}


def quantity(kind: str):
    """A parser of numbers with a unit, such as ``1Gbit`` or ``50ms``."""

    def parse(text: str) -> float:
        match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?) ?([A-Za-z]*?)(?:/s)?", text)
        units = UNITS[kind]
        if not match or match[2] not in units:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no {kind}: give a number and one of {', '.join(units)}, as in "
                f"{EXAMPLES[kind]}"
            )
        return float(match[1]) * units[match[2]]

    return parse


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The example as it was written, and every default."""


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m demo_optax.accounting", description=__doc__, formatter_class=Help
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--preset", choices=PRESETS, help="one of the paper's models")
    model.add_argument("--checkpoint", help="an Orbax checkpoint, or an .npz file")

    def add(name: str, default, meaning: str, **options) -> None:
        parser.add_argument(f"--{name}", default=default, help=meaning, **options)

    bandwidth, time = quantity("bandwidth"), quantity("time")
    rates, units = (", ".join(UNITS[kind]) for kind in UNITS)
    add("topk", 32, "coefficients sent of each block", type=int)
    add("value-coding", "float32", "of the values in a packet", choices=VALUE_CODINGS)
    add("selection", "topk", "of the coefficients", choices=SELECTIONS)
    add("block-side", 64, "elements per side of a block", type=int)
    add("block-rule", "pad", "at a tensor's edges", choices=BLOCK_RULES)
    add("workers", 64, "number of workers", type=int)
    add("bandwidth", "1Gbit", f"of each worker's link, a second: {rates}", type=bandwidth)
    add("latency", "1ms", f"of one round of the exchange: {units}", type=time)
    add("compute-time", "1s", "of a step without its exchange, in the same units", type=time)
    add("exchange", "all-gather", "of the packets", choices=("all-gather", "two-phase"))
    add("topk-back", None, "that owners send back in two phases; None: 4 times --topk", type=int)
    add("delay", 0, "of the exchange, in steps", type=int, choices=(0, 1))
    add("local-steps", 1, "of each worker, for one exchange", type=int)
    args = parser.parse_args(arguments)
    if args.topk_back is not None and args.exchange != "two-phase":
        parser.error("--topk-back is for --exchange two-phase: leave it out, or add that")
    return args


def exchange_of(args: argparse.Namespace) -> Exchange:
    """The exchange that the arguments describe."""
    two_phase = args.exchange == "two-phase"
    exchange = TwoPhase("data", topk_back=args.topk_back) if two_phase else AllGather("data")
    return Delayed(exchange) if args.delay else exchange


def megabytes(size: float) -> str:
    """With two decimals, truncated as in the paper's table."""
    return f"{math.floor(size / 1e4) / 100:.2f}"


def print_table(rows: list[tuple]) -> None:
    """Columns as wide as their longest entry, all but the first to the right."""
    widths = [max(len(str(entry)) for entry in column) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = [str(x).rjust(width) for x, width in zip(rest, widths[1:], strict=True)]
        print("  " + "  ".join([str(first).ljust(widths[0]), *cells]))
    print()


def print_bytes(params, setting: dict) -> None:
    print("MB per step and worker (MB = 10^6 bytes)")
    counts = [
        ("k", *TOPKS),
        (
            "published code's count, 12 bytes each",
            *[megabytes(reference_bytes(params, k, setting["block_side"])) for k in TOPKS],
        ),
        (
            f"packet with {setting['value_coding']} values, to everybody",
            *[megabytes(packet_bytes(Compression(topk=k, **setting), params)) for k in TOPKS],
        ),
    ]
    print_table(counts)
    print(
        f"  Dense gradient: {megabytes(dense_bytes(params, 2))} MB at 2 bytes per parameter, "
        f"{megabytes(dense_bytes(params, 4))} MB at 4.\n"
    )


def print_index_bits(block_size: int) -> None:
    print(f"Bits per index in blocks of {block_size} coefficients")
    rows = [("k", "coding", "bits", "entropy bound", "ratio")]
    for k in (k for k in TOPKS if k < block_size):
        cost = index_cost(block_size, k)
        ratio = f"{cost.bits / cost.bound:.3f}"
        rows.append((str(k), cost.coding, f"{cost.bits:.3f}", f"{cost.bound:.3f}", ratio))
    print_table(rows)


def print_times(times: dict, workers: int, compute_time: float) -> None:
    print(
        f"Seconds per step with {workers} workers, {compute_time:g} s of them compute, in a ring; "
        "hidden from: the bandwidth at which an exchange takes no longer than the compute"
    )
    rows: list[tuple] = [("", "MB sent", "transfer", "latency", "step", "hidden from")]
    for name, time in times.items():
        hidden = "never" if math.isinf(time.hiding_bandwidth) else rate(time.hiding_bandwidth)
        seconds = [f"{s:.3f}" for s in (time.transfer, time.waiting, time.step)]
        rows.append((name, megabytes(time.wire), *seconds, hidden))
    print_table(rows)


def rate(bits_per_second: float) -> str:
    unit = next(
        u
        for u in ("Tbit", "Gbit", "Mbit", "kbit", "bit")
        if bits_per_second >= UNITS["bandwidth"][u] or u == "bit"
    )
    return f"{bits_per_second / UNITS['bandwidth'][unit]:.3g} {unit}/s"


def main(arguments: list[str]) -> None:
    args = parse_arguments(arguments)
    params = preset_shapes(args.preset) if args.preset else checkpoint_shapes(args.checkpoint)
    setting = dict(
        value_coding=args.value_coding,
        selection=args.selection,
        block_side=args.block_side,
        block_rule=args.block_rule,
    )
    compression, exchange = Compression(topk=args.topk, **setting), exchange_of(args)
    sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(params)]
    packet = packet_bytes(compression, params, workers=args.workers, exchange=exchange)
    received = received_bytes(compression, params, args.workers, exchange)
    print(f"{args.preset or args.checkpoint}: {sum(sizes):,} parameters in {len(sizes)} tensors\n")
    print_bytes(params, setting)
    if args.selection == "topk":
        print_index_bits(args.block_side**2)
    method = "DeMo" if args.local_steps == 1 else "SparseLoCo"
    times = step_times(
        params,
        {f"{method}, k={args.topk}, {args.value_coding}": (compression, exchange)},
        args.workers,
        args.bandwidth,
        args.latency,
        args.compute_time,
        args.local_steps,
    )
    print_times(times, args.workers, args.compute_time)
    if args.local_steps > 1:
        print(
            f"Means over a round of {args.local_steps} steps. Each worker sends {packet:,} bytes "
            "at its end."
        )
    sent, received = packet / args.local_steps, received / args.local_steps
    print(
        f"k={args.topk} with {args.value_coding} values: {sent:,.0f} bytes a step, "
        f"{dense_bytes(params) / sent:.0f} times less than a dense float32 gradient. "
        f"Each of {args.workers} workers gets {received:,.0f} bytes a step."
    )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, FileNotFoundError, ImportError) as error:
        sys.exit(f"error: {error}")

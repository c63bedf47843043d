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
    plan,
    received_bytes,
    reference_bytes,
)
from demo_optax.accounting.models import PRESETS, checkpoint_shapes, preset_shapes
from demo_optax.compression import Compression
from demo_optax.compression.blocks import BLOCK_RULES
from demo_optax.compression.selection import SELECTIONS
from demo_optax.compression.settings import EXCHANGES
from demo_optax.compression.values import VALUE_CODINGS

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
        prog="python -m demo_optax.accounting",
        description=__doc__,
        formatter_class=Help,
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--preset", choices=PRESETS, help="one of the paper's models")
    model.add_argument("--checkpoint", help="an Orbax checkpoint, or an .npz file")
    parser.add_argument("--topk", type=int, default=32, help="coefficients sent of each block")
    parser.add_argument(
        "--value-coding", choices=VALUE_CODINGS, default="float32", help="on the wire"
    )
    parser.add_argument(
        "--selection", choices=SELECTIONS, default="topk", help="of the coefficients"
    )
    parser.add_argument("--block-side", type=int, default=64, help="elements per side of a block")
    parser.add_argument(
        "--block-rule", choices=BLOCK_RULES, default="pad", help="at a tensor's edges"
    )
    parser.add_argument("--workers", type=int, default=64, help="that exchange")
    parser.add_argument(
        "--bandwidth",
        type=quantity("bandwidth"),
        default="1Gbit",
        help=f"of each worker's link, a second: {', '.join(UNITS['bandwidth'])}",
    )
    parser.add_argument(
        "--latency",
        type=quantity("time"),
        default="1ms",
        help=f"of one round of the exchange: {', '.join(UNITS['time'])}",
    )
    parser.add_argument(
        "--compute-time",
        type=quantity("time"),
        default="1s",
        help="of a step without its exchange, in the same units",
    )
    parser.add_argument(
        "--exchange", choices=EXCHANGES, default="all-gather", help="of the packets"
    )
    parser.add_argument(
        "--topk-back", type=int, help="that owners send back in two phases; None: 4 times --topk"
    )
    parser.add_argument(
        "--delay", type=int, choices=(0, 1), default=0, help="of the exchange, in steps"
    )
    parser.add_argument(
        "--local-steps", type=int, default=1, help="of each worker, for one exchange"
    )
    return parser.parse_args(arguments)


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
    compression = Compression(
        topk=args.topk,
        exchange=args.exchange,
        topk_back=args.topk_back,
        delay=args.delay,
        **setting,
    )
    sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(params)]
    packet = packet_bytes(compression, params, workers=args.workers)
    received, dense = received_bytes(compression, params, args.workers), dense_bytes(params)
    print(f"{args.preset or args.checkpoint}: {sum(sizes):,} parameters in {len(sizes)} tensors\n")
    print_bytes(params, setting)
    if args.selection == "topk":
        print_index_bits(args.block_side**2)
    method = "DeMo" if args.local_steps == 1 else "SparseLoCo"
    print_times(
        plan(
            params,
            {f"{method}, k={args.topk}, {args.value_coding}": compression},
            args.workers,
            args.bandwidth,
            args.latency,
            args.compute_time,
            args.local_steps,
        ),
        args.workers,
        args.compute_time,
    )
    if args.local_steps > 1:
        print(
            f"Means over a round of {args.local_steps} steps, at whose end each worker sends "
            f"{packet:,} bytes."
        )
    sent, received = packet / args.local_steps, received / args.local_steps
    print(
        f"k={args.topk} with {args.value_coding} values: {sent:,.0f} bytes a step, "
        f"{dense / sent:.0f} times less than a dense float32 gradient. Each of {args.workers} "
        f"workers gets {received:,.0f} bytes a step."
    )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, FileNotFoundError, ImportError) as error:
        sys.exit(f"error: {error}")

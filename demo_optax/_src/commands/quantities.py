"""Numbers with units on a command line, such as ``300M``, ``100Mbit/s`` and ``20ms``."""

import argparse
import functools
import math
import re

SIZES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12, "p": 1e15}
SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
UNITS = {
    "bandwidth": (r"([kKmMgGtT]?)(?:bits?|b)(?:/s|ps)?", "bit, kbit, Mbit, Gbit, Tbit", "100Mbit"),
    "time": ("(us|µs|ms|s|min|h)", "us, ms, s, min, h", "20ms"),
    "memory size": ("([kKmMgGtT]?)B", "B, kB, MB, GB, TB", "80GB"),
    "number of FLOPs a second": ("([gGtTpP])(?:FLOPS?|FLOPs?/s)?", "G, T, P", "989T"),
    "number": ("([kKmMbBtT]?)", "k, M, B, T or no unit", "300M"),
}
"""The pattern of a unit, the units in words, and an example."""


def bandwidth(text: str) -> float:
    """Parses a bandwidth, and returns bits per second.

    Example:
      >>> bandwidth("100Mbit"), bandwidth("1 Gbit/s"), bandwidth("2.5Gbps")
      (100000000.0, 1000000000.0, 2500000000.0)
    """
    if found := re.fullmatch(r"([0-9.]+) ?([kKmMgGtT]?)(B|[Bb]ytes?)(/s|ps)?", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} counts bytes, but a bandwidth is in bits: give "
            f"{8 * float(found[1]):g}{found[2]}bit."
        )
    return _parse("bandwidth", text)


def count(text: str) -> int:
    """Parses a whole number such as ``1.3B``, ``65_536`` or ``319,946,752``."""
    value = round(_parse("number", text), 3)  # 1.1e3 * 1e6 is not whole otherwise
    if not math.isfinite(value) or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number: give one.")
    return int(value)


def _parse(kind: str, text: str) -> float:
    unit, units, example = UNITS[kind]
    whole = r"(?:\d{1,3}(?:,\d{3})+|\d[\d_]*)"
    found = re.fullmatch(rf"({whole}(?:\.\d+)?(?:e\d+)?) ?{unit}", text.strip())
    if not found:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no {kind}: give a number and a unit ({units}), as in {example}."
        )
    return float(re.sub("[_,]", "", found[1])) * (SIZES | SECONDS)[found[2].lower()]


duration = functools.partial(_parse, "time")  # returns seconds
memory = functools.partial(_parse, "memory size")  # returns bytes
flops = functools.partial(_parse, "number of FLOPs a second")

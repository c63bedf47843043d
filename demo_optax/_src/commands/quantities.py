"""Numbers with units on a command line, such as ``300M``, ``100Mbit/s`` and ``20ms``."""

import argparse
import math
import re

PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
PATTERNS = {
    "bandwidth": r"([kKmMgGtT]?)(?:bits?|b)(?:/s|ps)?",
    "time": r"(us|µs|ms|s|min|h)",
    "memory size": r"([kKmMgGtT]?)B",
    "number": r"([kKmMbBtT]?)",
}
UNITS = {
    "bandwidth": "(bit, kbit, Mbit, Gbit, Tbit), as in 100Mbit",
    "time": "(us, ms, s, min, h), as in 20ms",
    "memory size": "(B, kB, MB, GB, TB), as in 80GB",
    "number": "(k, M, B, T or no unit), as in 300M",
}


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
    return _parse("bandwidth", text, PREFIXES)


def duration(text: str) -> float:
    """Parses a time such as ``250 ms`` or ``2min``, and returns seconds."""
    return _parse("time", text, SECONDS)


def memory(text: str) -> float:
    """Parses a size of memory such as ``80GB``, and returns bytes."""
    return _parse("memory size", text, PREFIXES)


def count(text: str) -> int:
    """Parses a whole number such as ``1.3B``, ``65_536`` or ``319,946,752``."""
    value = round(_parse("number", text, COUNTS), 3)  # 1.1e3 * 1e6 is not whole otherwise
    if not math.isfinite(value) or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number: give one.")
    return int(value)


def _parse(kind: str, text: str, sizes: dict[str, float]) -> float:
    whole = r"(?:\d{1,3}(?:,\d{3})+|\d[\d_]*)"
    found = re.fullmatch(rf"({whole}(?:\.\d+)?(?:e\d+)?) ?{PATTERNS[kind]}", text.strip())
    if not found:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no {kind}: give a number and a unit {UNITS[kind]}."
        )
    return float(re.sub("[_,]", "", found[1])) * sizes[found[2].lower()]

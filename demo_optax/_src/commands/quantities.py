"""Numbers with units on a command line, such as ``300M``, ``100Mbit/s`` and ``20ms``."""

import argparse
import math
import re

PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
UNITS = {
    "bandwidth": (r"([kKmMgGtT]?)(?:bits?|b)(?:/s|ps)?", "bit, kbit, Mbit, Gbit, Tbit", "100Mbit"),
    "time": ("(us|µs|ms|s|min|h)", "us, ms, s, min, h", "20ms"),
    "memory size": ("([kKmMgGtT]?)B", "B, kB, MB, GB, TB", "80GB"),
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
    number, prefix = _parse("bandwidth", text)
    return number * PREFIXES[prefix.lower()]


def duration(text: str) -> float:
    """Parses a time, and returns seconds.

    Example:
      >>> duration("250 ms"), duration("2min")
      (0.25, 120.0)
    """
    number, unit = _parse("time", text)
    return number * SECONDS[unit]


def memory(text: str) -> float:
    """Parses a size of memory, and returns bytes.

    Example:
      >>> memory("80GB")
      80000000000.0
    """
    number, prefix = _parse("memory size", text)
    return number * PREFIXES[prefix.lower()]


def count(text: str) -> int:
    """Parses a whole number.

    Example:
      >>> count("1.3B"), count("65_536"), count("319,946,752")
      (1300000000, 65536, 319946752)
    """
    number, unit = _parse("number", text)
    value = round(number * COUNTS[unit.lower()], 3)  # 1.1e3 * 1e6 is not whole otherwise
    if not math.isfinite(value) or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number: give one.")
    return int(value)


def _parse(kind: str, text: str) -> tuple[float, str]:
    unit, units, example = UNITS[kind]
    whole = r"(?:\d{1,3}(?:,\d{3})+|\d[\d_]*)"
    found = re.fullmatch(rf"({whole}(?:\.\d+)?(?:e\d+)?) ?{unit}", text.strip())
    if not found:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no {kind}: give a number and a unit ({units}), as in {example}."
        )
    return float(re.sub("[_,]", "", found[1])), found[2]


def with_unit(value: float, unit: str) -> str:
    """Writes a number of bits per second or of seconds with the largest unit that fits.

    Example:
      >>> with_unit(1e8, "bit/s"), with_unit(0.02, "s"), with_unit(1.5, "s")
      ('100 Mbit/s', '20 ms', '1.5 s')
    """
    prefixes = {1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k", 1.0: "", 1e-3: "m", 1e-6: "u"}
    size, prefix = next(((s, p) for s, p in prefixes.items() if value >= s), (1.0, ""))
    return f"{value / size:g} {prefix}{unit}"

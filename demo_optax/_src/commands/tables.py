"""Numbers and tables as text."""

import math
import sys


def plus_minus() -> str:
    """Returns the sign of an error, or ``+-`` if the terminal lacks it."""
    return "±" if "±".encode(sys.stdout.encoding or "ascii", "ignore") else "+-"


def with_unit(value: float, unit: str) -> str:
    """Writes a number of bits per second or of seconds with the largest unit that fits.

    Example:
      >>> with_unit(1e8, "bit/s"), with_unit(0.02, "s"), with_unit(1.5, "s")
      ('100 Mbit/s', '20 ms', '1.5 s')
    """
    prefixes = {1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k", 1.0: "", 1e-3: "m", 1e-6: "u"}
    size = next((size for size in prefixes if value >= size), 1.0)
    return f"{value / size:.4g} {prefixes[size]}{unit}"


def megabytes(size: float) -> str:
    """Formats megabytes with two decimals, truncated as in the paper's table."""
    return f"{math.floor(size / 1e4) / 100:.2f}"


def print_table(title: str, *rows: tuple[object, ...]) -> None:
    """Prints columns as wide as their longest entry, all but the first aligned to the right."""
    print(title)
    widths = [max(len(str(entry)) for entry in column) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = [str(x).rjust(width) for x, width in zip(rest, widths[1:], strict=True)]
        print("  " + "  ".join([str(first).ljust(widths[0]), *cells]))
    print()

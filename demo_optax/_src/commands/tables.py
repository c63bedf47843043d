"""Tables of text."""

import math


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

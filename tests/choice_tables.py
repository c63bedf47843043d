"""The tables of docs/how_to/choose.md, computed by the command that it explains.

python -m tests.choice_tables writes them between their marks.
"""

import re
from collections.abc import Sequence

from benchmarks.quality.tables import Mean
from benchmarks.tools import pages
from demo_optax._src.accounting.choose import short
from demo_optax._src.accounting.methods import methods
from demo_optax.accounting import Choice, MeasuredLoss, Method, choose

PAGES = ("docs/how_to/choose.md",)
KIND = "choices"
WORKERS = 4, 8, 16, 64
PARAMETERS = 319_946_752  # of the paper's model of 300M
TOKENS = 65_536  # of each worker
LINKS = {
    "100 Gbit/s; NVLink is faster": 1e11,
    "10 Gbit/s": 1e10,
    "1 Gbit/s": 1e9,
    "100 Mbit/s": 1e8,
    "10 Mbit/s": 1e7,
}


def table(name: str, patterns: Sequence[str] = ("*",)) -> str:
    """The table of a name, ``links`` or ``methods``."""
    del patterns
    return {"links": _links, "methods": _methods}[name]()


def choice(workers: int, bandwidth: float) -> Choice:
    """The choice for a cell of the table of links."""
    model = dict(params=PARAMETERS, batch_tokens=TOKENS, width=1024)
    return choose(**model, workers=workers, bandwidth=bandwidth, latency=1e-3, compute_time=1.0)


def _links() -> str:
    workers = [f"{WORKERS[0]} workers", *map(str, WORKERS[1:])]
    dense = f"AdamW, {WORKERS[0]} to {WORKERS[-1]} workers"
    lines = [["Link between workers", *workers, dense], ["---"] * (len(WORKERS) + 2)]
    for link, bandwidth in LINKS.items():
        found = [choice(number, bandwidth) for number in WORKERS]
        cells = [f"**{x.chosen.method.row}** {x.chosen.time.step:.2f}" for x in found]
        adamw = [_seconds(x.candidates[0].time.step) for x in (found[0], found[-1])]
        lines.append([link, *cells, " to ".join(adamw)])
    return _table(lines)


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _methods() -> str:
    heads = ["", "Method", "Times AdamW's rate", "Loss minus AdamW's", "Measured with"]
    lines = [heads, ["---"] * len(heads)]
    for method in methods(topk_back=128):
        first, *others = [[_difference(x), _measured_with(x)] for x in method.losses()]
        lines.append([f"**{method.row}**", _take(method), f"{method.rate:g}", *first])
        lines += [["", "", "", *other] for other in others]
    return _table(lines)


def _take(method: Method) -> str:
    """The code of a method in one line, or its name where one line is too short."""
    if method.local_steps > 1:
        return method.name
    *names, optimizer = method.code.replace("demo_optax.", "").splitlines()
    for name, _, value in reversed([line.partition(" = ") for line in names]):
        optimizer = re.sub(rf"\b{name}\b(?!=)", value, optimizer)
    return f"`{optimizer.removeprefix('tx = ')}`"


def _difference(loss: MeasuredLoss) -> str:
    if loss.method == "AdamW":
        return "baseline"
    return Mean(loss.difference, loss.error).written("+.3f")


def _measured_with(loss: MeasuredLoss) -> str:
    seeds = "one seed" if loss.seeds == 1 else f"{loss.seeds} seeds"
    runs = f"{short(loss.parameters)}, {loss.workers} workers, {loss.steps:,} steps, {seeds}"
    return "; ".join(filter(None, (runs, loss.differs)))


def _table(lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    pages.write(PAGES, KIND, table)

"""The losses that `demo_optax.accounting.choose` weighs, and the tables of its choices."""

import json
import re
from collections.abc import Mapping, Sequence

from benchmarks import pages
from demo_optax._src.accounting.candidates import LOSSES, read_losses
from demo_optax._src.accounting.methods import MEASUREMENTS, methods
from demo_optax.accounting import Choice, MeasuredLoss, Method, choose

from . import tables
from .study import Study

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


def losses(studies: Mapping[str, Study]) -> str:
    """The losses of all measurements as JSON, with the largest model and the most workers of a run.

    Raises:
      ValueError: a measurement has no result yet.
    """
    rows = {(s.name, row.method.name): row for s in studies.values() for row in tables.rows(s)}
    measured = dict.fromkeys(each[:2] for every in MEASUREMENTS.values() for each in every)
    for name in measured:
        if name not in rows:
            raise ValueError(
                f"the study {name[0]!r} has no result of {name[1]!r}, which MEASUREMENTS names."
            )

    def loss(study: str, method: str) -> dict[str, str | float | None]:
        row, baseline = rows[study, method], rows[study, studies[study].baseline]
        difference = row.difference or tables.Mean(0.0, None)
        return {
            "study": study,
            "method": method,
            "difference": difference.value,
            "error": difference.error,
            "seeds": len(row.seeds),
            "workers": _workers(row),
            "parameters": tables.parameters(row.method),
            "steps": row.method.settings["steps"],
            "rate": row.rate / baseline.rate,
        }

    presets = {row.method.settings["preset"]: row.method for row in rows.values()}
    found = {
        "largest_model": max(map(tables.parameters, presets.values())),
        "most_workers": max(map(_workers, rows.values())),
        "losses": [loss(*name) for name in measured],
    }
    return json.dumps(found, indent=1) + "\n"


def _workers(row: tables.Row) -> int:
    settings = row.method.settings
    return settings.get("workers") or settings.get("simulate") or 8


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
    heads = ["", "Method", "Times AdamW's rate", "Loss minus AdamW's"]
    lines = [heads, ["---"] * len(heads)]
    measured = read_losses()
    for method in methods(topk_back=128):
        found = [(measured[each[:2]], each.differs) for each in MEASUREMENTS[method.name]]
        losses = [_loss_cell(loss, differs) for loss, differs in found] or ["not trained"]
        cells = f"**{method.row}**", _take(method), f"{method.rate:g}", "; ".join(losses)
        lines.append(list(cells))
    return _table(lines)


def _take(method: Method) -> str:
    """The code of a method in one line, or its name where one line is too short."""
    if method.local_steps > 1:
        return method.name
    *names, optimizer = method.code.replace("demo_optax.", "").splitlines()
    for name, _, value in reversed([line.partition(" = ") for line in names]):
        optimizer = re.sub(rf"\b{name}\b(?!=)", value, optimizer)
    return f"`{optimizer.removeprefix('tx = ')}`"


def _loss_cell(loss: MeasuredLoss, differs: str) -> str:
    if loss.method == "AdamW":
        return "baseline"
    workers = f", {loss.workers} workers" if loss.workers != 8 else ""
    seeds = ", one seed" if loss.seeds == 1 else ""
    notes = "".join(f", {note}" for note in [differs] if note)
    return f"{tables.Mean(loss.difference, loss.error).written('+.3f')}{workers}{seeds}{notes}"


def _table(lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write(studies: Mapping[str, Study]) -> None:
    """Brings the losses in the package and the tables of the page up to date."""
    LOSSES.write_text(losses(studies))
    pages.write(PAGES, KIND, table)

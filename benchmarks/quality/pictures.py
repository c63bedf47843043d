"""Pictures of what came of the studies, for the documentation."""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.pages import ROOT

from .study import Method, Study
from .tables import Row, rows

FOLDER = ROOT / "docs"
COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = "osv^D*X"


def draw(studies: Mapping[str, Study]) -> None:
    """Draws all of them anew."""
    with plt.style.context({"axes.spines.top": False, "axes.spines.right": False}):
        loss_against_bytes(studies["tiny"], FOLDER / "quality_bytes.png")
        over_steps(studies["small"], FOLDER / "quality_steps.png")
        over_steps(studies["long"], FOLDER / "quality_long.png")


def loss_against_bytes(study: Study, path: Path) -> None:
    """Methods that belong to a curve, on the first seed, which all have. The table has all methods.

    Next to a point stands its number of coefficients, or of local steps, where the curve has
    several.
    """
    figure, axes = plt.subplots(figsize=(9, 5), dpi=150, layout="constrained")
    results, seed = study.results(), study.seeds[0]
    curves: dict[str, list[Row]] = {}
    for row in rows(study):
        if row.method.curve is not None:
            curves.setdefault(row.method.curve, []).append(row)
    for place, ((name, points), style) in enumerate(zip(curves.items(), _styles(), strict=False)):
        points = sorted(points, key=lambda row: row.bytes_per_step)
        sizes = [row.bytes_per_step for row in points]
        losses = [study.of_method(row.method, results)[seed].comparable_loss for row in points]
        axes.plot(sizes, losses, label=name, **style)
        numbers = [_number(row.method) for row in points]
        if len(set(numbers)) > 1:
            offset = (0, -15 if place % 2 else 6)
            style = {"color": style["color"], "fontsize": 8, "ha": "center"}
            for number, *at in zip(numbers, sizes, losses, strict=True):
                axes.annotate(str(number), at, offset, textcoords="offset points", **style)
    axes.set(xscale="log", xlabel="bytes that a worker hands to the exchange, per step")
    axes.set_ylabel(f"held-out loss with seed {seed}, nats per byte")
    axes.legend(frameon=False, fontsize=9, loc="upper right")
    figure.savefig(path)
    plt.close(figure)


def _number(method: Method) -> int | None:
    return method.settings.get("local_steps", method.settings.get("topk"))


def _styles() -> Iterator[dict[str, Any]]:
    for colour, marker in itertools.cycle(zip(COLOURS, MARKERS, strict=True)):
        yield {"color": colour, "marker": marker, "linewidth": 1}


def over_steps(study: Study, path: Path) -> None:
    """Loss, its difference from the baseline, residual norm and sent share over the steps."""
    results = study.results()
    if not results:
        return
    figure, ((losses, differences), (residuals, shares)) = plt.subplots(
        2, 2, figsize=(9, 6), dpi=150, sharex=True, layout="constrained"
    )
    first = {
        name: found[study.seeds[0]]
        for name, method in study.methods.items()
        if study.seeds[0] in (found := study.of_method(method, results))
    }
    baseline = dict(first[study.baseline].evaluations) if study.baseline in first else {}
    for (name, result), style in zip(first.items(), _styles(), strict=False):
        style |= {"markersize": 3}
        _line(losses, result.evaluations, style, label=name)
        if baseline and name != study.baseline:
            both = [(at, loss, baseline.get(at)) for at, loss in result.evaluations]
            apart = [(at, a - b) for at, a, b in both if a is not None and b is not None]
            _line(differences, apart, style)
        _line(residuals, result.residuals or [], style)
        _line(shares, result.sent_shares or [], style)
    losses.legend(frameon=False)
    losses.set_ylabel("held-out loss, nats per byte")
    differences.set_ylabel(f"the same, minus that of {study.baseline}")
    differences.axhline(0.0, color="grey", linewidth=0.5)
    residuals.set(ylabel="norm of what stays in a momentum", xlabel="steps", ylim=(0, None))
    shares.set(ylabel="share of the energy that is sent", xlabel="steps", ylim=(0, None))
    figure.savefig(path)
    plt.close(figure)


def _line(axes: Axes, pairs: list[tuple[int, float]], style: dict[str, Any], **options) -> None:
    axes.plot([at for at, _ in pairs], [value for _, value in pairs], **style, **options)

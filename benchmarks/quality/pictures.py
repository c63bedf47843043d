"""Pictures of what came of the studies over their bytes, for the documentation.

The tag studies-2026-11 has what drew the pictures over steps and over sizes.
"""

import contextlib
import itertools
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.tools.pages import ROOT

from .study import BASELINE, Study
from .tables import Mean, Row, rows

FOLDER = ROOT / "docs"
COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = "osv^D*XP"


def draw(studies: Mapping[str, Study]) -> None:
    """Draws all of them anew."""
    with plt.style.context({"axes.spines.top": False, "axes.spines.right": False}):
        loss_against_bytes(studies["tiny"], studies["final"], FOLDER / "quality_bytes.png")
        with _figure(FOLDER / "quality_local.png", figsize=(9, 5)) as axes:
            _curves(axes, studies["local"])


@contextlib.contextmanager
def _figure(path: Path, *grid: int, **options) -> Iterator[Any]:
    """Axes of a figure that is saved behind."""
    figure, axes = plt.subplots(*grid, dpi=150, layout="constrained", **options)
    yield axes
    figure.savefig(path)
    plt.close(figure)


def loss_against_bytes(study: Study, unseen: Study, path: Path) -> None:
    """Left the curves of a study, right the methods of one with unseen seeds."""
    with _figure(path, 1, 2, figsize=(10, 5), width_ratios=(3, 2)) as (left, right):
        _curves(left, study)
        left.set_title("seeds that choices were made on", fontsize=10)
        _methods(right, unseen)
        right.set_title(f"unseen seeds: {', '.join(map(str, unseen.seeds))}", fontsize=10)


def _curves(axes: Axes, study: Study) -> None:
    """Methods that belong to a curve.

    Next to a point stands its number of coefficients, where the curve has several.
    """
    curves: dict[str, list[Row]] = {}
    for row in rows(study):
        if row.method.curve is not None:
            curves.setdefault(row.method.curve, []).append(row)
    for place, ((name, points), style) in enumerate(zip(curves.items(), _styles(), strict=False)):
        points = sorted(points, key=lambda row: row.bytes_per_step)
        for row in points:
            _point(axes, row.bytes_per_step, row, style)
        at = [(row.bytes_per_step, _above(row).value) for row in points]
        axes.plot(*zip(*at, strict=True), label=name, markerfacecolor="white", zorder=0, **style)
        numbers = [row.method.settings.get("topk") for row in points]
        if len(set(numbers)) > 1:
            offset = (0, -15 if place % 2 else 8)
            for number, each in zip(numbers, at, strict=True):
                _write(axes, str(number), each, offset, style, ha="center")
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    _label(axes, study)


def _methods(axes: Axes, study: Study) -> None:
    """All methods that have a result, each with its name."""
    found = rows(study)
    sizes = [row.bytes_per_step for row in found]
    middle = statistics.geometric_mean([min(sizes), max(sizes)]) if sizes else 0.0
    styles = dict(zip((row.method.name for row in found), _styles(), strict=False))
    for row in found:
        _point(axes, row.bytes_per_step, row, styles[row.method.name])
    _label(axes, study)
    bottom, top = axes.get_ylim()
    for on_the_right, (x, side) in {False: (8, "left"), True: (-8, "right")}.items():
        named = [row for row in found if (row.bytes_per_step > middle) is on_the_right]
        heights = _spread([_above(row).value for row in named], (top - bottom) / 30)
        for row, height in zip(named, heights, strict=True):
            style = styles[row.method.name]
            _write(axes, row.method.name, (row.bytes_per_step, height), (x, 3), style, ha=side)


def _spread(heights: list[float], least: float) -> list[float]:
    """Heights moved up, none more than needed, until each two are at least ``least`` apart."""
    spread = list(heights)
    order = sorted(range(len(heights)), key=heights.__getitem__)
    for lower, upper in itertools.pairwise(order):
        spread[upper] = max(spread[upper], spread[lower] + least)
    return spread


def _label(axes: Axes, study: Study) -> None:
    axes.axhline(0.0, color="grey", linewidth=0.5)
    axes.set(xscale="log", xlabel="bytes per step that a worker hands over")
    axes.set_ylabel(f"held-out loss minus that of {BASELINE}, nats per byte")


def _write(axes: Axes, text: str, place, offset, style: dict[str, Any], **options) -> None:
    options |= {"color": style["color"], "fontsize": 8, "annotation_clip": False}
    axes.annotate(text, place, offset, textcoords="offset points", **options)


def _above(row: Row) -> Mean:
    return row.difference or Mean(0.0, None)


def _point(axes: Axes, x: float, row: Row, style: dict[str, Any]) -> None:
    """Hollow for one seed; for several with a bar, the standard error of the difference."""
    above, several = _above(row), len(row.seeds) > 1
    fill = style["color"] if several else "white"
    axes.errorbar(x, above.value, above.error, capsize=3, markerfacecolor=fill, **style)


def _styles() -> Iterator[dict[str, Any]]:
    for colour, marker in zip(itertools.cycle(COLOURS), itertools.cycle(MARKERS), strict=True):
        yield {"color": colour, "marker": marker, "linewidth": 1}

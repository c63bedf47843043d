"""Pictures of what came of the studies, for the documentation."""

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.tools.pages import ROOT

from .study import Method, Study
from .tables import Mean, Row, parameters, rows

FOLDER = ROOT / "docs"
COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = "osv^D*XP"
SIZES = ("tiny_short", "small_short", "medium")


def draw(studies: Mapping[str, Study]) -> None:
    """Draws all of them anew."""
    with plt.style.context({"axes.spines.top": False, "axes.spines.right": False}):
        loss_against_bytes(studies["tiny"], studies["final"], FOLDER / "quality_bytes.png")
        of_methods(studies["local"], FOLDER / "quality_local.png")
        over_sizes([studies[name] for name in SIZES], FOLDER / "quality_sizes.png")
        over_steps(studies["small"], FOLDER / "quality_steps.png")
        over_steps(studies["long"], FOLDER / "quality_long.png")


def loss_against_bytes(study: Study, unseen: Study, path: Path) -> None:
    """Left the curves of a study, right the methods of one with unseen seeds."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10, 5), dpi=150, layout="constrained", width_ratios=(3, 2)
    )
    _curves(left, study)
    left.set_title("seeds that choices were made on", fontsize=10)
    _methods(right, unseen)
    right.set_title(f"unseen seeds: {', '.join(map(str, unseen.seeds))}", fontsize=10)
    figure.savefig(path)
    plt.close(figure)


def of_methods(study: Study, path: Path) -> None:
    """All methods of a study over their bytes."""
    figure, axes = plt.subplots(figsize=(9, 5), dpi=150, layout="constrained")
    _methods(axes, study)
    figure.savefig(path)
    plt.close(figure)


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
        numbers = [_number(row.method) for row in points]
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
    axes.set_ylabel(f"held-out loss minus that of {study.baseline}, nats per byte")


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


def _number(method: Method) -> int | None:
    return method.settings.get("local_steps", method.settings.get("topk"))


def _styles() -> Iterator[dict[str, Any]]:
    for colour, marker in zip(itertools.cycle(COLOURS), itertools.cycle(MARKERS), strict=True):
        yield {"color": colour, "marker": marker, "linewidth": 1}


def over_sizes(studies: Sequence[Study], path: Path) -> None:
    """Each method's difference from the baseline over the parameters, one size in each study."""
    figure, axes = plt.subplots(figsize=(9, 4), dpi=150, layout="constrained")
    baselines = [study.methods[study.baseline] for study in studies]
    sizes = [parameters(baseline) for baseline in baselines]
    found = [{row.method.name: row for row in rows(study)} for study in studies]
    common = [name for name in found[-1] if all(name in of_size for of_size in found)]
    for name, style in zip(common, _styles(), strict=False):
        points = [of_size[name] for of_size in found]
        for size, row in zip(sizes, points, strict=True):
            _point(axes, size, row, style)
        heights = [_above(row).value for row in points]
        axes.plot(sizes, heights, label=name, markerfacecolor="white", zorder=0, **style)
    axes.axhline(0.0, color="grey", linewidth=0.5)
    names = [
        f"{size / 1e6:.1f}M\n{baseline.settings['steps']:,} steps"
        for size, baseline in zip(sizes, baselines, strict=True)
    ]
    axes.set(xscale="log", xlabel="parameters")
    axes.set_xticks(sizes, names)
    axes.minorticks_off()
    axes.set_ylabel("held-out loss minus AdamW's, nats per byte")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)
    plt.close(figure)


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

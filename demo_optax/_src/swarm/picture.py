"""The picture of a swarm's run: a row for each worker, over time."""

from typing import Any

import numpy as np

from demo_optax._src.swarm.history import History

COUNTED, PALEST, LATE, LEFT, MISSING = "#2a6f97", "#b5cbd8", "#f4a259", "#6a994e", "#bc4749"


def draw(history: History, path: str) -> None:
    """Draws the life of a run: one row per worker, coloured where its packets counted or did not.

    With rounds a place is darker the more steps the worker took. Signs show where a process left,
    and where it is missing although it did not say so.
    """
    try:
        from matplotlib import colors, pyplot
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(f"to draw {path!r}, install matplotlib.") from error
    taken, names = history.taken(), list(history.taken())
    times = np.maximum.accumulate([x.time - history.manifests[0].time for x in history.manifests])
    figure, axes = pyplot.subplots(figsize=(9, 1.7 + 0.35 * len(names)), layout="constrained")
    if len(times) > 1:
        steps = np.full((2 * len(names) - 1, len(times) - 1), np.nan)  # with gaps between rows
        steps[::2] = np.array(list(taken.values()), float)[:, 1:]  # None, where it was away, is NaN
        blues = colors.LinearSegmentedColormap.from_list("steps", [PALEST, COUNTED])
        limits: dict[str, Any] = dict(vmin=0.5, vmax=max(np.nanmax(steps), 1.0))
        edges = np.add.outer(np.arange(len(names)), [-0.4, 0.4]).ravel()
        axes.pcolormesh(
            times,
            edges,
            np.ma.masked_invalid(steps),
            cmap=blues.with_extremes(under=LATE),
            **limits,
        )
    sign: dict[str, Any] = dict(linestyle="", markersize=9, markeredgecolor="white")
    for member, index in history.ends().items():
        at = times[index], names.index(history.names[member])
        if member in history.left:
            axes.plot(*at, ">", color=LEFT, **sign)
        elif index < len(times) - 1:
            axes.plot(*at, "X", color=MISSING, **sign)
    axes.set_yticks(range(len(names)), names, parse_math=False)  # a name may hold a $
    axes.set_ylim(len(names) - 0.5, -0.5)  # the first one is at the top, as in the tables
    axes.set_xlim(0.0, 1.02 * times[-1] or 1.0)  # so that no sign at the end is cut
    first, last = history.manifests[0].step, history.manifests[-1].step
    axes.set_xlabel(f"seconds, from {history.unit} {first} to {last}")
    signs = [
        Patch(color=COUNTED, label="counted"),
        Patch(color=LATE, label="late or skipped"),
        Line2D([], [], color=LEFT, marker=">", **sign, label="left"),
        Line2D([], [], color=MISSING, marker="X", **sign, label="missing"),
    ]
    figure.legend(handles=signs, loc="outside lower center", ncols=len(signs), frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)

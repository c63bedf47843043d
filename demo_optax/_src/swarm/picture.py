"""The picture of a swarm's run: a row for each worker, over time."""

from typing import Any

from demo_optax._src.swarm.history import History

COUNTED, LATE, LEFT, MISSING = "#2a6f97", "#f4a259", "#6a994e", "#bc4749"
PALEST = 0.35  # opacity where a worker took the fewest steps
LABELS = 8  # numbers of steps or rounds above the picture
NARROWEST = 0.025  # share of the picture that has room for a number of steps


def draw(history: History, path: str) -> None:
    """Draws the life of a run: one row per worker, coloured where its packets counted or did not.

    With rounds a place is darker the more steps the worker took, and has their number if there is
    room. Signs show where a process left, and where it is missing although it did not say so.
    """
    try:
        from matplotlib import pyplot
        from matplotlib.colors import to_rgba
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(f"to draw {path!r}, install matplotlib.") from error
    taken, manifests = history.taken(), history.manifests
    times = [manifest.time - manifests[0].time for manifest in manifests]
    has_rounds = history.unit == "round"
    room = NARROWEST * times[-1]
    most = max((n for steps in taken.values() for n in steps if n), default=1)
    figure, axes = pyplot.subplots(figsize=(9, 1.7 + 0.35 * len(taken)), layout="constrained")
    for row, steps in enumerate(taken.values()):
        spans = list(zip(times[1:], times, steps[1:], strict=False))
        seen = [(began, max(ended - began, 0.0), n) for ended, began, n in spans if n is not None]
        axes.broken_barh(
            [(began, seconds) for began, seconds, _ in seen],
            (row - 0.4, 0.8),
            facecolors=[
                to_rgba(COUNTED, PALEST + (1 - PALEST) * n / most) if n else LATE for *_, n in seen
            ],
            edgecolors="white",
            linewidth=[0.8 * (seconds > room) for _, seconds, _ in seen],
        )
        for began, seconds, n in seen:
            if has_rounds and n and seconds > room:
                middle, ink = began + seconds / 2, "white" if 2 * n > most else "black"
                axes.text(middle, row, str(n), ha="center", va="center", size=7, color=ink)
    sign: dict[str, Any] = dict(linestyle="", markersize=9, markeredgecolor="white")
    rows = {name: row for row, name in enumerate(taken)}
    for member, index in history.ends().items():
        at = times[index], rows[history.names[member]]
        if member in history.left:
            axes.plot(*at, ">", color=LEFT, **sign)
        elif index < len(manifests) - 1:
            axes.plot(*at, "X", color=MISSING, **sign)
    axes.set_yticks(range(len(taken)), taken, parse_math=False)  # a name may hold a $
    axes.set_xlabel("seconds")
    shown = range(0, len(manifests), max(len(manifests) // LABELS, 1))
    above = axes.secondary_xaxis("top")
    above.set_xticks([times[n] for n in shown], [str(manifests[n].step) for n in shown])
    above.set_xlabel(history.unit)
    signs = [
        Patch(color=COUNTED, label="counted" + ", darker for more steps" * has_rounds),
        Patch(color=LATE, label="late or skipped"),
        Line2D([], [], color=LEFT, marker=">", **sign, label="left"),
        Line2D([], [], color=MISSING, marker="X", **sign, label="missing"),
    ]
    figure.legend(handles=signs, loc="outside lower center", ncols=len(signs), frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)

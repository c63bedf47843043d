"""Pictures of the studies: loss over bytes, one point a method, and a curve for each family."""

from pathlib import Path

import matplotlib.pyplot as plt

from .study import Study
from .tables import Row, rows


def draw(study: Study, path: Path) -> None:
    """Held-out loss at the end over bytes per step and worker, with standard errors."""
    found = rows(study)
    figure, axes = plt.subplots(figsize=(9, 5.5), dpi=150)
    families: dict[str, list[Row]] = {}
    for row in found:
        families.setdefault(row.method.family, []).append(row)
    for name, family in families.items():
        family.sort(key=lambda row: row.bytes_per_step)
        places = [row.bytes_per_step for row in family]
        losses = [row.loss.value for row in family]
        errors = [row.loss.error or 0.0 for row in family]
        axes.errorbar(places, losses, errors, marker="o", markersize=4, capsize=2, label=name)
    axes.set(xscale="log", xlabel="bytes per step and worker")
    axes.set_ylabel("held-out loss, nats per byte")
    axes.legend(frameon=False, fontsize=7, ncols=2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)

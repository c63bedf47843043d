"""Tables of what came of the studies, in Markdown, and where they stand in the documentation."""

import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
import optax
from scipy import stats

import demo_optax
from benchmarks.tools import pages
from lm.model import PRESETS, build

from .study import Method, Result, Study

PAGES = ("docs/explanation/quality.md",)
KIND = "study"


class Mean(NamedTuple):
    """A mean of some values, and its standard error where there are several."""

    value: float
    error: float | None
    values: int = 1

    def __str__(self) -> str:
        return self.written(".3f")

    def written(self, form: str) -> str:
        """The mean and its error, as in ``1.345 ± 0.002``."""
        error = "" if self.error is None else f" ± {self.error:.3f}"
        return f"{self.value:{form}}{error}"

    def interval(self) -> str:
        """The interval that holds the true mean with 95%, by Student's t; nothing for one value."""
        if self.error is None:
            return ""
        reach = float(stats.t.ppf(0.975, self.values - 1)) * self.error
        return f"{self.value - reach:+.3f} to {self.value + reach:+.3f}"


def mean(values) -> Mean:
    values = np.asarray(values, float)
    several = len(values) > 1
    error = float(values.std(ddof=1) / math.sqrt(len(values))) if several else None
    return Mean(float(values.mean()), error, len(values))


class Row(NamedTuple):
    """What came of one method.

    Attributes:
      method: which.
      seeds: that are done.
      bytes_per_step: that a worker hands to the exchange.
      loss: at the end, nats per held-out byte; not finite where a run broke.
      difference: from the baseline's loss, the mean of the differences on each seed.
      difference_first: that of the first seed alone, on which all methods can be compared.
    """

    method: Method
    seeds: list[int]
    bytes_per_step: float
    loss: Mean
    difference: Mean | None
    difference_first: Mean | None


def rows(study: Study) -> list[Row]:
    """A row for each method that has a result, in the order of the file."""
    results = study.results()
    baseline = study.of_method(study.methods[study.baseline], results)
    made = []
    for method in study.methods.values():
        found = study.of_method(method, results)
        if found:
            made.append(_row(study, method, found, baseline))
    return made


def _row(
    study: Study, method: Method, found: Mapping[int, Result], baseline: Mapping[int, Result]
) -> Row:
    one = next(iter(found.values()))

    def difference(seeds) -> Mean | None:
        common = sorted(found.keys() & baseline.keys() & set(seeds))
        apart = [found[s].comparable_loss - baseline[s].comparable_loss for s in common]
        return mean(apart) if common and method.name != study.baseline else None

    return Row(
        method,
        sorted(found),
        one.bytes_per_step,
        mean([result.comparable_loss for result in found.values()]),
        difference(study.seeds),
        difference(study.seeds[:1]),
    )


def of_study(study: Study, patterns: Sequence[str] = ("*",)) -> str:
    """A table of the methods that have a result and a name like one of these patterns.

    Raises:
      ValueError: no method of the study has a name like a pattern.
    """
    for pattern in patterns:
        if not fnmatch.filter(study.methods, pattern):
            raise ValueError(f"no method of the study {study.name!r} has a name like {pattern!r}.")

    def is_wanted(row: Row) -> bool:
        return any(fnmatch.fnmatch(row.method.name, pattern) for pattern in patterns)

    found = list(filter(is_wanted, rows(study)))
    heads = [
        "",
        "bytes per step",
        "times fewer",
        "learning rate",
        "loss",
        f"minus {study.baseline}",
        "95% interval",
        "seeds",
        f"minus, seed {study.seeds[0]}",
    ]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in found:
        cells = [
            row.method.name,
            f"{row.bytes_per_step:,.0f}",
            f"{dense_gradient(row.method) / row.bytes_per_step:,.0f}",
            f"{row.method.learning_rate:g}",
            str(row.loss),
            _difference(row.difference),
            "" if row.difference is None else row.difference.interval(),
            str(len(row.seeds)),
            _difference(row.difference_first),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _difference(found: Mean | None) -> str:
    return "" if found is None else found.written("+.3f")


def dense_gradient(method: Method) -> int:
    """Bytes of the float32 gradient that a dense all-reduce would send."""
    return demo_optax.dense_bytes(_shapes(method))


def parameters(method: Method) -> int:
    """Parameters of the model."""
    return sum(leaf.size for leaf in jax.tree.leaves(_shapes(method)))


def _shapes(method: Method) -> optax.Params:
    preset = PRESETS[method.settings["preset"]]
    return jax.eval_shape(lambda: build(preset, 0)[1])


def table_of(studies: Mapping[str, Study]) -> pages.Table:
    """The tables of these studies, for `benchmarks.tools.pages`."""
    return lambda name, patterns: of_study(studies[name], patterns)


def write(studies: Mapping[str, Study]) -> None:
    """Brings the pages up to date."""
    pages.write(PAGES, KIND, table_of(studies))

"""Tables of what came of the studies, in Markdown, and where they stand in the documentation."""

import fnmatch
import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy import stats

import demo_optax
from benchmarks.tools import pages
from lm.model import PRESETS, PresetName, build

from .study import BASELINE, Method, Result, Study

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
    baseline = study.of_method(study.methods[BASELINE], results)
    found = [(method, study.of_method(method, results)) for method in study.methods.values()]
    return [_row(study, method, done, baseline) for method, done in found if done]


def _row(
    study: Study, method: Method, found: Mapping[int, Result], baseline: Mapping[int, Result]
) -> Row:
    losses = {seed: result.comparable_loss for seed, result in found.items()}

    def difference(seeds) -> Mean | None:
        common = sorted(losses.keys() & baseline.keys() & set(seeds))
        apart = [losses[seed] - baseline[seed].comparable_loss for seed in common]
        return mean(apart) if common and method.name != BASELINE else None

    sent = next(iter(found.values())).bytes_per_step
    differences = difference(study.seeds), difference(study.seeds[:1])
    return Row(method, sorted(found), sent, mean(list(losses.values())), *differences)


def of_study(study: Study, patterns: Sequence[str] = ("*",)) -> str:
    """A table of the methods that have a result and a name like one of these patterns.

    Raises:
      ValueError: no method of the study has a name like a pattern.
    """
    for pattern in patterns:
        if not fnmatch.filter(study.methods, pattern):
            raise ValueError(f"no method of the study {study.name!r} has a name like {pattern!r}.")
    lines = [
        f"|  | bytes per step | times fewer | learning rate | loss | minus {BASELINE} "
        f"| 95% interval | seeds | minus, seed {study.seeds[0]} |",
        "|" + "---|" * 9,
    ]
    for row in rows(study):
        name, sent = row.method.name, row.bytes_per_step
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            fewer = dense_gradient(row.method.settings["preset"]) / sent
            lines.append(
                f"| {name} | {sent:,.0f} | {fewer:,.0f} | {row.method.learning_rate:g} "
                f"| {row.loss} | {_difference(row.difference)} "
                f"| {row.difference.interval() if row.difference else ''} | {len(row.seeds)} "
                f"| {_difference(row.difference_first)} |"
            )
    return "\n".join(lines)


def _difference(found: Mean | None) -> str:
    return "" if found is None else found.written("+.3f")


@functools.cache
def dense_gradient(preset: PresetName) -> int:
    """Bytes of the float32 gradient that a dense all-reduce would send."""
    return demo_optax.dense_bytes(jax.eval_shape(lambda: build(PRESETS[preset], 0)[1]))


def table_of(studies: Mapping[str, Study]) -> pages.Table:
    """The tables of these studies, for `benchmarks.tools.pages`."""
    return lambda name, patterns: of_study(studies[name], patterns)


def losses(studies: Mapping[str, Study], written: Mapping[str, Any]) -> str:
    """What `demo-optax choose` weighs, as JSON: the losses of the studies that it names."""
    made = {(study.name, row.method.name): row for study in studies.values() for row in rows(study)}

    def measured(entry: Mapping[str, Any]) -> dict[str, str | float | None]:
        study, method = entry["study"], entry["method"]
        if (study, method) not in made:
            raise ValueError(f"{method!r} of the study {study!r} has no result: train it.")
        row, baseline = made[study, method], studies[study].methods[BASELINE]
        difference, settings = row.difference or Mean(0.0, None), row.method.settings
        counts = dict(seeds=len(row.seeds), workers=settings.get("workers", 8))
        size = dict(parameters=dense_gradient(settings["preset"]) // 4, steps=settings["steps"])
        named = dict(study=study, method=method, differs=entry["differs"])
        found = dict(difference=difference.value, error=difference.error)
        rate = row.method.learning_rate / baseline.learning_rate
        return named | found | counts | size | dict(rate=rate)

    presets = {row.method.settings["preset"] for row in made.values()}
    found: dict[str, Any] = dict(largest_model=max(map(dense_gradient, presets)) // 4)
    found["most_workers"] = max(row.method.settings.get("workers", 8) for row in made.values())
    methods = written["methods"].items()
    found["methods"] = {name: list(map(measured, entries)) for name, entries in methods}
    return json.dumps(found, indent=1) + "\n"

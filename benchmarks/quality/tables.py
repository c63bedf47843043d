"""Tables of what came of the studies, in Markdown, and where they stand in the documentation."""

import fnmatch
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

import demo_optax
from lm.model import PRESETS, build

from .study import FOLDER, Method, Result, Study

ROOT = FOLDER.parents[1]
PAGES = ("README.md", "docs/quality.md")


class Mean(NamedTuple):
    """A mean, and its standard error where there are several values."""

    value: float
    error: float | None

    def __str__(self) -> str:
        return self.written(".3f")

    def written(self, form: str) -> str:
        """As in ``1.345 ± 0.002``."""
        error = "" if self.error is None else f" ± {self.error:.3f}"
        return f"{self.value:{form}}{error}"


def mean(values) -> Mean:
    values = np.asarray(values, float)
    several = len(values) > 1
    return Mean(
        float(values.mean()),
        float(values.std(ddof=1) / math.sqrt(len(values))) if several else None,
    )


class Row(NamedTuple):
    """What came of one method.

    Attributes:
      method: which.
      rate: the learning rate.
      seeds: that are done.
      bytes_per_step: that a worker hands to the exchange.
      loss: at the end, nats per held-out byte; not finite where a run broke.
      beside: its difference from the baseline, seed by seed.
      beside_first: that of the first seed alone, on which all methods can be compared.
    """

    method: Method
    rate: float
    seeds: list[int]
    bytes_per_step: float
    loss: Mean
    beside: Mean | None
    beside_first: Mean | None


def rows(study: Study) -> list[Row]:
    """Of all methods that have a result, in the order of the file."""
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

    def beside(seeds) -> Mean | None:
        common = sorted(found.keys() & baseline.keys() & set(seeds))
        apart = [found[s].comparable_loss - baseline[s].comparable_loss for s in common]
        return mean(apart) if common and method.name != study.baseline else None

    return Row(
        method,
        one.learning_rate,
        sorted(found),
        one.bytes_per_step,
        mean([result.comparable_loss for result in found.values()]),
        beside(study.seeds),
        beside(study.seeds[:1]),
    )


def of_study(study: Study, patterns: Sequence[str] = ("*",)) -> str:
    """A table of the methods that have a result and a name like one of these patterns."""

    def is_wanted(row: Row) -> bool:
        return any(fnmatch.fnmatch(row.method.name, pattern) for pattern in patterns)

    found = list(filter(is_wanted, rows(study)))
    heads = [
        "",
        "bytes per step",
        "times fewer",
        "learning rate",
        "loss",
        f"beside {study.baseline}",
        "seeds",
        f"beside, seed {study.seeds[0]}",
    ]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in found:
        cells = [
            row.method.name,
            f"{row.bytes_per_step:,.0f}",
            f"{dense_gradient(row.method) / row.bytes_per_step:,.0f}",
            f"{row.rate:g}" + ("" if row.method.like is None else "*"),
            str(row.loss),
            _difference(row.beside),
            str(len(row.seeds)),
            _difference(row.beside_first),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _difference(found: Mean | None) -> str:
    return "" if found is None else found.written("+.3f")


def dense_gradient(method: Method) -> int:
    """Bytes of the float32 gradient that a dense all-reduce would send."""
    preset = PRESETS[method.settings["preset"]]
    return demo_optax.dense_bytes(jax.eval_shape(lambda: build(preset, 0)[1]))


def replaced(text: str, studies: Mapping[str, Study]) -> str:
    """A page with today's tables between their marks.

    These are ``<!-- study NAME -->``, or ``<!-- study NAME: PATTERN; PATTERN -->`` for some of its
    methods, and ``<!-- end -->``.

    Raises:
      KeyError: a mark names no study.
    """

    def table(mark: re.Match) -> str:
        patterns = mark[3].split("; ") if mark[3] else ("*",)
        return f"{mark[1]}\n{of_study(studies[mark[2]], patterns)}\n{mark[4]}"

    marks = r"(<!-- study (\w+)(?:: (.*?))? -->).*?(<!-- end -->)"
    return re.sub(marks, table, text, flags=re.DOTALL)


def write(studies: Mapping[str, Study]) -> None:
    """Brings the pages up to date."""
    for page in map(ROOT.__truediv__, PAGES):
        page.write_text(replaced(page.read_text(), studies))


def check(studies: Mapping[str, Study]) -> list[Path]:
    """Pages whose tables are not what the results give."""
    pages = map(ROOT.__truediv__, PAGES)
    return [page for page in pages if replaced(page.read_text(), studies) != page.read_text()]

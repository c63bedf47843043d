"""Studies as values: what is trained, what came of it, and which run is the next."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

FOLDER = Path(__file__).parent
STUDIES = FOLDER / "studies.yaml"
SPACING = 2.0
KINDS = "kinds"  # of methods, for studies to refer to


class Job(NamedTuple):
    """One run: settings of the trainer, and the lever that is tried on its optimizer, if any."""

    study: str
    method: str
    settings: dict[str, Any]
    lever: dict[str, Any]
    learning_rate: float
    seed: int

    @property
    def key(self) -> str:
        """The same for the same run, whatever its method and study are called."""
        return json.dumps(self[2:], sort_keys=True)


class Result(NamedTuple):
    """What came of a run; ``loss`` is None where it was not finite.

    Losses are in nats per held-out byte, ``evaluations`` pairs of a step and such a loss; bytes are
    those that a worker hands to the exchange, the mean over all steps; seconds those of a core.
    ``residuals`` and ``sent_shares`` are pairs of a step and the mean since the pair before, of the
    norm and the share in `demo_optax.ExchangeMetrics`; None where nothing is compressed, and in
    runs from before they were recorded, as is ``commit``, that of the checkout that was run.
    """

    method: str
    settings: dict[str, Any]
    lever: dict[str, Any]
    learning_rate: float
    seed: int
    loss: float | None
    bytes_per_step: float
    evaluations: list[tuple[int, float]]
    seconds: float
    versions: dict[str, str]
    residuals: list[tuple[int, float]] | None = None
    sent_shares: list[tuple[int, float]] | None = None
    commit: str | None = None

    @property
    def key(self) -> str:
        return json.dumps(self[1:5], sort_keys=True)

    @property
    def comparable_loss(self) -> float:
        """Infinite where a run broke."""
        return math.inf if self.loss is None else self.loss


@dataclass(frozen=True)
class Method:
    """One way to train.

    Attributes:
      name: in tables.
      settings: of the trainer, those of the study included.
      lever: a name in `levers` and its options, or nothing.
      search_from: the learning rate that a search begins with; None where ``learning_rate`` is set.
      learning_rate: of all runs, for methods that are not searched for the best.
      like: the method whose best rate this one takes.
      curve: what it is a point of in the picture, or None.
    """

    name: str
    settings: Mapping[str, Any]
    lever: Mapping[str, Any]
    curve: str | None = None
    search_from: float | None = None
    learning_rate: float | None = None
    like: str | None = None


@dataclass(frozen=True)
class Study:
    """Methods that are compared with each other, each on the same seeds."""

    name: str
    seeds: tuple[int, ...]
    baseline: str
    methods: Mapping[str, Method]

    @property
    def results_path(self) -> Path:
        return FOLDER / "results" / f"{self.name}.jsonl"

    def results(self) -> dict[str, Result]:
        """All results on file, by their job's key."""
        if not self.results_path.exists():
            return {}
        lines = self.results_path.read_text().splitlines()
        found = [Result(**json.loads(line)) for line in lines]
        return {result.key: result for result in found}

    def job(self, method: Method, rate: float, seed: int) -> Job:
        return Job(self.name, method.name, dict(method.settings), dict(method.lever), rate, seed)

    def by_rate(self, method: Method, results: Mapping[str, Result]) -> dict[float, float]:
        """Loss of the first seed at each rate that was tried."""
        wanted = dict(method.settings), dict(method.lever), self.seeds[0]
        return {
            result.learning_rate: result.comparable_loss
            for result in results.values()
            if (result.settings, result.lever, result.seed) == wanted
        }

    def best_rate(self, method: Method, results: Mapping[str, Result]) -> float | None:
        """The rate to train all seeds at; None while its search is under way."""
        if method.learning_rate is not None:
            return method.learning_rate
        if method.like is not None:
            return self.best_rate(self.methods[method.like], results)
        tried = self.by_rate(method, results)
        if not tried:
            return None
        best = min(tried, key=tried.__getitem__)
        between = {best * SPACING, best / SPACING} <= set(tried)
        return best if between and math.isfinite(tried[best]) else None

    def next_job(self, method: Method, results: Mapping[str, Result]) -> Job | None:
        """The run that a method needs next; None where there is none, or another method's first.

        A search goes from rate to rate of a grid, twice as high each, until the best of the first
        seed lies between two others; the other seeds are then trained at the best.
        """
        rate = self.best_rate(method, results)
        if rate is None and method.search_from is not None:
            tried = self.by_rate(method, results)
            best = min(tried, key=tried.__getitem__, default=method.search_from)
            candidates = [best, best * SPACING, best / SPACING]
            if tried and math.isinf(tried[best]):  # all broke: lower ones may not
                candidates = [min(tried) / SPACING]
            return self.job(method, next(r for r in candidates if r not in tried), self.seeds[0])
        if rate is None:
            return None
        jobs = (self.job(method, rate, seed) for seed in self.seeds)
        return next((job for job in jobs if job.key not in results), None)

    def of_method(self, method: Method, results: Mapping[str, Result]) -> dict[int, Result]:
        """For each seed that is done the result at the best rate."""
        rate = self.best_rate(method, results)
        if rate is None:
            return {}
        keys = {seed: self.job(method, rate, seed).key for seed in self.seeds}
        return {seed: results[key] for seed, key in keys.items() if key in results}


def read(path: Path = STUDIES) -> dict[str, Study]:
    """The studies of a YAML file.

    Raises:
      ValueError: a method has no learning rate, or more than one way to get it.
    """
    bodies = yaml.safe_load(path.read_text())
    return {name: _study(name, body) for name, body in bodies.items() if name != KINDS}


def _study(name: str, body: dict[str, Any]) -> Study:
    usual = body.get("lever", {})
    methods = {
        each: _method(each, body["settings"], {"lever": usual} | own)
        for each, own in body["methods"].items()
    }
    for method in methods.values():
        if method.like is not None and method.like not in methods:
            raise ValueError(f"{name}: {method.name} is like {method.like!r}, which is no method.")
    return Study(name, tuple(body["seeds"]), body["baseline"], methods)


def _method(name: str, common: dict[str, Any], own: dict[str, Any]) -> Method:
    common, own = dict(common), dict(own)
    usual = common.pop("learning_rate", None)
    rates = {key: own.pop(key, None) for key in ("search_from", "learning_rate", "like")}
    if not any(rates.values()):
        rates["learning_rate"] = usual
    if sum(value is not None for value in rates.values()) != 1:
        raise ValueError(f"{name}: give one of search_from, learning_rate and like, not {rates}.")
    lever, curve = own.pop("lever"), own.pop("curve", None)
    return Method(name, common | own, lever, curve, **rates)

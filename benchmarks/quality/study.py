"""Studies as values: what is trained, and what came of it."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

FOLDER = Path(__file__).parent
STUDIES = FOLDER / "studies.yaml"
BASELINE = "AdamW"  # of each study, from which differences are taken
SEEDS = (0, 1, 2)  # of a study that names no others
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
      learning_rate: the highest, of all runs.
      curve: what it is a point of in the picture, or None.
    """

    name: str
    settings: dict[str, Any]
    lever: dict[str, Any]
    learning_rate: float
    curve: str | None = None


@dataclass(frozen=True)
class Study:
    """Methods that are compared with `BASELINE`, each on the same seeds."""

    name: str
    seeds: tuple[int, ...]
    methods: Mapping[str, Method]

    @property
    def results_path(self) -> Path:
        return FOLDER / "results" / f"{self.name}.jsonl"

    def results(self) -> dict[str, Result]:
        """All results on file, by their job's key."""
        path = self.results_path
        lines = path.read_text().splitlines() if path.exists() else []
        return {result.key: result for result in (Result(**json.loads(line)) for line in lines)}

    def append(self, result: Result) -> None:
        """Keeps a result."""
        self.results_path.parent.mkdir(exist_ok=True)
        with self.results_path.open("a") as file:
            print(json.dumps(result._asdict()), file=file)

    def job(self, method: Method, seed: int) -> Job:
        given = method.settings, method.lever, method.learning_rate
        return Job(self.name, method.name, *given, seed)

    def of_method(self, method: Method, results: Mapping[str, Result]) -> dict[int, Result]:
        """The result for each seed that is done."""
        keys = {seed: self.job(method, seed).key for seed in self.seeds}
        return {seed: results[key] for seed, key in keys.items() if key in results}


def read(path: Path = STUDIES) -> dict[str, Study]:
    """The studies of a YAML file.

    Raises:
      ValueError: a method has no learning rate.
    """
    bodies = yaml.safe_load(path.read_text())
    return {name: _study(name, body) for name, body in bodies.items() if name != KINDS}


def _study(name: str, body: dict[str, Any]) -> Study:
    methods = {each: _method(each, body["settings"] | own) for each, own in body["methods"].items()}
    return Study(name, tuple(body.get("seeds", SEEDS)), methods)


def _method(name: str, settings: dict[str, Any]) -> Method:
    rate, lever = settings.pop("learning_rate", None), settings.pop("lever", {})
    if rate is None:
        raise ValueError(f"{name} has no learning_rate: give it or its study one.")
    return Method(name, settings, lever, rate, settings.pop("curve", None))

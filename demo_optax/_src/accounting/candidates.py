"""Candidates for a link: methods with their seconds per step and the losses that were measured."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from demo_optax._src.accounting.methods import Method
from demo_optax._src.accounting.traffic import StepTime

LOSSES = Path(__file__).with_name("losses.json")
"""Names the studies of each method; ``python -m benchmarks.quality write`` adds their losses."""


class MeasuredLoss(NamedTuple):
    """The loss of a method minus that of AdamW, in nats per byte of held-out text.

    Attributes:
      study, method: the study in ``benchmarks/quality/studies.yaml``, and its method.
      difference: mean of the differences on each seed.
      error: its standard error; None for one seed.
      seeds, workers, parameters, steps: their numbers in the runs.
      rate: the learning rate as a multiple of AdamW's.
      differs: how the runs differ from what they stand for, if they do.

    Example:
      >>> MeasuredLoss("final", "DeMo-Muon", -0.042, 0.007, 3, 8, 1_081_344, 1020, 1.0).difference
      -0.042
    """

    study: str
    method: str
    difference: float
    error: float | None
    seeds: int
    workers: int
    parameters: int
    steps: int
    rate: float
    differs: str = ""


class Memory(NamedTuple):
    """The bytes of memory that a worker needs, without those of the activations.

    Attributes:
      parameters, gradients, state: those of the model and of the optimizer's state.
      temporary: what an update needs for a while.
    """

    parameters: int
    gradients: int
    state: int
    temporary: int

    @property
    def total(self) -> int:
        """The sum of all."""
        return sum(self)


class Candidate(NamedTuple):
    """What a method costs over a link, in seconds, bytes, memory and loss.

    Attributes:
      method: what it sends, and the lines that use it.
      time: bytes and seconds of a step, whose compute includes that of an orthogonal step.
      loss: the measured loss, of the runs whose number of workers is closest.
      learning_rate: the rate to begin with if no AdamW was tuned for the model.
      memory: bytes that a worker needs without the activations.

    Example:
      >>> import demo_optax
      >>> model = dict(params=300_000_000, batch_tokens=65_536, width=1024)
      >>> link = dict(workers=8, bandwidth=1e9, latency=1e-3, compute_time=1.0)
      >>> candidate = demo_optax.accounting.choose(**model, **link).candidates[2]
      >>> candidate.method.name, candidate.learning_rate, round(candidate.time.step, 2)
      ('demo_muon', 0.000375, 1.22)
    """

    method: Method
    time: StepTime
    loss: MeasuredLoss
    learning_rate: float
    memory: Memory


def read_losses() -> Any:
    """Returns what the studies measured: their largest model, most workers, and the methods."""
    return json.loads(LOSSES.read_text())


def measured_losses(method: Method) -> list[MeasuredLoss]:
    """Returns the losses of a method, and how each was measured in another way."""
    losses, found = [MeasuredLoss(**entry) for entry in read_losses()["methods"][method.name]], []
    for loss in losses:
        rate = "" if loss.rate == method.rate else f"{loss.rate:g} times AdamW's rate"
        found.append(loss._replace(differs=", ".join(filter(None, (loss.differs, rate)))))
    return found


def measured_loss(method: Method, workers: int) -> MeasuredLoss:
    """Returns the loss of the runs whose number of workers is closest, as a ratio."""
    return min(measured_losses(method), key=lambda loss: abs(math.log(loss.workers / workers)))

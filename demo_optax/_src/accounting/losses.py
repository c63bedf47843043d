"""The losses that the studies measured, for the methods that `choose` compares."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from demo_optax._src.accounting.methods import Method

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

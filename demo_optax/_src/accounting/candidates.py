"""Candidates for a link: methods with their seconds per step and the losses that were measured."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from demo_optax._src.accounting.methods import MEASUREMENTS, Method
from demo_optax._src.accounting.traffic import StepTime, step_times
from demo_optax._src.exchange import Delayed

REQUESTS = 4  # in a row, of a swarm's step: write a packet, look, read packets, write the manifest
TEMPORARY = 6  # bytes a parameter: the most that an update of ours needs for an H100 or a TPU v5e
LOSSES = Path(__file__).with_name("losses.json")
"""The losses behind `MEASUREMENTS`, which ``python -m benchmarks.quality write`` writes."""


class MeasuredLoss(NamedTuple):
    """A loss minus AdamW's, in nats per byte of held-out text.

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


class Candidate(NamedTuple):
    """A method with what it costs.

    Attributes:
      method: what it sends, and the lines that use it.
      time: bytes and seconds of a step, whose compute includes that of an orthogonal step.
      loss: the measured loss, of the runs whose number of workers is closest; None without runs.
      learning_rate: the rate to begin with if no AdamW was tuned for the model.
      memory: bytes of float32 parameters and gradients, the state and what an update needs for a
        while, without the activations.

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
    loss: MeasuredLoss | None
    learning_rate: float
    memory: float

    @property
    def exchange(self) -> float:
        """Seconds of the exchange in each step, whether the compute hides them or not."""
        return self.time.transfer + self.time.waiting


def read_losses() -> dict[tuple[str, str], MeasuredLoss]:
    """Returns the measured losses by their study and method."""
    entries = [MeasuredLoss(**entry) for entry in json.loads(LOSSES.read_text())["losses"]]
    return {(entry.study, entry.method): entry for entry in entries}


def read_limits() -> tuple[int, int]:
    """Returns the parameters of the largest model of any study, and the most workers."""
    found = json.loads(LOSSES.read_text())
    return found["largest_model"], found["most_workers"]


def measured_losses(method: Method) -> list[MeasuredLoss]:
    """Returns the losses of a method, and how each was measured in another way."""
    losses, found = read_losses(), []
    for each in MEASUREMENTS[method.name]:
        loss = losses[each.study, each.method]
        rate = "" if loss.rate == method.rate else f"{loss.rate:g} times AdamW's rate"
        differs = ", ".join(filter(None, (each.differs, rate)))
        found.append(loss._replace(differs=differs))
    return found


def measured_loss(method: Method, workers: int) -> MeasuredLoss | None:
    """Returns the loss of the runs whose number of workers is closest, as a ratio."""
    return min(
        measured_losses(method), key=lambda x: abs(math.log(x.workers / workers)), default=None
    )


def memory_of(method: Method, params: int) -> float:
    """Returns the bytes of `Candidate.memory` for a number of parameters."""
    parameters, gradients = 4, 4
    return params * (parameters + gradients + method.state + TEMPORARY)


def evaluate(
    method: Method,
    params: Any,
    workers: int,
    bandwidth: float,
    latency: float,
    compute_time: float,
    dtype: str,
) -> StepTime:
    """Returns the bytes and seconds of a method's step; the arguments are those of `step_times`."""
    times = step_times(
        params,
        {} if method.setting is None else {method.name: method.setting},
        workers,
        bandwidth,
        latency,
        compute_time,
        method.local_steps,
        method.fragments,
    )
    dense = f"{'AdamW' if method.local_steps == 1 else 'DiLoCo'}, {dtype}"
    return times[dense if method.setting is None else method.name]


def evaluate_in_swarm(
    method: Method,
    params: Any,
    workers: int,
    bandwidth: float,
    upload: float,
    latency: float,
    compute_time: float,
) -> StepTime:
    """Returns the bytes and seconds of a method's step whose packets travel through a store.

    A worker writes its own packet, and then reads those of the others. Those of a round travel
    during the next one.
    """
    assert method.setting is not None
    setting, steps = {method.name: method.setting}, method.local_steps
    time = step_times(params, setting, workers, bandwidth, local_steps=steps)[method.name]
    transfer = 8 * time.packet * (1 / upload + (workers - 1) / bandwidth) / steps
    waiting = REQUESTS * latency / steps
    exchange, spare = transfer + waiting, compute_time - waiting
    overlaps = isinstance(method.setting[1], Delayed)
    return time._replace(
        transfer=transfer,
        waiting=waiting,
        step=max(compute_time, exchange) if overlaps else compute_time + exchange,
        hiding_bandwidth=bandwidth * transfer / spare if spare > 0 else math.inf,
    )

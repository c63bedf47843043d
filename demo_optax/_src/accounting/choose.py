"""The choice of an optimizer and an exchange for a model and a link, with its reasons."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from demo_optax._src import checks
from demo_optax._src.accounting.methods import (
    MeasuredLoss,
    Method,
    methods,
    methods_in_swarm,
    read_losses,
)
from demo_optax._src.accounting.traffic import BYTES, StepTime, dense_bytes, step_times

BACKS = 512, 256, 128  # coefficients that owners send back of each block
FEW_WORKERS = 16  # for whom the fewest are enough
TUNED_RATE, TUNED_WIDTH = 3e-3, 128
TEMPORARY = 6  # bytes a parameter
REQUESTS = 4  # in a row, of a swarm's step: write a packet, look, read packets, write the manifest
LARGEST_ALL_REDUCE = 1 / 4  # of the compute of a step
LARGEST_ALL_GATHER = 1 / 5
LARGEST_STEP = 2.0
LARGEST_ORTHOGONAL_STEP = {"A": 1 / 5, "B": 1 / 5, "C": 1 / 2, "D": 1 / 2}
SNAPSHOT_EVERY = 100  # steps, by default


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


class Choice(NamedTuple):
    """The candidates for a model and a link, and the one to take.

    Attributes:
      candidates: all of them, row by row.
      chosen: the one to take.
      reasons: sentences that say why.
      warnings: sentences that say what the measured loss does not cover.

    Example:
      >>> import demo_optax
      >>> model = dict(params=300_000_000, batch_tokens=65_536, width=1024)
      >>> link = dict(workers=16, bandwidth=1e7, latency=0.02, compute_time=1.0)
      >>> choice = demo_optax.accounting.choose(**model, **link)
      >>> choice.chosen.method.name
      'SparseLoCo k=64, fragments in two phases'
    """

    candidates: tuple[Candidate, ...]
    chosen: Candidate
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]


def choose(
    params: Any,
    workers: int,
    bandwidth: float,
    latency: float,
    compute_time: float,
    batch_tokens: int,
    width: int,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    memory: float = math.inf,
    swarm: bool = False,
    upload: float | None = None,
) -> Choice:
    """Chooses an optimizer and an exchange by the seconds of a step, and rounds by their losses.

    ``docs/how_to/choose.md`` explains the rules. Nothing is computed on a device.

    Args:
      params: arrays or shapes of the parameters, or their number. A number counts as one matrix of
        ``width`` columns.
      workers: number of workers.
      bandwidth: bits per second of each worker's link.
      latency: seconds per round of an exchange.
      compute_time: seconds of a step without an exchange and without an orthogonal step.
      batch_tokens: tokens in the batch of one worker.
      width: width of the model.
      dtype: dtype of the parameters, of the gradients, which a dense all-reduce sends, and of the
        moments of AdamW and Muon.
      memory: bytes of memory of a worker, for parameters, gradients, the optimizer and activations.
        What needs more without the activations is not chosen.
      swarm: compare what a swarm can carry. ``latency`` is then that of a request to the store, and
        ``bandwidth`` that at which each worker reads from it.
      upload: bits per second at which each worker writes to the store of a swarm, by default as
        many as it reads.

    Raises:
      TypeError, ValueError: an argument is out of range.

    Example:
      >>> choice = choose(300_000_000, 16, 1e8, 0.02, 1.0, batch_tokens=4096, width=1024)
      >>> print(choice.chosen.method.code)
      exchange = demo_optax.TwoPhase("data", topk_back=128, value_coding_back="int4")
      delayed = demo_optax.Delayed(exchange)
      tx = demo_optax.demo_scaled(rate, look_ahead=1.0, exchange=delayed)
    """
    for name, value in {"workers": workers, "batch_tokens": batch_tokens, "width": width}.items():
        checks.static_integer(name, value, at_least=1)
    checks.in_interval("bandwidth", bandwidth, "(0, inf)")
    checks.in_interval("latency", latency, "[0, inf)")
    checks.in_interval("compute_time", compute_time, "(0, inf)")
    checks.one_of("dtype", dtype, sorted(BYTES))
    checks.in_interval("memory", memory, "(0, inf]")
    if upload is not None and not swarm:
        raise ValueError(
            f"upload={upload} is for a swarm. Elsewhere workers send and receive at once: give "
            "bandwidth the lower of the two, and leave out upload."
        )
    upload = bandwidth if upload is None else upload
    checks.in_interval("upload", upload, "(0, inf)")
    if isinstance(params, (int, float, np.number)):
        checks.static_integer("params", params, at_least=1)
        params = jax.ShapeDtypeStruct((math.ceil(params / width), width), jnp.float32)
    extra, count = 5 * width / batch_tokens, dense_bytes(params, 1)
    model = count * BYTES[dtype]

    def candidate(method: Method) -> Candidate:
        compute, steps = compute_time * (1 + extra * method.orthogonal), method.local_steps
        link = workers, bandwidth, latency, compute, steps, method.fragments
        time = step_times(params, method.setting or dtype, *link)["DeMo"]
        if swarm:  # A worker writes its own packet, and then reads those of the others.
            transfer = time.transfer + 8 * time.packet / upload / steps
            waiting, overlaps = REQUESTS * latency / steps, method.row != "B"
            time = time._replace(transfer=transfer, waiting=waiting, overlaps=overlaps)
        rate = method.rate * TUNED_RATE * TUNED_WIDTH / width
        state = round(count * method.state) + method.moments * model
        needed = Memory(model, model, state, TEMPORARY * count)
        return Candidate(method, time, method.loss(workers), rate, needed)

    backs = BACKS if workers > FEW_WORKERS else BACKS[-1:]
    compared = [methods_in_swarm()] if swarm else map(methods, backs)
    found, row, reason = _choose_back([tuple(map(candidate, x)) for x in compared], compute_time)
    of_row = [each for each in found if each.method.row == row]
    if row == "E":
        chosen, why = _choose_round(of_row, compute_time, memory)
    else:
        chosen, why = _choose_optimizer(of_row, extra, memory)
    said = _warnings(chosen, count, workers, memory, dtype)
    said |= _swarm_warnings(chosen, upload, compute_time) if swarm else {}
    true = tuple(sentence for sentence, is_true in said.items() if is_true)
    return Choice(found, chosen, (reason, why), true)


def _choose_back(
    by_back: Sequence[tuple[Candidate, ...]], compute_time: float
) -> tuple[tuple[Candidate, ...], str, str]:
    """Returns the candidates whose owners send as much back as the link allows, and the row.

    The last of ``by_back`` send the fewest coefficients.
    """
    *more, fewest = [{x.method.row: x.time.exchange for x in candidates} for candidates in by_back]
    row, reason = _choose_row(fewest, compute_time)
    most = min(LARGEST_STEP * compute_time, fewest["C"])
    allowed = [each for each, exchange in zip(by_back, more, strict=False) if exchange["D"] <= most]
    if row == "D" and allowed:
        reason += " The owners send as many coefficients back as that allows while two phases stay"
        reason += " the shorter."
    return (*allowed, by_back[-1])[0], row, reason


def _choose_row(exchange: Mapping[str, float], compute: float) -> tuple[str, str]:
    """Returns the first row whose exchange the compute can bear; the rows have their seconds.

    A swarm has no all-reduce and no two phases, rows A and D.
    """
    gathered, owned, said = exchange["B"], exchange.get("D", math.inf), ""
    if "A" in exchange:
        said = f"A dense all-reduce takes {exchange['A']:.3g} s"
        if exchange["A"] <= LARGEST_ALL_REDUCE * compute:
            return "A", f"{said}, at most a quarter of the compute."
        said += ". "
    said += f"The packets of a step take {gathered:.3g} s"
    if gathered <= LARGEST_ALL_GATHER * compute:
        return "B", f"{said}, at most a fifth of the compute."
    if gathered <= compute:
        return "C", f"{said}, more than a fifth of the compute, which can hide it."
    if "D" in exchange:
        said += f", and those of two phases {owned:.3g} s"
    if min(gathered, owned) <= LARGEST_STEP * compute:
        row = "C" if gathered <= owned else "D"
        return row, f"{said}. With a delay a step takes at most twice the compute."
    return "E", f"{said}. Even with a delay a step would take more than twice the compute."


def _choose_optimizer(
    of_row: Sequence[Candidate], extra: float, memory: float
) -> tuple[Candidate, str]:
    """Returns one of a row's two candidates, of which one makes matrices orthogonal.

    Orthogonal steps add ``extra`` of the compute. A candidate that does not fit into the memory
    gives way to one that does.
    """
    most = LARGEST_ORTHOGONAL_STEP[of_row[0].method.row]
    first, other = sorted(of_row, key=lambda c: c.method.orthogonal is (extra > most))
    if first.memory.total > memory >= other.memory.total:
        return other, _does_not_fit(first, memory)
    size = "more than" if extra > most else "at most"
    return first, f"Orthogonal steps add {extra:.0%} to the compute, {size} {most:.0%}."


def _choose_round(
    rounds: Sequence[Candidate], compute: float, memory: float
) -> tuple[Candidate, str]:
    """Returns the lowest loss whose step is at most twice the compute, or the shortest step."""
    fitting = [c for c in rounds if c.memory.total <= memory] or rounds
    if fast := [c for c in fitting if c.time.step <= LARGEST_STEP * compute]:
        best = min(fast, key=lambda c: (c.loss.difference, c.time.step))
        return best, "Of the rounds that take at most twice the compute it has the lowest loss."
    shortest = min(fitting, key=lambda c: c.time.step)
    return shortest, "No round takes at most twice the compute. This one has the shortest step."


def _does_not_fit(candidate: Candidate, memory: float) -> str:
    needed = f"{candidate.method.name} needs {candidate.memory.total / 1e9:.3g} GB"
    return f"{needed} without the activations, more than {memory / 1e9:.3g} GB."


def _warnings(
    chosen: Candidate, params: int, workers: int, memory: float, dtype: str
) -> dict[str, bool]:
    """Returns sentences that say what a candidate does not show, and whether they are true."""
    studies, loss, method = read_losses(), chosen.loss, chosen.method
    largest, most = studies["largest_model"], studies["most_workers"]
    in_rounds, ratio = method.row == "E", workers / loss.workers
    return {
        f"No run of ours has more than {short(largest)} parameters. The loss is that of a model of "
        f"{short(loss.parameters)}.": params > largest,
        f"No run of ours has more than {most} workers.": workers > most,
        f"The loss is that of {loss.workers} workers, not of {workers}.": not 1 / 2 <= ratio <= 2,
        "In these runs its loss was higher than AdamW's.": loss.difference > 0 and not in_rounds,
        "The loss is that of one seed.": loss.seeds == 1,
        f"The loss was measured in another way ({loss.differs}).": loss.differs != "",
        "Local steps need batches as large as each worker can take.": in_rounds,
        "The trainer's parameters are float32: for its times and memory give dtype float32.": (
            (not method.setting or memory < math.inf)
            and method.flags is not None
            and dtype == "bfloat16"
        ),
        f"{_does_not_fit(chosen, memory)} Give each worker more devices, and shard the parameters "
        "over them with param_specs.": chosen.memory.total > memory,
    }


def _swarm_warnings(chosen: Candidate, upload: float, compute: float) -> dict[str, bool]:
    """Returns sentences about the time that packets and snapshots take through a store."""
    every = chosen.method.local_steps
    steps = math.ceil(every * chosen.time.exchange / compute)
    leaves = 2 if chosen.method.optimizer == "diloco" else 1
    seconds = 8 * chosen.memory.parameters * leaves / upload
    # Half of the time is for packets, and half of the rest for a worker that reads it to join.
    rounds = math.ceil(4 * seconds / chosen.time.step / every)
    return {
        "The seconds are computed, for a store as fast as the link of every worker.": True,
        f"A round lasts until its packets are there: for about {steps} steps, and no run has "
        "measured the loss of such rounds.": steps > every > 1,
        f"A snapshot takes {seconds:,.0f} s to write, and more beside the packets, but one is "
        f"due every {SNAPSHOT_EVERY} steps: give all workers --snapshot-every {rounds * every}, or "
        f"SwarmWorker snapshot_every={rounds}.": rounds * every > SNAPSHOT_EVERY,
    }


def short(number: int) -> str:
    """Writes a number with few digits, as in ``1.1M`` and ``300M``."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:{'.2g' if number < 10 * size else '.0f'}}{letter}"
    return str(number)

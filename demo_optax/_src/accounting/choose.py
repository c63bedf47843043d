"""The choice of an optimizer and an exchange for a model and a link."""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from demo_optax._src import checks
from demo_optax._src.accounting.candidates import Candidate, Memory
from demo_optax._src.accounting.losses import measured_loss
from demo_optax._src.accounting.methods import Method, methods, methods_in_swarm
from demo_optax._src.accounting.rules import (
    LARGEST_STEP,
    choose_optimizer,
    choose_round,
    choose_row,
    swarm_warnings,
    warnings,
)
from demo_optax._src.accounting.traffic import BYTES, dense_bytes, step_times

BACKS = 512, 256, 128  # coefficients that owners send back of each block
FEW_WORKERS = 16  # for whom the fewest are enough
TUNED_RATE, TUNED_WIDTH = 3e-3, 128
TEMPORARY = 6  # bytes a parameter
REQUESTS = 4  # in a row, of a swarm's step: write a packet, look, read packets, write the manifest


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
        return Candidate(method, time, measured_loss(method, workers), rate, needed)

    backs = BACKS if workers > FEW_WORKERS else BACKS[-1:]
    compared = [methods_in_swarm()] if swarm else map(methods, backs)
    found, row, reason = _choose_back([tuple(map(candidate, x)) for x in compared], compute_time)
    of_row = [each for each in found if each.method.row == row]
    if row == "E":
        chosen, why = choose_round(of_row, compute_time, memory)
    else:
        chosen, why = choose_optimizer(of_row, extra, memory)
    said = warnings(chosen, count, workers, memory, dtype)
    said |= swarm_warnings(chosen, upload, compute_time) if swarm else {}
    true = tuple(sentence for sentence, is_true in said.items() if is_true)
    return Choice(found, chosen, (reason, why), true)


def _choose_back(
    by_back: Sequence[tuple[Candidate, ...]], compute_time: float
) -> tuple[tuple[Candidate, ...], str, str]:
    """Returns the candidates whose owners send as much back as the link allows, and the row.

    The last of ``by_back`` send the fewest coefficients.
    """
    *more, fewest = [{x.method.row: x.time.exchange for x in candidates} for candidates in by_back]
    row, reason = choose_row(fewest, compute_time)
    most = min(LARGEST_STEP * compute_time, fewest["C"])
    allowed = [each for each, exchange in zip(by_back, more, strict=False) if exchange["D"] <= most]
    if row == "D" and allowed:
        reason += " The owners send as many coefficients back as that allows while two phases stay"
        reason += " the shorter."
    return (*allowed, by_back[-1])[0], row, reason

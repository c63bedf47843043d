"""The rules of a choice, each with the sentence that gives its reason."""

import math
from collections.abc import Mapping, Sequence

from demo_optax._src.accounting.candidates import Candidate
from demo_optax._src.accounting.losses import read_losses

LARGEST_ALL_REDUCE = 1 / 4  # of the compute of a step
LARGEST_ALL_GATHER = 1 / 5
LARGEST_STEP = 2.0
LARGEST_ORTHOGONAL_STEP = {"A": 1 / 5, "B": 1 / 5, "C": 1 / 2, "D": 1 / 2}
SNAPSHOT_EVERY = 100  # steps, by default


def choose_row(exchange: Mapping[str, float], compute: float) -> tuple[str, str]:
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


def choose_optimizer(
    of_row: Sequence[Candidate], extra: float, memory: float
) -> tuple[Candidate, str]:
    """Returns one of a row's two candidates, of which one makes matrices orthogonal.

    Orthogonal steps add ``extra`` of the compute. A candidate that does not fit into the memory
    gives way to one that does.
    """
    most = LARGEST_ORTHOGONAL_STEP[of_row[0].method.row]
    first, other = sorted(of_row, key=lambda c: c.method.orthogonal is (extra > most))
    if first.memory.total > memory >= other.memory.total:
        return other, does_not_fit(first, memory)
    size = "more than" if extra > most else "at most"
    return first, f"Orthogonal steps add {extra:.0%} to the compute, {size} {most:.0%}."


def choose_round(
    rounds: Sequence[Candidate], compute: float, memory: float
) -> tuple[Candidate, str]:
    """Returns the lowest loss whose step is at most twice the compute, or the shortest step."""
    fitting = [c for c in rounds if c.memory.total <= memory] or rounds
    if fast := [c for c in fitting if c.time.step <= LARGEST_STEP * compute]:
        best = min(fast, key=lambda c: (c.loss.difference, c.time.step))
        return best, "Of the rounds that take at most twice the compute it has the lowest loss."
    shortest = min(fitting, key=lambda c: c.time.step)
    return shortest, "No round takes at most twice the compute. This one has the shortest step."


def does_not_fit(candidate: Candidate, memory: float) -> str:
    needed = f"{candidate.method.name} needs {candidate.memory.total / 1e9:.3g} GB"
    return f"{needed} without the activations, more than {memory / 1e9:.3g} GB."


def warnings(
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
        f"{does_not_fit(chosen, memory)} Give each worker more devices, and shard the parameters "
        "over them with param_specs.": chosen.memory.total > memory,
    }


def swarm_warnings(chosen: Candidate, upload: float, compute: float) -> dict[str, bool]:
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

"""The rules of a choice, each with the sentence that gives its reason."""

import math
from collections.abc import Mapping, Sequence

from demo_optax._src.accounting.candidates import Candidate, read_limits

LARGEST_ALL_REDUCE = 1 / 4  # of the compute of a step
LARGEST_ALL_GATHER = 1 / 5
LARGEST_STEP = 2.0
SNAPSHOT_EVERY = 100  # steps, by default
LARGEST_ORTHOGONAL_STEP = {"A": 1 / 5, "B": 1 / 5, "C": 1 / 2, "D": 1 / 2}


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


def chooses_muon(row: str, extra: float) -> tuple[bool, str]:
    """Returns whether matrices are made orthogonal, for ``extra`` of the compute in addition."""
    most = LARGEST_ORTHOGONAL_STEP[row]
    is_small = extra <= most
    size = "at most" if is_small else "more than"
    return is_small, f"Orthogonal steps add {extra:.0%} to the compute, {size} {most:.0%}."


def does_not_fit(candidate: Candidate, memory: float | None) -> str:
    needed = f"{candidate.method.name} needs {candidate.memory / 1e9:.3g} GB"
    return f"{needed} without the activations, more than {(memory or 0) / 1e9:.3g} GB."


def choose_round(rounds: Sequence[Candidate], compute: float) -> tuple[Candidate, str]:
    """Returns the lowest loss whose step is at most twice the compute, or the shortest step."""
    trained = [(c, c.loss.difference) for c in rounds if c.loss]
    fast = [(c, loss) for c, loss in trained if c.time.step <= LARGEST_STEP * compute]
    if fast:
        best, _ = min(fast, key=lambda pair: (pair[1], pair[0].time.step))
        return best, "Of the rounds that take at most twice the compute it has the lowest loss."
    shortest, _ = min(trained, key=lambda pair: pair[0].time.step)
    return shortest, "No round takes at most twice the compute. This one has the shortest step."


def warnings(chosen: Candidate, params: int, workers: int) -> list[str]:
    """Returns sentences that say what the measured loss of a candidate does not cover."""
    (largest, most), loss, found = read_limits(), chosen.loss, []
    if params > largest:
        found.append(f"No run of ours has more than {short(largest)} parameters.")
    if workers > most:
        found.append(f"No run of ours has more than {most} workers.")
    if loss is None:
        found.append(f"No run has trained {chosen.method.name}: its loss is unknown.")
    else:
        if params > largest:
            found[0] += f" The loss is that of a model of {short(loss.parameters)}."
        if not 1 / 2 <= workers / loss.workers <= 2:
            found.append(f"The loss is that of {loss.workers} workers, not of {workers}.")
        if loss.difference > 0 and chosen.method.row != "E":
            found.append("In these runs its loss was higher than AdamW's.")
        if loss.seeds == 1:
            found.append("The loss is that of one seed.")
        if loss.differs:
            found.append(f"The loss was measured in another way ({loss.differs}).")
    if chosen.method.row == "E":
        found.append("Local steps need batches as large as each worker can take.")
    return found


def swarm_warnings(chosen: Candidate, compute: float, params: int, upload: float) -> list[str]:
    """Returns sentences about the time that packets and snapshots take through a store."""
    steps = math.ceil(chosen.method.local_steps * chosen.exchange / compute)
    found = ["The seconds are computed, for a store as fast as the link of every worker."]
    if chosen.method.row == "E" and steps > chosen.method.local_steps:
        found.append(
            f"A round lasts until its packets are there: for about {steps} steps, and no run has "
            "measured the loss of such rounds."
        )
    leaves = 2 if chosen.method.name.startswith("DiLoCo") else 1
    seconds = 32 * params * leaves / upload
    # Half of the time is for packets, and half of the rest for a worker that reads it to join.
    rounds = math.ceil(4 * seconds / chosen.time.step / chosen.method.local_steps)
    if (every := rounds * chosen.method.local_steps) > SNAPSHOT_EVERY:
        found.append(
            f"A snapshot takes {seconds:,.0f} s to write, and more beside the packets, but one is "
            f"due every {SNAPSHOT_EVERY} steps: give all workers --snapshot-every {every}, or "
            f"SwarmWorker snapshot_every={rounds}."
        )
    return found


def short(number: int) -> str:
    """Writes a number with few digits, as in ``1.1M`` and ``300M``."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:{'.2g' if number < 10 * size else '.0f'}}{letter}"
    return str(number)

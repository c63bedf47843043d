r"""Chooses an optimizer and an exchange for a model and a link, and prints what each costs.

demo-optax choose --params 300M --workers 16 --bandwidth 100Mbit --latency 20ms \
    --compute-time 1s --batch-tokens 65536 --width 1024
"""

import argparse
import textwrap
from collections.abc import Callable

from demo_optax._src.accounting.candidates import Candidate
from demo_optax._src.accounting.choose import choose
from demo_optax._src.accounting.rules import short
from demo_optax._src.accounting.traffic import BYTES
from demo_optax._src.commands.quantities import bandwidth, count, duration, memory
from demo_optax._src.commands.tables import print_table, with_unit

COSTS = "s a step", "MB a step", "GB"
LOSSES = "loss - AdamW's", "seeds", "measured with"


def add_arguments(add: Callable[..., None]) -> None:
    def need(name: str, parse: Callable, meaning: str) -> None:
        add(f"--{name}", meaning, type=parse, required=True)

    need("params", count, "number of parameters, as in 300M or 1.3B")
    need("workers", count, "number of workers, which are devices or groups of devices")
    need("bandwidth", bandwidth, "of each worker's link, per second, as in 100Mbit")
    need("latency", duration, "half the time that ping shows, as in 20ms; with --swarm all of it")
    need("compute-time", duration, "time of a step of one worker that trains alone, as in 1s")
    need("batch-tokens", count, "sequences in the batch of one worker times their length")
    need("width", count, "width of the model, which is the size of an embedding")
    add("--swarm", "compares what a swarm can carry, over a link to its store", action="store_true")
    add("--upload", "with --swarm, at which a worker writes, if not --bandwidth", type=bandwidth)
    dtypes = dict(choices=sorted(BYTES), default="bfloat16")
    add("--dtype", "of the parameters, in which a dense all-reduce sends gradients", **dtypes)
    add("--memory", "of a worker, as in 80GB; takes nothing that needs more", type=memory)


def run(args: argparse.Namespace) -> None:
    choice = choose(**{name: value for name, value in vars(args).items() if name != "run"})
    chosen = choice.chosen
    print(
        f"{short(args.params)} parameters, width {args.width:,}, {args.workers} workers with "
        f"{args.batch_tokens:,} tokens a step each,\n"
        f"{with_unit(args.bandwidth, 'bit/s')}, {with_unit(args.latency, 's')} of latency, "
        f"{with_unit(args.compute_time, 's')} of compute\n"
    )
    print_table(
        "Seconds include the orthogonal steps of Muon. MB cross the link of a worker in each "
        "direction. GB are those of parameters, gradients and optimizer, without activations. "
        "Losses are in nats per byte.",
        ("   row and method", *COSTS, *LOSSES),
        *[_cells(candidate, candidate is chosen) for candidate in choice.candidates],
    )
    print(f"Take {chosen.method.row}: {chosen.method.name}.")
    print(*choice.reasons, sep="\n", end="\n\n")
    multiple = "" if chosen.method.rate == 1 else f"{chosen.method.rate:g} times "
    rate = f"{chosen.learning_rate:.3g}"
    print(f"    rate = {rate}  # or {multiple}the best rate of your AdamW")
    print(textwrap.indent(chosen.method.code, "    ") + "\n")
    if chosen.method.flags is None:
        print("The trainer, examples/train_lm.py, has no settings for it.")
    else:
        print(
            "With the trainer, beside your --preset, --batch-size and --sequence-length:\n\n"
            f"    python examples/train_lm.py {chosen.method.flags} --learning-rate {rate}"
        )
    for warning in choice.warnings:
        print(f"\nWarning: {warning}", end="")
    if chosen.method.in_swarm:
        print("\n\ndocs/how_to/swarm.md shows how to make loss_fn, mesh and member.", end="")
    print("\n\ndocs/how_to/choose.md explains the rules, docs/explanation/quality.md the losses.")


def _cells(candidate: Candidate, is_chosen: bool) -> tuple[str, ...]:
    method, time, loss = candidate.method, candidate.time, candidate.loss
    name = f"{'>' if is_chosen else ' '} {method.row} {method.name}"
    costs = f"{time.step:,.2f}", f"{time.wire / 1e6:,.1f}", f"{candidate.memory / 1e9:.3g}"
    error = "" if loss.error is None else f" +/- {loss.error:.3f}"
    difference = "baseline" if loss.method == "AdamW" else f"{loss.difference:+.3f}{error}"
    runs = f"{short(loss.parameters)}, {loss.workers} workers"
    differs = f"; {loss.differs}" if loss.differs else ""
    return name, *costs, difference, str(loss.seeds), runs + differs

r"""Chooses an optimizer and an exchange for a model and a link, and prints what each costs.

demo-optax choose --params 300M --workers 16 --bandwidth 100Mbit --latency 20ms \
    --compute-time 1s --batch-tokens 65536 --width 1024
demo-optax choose --params 300M --sites 2 --nodes-per-site 4 --devices 8 --device h100 \
    --bandwidth 1Gbit --latency 10ms --batch-tokens 2M --width 1024
"""

import argparse
import inspect
import math
import textwrap
from typing import Any

import jax
import jax.numpy as jnp

from demo_optax._src.accounting.choose import Candidate, Choice, choose, short
from demo_optax._src.accounting.devices import PEAK_FLOPS, UTILIZATION, estimate_compute_time
from demo_optax._src.accounting.methods import Method
from demo_optax._src.accounting.traffic import BYTES, uplink_bytes
from demo_optax._src.commands.quantities import bandwidth, count, duration, flops, memory
from demo_optax._src.commands.tables import plus_minus, print_table, with_unit

COSTS = "s a step", "MB a step", "GB"
LOSSES = "loss - AdamW's", "seeds", "measured with"
UPLINK = "AdamW, all-reduce", "demo_muon", "demo_muon, two phases, delayed"
OF_A_SITE = """\
mesh = jax.make_mesh(({sites}, {nodes}, {devices}), ("site", "node", "fsdp"))
spec = lambda x: jax.P({axes}) if x.ndim > 1 and x.shape[0] % {parts} == 0 else jax.P()
specs = {specs}
{code}
opt_state = demo_optax.init_opt_state(tx, params, mesh, "site", specs)
step = demo_optax.make_train_step(loss_fn, tx, mesh, "site", param_specs=specs)"""


COUNT, ONE = dict(type=count, required=True), dict(type=count, default=1)
WHO, COMPUTE = dict(type=count, one_of="who"), dict(one_of="compute")
TIME, SPEED = dict(type=duration, required=True), dict(type=bandwidth, required=True)
DTYPE = dict(choices=sorted(BYTES), default="bfloat16")
ARGUMENTS = {
    "--params": (COUNT, "number of parameters, as in 300M or 1.3B"),
    "--workers": (WHO, "number of workers, which are devices or groups of devices"),
    "--sites": (WHO, "in place of --workers: sites, each of which is a worker"),
    "--nodes-per-site": (ONE, "nodes that share the uplink of a site"),
    "--devices": (ONE, "devices of a worker; with --sites, those of a node"),
    "--bandwidth": (SPEED, "of each worker's link, per second, as in 100Mbit"),
    "--latency": (TIME, "half the time that ping shows, as in 20ms; with --swarm all of it"),
    "--compute-time": (COMPUTE | dict(type=duration), "of a worker that trains alone, as in 1s"),
    "--device": (COMPUTE | dict(choices=PEAK_FLOPS), "in place of the time, to estimate it"),
    "--flops": (COMPUTE | dict(type=flops), "the same by the peak of a device, as in 400T"),
    "--batch-tokens": (COUNT, "sequences in the batch of one worker times their length"),
    "--width": (COUNT, "width of the model, which is the size of an embedding"),
    "--swarm": (dict(action="store_true"), "compares what a swarm can carry to its store"),
    "--upload": (dict(type=bandwidth), "with --swarm, of a worker that writes more slowly"),
    "--dtype": (DTYPE, "of the parameters and gradients, and of the moments of AdamW"),
    "--memory": (dict(type=memory), "of a worker, as in 80GB; takes nothing that needs more"),
}


def run(args: argparse.Namespace) -> None:
    given = vars(args)
    sites, nodes = given.get("sites"), args.nodes_per_site
    if nodes > 1 and not sites:
        raise ValueError(
            f"--nodes-per-site {nodes} was given without --sites: give the number of sites in "
            "place of --workers."
        )
    names = given.keys() & inspect.signature(choose).parameters.keys() - {"compute_time"}
    settings: dict[str, Any] = {"workers": sites} | {name: given[name] for name in names}
    estimated, compute_time = "", given.get("compute_time")
    if compute_time is None:
        devices = args.devices * nodes
        peak = PEAK_FLOPS[args.device] if "device" in given else args.flops
        compute_time = estimate_compute_time(args.params, args.batch_tokens, peak * devices)
        estimated = f", estimated at {UTILIZATION:.0%} of the peak of {devices} device(s)"
    choice, *others = [choose(**settings, compute_time=x * compute_time) for x in (1, 0.5, 2)]
    chosen = choice.chosen
    print(
        f"{short(args.params)} parameters in {args.dtype}, width {args.width:,}, "
        f"{settings['workers']} workers with {args.batch_tokens:,} tokens a step each,\n"
        f"{with_unit(args.bandwidth, 'bit/s')}, {with_unit(args.latency, 's')} of latency, "
        f"{with_unit(compute_time, 's')} of compute{estimated}\n"
    )
    print_table(
        "Seconds include the orthogonal steps of Muon. MB cross the link of a worker in each "
        "direction. GB are those of parameters, gradients and optimizer, without activations. "
        "Losses are in nats per byte.",
        ("   row and method", *COSTS, *LOSSES),
        *[_cells(candidate, candidate is chosen) for candidate in choice.candidates],
    )
    parts = [f"{size / 1e9:.3g} GB of {name}" for name, size in chosen.memory._asdict().items()]
    needed = f"Without activations a worker needs {', '.join(parts)} memory."
    print(f"Take {chosen.method.row}: {chosen.method.name}.", *choice.reasons, needed, sep="\n")
    if estimated:
        half, double = (f"{x.chosen.method.row}: {x.chosen.method.name}" for x in others)
        print(f"If the compute takes half of the estimate, take {half}; if double, {double}.")
    print()
    if of_sites := bool(sites) and "swarm" not in given:
        _print_uplink(choice, args)
    _print_lines(chosen, args, of_sites)
    for warning in choice.warnings:
        print(f"\nWarning: {warning}", end="")
    if chosen.method.in_swarm:
        print("\n\ndocs/how_to/swarm.md shows how to make loss_fn, mesh and member.", end="")
    print("\n\ndocs/how_to/choose.md explains the rules, docs/explanation/quality.md the losses.")


def _cells(candidate: Candidate, is_chosen: bool) -> tuple[str, ...]:
    method, time, loss = candidate.method, candidate.time, candidate.loss
    name = f"{'>' if is_chosen else ' '} {method.row} {method.name}"
    costs = f"{time.step:,.2f}", f"{time.wire / 1e6:,.1f}", f"{candidate.memory.total / 1e9:.3g}"
    error = "" if loss.error is None else f" {plus_minus()} {loss.error:.3f}"
    difference = "baseline" if loss.method == "AdamW" else f"{loss.difference:+.3f}{error}"
    runs = f"{short(loss.parameters)}, {loss.workers} workers"
    differs = f"; {loss.differs}" if loss.differs else ""
    return name, *costs, difference, str(loss.seeds), runs + differs


def _print_uplink(choice: Choice, args: argparse.Namespace) -> None:
    """Prints what crosses the uplink of a site if the site is a worker, and if each node is one."""
    methods = [x.method for x in choice.candidates if x.method.name in UPLINK or x is choice.chosen]
    shapes = jax.ShapeDtypeStruct((math.ceil(args.params / args.width), args.width), jnp.float32)

    def megabytes(method: Method, workers: int) -> str:
        sent, rounds = method.setting or args.dtype, (method.local_steps, method.fragments)
        return f"{uplink_bytes(sent, shapes, args.sites, workers, *rounds) / 1e6:,.2f}"

    print_table(
        "MB that cross the uplink of a site in each direction, in the mean of a step, if a worker "
        f"is a site with its {args.nodes_per_site} nodes, or a node",
        ("", "site", "node"),
        *[(x.name, megabytes(x, 1), megabytes(x, args.nodes_per_site)) for x in methods],
    )


def _print_lines(chosen: Candidate, args: argparse.Namespace, of_sites: bool) -> None:
    """Prints the lines of an optax loop, and the settings of the trainer."""
    method, rate, nodes = chosen.method, f"{chosen.learning_rate:.3g}", args.nodes_per_site
    code, flags = method.code, method.flags and f"{method.flags} --learning-rate {rate}"
    if of_sites:
        # Fragments are parts of whole parameters, and only packets are sent once by copies.
        is_packet = bool(method.setting)
        code = OF_A_SITE.format(
            code=code.replace('"data"', '"site"'),
            specs="None" if method.fragments else "jax.tree.map(spec, params)",
            axes='"fsdp"' if is_packet else '("node", "fsdp")',
            parts=args.devices if is_packet else nodes * args.devices,
            sites=args.sites,
            nodes=nodes,
            devices=args.devices,
        )
        several = (
            f" --fsdp {nodes * args.devices} \\\n        --coordinator HOST:PORT "
            f"--num-processes {args.sites * nodes} --process-id 0  # site after site"
        )
        flags = flags + several if flags and not method.fragments else None
    multiple = "" if method.rate == 1 else f"{method.rate:g} times "
    print(f"    rate = {rate}  # or {multiple}the best rate of your AdamW")
    print(textwrap.indent(code, "    ") + "\n")
    if flags is None:
        print("The trainer, examples/train_lm.py, has no settings for it.")
    else:
        print("With the trainer, beside your --preset, --batch-size and --sequence-length:\n")
        print(f"    python examples/train_lm.py {flags}")

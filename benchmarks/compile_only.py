"""What XLA makes of one optimizer update for chips that need not be here.

    make accelerators                                 environments and the table, about 7 GB
    python benchmarks/compile_only.py tpu             8 TPU v5e; needs jax[tpu]
    python benchmarks/compile_only.py h100 --layers 16
    python benchmarks/compile_only.py tpu --chips 64 --exchange two-phase --keep

Compiles for eight chips, or another number, and runs nothing. Prints seconds to lower and compile
(on idle cores), the collectives, temporary memory, XLA's own estimate of the cost (TPU: cycles;
GPU: picoseconds at the speed of light; neither prices sorts, scatters and gathers well) and how
many such operations there are. With --keep the figures go to results/compile_only.jsonl.
"""

import argparse
import collections
import os
import pathlib
import re
import time
from collections.abc import Iterable

from tools import kept

ENVIRONMENT = {
    "tpu": {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_ID": "0",
        "TPU_WORKER_HOSTNAMES": "localhost",
    },
    "h100": {
        "XLA_FLAGS": "--xla_gpu_collect_cost_model_stats=true "
        "--xla_gpu_experimental_cost_model_gemm_tiling_options=all"
    },
}
ESTIMATE = {
    "tpu": re.compile(r'estimated_cycles":"(\d+)'),
    "h100": re.compile(r'"exec_time_us":([\d.eE+-]+)[^{}]*?"name":"sol"'),
}
UNIT = {"tpu": (1.0, "cycles"), "h100": (1e6, "ps")}
CHIP = {"tpu": "TPU v5e", "h100": "H100"}
UNPRICED = re.compile(r" (sort|scatter|gather|while|copy)\(|custom_call_target=\"[^\"]*(TopK)\"")
TPU_SLICES = {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}


def topology(target: str, chips: int):
    from jax.experimental import topologies

    if target == "tpu":
        name = f"v5e:{TPU_SLICES[chips]}"
        return topologies.get_topology_desc(platform="tpu", topology_name=name)
    config = (pathlib.Path(__file__).parent / "h100.txtpb").read_text()
    shape = f"1x{-(-chips // 8)}x{min(chips, 8)}"
    return topologies.get_topology_desc(platform="cuda", target_config=config, topology=shape)


def update(optimizer: str, args):
    """A jitted update with stacked gradients, and the shapes that it is called with."""
    import jax
    import numpy as np
    import optax
    from jax.sharding import AxisType, Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P
    from step_cost import MAKERS, transformer_shapes

    import demo_optax

    devices = np.array(topology(args.target, args.chips).devices)
    mesh = Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
    names = "topk", "value_coding", "selection", "transform"
    compression = demo_optax.Compression(**{name: getattr(args, name) for name in names})
    kinds = {"all-gather": demo_optax.AllGather, "two-phase": demo_optax.TwoPhase}
    exchange = kinds[args.exchange]("data")
    exchange = demo_optax.Delayed(exchange) if args.delay else exchange
    momentum = demo_optax.decoupled_momentum(0.95, compression, exchange=exchange)
    tx = {
        "demo": optax.chain(momentum, optax.scale_by_sign(), optax.scale_by_learning_rate(1e-3)),
        "demo_scaled": MAKERS["demo_scaled"](1e-3, compression, exchange=exchange),
        "demo_muon": MAKERS["demo_muon"](1e-3, compression, exchange=exchange),
        "adamw": optax.chain(demo_optax.mean_over_workers("data"), optax.adamw(1e-3)),
        "fragments": demo_optax.local_steps(
            optax.adamw(1e-3),
            demo_optax.decoupled(optax.sgd(0.7), compression, axis_name="data"),
            every=8,
            fragments=8,
            axis_name="data",
        ),
    }[optimizer]
    params = transformer_shapes(args.layers, args.width)
    stacked = demo_optax.stack_workers(tx, mesh)
    state_specs = demo_optax.state_specs(tx, params, mesh)

    def apply(gradients, state, params):
        updates, state = stacked.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    def place(x, spec):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    gradients = {
        name: place(jax.ShapeDtypeStruct((mesh.size, *x.shape), x.dtype), P("data"))
        for name, x in params.items()
    }
    state = jax.tree.map(place, jax.eval_shape(stacked.init, params), state_specs)
    params = {name: place(x, P()) for name, x in params.items()}
    # With shardings of the results XLA gives each of them its own donated array: without, it pairs
    # parameters with momenta of the same size, and copies.
    results = jax.tree.map(lambda x: x.sharding, (params, state))
    program = jax.jit(apply, donate_argnums=(1, 2), out_shardings=results)
    return program, (gradients, state, params)


def measure(optimizer: str, args) -> None:
    import jax
    from hlo import arguments_behind, collectives

    program, shapes = update(optimizer, args)
    start = time.perf_counter()
    compiled = program.lower(*shapes).compile()
    compiling = time.perf_counter() - start
    text = compiled.as_text()
    if args.hlo:
        pathlib.Path(args.hlo).write_text(text)
    count = sum(x.size for x in shapes[2].values())
    scale, unit = UNIT[args.target]
    cost = scale * sum(float(price) for price in ESTIMATE[args.target].findall(text)) / count
    memory = compiled.memory_analysis().temp_size_in_bytes / count
    model = f"{count / 1e6:.1f}M parameters in {len(shapes[2])} tensors"
    found = collectives(text)
    figures = {
        "seconds to compile": round(compiling, 1),
        "collectives": counted(each.kind for each in found),
        "temporary bytes per parameter": round(memory, 2),
        "XLA's estimate per parameter": f"{cost:.3g} {unit}",
        "not priced": counted(a or b for a, b in UNPRICED.findall(text)),
    }
    print(f"{args.target}, {optimizer}: {model}")
    for name, figure in figures.items():
        print(f"  {name}: {figure}")
    for each in found:
        print(f"  {each.kind} of {each.operand_bytes} bytes of {each.dtype}")
    for name, arguments in arguments_behind(text):
        waits = any(argument.startswith("gradients") for argument in arguments)
        print(f"  {name} waits for the gradient: {waits}")
    if args.keep:
        kept.append(
            "compile_only",
            name=full_name(optimizer, args),
            model=model,
            where=f"compiled for {args.chips} {CHIP[args.target]}",
            version=f"jax {jax.__version__}",
            figures=figures,
        )


def full_name(optimizer: str, args) -> str:
    """The optimizer, what it sends and how, as the tables have them."""
    from step_cost import name_of

    if optimizer == "adamw":
        return "adamw, float32 all-reduce"
    words = [name_of(optimizer, args.topk, args)]
    words += [args.exchange] * (args.exchange != "all-gather") + ["delayed"] * args.delay
    return ", ".join(words)


def counted(kinds: Iterable[str]) -> str:
    """The numbers of each kind, as in "1 sort, 2 gather"."""
    numbers = collections.Counter(kinds).items()
    return ", ".join(f"{number} {kind}" for kind, number in numbers) or "none"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", choices=("tpu", "h100"))
    for name, number in {"layers": 2, "width": 512, "topk": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    for name, word in {"value-coding": "int4", "selection": "topk", "transform": "dct"}.items():
        parser.add_argument(f"--{name}", default=word)
    parser.add_argument("--exchange", default="all-gather", choices=("all-gather", "two-phase"))
    parser.add_argument("--delay", type=int, default=0, choices=(0, 1))
    parser.add_argument("--chips", type=int, default=8, choices=TPU_SLICES)
    kinds = ("adamw", "demo", "demo_scaled", "demo_muon", "fragments")
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "demo"], choices=kinds)
    parser.add_argument("--hlo", help="a file for the optimised HLO of the last program")
    parser.add_argument("--keep", action="store_true", help="append the figures to results/")
    args = parser.parse_args()
    # Before JAX is imported: the topology is found all the same.
    os.environ |= {"JAX_PLATFORMS": "cpu"} | ENVIRONMENT[args.target]
    for optimizer in args.optimizers:
        measure(optimizer, args)


if __name__ == "__main__":
    main()

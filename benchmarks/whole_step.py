"""What a whole train step needs of a device's memory, compiled for chips that need not be here.

    python benchmarks/whole_step.py tpu --width 1664  eight TPU v5e; needs jax[tpu]
    python benchmarks/whole_step.py h100 --preset tiny

Each of eight workers has one chip and a batch of 8 sequences of 1,024 tokens; each layer's
activations are computed again on the way back. Prints bytes for each parameter at the peak. XLA for
TPUs reuses little memory while there is plenty, so only a model that fills the chip shows what a
step needs there. With --keep the figures go to results/whole_step.jsonl.
"""

import argparse
import os
import sys

from compile_only import CHIP, ENVIRONMENT, topology
from tools import kept

WORKERS, SEQUENCES, LENGTH = 8, 8, 1024


def optimizers() -> dict:
    """Those of the table by their names there, which exchange over the axis "data"."""
    import optax

    import demo_optax
    from benchmarks.device.models import RATE, matrices
    from benchmarks.device.models import optimizers as made_of

    made, mean = made_of("data"), demo_optax.mean_over_workers("data")
    numbers = dict(weight_dimension_numbers=matrices, axis_name="data")
    return {
        "adamw, float32 all-reduce": optax.chain(mean, made["adamw"]),
        "muon, float32 all-reduce": optax.chain(mean, made["muon"]),
        "demo_scaled": made["demo_scaled"],
        "demo_muon, no look-ahead": demo_optax.demo_muon(RATE, look_ahead=None, **numbers),
        "demo_muon": made["demo_muon"],
    }


def compiled(tx, model, mesh):
    """The program of a step, and the bytes of the state of one worker."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import demo_optax

    def place(x, spec):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    params = jax.tree.map(lambda x: place(x, P()), model.shapes)
    state = jax.eval_shape(lambda p: demo_optax.init_opt_state(tx, p, mesh), params)
    state = jax.tree.map(place, state, demo_optax.state_specs(tx, params, mesh))
    batch = place(jax.ShapeDtypeStruct((WORKERS * SEQUENCES, LENGTH + 1), np.int32), P("data"))
    step = demo_optax.make_train_step(model.loss_fn, tx, mesh)
    program = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, batch).compile()
    of_worker = sum(
        x.dtype.itemsize * np.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(state)
    )
    return program, int(of_worker)


def measure(target: str, names: list[str], preset: str, width: int | None, keep: bool) -> None:
    import jax
    import numpy as np
    from jax.sharding import AxisType, Mesh

    from benchmarks.device.models import model_of
    from lm.model import PRESETS

    shape = PRESETS[preset]
    if width is not None:
        shape = shape._replace(width=width, heads=width * shape.heads // shape.width)
    model = model_of(shape)
    devices = np.array(topology(target, WORKERS).devices)
    mesh = Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
    sizes = [x.size for x in jax.tree.leaves(model.shapes)]
    count = sum(sizes)
    words = f"{count / 1e6:.0f}M parameters in {len(sizes)} tensors"
    print(f"{words}, the largest {max(sizes) / count:.0%}; {CHIP[target]}")
    for name, tx in optimizers().items():
        if names and name not in names:
            continue
        program, of_state = compiled(tx, model, mesh)
        plan = program.memory_analysis()
        total = plan.peak_memory_in_bytes
        temporary = total - plan.argument_size_in_bytes
        figures = {
            "state": round(of_state / count, 2),
            "gradient, activations and temporary": round(temporary / count, 2),
            "all, with the parameters": round(total / count, 2),
        }
        print(f"{name}: {figures}", flush=True)
        if keep:
            where = f"compiled for {WORKERS} {CHIP[target]}"
            version = f"jax {jax.__version__}"
            kept.append(
                "whole_step", name=name, model=words, where=where, version=version, figures=figures
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", choices=("tpu", "h100"))
    parser.add_argument("--preset", default="300m")
    parser.add_argument("--width", type=int, help="instead of the preset's")
    parser.add_argument("--optimizers", nargs="*", default=[], help="all of the table by default")
    parser.add_argument("--keep", action="store_true", help="append the figures to results/")
    args = parser.parse_args()
    os.environ |= {"JAX_PLATFORMS": "cpu"} | ENVIRONMENT[args.target]
    measure(args.target, args.optimizers, args.preset, args.width, args.keep)


if __name__ == "__main__":
    sys.path.insert(0, str(kept.ROOT))
    sys.path.insert(0, str(kept.ROOT / "examples"))
    main()

"""What one optimizer step costs on one device, and optax.adamw: nanoseconds per parameter.

    python benchmarks/step_cost.py [--layers 4] [--topk 8 32]
    python benchmarks/step_cost.py --optimizer demo_scaled --selection bins --value-coding sign

Only the ratios mean something on a shared machine; each is a median of steps run in turn. With
--keep the figures go to results/step_cost.jsonl, for `python -m benchmarks.tools.step_tables`.
"""

import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import optax
from tools import kept

import demo_optax


def transformer_shapes(layers: int, width: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of the paper's model family."""
    shapes = {"embedding": (8192, width)}
    for i in range(layers):
        shapes |= {
            f"layer{i}/attention_in": (width, 3 * width),
            f"layer{i}/attention_out": (width, width),
            f"layer{i}/ff_proj": (width, 8 * width),
            f"layer{i}/ff_out": (4 * width, width),
        }
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def demo_muon(rate: float, compression: demo_optax.Compression, **options):
    """As the trainer has it: it looks ahead, and the embedding is no matrix."""

    def dimension_numbers(path, x):
        matrix = x.ndim == 2 and "embedding" not in jax.tree_util.keystr(path)
        return optax.contrib.MuonDimensionNumbers() if matrix else None

    matrices = functools.partial(jax.tree.map_with_path, dimension_numbers)
    options |= dict(look_ahead=1.0, weight_dimension_numbers=matrices)
    return demo_optax.demo_muon(rate, compression, **options)


MAKERS = {"demo": demo_optax.demo, "demo_scaled": demo_optax.demo_scaled, "demo_muon": demo_muon}


def name_of(optimizer: str, topk: int, args: argparse.Namespace) -> str:
    """The optimizer and what it sends, as the tables have them."""
    words = [optimizer, f"{args.selection} {topk}", args.value_coding]
    return ", ".join(words + [args.transform] * (args.transform != "dct"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, number in {"layers": 4, "width": 512, "block-side": 64, "rounds": 9}.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    for name, word in {"value-coding": "float32", "selection": "topk", "transform": "dct"}.items():
        parser.add_argument(f"--{name}", default=word)
    parser.add_argument("--topk", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--optimizer", choices=MAKERS, default="demo")
    parser.add_argument("--keep", action="store_true", help="append the figures to results/")
    args = parser.parse_args()

    params = optax.tree.random_like(
        jax.random.key(0), transformer_shapes(args.layers, args.width), jax.random.normal
    )
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    names = "block_side", "value_coding", "selection", "transform"
    settings = {name: getattr(args, name) for name in names}
    make = MAKERS[args.optimizer]
    optimizers = {"optax.adamw": optax.adamw(1e-3)} | {
        name_of(args.optimizer, k, args): make(1e-3, demo_optax.Compression(k, **settings))
        for k in args.topk
    }
    runs = {}
    for name, tx in optimizers.items():

        def update(state, params, gradient, tx=tx):
            updates, state = tx.update(gradient, state, params)
            return state, optax.apply_updates(params, updates)

        step = jax.jit(update, donate_argnums=(0, 1))
        own = jax.tree.map(jnp.copy, params)
        runs[name] = (step, [tx.init(own), own], [])

    for _ in range(args.rounds + 2):
        for step, carry, times in runs.values():
            start = time.perf_counter()
            carry[:] = jax.block_until_ready(step(*carry, params))
            times.append(time.perf_counter() - start)

    medians = {name: statistics.median(times[2:]) for name, (_, _, times) in runs.items()}
    where = kept.machine() if jax.default_backend() == "cpu" else jax.devices()[0].device_kind
    model = f"{count / 1e6:.1f}M parameters in {len(params)} tensors"
    print(f"{model} on {where}")
    for name, seconds in medians.items():
        ratio = seconds / medians["optax.adamw"]
        cost = 1e9 * seconds / count
        print(f"{name:24} {cost:7.2f} ns/parameter {ratio:6.1f}x adamw")
        if args.keep:
            figures = {"ns per parameter": round(cost, 2), "times adamw": round(ratio, 1)}
            own = dict(name=name, model=model, where=where, version=f"jax {jax.__version__}")
            kept.append("step_cost", **own, figures=figures)


if __name__ == "__main__":
    main()

"""What a momentum of 16 bits costs in loss: held-out loss of the `tiny` model, seed by seed.

python benchmarks/momentum_dtype.py [--steps 200] [--seeds 3] [--decay 0.95 0.999]
"""

import argparse
import math
import pathlib
import sys

import numpy as np
import optax

import demo_optax

sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))
from value_codings import train

from lm.config import Config
from lm.setup import prepare


def optimizer(dtype: str, decay: float, learning_rate: float) -> optax.GradientTransformation:
    """DeMo of scaled gradients as in version 0.1, with a momentum stored in this dtype."""
    return demo_optax.decoupled(
        optax.chain(optax.scale_by_sign(), optax.scale_by_learning_rate(learning_rate)),
        demo_optax.Compression(topk=32, value_coding="int4"),
        decay=decay,
        gradient_weight=learning_rate,
        momentum_dtype=dtype,
        precondition=optax.scale_by_rms(0.95, eps_in_sqrt=False, bias_correction=True),
        axis_name="data",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--decay", type=float, nargs="+", default=[0.95, 0.999])
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    args = parser.parse_args()
    run = prepare(Config(steps=args.steps))
    for decay in args.decay:
        losses = {}
        for dtype in ("float32", "bfloat16"):
            own = run._replace(tx=optimizer(dtype, decay, args.learning_rate))
            losses[dtype], _ = train(own, args.seeds, lambda: None)
            print(
                f"decay {decay}, {dtype}:", *[f"{loss:.3f}" for loss in losses[dtype]], flush=True
            )
        difference = np.subtract(losses["bfloat16"], losses["float32"])
        error = difference.std(ddof=1) / math.sqrt(args.seeds)
        print(f"decay {decay}: bfloat16 - float32 = {difference.mean():+.4f} ± {error:.4f}")


if __name__ == "__main__":
    main()

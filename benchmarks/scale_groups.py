"""What a scale for several blocks saves, and what it loses, on the momenta of a real run.

    python benchmarks/scale_groups.py [OPTIMIZER]

Trains `tiny` for a while with DeMo, takes what each worker would send next, and codes it with one
scale for 1, 2, 4, 16 and 64 neighbouring blocks: bits per value, scale included, and the share of
the values' energy that rounding loses.
"""

import itertools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

import demo_optax
from demo_optax._src.compression import values as codings
from demo_optax._src.compression.top_k import TopK

sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))
from lm.config import Config
from lm.recipes import OptimizerName
from lm.setup import batches_of, prepare

STEPS = 150
GROUPS = (1, 2, 4, 16, 64)


def momenta_of_a_run(optimizer: OptimizerName, topk: int) -> list[list[jax.Array]]:
    """For each of two workers the momenta of all parameters."""
    run = prepare(
        Config(
            optimizer=optimizer,
            selection="topk",
            topk=topk,
            value_coding="int4",
            workers=2,
            steps=STEPS,
        )
    )
    step = demo_optax.make_train_step(run.loss_fn, run.tx, run.mesh, clip_norm=1.0)
    params, state = run.params, demo_optax.init_opt_state(run.tx, run.params, run.mesh)
    for batch in itertools.islice(batches_of(run, 0), STEPS):
        params, state, metrics = step(params, state, batch)
        metrics.loss.block_until_ready()
    stacked = [np.asarray(leaf) for leaf in jax.tree.leaves(state[0].momentum)]
    return [[jnp.asarray(leaf[worker]) for leaf in stacked] for worker in range(2)]


def lost(values: jax.Array, coding: codings.ValueCoding, group: int) -> float:
    """Share of the energy of ``(blocks, k)`` that rounding loses."""
    values = values[: len(values) // group * group]
    grouped = values.reshape(len(values) // group, -1)
    decoded, _ = codings.decode(codings.encode(grouped, coding), coding)
    return float(jnp.sum((grouped - decoded) ** 2) / jnp.sum(grouped**2))


def main(optimizer: OptimizerName = "demo-scaled") -> None:
    for k in (8, 32):
        sent = []
        for momenta in momenta_of_a_run(optimizer, k):
            # Of matrices in 64x64 blocks nothing that is stored is padding.
            matrices = [x.reshape(-1, 4096) for x in momenta if x.shape[-1] == 4096]
            blocks = jnp.concatenate(matrices)
            selector = TopK(blocks.shape[1], k)
            sent.append(selector.take(blocks, selector.select(blocks)))
        print(f"k = {k}: bits per value, and energy lost, with one scale for so many blocks")
        print(f"{'':8}" + "".join(f"{group:>18}" for group in GROUPS))
        for coding in ("int8", "int4", "int2", "sign"):
            row = []
            for group in GROUPS:
                bits = codings.value_bits(coding) + codings.scale_bits(coding) / (group * k)
                loss = np.mean([lost(values, coding, group) for values in sent])
                row.append(f"{bits:9.3f} {loss:8.3%}")
            print(f"{coding:8}" + "".join(row))


if __name__ == "__main__":
    main(*sys.argv[1:])

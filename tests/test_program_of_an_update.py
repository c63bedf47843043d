"""What XLA makes of one update: temporary memory, and operations that grow with shapes."""

import jax
import jax.numpy as jnp
import optax
import pytest

import demo_optax
from tests.sweeps import slow

WIDTH = 256


def shapes(layers):
    """An embedding and the four matrices of each layer, as in the models of the trainer."""
    sizes = {"embedding": (16 * WIDTH, WIDTH)}
    for layer in range(layers):
        for name, rows, columns in (
            ("attention_in", 1, 3),
            ("attention_out", 1, 1),
            ("ff_in", 1, 8),
            ("ff_out", 4, 1),
        ):
            sizes[f"{layer}/{name}"] = rows * WIDTH, columns * WIDTH
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in sizes.items()}


def compiled(tx, params):
    def step(state, params, gradient):
        updates, state = tx.update(gradient, state, params)
        return state, optax.apply_updates(params, updates)

    state = jax.eval_shape(tx.init, params)
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(state, params, params)
    # As users compile it: the flag that makes other tests quick costs memory and instructions.
    is_older = jax.__version_info__ < (0, 11)
    return lowered.compile({"xla_cpu_use_fusion_emitters": True} if is_older else None)


# Before groups of blocks were merged and the state was narrow: 8.8 and 10.0 bytes for each
# parameter, 22,784 and 32,444 instructions for 17 tensors.
@pytest.mark.parametrize(
    ("make", "temporary", "instructions"),
    [slow(demo_optax.demo_scaled, 5.5, 11_000), (demo_optax.demo_muon, 4.9, 16_500)],
)
def test_an_update_needs_little_memory_and_few_instructions(make, temporary, instructions):
    params = shapes(4)
    program = compiled(make(1e-3), params)
    count = sum(x.size for x in params.values())
    assert program.memory_analysis().temp_size_in_bytes <= temporary * count
    assert program.as_text().count(" = ") <= instructions

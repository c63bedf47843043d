"""The annotations of arrays are checked wherever the tests call the library."""

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from demo_optax._src.compression import bits, sparse
from demo_optax._src.compression.top_k import TopK

BLOCKS, POSITIONS, VALUES = jnp.ones((2, 8)), jnp.zeros((2, 3), jnp.int32), jnp.ones((2, 3))


@pytest.mark.parametrize(
    "call",
    [
        lambda: sparse.add(BLOCKS, POSITIONS, VALUES[:1]),  # blocks of another number
        lambda: sparse.add(BLOCKS, POSITIONS.astype(jnp.float32), VALUES),
        lambda: TopK(8, 3).select(BLOCKS[0]),  # one block, without its axis
        lambda: jax.jit(sparse.add)(BLOCKS, POSITIONS[:, :2], VALUES),  # of tracers as well
        lambda: bits.pack_bits(jnp.zeros(3, jnp.int32), 4),
    ],
)
def test_an_array_of_another_shape_or_dtype_is_refused(call):
    with pytest.raises(jaxtyping.TypeCheckError):
        call()

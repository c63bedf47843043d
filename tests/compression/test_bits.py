"""Fields of a few bits, packed into words without gaps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from demo_optax._src.compression import bits as packing
from tests.sweeps import sweep


@sweep(0, 1, 2, 3, 4, 5, 7, 8, 10, 12, 13, 16, 17, 24, 31, 32, bits=range(33))
def test_packing_is_one_long_number_and_unpacking_its_inverse(bits):
    random = np.random.default_rng(bits)
    for count in (1, 77):
        fields = random.integers(0, 1 << bits, count, np.uint64).astype(np.uint32)
        fields[-1] = (1 << bits) - 1
        words = jax.jit(packing.pack_bits, static_argnums=1)(fields, bits)
        number = sum(int(field) << (i * bits) for i, field in enumerate(fields))
        size = -(-count * bits // 32)
        expected = [number >> (32 * i) & 0xFFFFFFFF for i in range(size)]
        assert words.dtype == np.uint32
        assert np.asarray(words).tolist() == expected
        unpacked = jax.jit(packing.unpack_bits, static_argnums=(1, 2))(words, bits, count)
        assert np.asarray(unpacked).tolist() == fields.tolist()


@pytest.mark.parametrize("bits", [0, 5, 32])
def test_no_fields_take_no_words(bits):
    words = packing.pack_bits(jnp.zeros(0, jnp.uint32), bits)
    assert words.shape == packing.unpack_bits(words, bits, 0).shape == (0,)

"""Value codings against NumPy, and the properties that error feedback rests on."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from demo_optax._src.compression import values as codings
from tests.sweeps import sweep

QUANTISED = [c for c in codings.VALUE_CODINGS if c not in ("float32", "bfloat16")]
LEVELS = {
    "int8": np.arange(-127, 128),
    "int4": np.arange(-7, 8),
    "int2": np.array([-3, -2, 2, 3]),
    "sign": np.array([-1, 1]),
}

blocks = hnp.arrays(
    np.float32,
    st.sampled_from([(1, 1), (3, 8), (2, 33)]),  # few, since each is another program to compile
    elements=st.floats(-(2.0**60), 2.0**60, width=32, allow_subnormal=False),
)


encode = jax.jit(codings.encode, static_argnums=1)
decode = jax.jit(lambda coded, coding: codings.CODINGS[coding].decode(*coded), static_argnums=1)


def roundtrip(values, coding):
    coded = encode(jnp.asarray(values), coding)
    decoded, sound = decode(coded, coding)
    assert sound
    assert int(coded.values.max()) < 2 ** codings.CODINGS[coding].bits
    assert int(np.array(coded.scales).max(initial=0)) < 2**10
    return np.array(decoded), coded


@settings(deadline=None, max_examples=30)
@given(values=blocks)
def test_plain_codings_are_those_of_ml_dtypes(values):
    np.testing.assert_array_equal(roundtrip(values, "float32")[0], values)
    expected = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(roundtrip(values, "bfloat16")[0], expected)


@sweep("int8", "int2", coding=QUANTISED)
@settings(deadline=None, max_examples=30)
@given(values=blocks)
def test_quantised_values_are_the_nearest_level_times_a_coarse_scale(coding, values):
    decoded, coded = roundtrip(values, coding)
    for row, out, field in zip(values, decoded, np.array(coded.scales), strict=True):
        scale = np.uint32(field << 21).view(np.float32).astype(float)
        levels = LEVELS[coding] * scale
        assert set(out.astype(float)) <= set(levels)  # exact: no rounding of level times scale
        error = np.abs(out - row.astype(float))
        best = np.abs(levels[:, None] - row.astype(float)).min(axis=0)
        assert (error <= best * (1 + 1e-5) + 1e-6 * scale).all()
        largest = np.abs(row).max()
        if coding in ("int8", "int4") and scale > 0:
            assert largest <= levels.max() <= 1.26 * largest  # nothing is clipped, little wasted


@sweep("int4", "sign", coding=QUANTISED)
@settings(deadline=None, max_examples=30)
@given(values=blocks)
def test_what_stays_has_no_more_energy_than_what_was_there(coding, values):
    values = values.astype(float)
    left = values - roundtrip(values, coding)[0]
    assert (left**2).sum() <= 1.1 * (values**2).sum() + 1e-30


@pytest.mark.parametrize("coding", QUANTISED)
def test_scales_and_levels_that_do_not_exist_are_found(coding):
    coded = jax.tree.map(np.asarray, encode(np.ones((3, 5), np.float32), coding))
    assert decode(coded, coding)[1]
    infinite = coded._replace(scales=coded.scales.copy())
    infinite.scales[1] = 255 << 2
    assert not decode(infinite, coding)[1]
    if len(LEVELS[coding]) < 2 ** codings.CODINGS[coding].bits:
        unknown = coded._replace(values=coded.values.copy())
        unknown.values[2, 4] = len(LEVELS[coding])
        assert not decode(unknown, coding)[1]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("coding", ["float32", "bfloat16"])
def test_values_that_are_not_finite_are_found(coding, bad):
    coded = encode(np.float32([[1.0, bad]]), coding)
    assert not decode(coded, coding)[1]


def test_zeros_and_numbers_too_small_for_a_scale_are_sent_as_zeros():
    for coding in QUANTISED:
        decoded, _ = roundtrip(np.array([[0.0, 0.0], [1e-39, 0.0]], np.float32), coding)
        np.testing.assert_array_equal(decoded, 0.0)

"""How the tensors of a model are divided into parts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo_optax._src.compression import plan

LEAST = plan._SMALLEST_PART


@given(st.lists(st.one_of(st.just(0), st.integers(0, 20 * LEAST)), max_size=80))
def test_parts_are_neighbours_that_hold_all_tensors_once(sizes):
    bounds = plan._part_bounds(sizes)
    starts, stops = zip(*bounds, strict=True)
    assert (starts[0], *stops) == (*starts, len(sizes))
    assert all(start < stop for start, stop in bounds) or bounds == [(0, 0)]


@given(st.lists(st.integers(0, 20 * LEAST), min_size=1, max_size=80))
def test_no_part_exceeds_an_even_one_by_more_than_a_tensor(sizes):
    bounds = plan._part_bounds(sizes)
    parts = max(min(round(len(sizes) ** 0.6), sum(sizes) // LEAST), 1)
    assert len(bounds) <= parts
    for start, stop in bounds:
        assert sum(sizes[start:stop]) <= sum(sizes) / parts + max(sizes)


@pytest.mark.parametrize("tensors, parts", [(1, 1), (9, 4), (17, 5), (65, 12)])
def test_the_number_of_parts_grows_slowly(tensors, parts):
    assert len(plan._part_bounds([LEAST] * tensors)) == parts
    assert len(plan._part_bounds([LEAST // (2 * tensors)] * tensors)) == 1

"""Which variations of a test run with ``make test``, and which with ``make test-all`` alone."""

import functools
import itertools

import pytest

slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def sweep(*quick, **dimensions):
    """A test of all combinations of values; those that are not ``quick`` are slow.

    >>> every_mode = sweep(("vmap", 1.0), ("pmap", 0.3), mode=["vmap", "pmap"], alpha=[1.0, 0.3])
    """
    quick = [each if len(dimensions) > 1 else (each,) for each in quick]
    combinations = list(itertools.product(*dimensions.values()))
    assert all(each in combinations for each in quick), "each quick one must be a combination"
    params = [
        pytest.param(
            *each,
            marks=() if each in quick else pytest.mark.slow,
            id="-".join(getattr(value, "__name__", str(value)) for value in each),
        )
        for each in combinations
    ]
    return pytest.mark.parametrize(",".join(dimensions), params)

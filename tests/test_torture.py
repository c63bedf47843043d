"""A small part of `make torture`, and that it notices what is lost."""

from collections import Counter

import pytest

from benchmarks.torture.__main__ import KINDS

TRIES = {
    "packets": 100,
    "byzantine": 6,
    "checkpoints": 12,
    "kills": 2,
    "signals": 2,
    "stops": 1,
    "mismatches": 4,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_nothing_is_lost(name):
    kind = KINDS[name]
    tries = list(kind.run(TRIES[name], 1))
    assert [one for one in tries if one.lost] == []
    assert Counter(one.row for one in tries) == dict.fromkeys(kind.ROWS, TRIES[name])

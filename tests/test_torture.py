"""A small part of `make torture`, and that it notices what is lost."""

from collections import Counter

import pytest

from benchmarks.torture import byzantine, outcomes, packets
from benchmarks.torture.__main__ import KINDS
from demo_optax._src.compression import packet
from demo_optax._src.compression.bits import checksum
from demo_optax._src.exchange import all_gather

TRIES = {
    "packets": 100,
    "byzantine": 6,
    "checkpoints": 12,
    "kills": 2,
    "signals": 2,
    "stops": 1,
    "mismatches": 4,
}
COMPILED = (packets.clean_step, packets.forged_steps, packets.forger, byzantine.step_of)


def rows_lost(tries):
    return Counter(one.row for one in tries if one.lost)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_nothing_is_lost(name):
    kind = KINDS[name]
    tries = list(kind.run(TRIES[name], 1))
    assert [one for one in tries if one.lost] == []
    assert Counter(one.row for one in tries) == dict.fromkeys(kind.ROWS, TRIES[name])


@pytest.fixture
def worse(monkeypatch):
    """What replaces a part of the library; nothing that is compiled so is used elsewhere."""

    def forget():
        for function in COMPILED:
            function.cache_clear()

    forget()
    yield monkeypatch.setattr
    forget()


def of(kind):
    return {row: 3 for row in packets.ROWS if row.startswith(kind)}


@pytest.mark.slow
def test_packets_without_an_origin_are_noticed(worse):
    worse(packet, "_expected_checksum", lambda layout, rest, origin: checksum(rest))
    assert rows_lost(packets.run(3, 0)) == of("replayed") | of("foreign")


@pytest.mark.slow
def test_receivers_that_differ_silently_are_noticed(worse):
    plain = all_gather.summarise
    worse(all_gather, "summarise", lambda *a: (m := plain(*a))._replace(agreed=m.participants >= 0))
    lost = rows_lost(packets.run(3, 0))
    assert lost == {row: 3 for row in packets.ROWS if row.endswith("receiver")}


@pytest.mark.slow
def test_messages_without_a_limit_are_noticed(worse):
    plain = all_gather.norm_caps
    worse(all_gather, "norm_caps", lambda *args: 1e30 * plain(*args))
    lost = [one.lost for one in byzantine.run(len(byzantine.SETTINGS), 0) if one.lost]
    assert len(lost) == 2 and all("demo_sgd" in reason for reason in lost)


def test_the_table_counts():
    tries = [outcomes.Try("a"), outcomes.Try("b", "why"), outcomes.Try("b")]
    tallies = outcomes.counted(tries)
    assert tallies == {"a": (1, 0), "b": (2, 1)}
    columns = outcomes.table(tallies, {"a": 1.4}).columns
    cells = zip(*(column.cells for column in columns), strict=True)
    assert list(cells) == [
        ("a", "1", "1", "0", "1"),
        ("b", "2", "1", "1", ""),
        ("all", "3", "2", "1", "1"),
    ]

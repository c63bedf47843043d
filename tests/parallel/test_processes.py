"""What the first of several processes does or raises, and what the others hear of it."""

import threading

import jax
import pytest
from jax.experimental import multihost_utils

from demo_optax._src.checkpoint import reading
from demo_optax._src.parallel.processes import by_lead


class Holds(Exception):
    """Holds what pickle refuses."""

    def __init__(self):
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class TwoArguments(Exception):
    """Is pickled, but pickle cannot make it anew."""

    def __init__(self, what, why):
        super().__init__(f"{what}: {why}")


class Doubled(Exception):
    """Pickle makes another error of it."""

    def __init__(self, what):
        super().__init__(f"again {what}")


class Speechless(Exception):
    """Has no text."""

    def __init__(self):
        super().__init__(threading.Lock())

    def __str__(self):
        raise ValueError("no text")


@pytest.fixture
def in_both_processes(monkeypatch):
    """Runs a function as the first and then as the second of two processes."""
    sent, number = [], [0]

    def broadcast(x):
        if number[0] == 0:
            sent.append(x)
            return x
        answer = sent.pop(0)
        assert (x.shape, x.dtype) == (answer.shape, answer.dtype)
        return answer

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: number[0])
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", broadcast)

    def run(fn):
        results = []
        for number[0] in range(2):
            try:
                results.append(fn())
            except BaseException as error:
                results.append(error)
        assert sent == []
        return results

    yield run
    number[0] = 0


def raising(error):
    def fn():
        raise error

    return fn


def test_all_get_the_result_of_the_first(in_both_processes):
    assert (
        in_both_processes(lambda: by_lead(lambda: (jax.process_index(), b"ab", None)))
        == [(0, b"ab", None)] * 2
    )


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_errors_and_interrupts_are_raised_in_all(error, in_both_processes):
    first, second = in_both_processes(lambda: by_lead(raising(error)))
    assert first is error and repr(second) == repr(error)


@pytest.mark.parametrize(
    "error, text",
    [
        (Holds(), "Holds: holds a lock"),
        (TwoArguments("a", "b"), "TwoArguments: a: b"),
        (Doubled("a"), "Doubled: again a"),
        (Speechless(), "Speechless"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_an_error_that_pickle_cannot_restore_is_raised_as_its_text(error, text, in_both_processes):
    first, second = in_both_processes(lambda: by_lead(raising(error)))
    assert first is error and type(second) is RuntimeError and str(second).endswith(text)


@pytest.mark.parametrize("value", [threading.Lock(), lambda: 0], ids=["lock", "lambda"])
def test_a_result_that_cannot_be_pickled_is_an_error_in_all(value, in_both_processes):
    first, second = in_both_processes(lambda: by_lead(lambda: value))
    assert repr(first) == repr(second) and "pickle" in str(first)


def test_an_interrupt_while_a_process_reads_is_told_to_the_others(monkeypatch):
    told = []
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda x: told.append(int(x)) or x)
    with pytest.raises(KeyboardInterrupt):
        reading.on_all(3, raising(KeyboardInterrupt()))
    assert told == [2]

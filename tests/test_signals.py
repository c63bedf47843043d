"""What the trainer makes of signals, in this process."""

import os
import signal
import time

from lm.signals import Signals


def requested(signals, seconds=5):
    """Whether signals that were sent have asked for an end before so many seconds are over."""
    deadline = time.monotonic() + seconds
    while not (found := signals.stop_requested()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def test_signals_ask_for_an_end_and_handlers_come_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        with Signals("") as signals:
            assert not signals.stop_requested()
            os.kill(os.getpid(), number)
            assert requested(signals)
            assert signals.exit_status == status
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_second_sigterm_counts_as_one():
    with Signals("") as signals:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            assert requested(signals)

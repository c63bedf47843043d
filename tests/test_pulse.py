"""Signs of life of several processes, by a service of our own in the place of JAX's."""

import time
from types import SimpleNamespace

import jax
import pytest

from lm import pulse
from lm.pulse import LEFT, SIGNS, Pulse


class Service:
    def __init__(self):
        self.signs, self.answers = {}, True

    def key_value_set(self, key, value, allow_overwrite):
        assert allow_overwrite
        self.signs[key] = value

    def key_value_dir_get(self, place):
        if not self.answers:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: nobody answers")
        return [(key, value) for key, value in self.signs.items() if key.startswith(place)]


@pytest.fixture
def service(monkeypatch):
    found = Service()
    monkeypatch.setattr(pulse, "global_state", SimpleNamespace(client=found))
    return found


def eventually(true, seconds=20):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_process_without_new_signs_is_missed_until_it_has_one_or_left(service):
    here = Pulse(0.01)
    here.start()
    for sign in ("1", "2", LEFT):
        service.signs[f"{SIGNS}/7"] = sign
        eventually(lambda: here.silence() < 0.1)
        if sign != LEFT:
            eventually(lambda: here.silence() > 0.5)
    own = f"{SIGNS}/{jax.process_index()}"
    assert int(service.signs[own]) > 0
    here.stop()
    assert service.signs[own] == LEFT


def test_a_service_that_does_not_answer_is_silence_too(service):
    here = Pulse(0.01)
    here.start()
    for answers in (True, False, True):
        service.answers = answers
        eventually(lambda answers=answers: (here.silence() < 0.1) == answers)
    here.stop()

"""The trainer as a worker of a run for members only."""

import dataclasses

import pytest

import lm.swarm
from demo_optax._src.swarm import steps
from tests.members import Run
from tests.nano import NANO


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(lm.swarm, "keep_compiled_programs", lambda: None)
    return Run(tmp_path, ["paris", "oslo"])


def config_of(run, key="paris", owner="owner", **settings):
    files = {"key": str(run.folder / f"{key}.key"), "owner": str(run.folder / f"{owner}.pub")}
    settings = files | {"swarm": run.anybody.url, "workers": None} | settings
    return dataclasses.replace(NANO, **settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"owner": "mallory"}, "/mallory.pub' is in "),
        ({"roster_at_least": 2}, "the owner's roster is needed, of number 2 or higher"),
    ],
)
def test_what_keeps_a_member_out_is_said_in_one_line(run, settings, said, monkeypatch):
    monkeypatch.setattr(lm.swarm, "prepare", lambda config: None)
    run.make("mallory")
    with pytest.raises(SystemExit) as ended:
        lm.swarm.run_or_exit(config_of(run, **settings))
    line = str(ended.value.code)
    assert line.startswith("error: ") and said in line and "\n" not in line


def test_a_worker_names_the_members_and_says_when_they_change(run, capsys, monkeypatch):
    monkeypatch.setattr(steps, "ROSTER_SECONDS", 0.0)
    run.make("lima")
    add = lambda params, tokens: run.change("lima") or 1.0  # noqa: E731
    monkeypatch.setattr(lm.swarm, "make_evaluation", lambda *_: add)
    lm.swarm.run_or_exit(config_of(run))
    shown = capsys.readouterr().out
    assert shown.count("members only, roster 1: paris, oslo\n") == 1
    assert shown.count("members only, roster 2: paris, oslo, lima") == 1

"""What a run's store tells of it: who counted, was late, left or vanished; and its picture."""

import functools
import itertools
import os
import sys

import pytest

from demo_optax import swarm
from demo_optax._src.commands.main import main
from demo_optax._src.swarm import records
from demo_optax._src.swarm.records import Claim, Manifest, PacketRef
from demo_optax.swarm import Member, read_history, status, watch_history
from tests.members import Counting

OSLO, PARIS, ROME, ROME_AGAIN = (0, 1), (1, 1), (2, 1), (2, 2)
NAMES = {OSLO: "oslo", PARIS: "paris", ROME: "rome", ROME_AGAIN: "rome"}
SECONDS = 0.5, 0.5, 0.5, 2.5, 0.5, 0.5, 0.5
# Rome vanishes after round 2 and comes back in 5; Oslo is late in 4; Paris leaves after 6.
TAKEN = {
    "oslo": [5, 5, 5, 25, 0, 10, 5, 5],
    "paris": [10, 10, 10, 50, 10, 10, 10, None],
    "rome": [10, 10, 10, None, None, 10, 10, 10],
}

OPEN = "open: whoever may write to the place may take part"


def write(store, taken):
    """Writes a run in which rounds take as long as SECONDS says."""
    members = {"oslo": [OSLO] * 8, "paris": [PARIS] * 8, "rome": [ROME] * 5 + [ROME_AGAIN] * 3}
    for member, name in NAMES.items():
        store.put(records.claim_key(member), records.encode(Claim(name, "", 0.0)))
    for step, time in enumerate(itertools.accumulate(SECONDS, initial=1000.0)):
        packets = [
            PacketRef(*members[name][step], "0" * 64, steps[step], 32 * steps[step])
            for name, steps in taken.items()
            if steps[step]
        ]
        manifest = Manifest(step, tuple(packets), "", time)
        store.put(records.step_key("manifests", step), records.encode(manifest))
    store.put(records.left_key(PARIS), b"")


def test_a_summary_tells_rounds_from_steps_and_leaving_from_vanishing(store):
    """A worker is late between packets of one process, and away between those of two."""
    write(store, TAKEN)
    history = read_history(store)
    lines = status(history).splitlines()
    assert history.taken() == TAKEN
    assert lines[0].startswith("round 7, decided at 1970-01-01 00:16:45 UTC")
    assert lines[1:4] == [
        "members: oslo, rome",
        "left: paris after round 6",
        "snapshots before rounds: none",
    ]
    assert lines[4].startswith("last 8 rounds: 0.500 s each and 0.050 s a step (medians), ")
    assert lines[4].endswith(" tokens a second counted")
    before = status(history._replace(manifests=history.manifests[:4], left=frozenset()))
    assert before.splitlines()[1:3] == ["members: oslo, paris", "missing: rome after round 2"]


def test_a_run_without_rounds_has_steps_and_goodput(store):
    write(store, {name: [n and 1 for n in steps] for name, steps in TAKEN.items()})
    history = read_history(store)
    summary = status(history)
    assert summary.startswith("step 7, ") and "left: paris after step 6" in summary
    assert "last 8 steps: 0.500 s each (median), " in summary and "rounds" not in summary
    # 6, 6 and 5 steps of half a second; 5.5, 5 and 2.5 seconds, without Rome's absence
    assert history.goodput() == pytest.approx((6 + 6 + 5) / 2 / (5.5 + 5.0 + 2.5))
    assert history.goodput(3) == pytest.approx((6 + 6 + 5) / 2 / (3 * 5.5))


def test_goodput_of_unequal_workers_is_by_the_speed_of_each(store):
    write(store, TAKEN)
    history = read_history(store)
    assert history.goodput() == pytest.approx((6.0 + 5.0 + 2.5) / (5.5 + 5.0 + 2.5), abs=0.05)
    write(store, {"oslo": [5, 5, 5, 25, 5, 5, 5, 5]})
    assert read_history(store).goodput() == 1.0


def test_weights_that_nobody_set_count_steps_and_the_next_snapshot_is_due(store):
    member = Member(store, "lima")
    for step in range(3):
        member.exchange(step, b"a packet")
    summary = status(read_history(store))
    assert " steps a second counted" in summary and "next before" not in summary
    store.put("run.json", b'{"snapshot_every": "4"}')
    assert "snapshots before steps: none; next before 4" in status(read_history(store))
    for step in 4, 8:
        store.put(f"snapshots/{step:08d}.json", b"")
    assert "snapshots before steps: 4, 8; next before 12" in status(read_history(store))


@pytest.mark.parametrize("odd", ["null", "[]", "{}", "Infinity", "-4", "0", '"x"', '"\\ud800"'])
def test_settings_that_no_worker_wrote_name_no_snapshot_to_come(odd, store):
    Member(store, "lima").exchange(0, b"a packet")
    store.put("run.json", f'{{"snapshot_every": {odd}}}'.encode())
    assert "next before" not in status(read_history(store))


def test_watching_reads_what_is_new_alone_and_waits_for_as_long_as_it_may(store):
    write(store, TAKEN)
    watched, pauses = Counting(store), []
    looks = watch_history(watched, 5, pauses.append)
    assert next(looks) == read_history(store, 5)
    first = set(watched.asked)
    watched.asked.clear()
    assert next(looks) == read_history(store, 5) and pauses == [10.0]
    listed = ["manifests", "run.json", "slots", "snapshots"]  # nobody has written run.json yet
    assert sorted(watched.asked) == listed
    assert len([key for key in first if key.startswith("manifests/")]) == 5
    watched.asked.clear()
    for step in range(8, 48):
        manifest = Manifest(step, (PacketRef(*OSLO, "0" * 64, 5, 32.0),), "", 2000.0 + step)
        store.put(records.step_key("manifests", step), records.encode(manifest))
    assert next(looks).manifests[-1].step == 47 and pauses == [10.0, 10.0]
    assert len(watched.asked) == 5 + len(listed)
    many = watch_history(watched, 40, pauses.append)
    next(many), next(many)
    for step in range(48, 88):
        store.put(records.step_key("manifests", step), records.encode(manifest))
    next(many), next(many)
    assert pauses[2:] == [10.0, 10.0, 44.0]  # seconds, for as many requests


def test_a_run_is_watched_until_ctrl_c(store, capsys, monkeypatch):
    write(store, TAKEN)
    looks = iter([None])

    def sleep(seconds):
        if next(looks, "over") == "over":
            raise KeyboardInterrupt

    watch = functools.partial(watch_history, sleep=sleep)
    monkeypatch.setattr(swarm, "watch_history", watch)
    main(["swarm", store.url, "--watch"])
    shown = capsys.readouterr().out
    assert shown.count("members: oslo, rome") == shown.count("Ctrl-C ends this.") == 2
    assert "\x1b" not in shown  # nobody's terminal


def test_nobody_need_read_all_that_is_printed(store, monkeypatch):
    write(store, TAKEN)
    read, written = os.pipe()
    os.close(read)
    with open(written, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        main(["swarm", store.url])


def test_a_worker_with_nothing_finite_is_there_but_counts_for_nothing(store, capsys):
    for member in (OSLO, PARIS):
        store.put(records.claim_key(member), records.encode(Claim(NAMES[member], "", 0.0)))
    for step, of_paris in enumerate([0, 4, 0, 0]):  # NaN, then a round, then NaN for good
        packets = (
            PacketRef(*OSLO, "0" * 64, 4, 1.0),
            PacketRef(*PARIS, "0" * 64, of_paris, of_paris / 4),
        )
        manifest = Manifest(step, packets, "", 1000.0 + step)
        store.put(records.step_key("manifests", step), records.encode(manifest))
    history = read_history(store)
    assert [history.members(n) for n in range(4)] == [["oslo"], ["oslo", "paris"], *[["oslo"]] * 2]
    assert history.taken() == {"oslo": [4, 4, 4, 4], "paris": [0, 4, 0, 0]}
    assert history.tokens_per_second() == (2 + 1 + 1) / 3
    assert history.goodput() == pytest.approx((3 + 1) / 6)
    lines = status(history).splitlines()
    assert lines[1:3] == ["members: oslo", "skipped it, since nothing was finite: paris"]
    assert "missing" not in status(history) and "1.33 tokens a second" in lines[-2]
    main(["swarm", store.url])
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["worker", "counted", "late", "skipped", "steps"] in shown
    assert ["oslo", "4", "0", "0", "16"] in shown and ["paris", "1", "0", "3", "4"] in shown
    assert ["0", "4", "skipped"] in shown and ["1", "4", "4"] in shown


def test_the_command_prints_the_steps_of_every_worker_in_rounds(store, capsys, tmp_path):
    write(store, TAKEN)
    main(["swarm", store.url])
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["worker", "counted", "late", "skipped", "steps"] in shown
    assert ["oslo", "7", "1", "0", "60"] in shown
    assert ["round", "oslo", "paris", "rome"] in shown
    assert ["4", "late", "10", "away"] in shown and ["7", "5", "away", "10"] in shown


def test_the_picture_has_every_worker_and_sign_and_names_are_text(
    store, tmp_path, monkeypatch, capsys
):
    pyplot, drawn = pytest.importorskip("matplotlib.pyplot"), []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    for name, member in NAMES.items():
        monkeypatch.setitem(NAMES, name, {"oslo": "$x_{$", "paris": "[/gpu]"}.get(member, member))
    write(store, TAKEN)
    main(["swarm", store.url, "--picture", str(tmp_path / "life.png")])
    assert "members: $x_{$, rome\nleft: [/gpu] after round 6" in capsys.readouterr().out
    axes = drawn[0].axes[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["$x_{$", "[/gpu]", "rome"]
    assert [line.get_marker() for line in axes.lines] == [">", "X"]
    (mesh,) = axes.collections
    rows, gaps = (mesh.get_array().filled(-1.0)[start::2] for start in (0, 1))
    assert rows.tolist() == [[-1 if n is None else n for n in x[1:]] for x in TAKEN.values()]
    assert len(gaps) == 2 and (gaps == -1).all()
    assert axes.yaxis.get_inverted()  # the first worker is at the top
    assert axes.get_xlim()[1] > max(line.get_xdata()[0] for line in axes.lines)
    assert (tmp_path / "life.png").stat().st_size > 0


@pytest.mark.parametrize(
    "name", ["\x1b[2J", "oslo\nmembers: rome", "\ud800", "\u202eslo"], ids=ascii
)
def test_a_name_that_moves_the_cursor_is_no_name_and_others_are_shown_as_text(name, store, capsys):
    store.put(records.claim_key(OSLO), records.encode(Claim(name, "", 0.0)))
    store.put(records.claim_key(PARIS), records.encode(Claim("åbo [red]", "", 0.0)))
    main(["swarm", store.url])
    assert capsys.readouterr().out == f"no step yet; joined: slot 0, åbo [red]\n{OPEN}\n"
    with pytest.raises(
        ValueError, match=r"worker must be a name .* characters that can be printed"
    ):
        Member(store, name)


def test_a_member_says_for_good_that_it_left(store):
    member = Member(store, "paris")
    member.exchange(0, b"a packet")
    assert read_history(store).left == frozenset()
    member.leave(1)
    assert read_history(store).left == {member.me}
    assert Member(store, "paris").me == (member.slot, 2)
    assert status(read_history(store)).splitlines()[1:3] == [
        "members: nobody",
        "left: paris after step 0",
    ]


@pytest.mark.parametrize("folder", ["of-nobody", "there"])
def test_a_place_without_a_run_is_refused_and_not_made(folder, tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(SystemExit, match=r"error: there is no run of a swarm at .*: give the"):
        main(["swarm", str(tmp_path / folder)])
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert not list((tmp_path / "there").iterdir())

"""The choice of a method: by its rules, for five users, and in lines that do what they say."""

import dataclasses
import functools
import math
import re
import shlex
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import demo_optax
from benchmarks.quality import study, tables
from benchmarks.tools import pages
from demo_optax import accounting
from demo_optax._src.accounting import devices, methods
from demo_optax._src.commands.quantities import bandwidth as bits
from demo_optax.swarm import Member, ObjectStore
from lm import setup, utilization
from lm.config import from_command_line
from lm.validation import require_sensible
from tests import choice_tables, swarms
from tests.sweeps import slow

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/how_to/choose.md").read_text()
SHAPES = accounting.preset_shapes("300m")
PARAMETERS = sum(math.prod(x.shape) for x in jax.tree.leaves(SHAPES))
TOKENS = 65_536
SENT = demo_optax.Compression(32, value_coding="sign", selection="bins")
EVERY_STEP = {
    "B": (SENT, demo_optax.AllGather("data")),
    "C": (SENT, demo_optax.Delayed(demo_optax.AllGather("data"))),
    "D": (SENT, demo_optax.Delayed(demo_optax.TwoPhase("data", value_coding_back="int4"))),
}


def choose(bandwidth, workers, tokens=TOKENS, latency=1e-3, **options):
    link = dict(bandwidth=bits(bandwidth), workers=workers, latency=latency)
    given = dict(params=PARAMETERS, compute_time=1.0, batch_tokens=tokens, width=1024)
    return accounting.choose(**(given | link | options))


USERS = [  # the link and the number of workers, and the method of the page's rules
    ("3600Gbit", 8, {"latency": 1e-5}, "A Muon, all-reduce"),  # one box with NVLink
    ("100Gbit", 64, {}, "A Muon, all-reduce"),  # a data centre
    ("100Gbit", 64, {"dtype": "float32"}, "B demo_muon"),
    ("1Gbit", 16, {}, "C demo_muon, delayed"),  # nodes on Ethernet
    ("100Mbit", 8, {"tokens": 4096}, "D demo_scaled, two phases, delayed"),  # offices
    ("60Mbit", 4, {}, "C demo_muon, delayed"),
    ("40Mbit", 16, {}, "E SparseLoCo k=512, fragments in two phases"),
    ("10Mbit", 16, {"latency": 0.02}, "E SparseLoCo k=64, fragments in two phases"),  # homes
    ("10Gbit", 8, {}, "B demo_muon"),  # nodes on fast Ethernet
    ("10Gbit", 8, {"tokens": 20_000}, "B demo_scaled"),
    ("1Tbit", 16, {"tokens": 25_601}, "A Muon, all-reduce"),
    ("1Tbit", 16, {"tokens": 25_599}, "A AdamW, all-reduce"),
    ("10Gbit", 16, {"tokens": 25_601}, "B demo_muon"),
    ("10Gbit", 16, {"tokens": 25_599}, "B demo_scaled"),
    ("1Gbit", 16, {"tokens": 10_241}, "C demo_muon, delayed"),
    ("1Gbit", 16, {"tokens": 10_239}, "C demo_scaled, delayed"),
]


@pytest.mark.parametrize(("link", "workers", "options", "expected"), USERS)
def test_users_get_what_the_rules_of_the_page_give_them(link, workers, options, expected):
    method = choose(link, workers, **options).chosen.method
    assert f"{method.row} {method.name}" == expected


def row_by_hand(bandwidth, workers, latency):
    """The page's rules for a compute of one second."""
    link = dict(workers=workers, bandwidth=bandwidth, latency=latency, compute_time=1.0)
    params = jax.ShapeDtypeStruct((PARAMETERS // 1024, 1024), jnp.float32)
    times = accounting.step_times(params, EVERY_STEP, **link)
    step = {name: time.step for name, time in times.items()}
    if step["AdamW, bfloat16"] - 1 <= 1 / 4:
        return "A"
    if step["B"] - 1 <= 1 / 5:
        return "B"
    if step["B"] - 1 <= 1:
        return "C"
    if min(step["C"], step["D"]) <= 2:
        return min("CD", key=step.get)
    return "E"


def test_every_link_has_the_row_of_the_rules():
    taken = set()
    for link in ("1Tbit", "100Gbit", "20Gbit", "10Gbit", "1Gbit", "200Mbit", "60Mbit", "10Mbit"):
        for workers in (2, 8, 64):
            for latency in (1e-5, 0.05):
                row = row_by_hand(bits(link), workers, latency)
                assert choose(link, workers, latency=latency).chosen.method.row == row
                taken.add((row, workers < 8))
    assert len(taken) == 9  # few workers take no D


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_what_does_not_fit_is_not_taken(dtype, size):
    """Parameters and gradients, 6 bytes for a while, and the state: moments have their dtype."""
    of_model = 2 * size + 6
    adamw, muon = of_model + 2 * size, of_model + size
    demo_muon, demo_scaled = of_model + 6, of_model + 8
    found = functools.partial(choose, dtype=dtype)
    by_name = {c.method.name: c.memory for c in found("1Gbit", 16).candidates}
    assert by_name["Muon, all-reduce"].total == muon * PARAMETERS
    assert by_name["AdamW, all-reduce"].total == adamw * PARAMETERS
    assert by_name["demo_muon"] == tuple(PARAMETERS * x for x in (size, size, 6, 6))
    fits = found("10Tbit", 16, tokens=4096, memory=(adamw - 1) * PARAMETERS)
    assert fits.chosen.method.name == "Muon, all-reduce"
    said = f"AdamW, all-reduce needs {adamw * PARAMETERS / 1e9:.3g} GB without the activations"
    assert said in fits.reasons[1]
    fits = found("1Gbit", 16, tokens=4096, memory=(demo_scaled - 1) * PARAMETERS)
    assert fits.chosen.method.name == "demo_muon, delayed"
    fits = found("10Mbit", 16, latency=0.02, memory=(of_model + 3 * size + 7) * PARAMETERS)
    assert fits.chosen.method.name.startswith("SparseLoCo")
    assert not any("param_specs" in warning for warning in fits.warnings)
    none = found("1Gbit", 16, memory=(demo_muon - 1) * PARAMETERS)
    assert none.chosen.method.name == "demo_muon, delayed"
    given = (demo_muon - 1) * PARAMETERS / 1e9
    assert f"more than {given:.3g} GB. Give each worker more devices" in none.warnings[-1]


def states_of(method, params):
    made = {"optax": optax, "demo_optax": demo_optax, "rate": 1e-3}
    lines = [x for x in method.code.splitlines() if "SwarmWorker" not in x]
    exec("\n".join(lines), made)
    over_axis = jax.vmap(made["tx"].init, axis_name="data", axis_size=8, in_axes=None)
    return jax.tree.leaves(jax.eval_shape(over_axis, params))


@pytest.mark.parametrize(
    "method", [*methods.methods(128), *methods.methods_in_swarm()], ids=lambda method: method.name
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_method_has_the_state_of_its_optimizer(method, dtype):
    params = {"w": jax.ShapeDtypeStruct((1920, 2048), dtype)}  # thirty blocks in a column
    found = sum(x.size * x.dtype.itemsize for x in states_of(method, params)) / 8
    (x,) = params.values()
    # A delay keeps an outbox, and two phases 4 bytes a parameter and worker.
    expected = method.state + method.moments * x.dtype.itemsize
    assert expected - 0.01 <= found / x.size <= expected + 1


@pytest.mark.parametrize(("link", "back"), [("1Gbit", 512), ("100Mbit", 256), ("90Mbit", 128)])
def test_owners_of_many_workers_send_as_many_coefficients_back_as_the_link_allows(link, back):
    chosen = choose(link, 64).chosen
    assert chosen.method.setting[1].inner.topk_back == back
    assert f"topk_back={back}" in chosen.method.code
    assert chosen.time.exchange <= 2
    assert (
        choose(link, 16).chosen.method.row != "D" or "=128" in choose(link, 16).chosen.method.code
    )


def test_owners_never_send_so_much_back_that_an_all_gather_would_be_shorter():
    found = choose("398Mbit", 17, latency=0.02)
    steps = {candidate.method.name: candidate.time.step for candidate in found.candidates}
    assert found.chosen.method.row == "D"
    assert found.chosen.time.step <= steps["demo_muon, delayed"]


def test_where_no_round_is_fast_the_shortest_step_is_taken():
    slowest = choose("1Mbit", 16)
    rounds = [c for c in slowest.candidates if c.method.row == "E"]
    assert slowest.chosen == min(rounds, key=lambda c: c.time.step)
    assert slowest.chosen.time.step > 2


def test_the_orthogonal_step_is_in_the_seconds():
    step = {c.method.name: c.time.step for c in choose("10Gbit", 8).candidates}
    assert step["demo_muon"] - step["demo_scaled"] == pytest.approx(5 * 1024 / TOKENS)


def test_a_number_of_parameters_counts_as_parameters_of_this_number():
    by_number, by_shapes = choose("100Mbit", 16), choose("100Mbit", 16, params=SHAPES)
    for one, other in zip(by_number.candidates, by_shapes.candidates, strict=True):
        assert one.time.step == pytest.approx(other.time.step, rel=1e-3)
    assert by_number.chosen.method == by_shapes.chosen.method
    assert choose("100Mbit", 16, params=np.int64(PARAMETERS)) == by_number


def warnings(link, **options):
    return " ".join(choose(*link, **options).warnings)


def test_thin_evidence_is_said():
    small = {"params": {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)}}
    assert warnings(("10Mbit", 8), **small) == ""
    assert "29M parameters. The loss is that of a model of 1.1M" in warnings(("10Gbit", 8))
    assert "more than 64 workers" in warnings(("1Gbit", 65))
    assert "that of 8 workers, not of 32" in warnings(("1Gbit", 32), tokens=4096)
    assert "The loss is that of one seed" in warnings(("10Mbit", 16))
    assert "batches as large as each worker can take" in warnings(("10Mbit", 16))
    assert "in another way (all-gather)" in warnings(("100Mbit", 16), tokens=4096)


def test_the_losses_in_the_package_are_what_the_studies_found():
    found = tables.losses(study.read(), methods.read_losses())
    assert methods.LOSSES.read_text() == found, "run python -m benchmarks.quality write"


def test_a_measurement_without_a_result_is_refused():
    named = {"methods": {"demo_muon": [dict(study="final", method="DeMo-Lion", differs="")]}}
    with pytest.raises(ValueError, match=r"'DeMo-Lion' of the study 'final' has no result"):
        tables.losses(study.read(), named)


def test_the_page_has_what_is_chosen():
    assert pages.outdated(choice_tables.PAGES, choice_tables.KIND, choice_tables.table) == [], (
        "run python -m tests.choice_tables"
    )
    rows = [line.split(" | ") for line in PAGE.splitlines() if re.match(r"\| \d+ .bit/s", line)]
    for (_, *cells, _), bandwidth in zip(rows, choice_tables.LINKS.values(), strict=True):
        for cell, workers in zip(cells, choice_tables.WORKERS, strict=True):
            assert cell.startswith(f"**{row_by_hand(bandwidth, workers, 1e-3)}** ")
    found = methods.read_losses()
    largest, most = f"{found['largest_model'] / 1e6:.0f}M", found["most_workers"]
    assert f"The largest has {largest} parameters, and the most workers are {most}" in PAGE


ALL = methods.methods(topk_back=128)
BY_NAME = {method.name: method for method in ALL}
IN_SWARM = {method.name: method for method in methods.methods_in_swarm()}


def test_methods_have_measurements_by_their_names():
    measured = methods.read_losses()["methods"]
    assert list(BY_NAME | IN_SWARM) == list(measured) and all(measured.values())


SMALL = {"w": jax.ShapeDtypeStruct((256, 128), jnp.float32)}


def packets(**options):
    """What each method sends in one exchange of four workers."""
    choice = choose("1Gbit", 4, params=SMALL, dtype="float32", **options)
    return {candidate.method.name: candidate.time.packet for candidate in choice.candidates}


@pytest.mark.parametrize("name", [slow(x) if "k=512" in x else x for x in BY_NAME])
def test_lines_for_an_optax_loop_send_what_was_counted(name):
    method = BY_NAME[name]
    names = {"optax": optax, "demo_optax": demo_optax, "rate": 1e-3}
    exec(method.code, names)
    sent = demo_optax.packet_bytes(names["tx"], SMALL, workers=4)
    participants = 0 if method.setting else 4  # bytes of their number
    assert sent - packets()[name] == participants
    assert all(len(line) <= 96 for line in method.code.splitlines())


def trainer_of(method):
    """The trainer's configuration by a method's settings, and the compression that it makes."""
    config = from_command_line(None, [*shlex.split(method.flags), "--learning-rate", "0.003"])
    require_sensible(config)
    assert (config.local_steps or 1) == method.local_steps
    made = setup.compression(config)
    if method.row == "E":  # what SparseLoCo makes of it
        made = dataclasses.replace(made, transform="identity")
    return config, made


@pytest.mark.parametrize("name", [name for name, method in BY_NAME.items() if method.flags])
def test_settings_for_the_trainer_send_what_was_counted(name):
    method = BY_NAME[name]
    config, made = trainer_of(method)
    if method.setting:
        unlimited = setup.exchange(dataclasses.replace(config, norm_limit=None))
        assert (made, unlimited) == method.setting


@pytest.mark.parametrize("name", IN_SWARM)
def test_lines_and_settings_for_a_swarm_send_what_was_counted(name, tmp_path):
    method = IN_SWARM[name]
    member = Member(ObjectStore(str(tmp_path)), "paris")
    given = dict(loss_fn=swarms.loss_fn, mesh=swarms.mesh_of_worker(0), member=member, rate=1e-3)
    names = {"optax": optax, "demo_optax": demo_optax} | given
    exec(method.code, names)
    names["worker"].close()
    compression, exchange = method.setting
    assert names["worker"].delay == isinstance(exchange, demo_optax.Delayed)
    assert names["tx"].compression == compression and names["tx"].exchange.axis_name is None
    assert accounting.packet_bytes(compression, SMALL) == packets(swarm=True)[name]
    assert names["tx"].steps_per_round == (method.local_steps if method.row == "E" else None)
    assert all(len(line) <= 96 for line in method.code.splitlines())
    config, made = trainer_of(method)
    assert made == compression and setup.delay(config) == names["worker"].delay


def by_swarm(bandwidth, workers=8, **options):
    return choose(bandwidth, workers, latency=0.04, swarm=True, **options)


@pytest.mark.parametrize(
    ("bandwidth", "options", "row", "name"),
    [
        ("10Gbit", {}, "B", "demo_muon"),
        ("10Gbit", {"memory": 17 * PARAMETERS}, "B", "demo_muon"),
        ("1Gbit", {}, "C", "demo_muon, delayed"),
        ("100Mbit", {}, "C", "demo_muon, delayed"),
        ("80Mbit", {"workers": 16}, "E", "SparseLoCo k=512, delayed"),
        ("10Mbit", {}, "E", "SparseLoCo k=64, delayed"),
    ],
)
def test_a_swarm_gets_what_it_can_carry(bandwidth, options, row, name):
    choice = by_swarm(bandwidth, **options)
    assert (choice.chosen.method.row, choice.chosen.method.name) == (row, name)
    assert [c.method.name for c in choice.candidates] == list(IN_SWARM)
    assert not re.search("dense|two phases", choice.reasons[0])


def test_a_worker_of_a_swarm_writes_its_packet_before_it_reads_those_of_others():
    for workers, upload in (1, None), (2, None), (8, "10Mbit"):
        options = dict(upload=bits(upload)) if upload else {}
        for candidate in by_swarm("100Mbit", workers=workers, **options).candidates:
            time, steps = candidate.time, candidate.method.local_steps
            writing = 8 * time.packet / (1e7 if upload else 1e8)
            reading = 8 * time.packet * (workers - 1) / 1e8
            np.testing.assert_allclose(time.transfer, (writing + reading) / steps)


def test_snapshots_that_are_due_too_often_are_told():
    (told,) = [x for x in by_swarm("10Mbit").warnings if x.startswith("A snapshot")]
    seconds = 16 * PARAMETERS / 1e7  # in bfloat16
    assert f"takes {seconds:,.0f} s to write" in told
    every, rounds = map(int, re.search(r"every (\d+), or .*=(\d+)", told).groups())
    assert every == 30 * rounds and every * by_swarm("10Mbit").chosen.time.step >= 4 * seconds
    assert "snapshot" not in " ".join(by_swarm("10Gbit").warnings)


def test_what_a_candidate_does_not_show_is_told():
    for dtype in "bfloat16", "float32":
        choice = choose("3600Gbit", 8, tokens=2000, dtype=dtype)
        assert choice.chosen.method.name == "AdamW, all-reduce"
        assert ("give dtype float32" in " ".join(choice.warnings)) == (dtype == "bfloat16")
    with_memory = " ".join(choose("1Gbit", 8, memory=80e9).warnings)
    assert "for its times and memory give dtype float32" in with_memory


def test_the_latency_of_a_swarm_is_that_of_four_requests():
    waiting = {
        workers: [c.time.waiting for c in by_swarm("1Gbit", workers=workers).candidates[::6]]
        for workers in (1, 2, 8, 64)
    }
    for found in waiting.values():
        np.testing.assert_allclose(found, [4 * 0.04, 4 * 0.04 / 30])


def test_rounds_of_a_swarm_travel_during_the_next_round():
    fast, slow = (by_swarm(link).candidates[-1] for link in ("100Mbit", "1Mbit"))
    assert fast.time.step == 1.0 > fast.time.exchange > 0
    assert slow.time.step == slow.time.exchange > 2.0
    rounds = " ".join(by_swarm("1Mbit").warnings)
    assert f"for about {math.ceil(30 * slow.time.exchange)} steps, and no run has" in rounds
    assert "A round lasts" not in " ".join(by_swarm("20Mbit").warnings)


def test_rates_are_those_of_the_runs_but_for_muon():
    for method in [*ALL, *IN_SWARM.values()]:
        loss = method.loss(workers=8)
        if method.name != "Muon, all-reduce":
            assert loss.rate == method.rate


def test_losses_are_those_of_the_closest_number_of_workers():
    found = [BY_NAME["demo_muon"].loss(n).workers for n in (1, 22, 23, 999)]
    assert found == [8, 8, 64, 64]


def test_an_estimate_of_the_compute_is_six_flops_for_each_parameter_and_token():
    seconds = accounting.estimate_compute_time(10**9, 10**6, flops=1e15)
    assert seconds == pytest.approx(6e15 / 0.4e15)


def test_the_trainer_knows_the_same_peaks():
    for peak in set(utilization.PEAK_FLOPS.values()):
        assert peak in devices.PEAK_FLOPS.values()

"""The command `demo-optax`: what it prints, and what it says when it refuses."""

import argparse
import contextlib
import importlib
import io
import pathlib
import re
import shlex
import sys
import textwrap
import tomllib

import jax
import jax.numpy as jnp
import optax
import pytest

import demo_optax
from benchmarks import hlo
from demo_optax import Compression, accounting
from demo_optax._src.commands import quantities
from demo_optax._src.commands.main import main
from demo_optax.swarm import Member, MembersOnly, ObjectStore
from lm.config import from_command_line
from lm.validation import require_sensible

ROOT = pathlib.Path(__file__).parents[1]
CHOOSE = (
    "choose --params 300M --workers 16 --bandwidth 100Mbit --latency 20ms --compute-time 1s "
    "--batch-tokens 65536 --width 1024"
)
BYTES = "bytes --preset 300m --topk 8 --value-coding int4 --workers 64"


OPEN = "open: whoever may write to the place may take part"


@pytest.fixture
def printed(capsys):
    """What a command line prints."""

    def run(words: str) -> str:
        main(shlex.split(words))
        return capsys.readouterr().out

    return run


def test_the_console_script_is_this_command():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["demo-optax"].partition(":")
    assert getattr(importlib.import_module(module), name) is main


def test_choose_marks_a_method_and_gives_its_lines(printed):
    shown = printed(CHOOSE)
    choice = accounting.choose(300_000_000, 16, 1e8, 0.02, 1.0, 65_536, 1024)
    (marked,) = [line for line in shown.splitlines() if line.startswith("  > ")]
    assert choice.chosen.method.name in marked
    assert f"{choice.chosen.time.step:.2f}" in marked and "-0.021 ± 0.004" in marked
    for candidate in choice.candidates:
        assert f"{candidate.method.row} {candidate.method.name} " in shown
    assert all(f"    {line}" in shown for line in choice.chosen.method.code.splitlines())
    assert "rate = 0.000375  # or the best rate of your AdamW" in shown
    flags = f"{choice.chosen.method.flags} --learning-rate 0.000375"
    assert f"    python examples/train_lm.py {flags}" in shown
    assert all(f"Warning: {warning}" in shown for warning in choice.warnings)
    assert all(reason in shown for reason in choice.reasons)


PRINTED = {
    CHOOSE.replace("100Mbit", "400Gbit").replace("20ms", "10us"): [
        "Take A: Muon, all-reduce.",
        "The trainer, examples/train_lm.py, has no settings for it.",
        "rate = 0.00075  # or 2 times the best rate of your AdamW",
    ],
    f"{CHOOSE} --memory 4GB": [
        "needs 4.8 GB without the activations, more than 4 GB.",
        "a worker needs 0.6 GB of parameters, 0.6 GB of gradients, 1.8 GB of state, 1.8 GB of temp",
    ],
    f"{CHOOSE} --dtype bfloat16": ["AdamW, all-reduce 91.60 1,125.0 4.2"],
    f"{CHOOSE} --dtype float32": ["AdamW, all-reduce 181.60 2,250.0"],
    f"{CHOOSE} --swarm": [
        "worker = SwarmWorker(loss_fn, tx, mesh, member, delay=1)",
        "python examples/train_lm.py --swarm s3://bucket/run --worker paris --opt",
        "docs/how_to/swarm.md shows how to make loss_fn, mesh and member.",
    ],
    f"{BYTES} --bandwidth 1Gbit": [
        "319,946,752 parameters in 65 tensors",
        "1,260,032 bytes a step",
    ],
}


@pytest.mark.parametrize("words", PRINTED)
def test_what_is_printed_of_a_line(words, printed):
    shown = " ".join(printed(words).split())
    assert [text for text in PRINTED[words] if " ".join(text.split()) not in shown] == []
    if "--swarm" in words:
        assert not re.search("two phases|fragments|axis", shown)


SITES = (
    "choose --params 300M --sites 2 --nodes-per-site 2 --devices 2 --bandwidth 1Gbit "
    "--latency 10ms --batch-tokens 65536 --width 1024"
)


def test_choose_estimates_the_compute_and_says_what_it_would_take_otherwise(printed):
    of_h100 = accounting.estimate_compute_time(300_000_000, 65_536, 8 * 989e12)
    without = CHOOSE.replace("--compute-time 1s", "--devices 8")
    shown = printed(f"{without} --device h100")
    assert (
        f"{1e3 * of_h100:.4g} ms of compute, estimated at 40% of the peak of 8 device(s)" in shown
    )
    for factor in (0.5, 1, 2):
        link = 300_000_000, 16, 1e8, 0.02, factor * of_h100
        method = accounting.choose(*link, 65_536, 1024).chosen.method
        before = {0.5: "half of the estimate, take ", 1: "Take ", 2: "if double, "}[factor]
        assert f"{before}{method.row}: {method.name}" in shown
    assert printed(f"{without} --flops 989TFLOPS") == shown
    assert "estimate" not in printed(CHOOSE)


def test_lines_for_two_sites_send_only_a_packet_between_them(printed):
    shown = printed(f"{SITES} --compute-time 1s")
    lines = textwrap.dedent(shown.split("AdamW\n")[-1].split("\n\n")[0])
    params = {"w": jnp.zeros((256, 128)), "b": jnp.zeros(128)}
    loss_fn = lambda params, x: jnp.mean((x @ params["w"] + params["b"][None] - 1) ** 2)  # noqa: E731
    made = {"jax": jax, "demo_optax": demo_optax, "rate": 1e-3}
    made |= {"params": params, "loss_fn": loss_fn}
    exec(lines, made)
    batch, mesh = jnp.ones((16, 256)), made["mesh"]
    program = made["step"].lower(params, made["opt_state"], batch).compile().as_text()
    crossing = [x for x in hlo.collectives(program) if x.crosses(mesh, "site")]
    sent = demo_optax.packet_bytes(made["tx"], params, "site", mesh, made["specs"])
    assert [x.kind for x in crossing] == ["all-gather"] and sent < 4 * 256 * 128 / 8
    assert crossing[0].operand_bytes * mesh.size // 2 == sent
    trainer = shown.split("examples/train_lm.py")[1].partition("#")[0].replace("\\\n", " ")
    config = from_command_line(None, shlex.split(trainer.replace("HOST:PORT", "10.8.0.1:7007")))
    require_sensible(config)
    assert (config.fsdp, config.num_processes) == (4, 4)
    flags = "--fsdp 4 \\\n        --coordinator HOST:PORT --num-processes 4 --process-id 0"
    assert "demo_muon" in lines and flags in shown


def test_lines_for_two_sites_send_a_dense_gradient_once(printed):
    shown = printed(f"{SITES.replace('1Gbit', '10Tbit').replace('10ms', '1us')} --compute-time 1s")
    assert "Take A: Muon, all-reduce." in shown
    lines = textwrap.dedent(shown.split("AdamW\n")[-1].split("\n\n")[0])
    params = {"w": jnp.zeros((256, 128))}
    made = {"jax": jax, "demo_optax": demo_optax, "optax": optax, "rate": 1e-3}
    made |= {"params": params, "loss_fn": lambda params, x: jnp.mean((x @ params["w"]) ** 2)}
    exec(lines, made)
    sent = demo_optax.packet_bytes(made["tx"], params, "site", made["mesh"], made["specs"])
    assert sent == pytest.approx(4 * 256 * 128, rel=0.01)


def test_choose_says_what_crosses_the_uplink_of_a_site(printed):
    shown = printed(f"{SITES} --compute-time 1s")
    cells = [re.split(r"\s{2,}", line.strip()) for line in shown.splitlines()]
    rows = {name: sizes for name, *sizes in cells}
    site, node = map(float, rows["demo_muon"])
    assert node == pytest.approx(3 * site, rel=0.01)
    assert rows["AdamW, all-reduce"] == ["600.00", "900.00"]
    rounds = printed(f"{SITES.replace('1Gbit', '1Mbit')} --compute-time 1s")
    assert "specs = None" in rounds and 'fragments=30, axis_name="site"' in rounds
    assert "examples/train_lm.py, has no settings" in rounds
    swarm = printed(f"{SITES} --compute-time 1s --swarm")
    assert "uplink" not in swarm and "2 workers with" in swarm


def test_bytes_knows_every_exchange(printed):
    shown = printed(f"{BYTES} --exchange two-phase --topk-back 16 --delay 1")
    exchange = demo_optax.Delayed(demo_optax.TwoPhase("data", topk_back=16))
    setting = Compression(topk=8, value_coding="int4"), exchange
    time = accounting.step_times(accounting.preset_shapes("300m"), setting, 64, 1e9)["DeMo"]
    assert f"Each of 64 workers gets {time.wire:,} bytes a step" in shown


COMMAND_LINES = [
    CHOOSE,
    CHOOSE.replace("100Mbit", "400Gbit"),
    f"{CHOOSE} --swarm",
    BYTES,
    "bytes --help",
    "choose --help",
    "swarm --help",
    "--help",
]


@pytest.mark.parametrize("words", COMMAND_LINES)
def test_what_a_command_says_itself_can_be_printed_anywhere(words, capsys):
    with contextlib.suppress(SystemExit):
        main(shlex.split(words))
    assert capsys.readouterr().out.replace("±", "+-").isascii()


@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", r"\xe5bo \u6771\u4eac"), ("cp1252", r"åbo \u6771\u4eac")]
)
def test_names_that_a_terminal_cannot_print_are_printed_as_escapes(
    encoding, shown, tmp_path, monkeypatch
):
    Member(ObjectStore(str(tmp_path)), "åbo 東京").exchange(0, b"a packet")
    terminal = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(sys, "stdout", terminal)
    main(["swarm", str(tmp_path)])
    terminal.flush()
    assert terminal.buffer.getvalue().decode(encoding).count(shown) == 2


def test_a_terminal_without_plus_minus_gets_another_sign(monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    main(shlex.split(CHOOSE))
    terminal.flush()
    assert b" -0.021 +- 0.004 " in terminal.buffer.getvalue()


def test_swarm_looks_at_a_store_and_needs_its_package(printed, tmp_path, monkeypatch):
    (tmp_path / "slots/000").mkdir(parents=True)
    (tmp_path / "slots/000/000001").touch()
    assert printed(f"swarm {tmp_path}") == f"no step yet; joined: slot 0\n{OPEN}\n"
    monkeypatch.delitem(sys.modules, "demo_optax.swarm", raising=False)
    monkeypatch.delattr(demo_optax, "swarm", raising=False)
    for name in [name for name in sys.modules if name.startswith("demo_optax._src.swarm")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(SystemExit, match=r"error: a swarm needs obstore: in the source folder"):
        printed(f"swarm {tmp_path}")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("", "the following arguments are required: COMMAND"),
        ("bytes --topk 8", "required: --preset"),
        ("bytes --preset 300m --topk-back 8", "--topk-back 8 is for --exchange two-phase"),
        (
            "bytes --preset 300m --local-steps 4 --fragments 2 --delay 1",
            "fragments=2 come late anyway, so that local_steps takes no delay with them",
        ),
        (CHOOSE.replace("20ms", "20"), "argument --latency: '20' is no time: give a number and"),
        (CHOOSE.replace("16", "0"), "workers must be at least 1, not 0"),
        (CHOOSE.replace(" --width 1024", ""), "required: --width"),
        (SITES, "one of the arguments --compute-time --device --flops is required"),
        (f"{CHOOSE} --sites 2", "argument --sites: not allowed with argument --workers"),
        (f"{CHOOSE} --nodes-per-site 2", "--nodes-per-site 2 was given without --sites"),
        (f"{SITES} --flops 989", "'989' is no number of FLOPs a second"),
    ],
)
def test_a_command_says_what_is_wrong(words, complaint, capsys):
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(words))
    assert ended.value.code != 0
    assert complaint in f"{ended.value.code}{capsys.readouterr().err}"


@pytest.mark.parametrize(
    ("parse", "texts", "value"),
    [
        ("count", ["300M", "300m", "300 M", "300_000_000", "300,000,000", "3e8", "0.3B"], 3e8),
        ("count", ["1.3B", "1.3b", "1300M"], 1.3e9),
        ("bandwidth", ["100Mbit", "100 Mbit/s", "100mbit", "100Mb/s", "100Mbps", "0.1Gbit"], 1e8),
        ("bandwidth", ["10Gbit/s", "10 Gbits", "1e10bit"], 1e10),
        ("duration", ["20ms", "20 ms", "0.02s", "20000us", "20000 µs"], 0.02),
        ("duration", ["90s", "1.5min", "0.025h"], 90.0),
    ],
)
def test_quantities_are_read_kindly(parse, texts, value):
    assert [getattr(quantities, parse)(text) for text in texts] == [pytest.approx(value)] * len(
        texts
    )


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        ("count", "many", "'many' is no number: give a number and a unit .* as in 300M"),
        ("count", "-3", "'-3' is no number"),
        ("count", "1.5", "'1.5' is not a whole number"),
        ("count", "1e999", "'1e999' is not a whole number"),
        ("count", "1,00", "'1,00' is no number"),
        ("duration", "0,5s", "'0,5s' is no time"),
        ("bandwidth", "100", "'100' is no bandwidth: give a number and a unit .* as in 100Mbit"),
        (
            "bandwidth",
            "1.5MB/s",
            r"'1.5MB/s' counts bytes, but a bandwidth is in bits: give 12Mbit",
        ),
        ("duration", "1.2.3s", "'1.2.3s' is no time: give a number and a unit .* as in 20ms"),
        ("duration", "5 days", "'5 days' is no time"),
    ],
)
def test_quantities_that_cannot_be_read_are_refused(parse, text, message):
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        getattr(quantities, parse)(text)


@pytest.mark.parametrize("flags", ["--key paris.key", "--owner owner.pub", "--roster-at-least 2"])
def test_a_worker_gets_a_key_and_its_owner_or_neither(flags):
    config = from_command_line(None, ["--swarm", "run", *flags.split()])
    with pytest.raises(ValueError, match="give --key with the file of this worker's key and --own"):
        require_sensible(config)


@pytest.mark.parametrize("there", ["paris.key", "paris.pub"])
def test_a_key_replaces_no_file(there, printed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path(there).write_text("kept")
    said = f"error: The file '{there}' is there already: give another name, or take both files away"
    with pytest.raises(SystemExit, match=said):
        printed("key paris")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["kept"]


def test_keys_and_a_roster_are_made_and_changed(printed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("owner", "paris", "rome"):
        line = (shown := printed(f"key {name}")).splitlines()[0]
        assert f"{line}\n" == (tmp_path / f"{name}.pub").read_text()
        assert (tmp_path / f"{name}.key").read_text().split()[0] not in shown
    shown = printed("roster run --owner owner.key --add paris.pub rome.pub")
    (kept,) = pathlib.Path().glob("owner.key.*.roster")
    assert shown == f"roster 1 of run\n  slot 0: paris\n  slot 1: rome\ncopy: {kept}\n"
    assert printed("roster run --owner owner.key --without rome") == (
        f"roster 2 of run\n  slot 0: paris\ncopy: {kept}\n"
    )
    store = ObjectStore("run")
    second = store.get("roster.json")
    for again in "", " --add paris.pub":
        shown = printed(f"roster run --owner owner.key{again}")
        assert shown == "roster 2 of run\n  slot 0: paris\n"
    with pytest.raises(
        SystemExit, match=r"at 'run' yet \(members only, roster 2: paris\): give the"
    ):
        printed("swarm run --key paris.key --owner owner.pub")
    assert store.get("roster.json") == second == kept.read_bytes()
    Member(MembersOnly(store, "paris.key", "owner.pub")).exchange(0, b"a packet")
    for key in ("paris.key", "owner.key"):
        shown = printed(f"swarm run --key {key} --owner owner.pub")
        assert "members: paris" in shown and "members only, roster 2: paris" in shown
    assert printed("roster run --owner owner.key --add rome.pub").startswith("roster 3")
    store.put("roster.json", second)  # as whoever may write there can
    shown = printed("roster run --owner owner.key")
    assert shown.endswith(f"slot 0: paris\nroster 3 is missing there: put back {kept}\n")
    assert printed("roster run --owner owner.key --without rome").startswith("roster 4")
    for line, said in [
        ("swarm run --key paris.key", "the run at 'run' is for members only: give --key"),
        ("swarm run --owner owner.pub", "the run at 'run' is for members only: give --key"),
        (
            "swarm run --key rome.key --owner owner.pub",
            "the key of rome was taken out of the roster by number 4",
        ),
        ("roster run --owner rome.key", "has a roster that rome has not signed"),
        ("roster run --owner owner.pub", "'owner.pub' holds a public line: give .* owner.key."),
        ("roster new --owner owner.key --without rome", "new has no roster: give the place of one"),
    ]:
        with pytest.raises(SystemExit, match=said):
            printed(line)
    assert not pathlib.Path("new").exists()
    Member(ObjectStore("open"), "paris")
    for key, said in (
        ("owner.key", f"put back its copy: {kept}."),
        ("rome.key", "place of its own."),
    ):
        with pytest.raises(SystemExit, match=f"open has an open run, which stays open.*{said}$"):
            printed(f"roster open --owner {key} --add paris.pub")

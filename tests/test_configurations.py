"""Configurations that no run can be made of: one line on stderr, status 2, nothing written."""

import concurrent.futures
import math
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import pytest

from lm import config as configuration
from lm import rendezvous, train
from tests.ports import free_port
from tests.sweeps import slow

ROOT = pathlib.Path(__file__).parents[1]
TRAINER = ROOT / "examples" / "train_lm.py"
GOOD = ["--preset=nano", "--text", "text", "--batch-size=8", "--workers=8", "--sequence-length=16"]
SECONDS = 10

COUNTS = """
batch-size block-side checkpoint-every evaluate-every fsdp local-steps microbatches num-processes
sequence-length steps topk warmup-steps workers
"""
REAL_NUMBERS = "b2", "decay", "learning-rate", "weight-decay"
WORDS = [
    *[(f"--{flag} {n}", f"--{flag} {n} must") for flag in COUNTS.split() for n in (0, 10**13)],
    *[
        (f"--{flag} {x}", f"--{flag} {x} must")
        for flag in REAL_NUMBERS
        for x in (-0.1, math.nan, math.inf)
    ],
    ("--steps many", "--steps"),
    ("--steps 1 2", "2"),
    ("--stepz 3", "--stepz"),
    ("stray", "stray"),
    ("--optimizer sgd", "--optimizer"),
    ("--preset huge", "--preset"),
    ("--remat 1", "1"),
    ("--seed -1", "--seed -1 must"),
    (f"--seed {2**32}", f"--seed {2**32} must"),
    ("--topk 5 --block-side 2", "--topk 5 is more than a block has: give at most 4"),
    ("--warmup-steps 11 --steps 10", "--warmup-steps 11 would never end"),
    ("--batch-size 3", "--batch-size 3 cannot be divided among 8 devices"),
    ("--batch-size 1000000000", "--batch-size 1000000000 of --sequence-length 16 is more"),
    ("--microbatches 2", "a multiple of 16"),
    ("--workers 16 --batch-size 16", "there are 8 devices"),
    ("--fsdp 2 --batch-size 16", "there are 8 devices"),
    ("--vocabulary 1000000000", "--vocabulary 1000000000 must"),
    ("--sample-length -1", "--sample-length -1 must"),
    ("--optimizer demo --look-ahead 1", "is for demo-scaled and demo-muon"),
    ("--optimizer demo --b2 0.9", "--b2 0.9 is the decay of a second moment, and demo has none"),
    ("--b2 1", "--b2 1.0 must"),
    ("--local-steps 2", "--local-steps 2 are for --optimizer diloco"),
    ("--optimizer diloco --steps 30", "--steps 30 end inside a round of --local-steps 20"),
    ("--fragments 2", "--fragments 2 is for rounds of local steps"),
    ("--optimizer diloco --fragments 3", "--fragments 3 are exchanged one after another"),
    ("--optimizer sparseloco --fragments 20 --delay 1", "come late anyway"),
    ("--optimizer adamw --delay 1", "--delay 1 is for optimizers that send packets"),
    ("--optimizer adamw --transform identity", "--transform identity is for optimizers that send"),
    ("--optimizer diloco --block-side 32", "--block-side 32 is for optimizers that send packets"),
    ("--optimizer sparseloco --transform identity", "sends parts of parameters as they are"),
    (
        "--workers None --swarm run --steps 20 --optimizer diloco --transform dct",
        "--optimizer diloco sends parts of",
    ),
    ("--workers None --swarm run --transform random", "--transform random changes the basis"),
    ("--workers None --swarm run --worker a\x1bb", "--worker 'a\\x1bb' has characters that"),
    ("--optimizer diloco --exchange two-phase", "--exchange two-phase is for optimizers that"),
    ("--exchange two-phase --topk-back 5000", "--topk-back 5000 is more than a block has"),
    ("--topk-back 64", "--topk-back 64 is for what owners send back"),
    ("--value-coding-back int4", "--value-coding-back int4 is for what owners send back"),
    ("--steps 0 --seed -1", "--steps 0 must be greater than or equal to 1; --seed -1"),
    # Text and tokenizer
    ("--text missing", "--text missing cannot be read (FileNotFoundError: there is no"),
    ("--text empty.txt", "no text found in empty.txt"),
    ("--text binary", "no text found in binary"),
    ("--text short.txt", "more than the text has, 5 bytes"),
    ("--text text --sequence-length 512", "the text is too short"),
    ("--text /dev/zero", "no text found in /dev/zero"),
    ("--text garbage.arrayrecord", "--text garbage.arrayrecord"),
    ("--text empty.arrayrecord", "--text empty.arrayrecord"),
    ("--text no-dataset", "--text no-dataset"),
    ("--text broken-dataset", "--text broken-dataset"),
    ("--text s3:/bucket/text", "--text s3:/bucket/text cannot be read (ValueError: 's3:/bucket"),
    ("--text s3://bucket/text", "--text s3://bucket/text cannot be read (ImportError"),
    ("--text splits", "ValueError: it is a dataset of several splits"),
    ("--tokenizer short.txt", "--tokenizer short.txt is no file of the library tokenizers"),
    ("--tokenizer object.json", "object.json is no file of the library tokenizers"),
    ("--tokenizer no-end.json", "which must be 0"),
    ("--tokenizer s3://bucket/tokens.json", "s3:// needs s3fs"),
    ("--tokenizer empty.txt/tokenizer.json", "empty.txt is no folder"),
    # Folders
    (["--checkpoint-dir", ""], "--checkpoint-dir '' must"),
    ("--checkpoint-dir short.txt/run", "short.txt is no folder"),
    ("--checkpoint-dir s3://bucket/run", "s3:// needs s3fs"),
    ("--checkpoint-dir ftp://host/run", "other stores are not known"),
    ("--checkpoint-dir s3:/bucket/run", "--checkpoint-dir: 's3:/bucket/run' has a folder 's3:'"),
    ("--checkpoint-dir file://host/run", "--checkpoint-dir: 'file://host/run' names a folder on"),
    (["--log-dir", ""], "--log-dir '' must"),
    ("--log-dir gs://bucket/log", "--log-dir gs://bucket/log is a URL: give a folder"),
    ("--log-dir dangling", "dangling is no folder"),
    # Several processes
    ("--coordinator localhost", "belong together"),
    ("--coordinator localhost --num-processes 2 --process-id 1", "must be HOST:PORT"),
    ("--coordinator :1234 --num-processes 2 --process-id 1", "must be HOST:PORT"),
    ("--coordinator localhost:65536 --num-processes 2 --process-id 1", "must be HOST:PORT"),
    ("--coordinator localhost:1234 --num-processes 2 --process-id 2", "count from 0 to 1"),
    ("--coordinator localhost:1234 --num-processes 2 --process-id -1", "--process-id -1 must"),
    ("--peer-timeout 0", "--peer-timeout 0 must"),
    ("--config missing.yaml", "--config missing.yaml"),
    ("--config s3://bucket/run.yaml", "--config s3://bucket/run.yaml: it is a URL: give a file"),
    ("--config text", "--config text"),
]

FILES = [
    ("batch-size: 8\nbatch_size: 16", "sets batch_size 2 times"),
    ("config: given.yaml", "it names another file"),
    ("steps: many", "--steps"),
    ("steps: [1, 2]", "2"),
    ("steps: -3", "--steps -3 must"),
    ("1: 2", "--1"),
    ("remat: 7", "7"),
    ("checkpoint_dir: {a: b}", "checkpoint_dir must be a value"),
    ("- steps", "must hold lines like"),
    ("steps: 'unfinished", "quoted scalar"),
    ("steps: 1\n---\nsteps: 2", "but found another document"),
    ("steps: !!python/name:os.system", "could not determine a constructor"),
    ("steps: &a [*a]", "steps must be a value"),
]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder to be in, with text to train on and much that is none."""
    monkeypatch.chdir(tmp_path)
    for folder in ("text", "empty", "no-dataset", "broken-dataset", "splits/train"):
        (tmp_path / folder).mkdir(parents=True)
    for name, content in {
        "text/one.txt": "some text to learn from\n" * 200,
        "empty.txt": "",
        "short.txt": "short",
        "binary": b"\x89PNG\xff\0" * 99,
        "object.json": "{}",
        "no-end.json": '{"model": {"type": "BPE", "vocab": {}, "merges": []}}',
        "garbage.arrayrecord": b"garbage",
        "empty.arrayrecord": b"",
        "large.arrayrecord": b"garbage!" * 2**14,
        "no-dataset/dataset_info.json": "garbage",
        "broken-dataset/dataset_info.json": "{}",
        "broken-dataset/state.json": "{}",
        "splits/dataset_dict.json": "{}",
    }.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (tmp_path / "dangling").symlink_to("nowhere/at/all")
    return tmp_path


@pytest.fixture
def refused(files, capfd, monkeypatch):
    """A function of a command line that is refused: the one line that it leaves."""
    monkeypatch.setattr(train, "train", lambda run, signals: pytest.fail("it would have trained"))
    jax.devices()  # before the trainer asks for its own
    handler = signal.getsignal(signal.SIGTERM)

    def refusal(words):
        before, started = everything_in(files), time.monotonic()
        with pytest.raises(SystemExit) as ended:
            train.run_or_exit(configuration.from_command_line(None, words))
        assert time.monotonic() - started < SECONDS
        out, err = capfd.readouterr()
        assert (ended.value.code, out, err.count("\n")) == (2, "", 1), out + err
        assert everything_in(files) == before
        return err

    yield refusal
    signal.signal(signal.SIGTERM, handler)


def everything_in(folder):
    return {(str(path), path.lstat().st_mtime_ns) for path in folder.rglob("*")}


@pytest.mark.parametrize("words, message", WORDS)
def test_a_command_line_that_no_run_can_be_made_of(words, message, refused):
    words = words.split() if isinstance(words, str) else words
    assert message in refused([*GOOD, *words])


@pytest.mark.parametrize("content, message", FILES)
def test_a_file_that_no_run_can_be_made_of(content, message, files, refused):
    (files / "given.yaml").write_text(content)
    assert message in refused([*GOOD, "--config", "given.yaml"])


def test_what_all_the_others_change_is_accepted(files, monkeypatch):
    monkeypatch.setattr(train, "train", lambda run, signals: run.corpus.train.size)
    (files / "given.yaml").write_text("steps: 3\n")
    words = [*GOOD, "--config", "given.yaml", "--checkpoint-dir", "run/1", "--log-dir", "log"]
    assert train.run_or_exit(configuration.from_command_line(None, words)) > 1000


# Several processes


def process(number, of, port, host="127.0.0.1", seconds=1):
    return [
        *(*GOOD, "--coordinator", f"{host}:{port}", "--num-processes", str(of)),
        *("--process-id", str(number), "--peer-timeout", str(seconds)),
    ]


@pytest.mark.parametrize("host", ["127.0.0.1", "::"])
def test_a_port_in_use(host, refused):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as other:
        port = other.getsockname()[1]
        assert f"cannot listen on port {port} of --coordinator" in refused(process(0, 2, port))


@pytest.mark.parametrize("host", [slow("127.0.0.1"), "[::1]", "no-such-host.invalid"])
def test_a_first_process_that_never_comes(host, refused):
    port = free_port()
    shown = f"--coordinator {host}:{port} was not found"
    assert shown in refused(process(1, 2, port, host))


def test_another_service_at_the_coordinators_address(refused):
    other = socket.create_server(("127.0.0.1", 0))

    def answer_once():
        connection, _ = other.accept()
        connection.sendall(b"220 mail\r\n")
        connection.close()
        other.close()

    service = threading.Thread(target=answer_once)
    port = other.getsockname()[1]
    service.start()
    assert f"127.0.0.1:{port} was not found" in refused(process(1, 2, port))
    service.join()


def test_other_processes_that_never_come(refused):
    shown = refused(process(0, 4, free_port()))
    assert "of --num-processes 4, those with --process-id [1, 2, 3] did not come" in shown


def test_who_came_hears_who_did_not():
    address = f"127.0.0.1:{free_port()}"
    with concurrent.futures.ThreadPoolExecutor() as threads:
        runs = [threads.submit(rendezvous.meet, address, 3, number, 1) for number in (0, 1)]
    for run, error in zip(runs, (TimeoutError, ValueError), strict=True):
        with pytest.raises(error, match=r"those with --process-id \[2\] did not come"):
            run.result()


def test_processes_that_count_differently(capfd):
    address = f"127.0.0.1:{free_port()}"
    with concurrent.futures.ThreadPoolExecutor() as threads:
        runs = [threads.submit(rendezvous.meet, address, 2 + n, n, 60) for n in (0, 1)]
    for run in runs:
        with pytest.raises(ValueError, match=r"--num-processes is 2 for process 0, and 3 for proc"):
            run.result()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "words, message",
    [
        ("--distributed", "the processes cannot find each other"),
        slow("--steps 0", "--steps 0 must"),
    ],
)
def test_the_trainer_itself_refuses(words, message, files):
    command = [sys.executable, str(TRAINER), *GOOD, *words.split()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1), run
    assert message in run.stderr


def test_processes_that_meet_free_the_port():
    port = free_port()
    with concurrent.futures.ThreadPoolExecutor() as threads:
        runs = [
            threads.submit(rendezvous.meet, f"127.0.0.1:{port}", 3, number, 20)
            for number in range(3)
        ]
    assert [run.result() for run in runs] == [None, None, None]
    socket.create_server(("127.0.0.1", port)).close()

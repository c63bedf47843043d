"""The settings of a run, from the command line or a YAML file, and back to one."""

import contextlib
import dataclasses
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NoReturn, TypeVar

import tyro
import yaml
from pydantic import Field
from rich.console import Console

from demo_optax import Selection, TransformName, ValueCoding
from demo_optax.checkpoint import folder_of

from .model import PresetName
from .recipes import OptimizerName

WRONG = 2  # the exit status for settings that are wrong

Count = Annotated[int, Field(ge=1, lt=2**31)]
CountOrZero = Annotated[int, Field(ge=0, lt=2**31)]
Devices = Annotated[int, Field(ge=1, le=2**16)]
ExchangeName = Literal["all-gather", "two-phase"]


@dataclass(frozen=True)
class Config:
    config: Annotated[str, Field(min_length=1)] | None = None
    """YAML file with any of these settings: `steps: 300` sets --steps
    300. The command line overrides the file."""
    optimizer: OptimizerName = "demo-scaled"
    """demo-scaled: DeMo, each worker scales its gradients first. demo:
    DeMo, version 1. demo-muon: demo-scaled whose workers make their own
    gradients of matrices orthogonal first. demo-sgd, demo-adamw,
    demo-signum: decoupled momentum before other steps. diloco, sparseloco: each worker
    trains alone with AdamW; after each round the workers exchange their
    progress, dense or sparse. adamw: ordinary data parallelism with a
    dense all-reduce."""
    preset: PresetName = "tiny"
    """Size of the model: tiny has about 1M parameters and small 10M; the
    other two are the paper's. nano only tries out the machinery."""
    text: tuple[str, ...] = ()
    """Files, folders or URLs (gs://bucket/folder) of text to learn from.
    Also *.arrayrecord files of text, and folders that Hugging Face
    datasets were saved to. By default the sources of Python's standard
    library. Files of a URL are copied to a temporary folder first."""
    tokenizer: Annotated[str, Field(min_length=1)] | None = None
    """File of the library tokenizers, a path or a URL. If it does not
    exist, a tokenizer is learned from the text and saved there. With
    several hosts, all must see the same file: use a shared disk or a URL.
    By default every byte is a token."""
    vocabulary: Annotated[int, Field(gt=256, le=2**20)] = 4096
    """Number of tokens, if a tokenizer is learned."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype in which the model computes, by default the preset's.
    Parameters are float32."""
    remat: bool = False
    """Save memory: compute each layer's activations again in the backward
    pass."""
    scan_layers: bool = False
    """Compile one layer instead of all. Compiling is faster; steps are
    often a little slower."""
    workers: Devices | None = None
    """Number of DeMo workers in all processes. By default one on each
    accelerator, or 8 on virtual CPU devices."""
    simulate: Devices | None = None
    """Number of workers that share one device, a GPU or a CPU. With
    --workers instead, each has a device of its own."""
    fsdp: Devices = 1
    """Devices of each worker. They share its batch, and each holds a part
    of its parameters."""
    steps: Count = 600
    """Updates of the parameters."""
    batch_size: Count = 32
    """Sequences in one step, of all workers together, or in a swarm of this
    one. The default suits the preset tiny on a CPU."""
    sequence_length: Count = 64
    """Tokens in a sequence. The default suits the preset tiny on a
    CPU."""
    local_steps: Count | None = None
    """Steps in a round of diloco and sparseloco, by default 20. The
    held-out loss is that of the parameters after the last complete round."""
    merge: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Part of the way from the shared parameters that a worker keeps when
    the result of a round comes, for diloco and sparseloco. By default it
    keeps what it went since it sent its packet, and in a swarm with
    --delay 1 half of the way."""
    fragments: Count | None = None
    """Parts in which diloco and sparseloco exchange the progress of a round,
    one after another; a divisor of --local-steps. With as many as those,
    each step computes while one part is exchanged."""
    round_seconds: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Seconds of a round of diloco and sparseloco in a swarm, instead of
    --local-steps, so that workers of unequal speed need not wait for each
    other. Schedules and --steps still count --local-steps for a round."""
    microbatches: Count = 1
    """Parts into which each worker divides its sequences, to save
    memory."""
    learning_rate: Annotated[float, Field(gt=0, le=1e3)] | None = None
    """Highest learning rate. The rate warms up linearly, then falls along
    a cosine to a tenth. The default depends on the optimizer and is
    proportional to 1 / width. For demo-scaled and adamw it is 3e-3 * 128
    / width."""
    warmup_steps: Count | None = None
    """Steps of the warm-up, by default 50, and at most half of all
    steps."""
    decay: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Decay of the momentum; b1 of adamw. By default what suits the
    optimizer."""
    weight_decay: Annotated[float, Field(ge=0, le=1e3)] | None = None
    """Decoupled weight decay. By default what suits the optimizer."""
    b2: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Decay of the second moment, for optimizers that have one: adamw,
    diloco, sparseloco, demo-scaled, demo-muon and demo-adamw. By default
    what suits the optimizer."""
    topk: Count | None = None
    """Coefficients that are sent of each block, by default 32."""
    block_side: Annotated[int, Field(ge=1, le=2**12)] = 64
    """Elements per side of a block."""
    value_coding: ValueCoding | None = None
    """Coding of the values that are sent. By default sign for
    demo-scaled and demo-muon, float32 for demo, and int4 for the others.
    docs/explanation/bytes.md compares them."""
    transform: TransformName | None = None
    """Transform of the blocks, by default dct. The momentum is stored in
    its coefficients. diloco and sparseloco have none."""
    selection: Selection | None = None
    """Which coefficients are sent. topk: the largest. bins: the largest
    in each of --topk bins. The others follow from the step, so that no
    positions are sent (docs/reference/settings.md). By default bins for
    demo-scaled and demo-muon, and topk for the others."""
    exchange: ExchangeName = "all-gather"
    """all-gather: every worker receives all packets. two-phase: each
    worker averages a share of the blocks and sends the result to all.
    Then traffic hardly grows with the number of workers."""
    topk_back: Count | None = None
    """Coefficients of each block that are sent back in two phases, by
    default four times --topk."""
    value_coding_back: ValueCoding | None = None
    """Coding of the values that are sent back, by default that of
    --value-coding."""
    delay: Literal[0, 1] | None = None
    """1: exchange packets while the next step computes its gradient, or
    in a swarm during the next steps of a round. By default 1 for rounds
    in a swarm, otherwise 0."""
    look_ahead: Annotated[float, Field(ge=0, le=100)] | None = None
    """Each worker takes its gradient where its own momentum would lead,
    this many steps of the optimizer ahead. For demo-scaled and
    demo-muon. By default demo-muon takes 1, and 1.5 with a delay. 0: at
    the shared parameters."""
    norm_limit: Annotated[float, Field(ge=1, lt=float("inf"))] | None = 10.0
    """Largest norm of a worker's message, as a multiple of the median
    norm of all messages. It limits the damage that one broken worker can
    do. Ordinary runs never reach it. None: no limit."""
    swarm: Annotated[str, Field(min_length=1)] | None = None
    """Place where the workers of a swarm exchange packets: a folder that
    all see, file:///folder, s3://bucket/run, gs://bucket/run or
    az://container/run. This process is one worker. Others may come and
    go. --batch-size is that of this worker."""
    worker: Annotated[str, Field(min_length=1)] | None = None
    """Name of this worker in a swarm. Each needs a name of its own, and
    keeps it when it is started again. By default the host's name."""
    key: Annotated[str, Field(min_length=1)] | None = None
    """File of this worker's key, in a swarm for members only. The name of
    the worker is then that of the roster."""
    owner: Annotated[str, Field(min_length=1)] | None = None
    """File with the public line of the owner of a swarm for members only."""
    roster_at_least: Annotated[int, Field(ge=0)] = 0
    """Lowest number of a roster that this worker believes."""
    slots: Count = 16
    """Largest number of workers of a swarm at a time."""
    deadline: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Seconds for which a step of a swarm waits for workers that took part
    in the last one. By default three median steps or half a median round,
    at least 2 s."""
    min_workers: Count = 1
    """Workers of a swarm without which no step is taken."""
    snapshot_every: Count = 100
    """Steps between two snapshots of a swarm, from which new workers
    start. With rounds they are written at the end of one."""
    evaluate_every: Count = 100
    """Steps between two evaluations on held-out text. With each evaluation
    and each checkpoint goes a check that all workers hold the same
    parameters, bit by bit. Damage is repaired from the majority. Without a
    majority, the run ends."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the initial parameters and of the order of the text."""
    checkpoint_dir: Annotated[str, Field(min_length=1)] | None = None
    """Folder or gs:// URL for checkpoints. If it holds checkpoints, the
    run continues from the last one. With several hosts, all must see it.
    SIGTERM and SIGINT save and stop; a second SIGINT stops at once."""
    checkpoint_every: Count = 100
    """Steps between two checkpoints. The last three are kept."""
    log_checksums: bool = False
    """Whether a worker of a swarm logs a checksum of all parameters after
    each exchange, to compare with those of others. It takes time."""
    log_dir: Annotated[str, Field(min_length=1)] | None = None
    """Folder for config.yaml, for steps.jsonl with a line for each step,
    and for TensorBoard. TensorBoard also shows held-out losses and
    samples.
    Processes other than the first log their own workers in subfolders.
    Each worker of a swarm needs a folder of its own."""
    sample_length: CountOrZero = 0
    """Tokens of text that the trained model writes at the end, from nothing
    and after `def `."""
    coordinator: str | None = None
    """HOST:PORT of the first process, if there are several. Needs
    --num-processes and --process-id."""
    num_processes: Devices | None = None
    """Number of processes, one on each host."""
    process_id: CountOrZero | None = None
    """Number of this process, from 0."""
    distributed: bool = False
    """There are several processes, and JAX finds them itself: under
    SLURM, Kubernetes, or on a TPU pod."""
    peer_timeout: Annotated[int, Field(ge=1, le=10**6)] = 300
    """Seconds without progress after which a process considers the others
    lost, and ends."""

    def write(self, path: Path) -> None:
        """Writes a YAML file for ``--config``, without the settings of this process alone."""
        own = ("config", "coordinator", "num_processes", "process_id", "worker", "key")
        unset = {field.name for field in dataclasses.fields(self) if field.default is None}
        plain = {
            name: _plain(value)
            for name, value in dataclasses.asdict(self).items()
            if name not in own and not (value is None and name in unset)
        }
        path.write_text(yaml.safe_dump(plain, sort_keys=False))


def _plain(value):
    return list(value) if isinstance(value, tuple) else value


DEFAULT = Config()


def refuse(message: object) -> NoReturn:
    """Exits with one line on stderr."""
    line = " ".join(f"error: {message}".split())
    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    console.print(line, style="red", soft_wrap=True)
    sys.exit(WRONG)


C = TypeVar("C", bound=Config)


def from_command_line(
    description: str | None, words: Sequence[str] | None = None, default: C = DEFAULT
) -> C:
    """Settings from the command line; for others from its file, and then from the default."""
    words = list(sys.argv[1:] if words is None else words)
    config = _parsed(description, words, default)
    if config.config is None:
        return config
    try:
        words = from_file(config.config) + words
    except (OSError, ValueError, yaml.YAMLError) as error:
        refuse(f"--config {config.config}: {error}")
    return _parsed(description, words, default)


def _parsed(description: str | None, words: list[str], default: C) -> C:
    """Exits with the first sentence of the message that tyro would draw a box around."""
    drawn = io.StringIO()
    try:
        with contextlib.redirect_stderr(drawn):
            return tyro.cli(type(default), description=description, args=words, default=default)
    except SystemExit as ended:
        if not ended.code:
            raise
    _title, *rows = drawn.getvalue().splitlines()
    text = " ".join(row.strip("│╰ ") for row in rows).partition("──")[0]
    sentence = text.removeprefix("Error parsing ").partition("Got errors")[0].strip(". ")
    refuse(f"{sentence}. --help explains all settings.")


def from_file(place: str) -> list[str]:
    """Turns the settings of a YAML file into the words of a command line.

    Raises:
      OSError, ValueError, yaml.YAMLError: the file holds no settings.
    """
    if (path := folder_of(place)) is None:
        raise ValueError("it is a URL: give a file of this machine.")
    text = path.read_text()
    settings = yaml.safe_load(text) or {}
    if not isinstance(settings, dict):
        raise ValueError(f"it must hold lines like `steps: 300`, not {settings!r}.")
    names = [str(key.value).replace("-", "_") for key, _ in yaml.compose(text).value]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"it sets {name} {names.count(name)} times: leave one of them.")
    if "config" in names:
        raise ValueError("it names another file: give all settings in one.")
    return [word for name, value in settings.items() for word in _words(name, value)]


def _words(name: str, value) -> list[str]:
    flag = f"--{str(name).replace('_', '-')}"
    values = value if isinstance(value, list) else [value]
    if any(isinstance(x, (dict, list)) for x in values):
        raise ValueError(f"{name} must be a value or a list of values, not {value!r}.")
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [f"{flag}={value}"]

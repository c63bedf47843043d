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

from demo_optax.compression.selection import Selection
from demo_optax.compression.transforms import TransformName
from demo_optax.compression.values import ValueCoding

from .model import PresetName
from .recipes import OptimizerName

PROFILE_BEHIND = 10  # steps, the first of which compile and warm up
WRONG = 2  # the exit status of whatever a user may have set wrongly

Count = Annotated[int, Field(ge=1, lt=2**31)]
CountOrZero = Annotated[int, Field(ge=0, lt=2**31)]
Devices = Annotated[int, Field(ge=1, le=2**16)]
ExchangeName = Literal["all-gather", "two-phase"]


@dataclass(frozen=True)
class Config:
    config: Path | None = None
    """YAML file with any of these settings, `steps: 300` for --steps 300. What the command line
    says comes first."""
    optimizer: OptimizerName = "demo-scaled"
    """demo-scaled: DeMo of gradients that each worker scales. demo: DeMo as published. demo-sgd and
    the like: decoupled momentum before other steps. diloco, sparseloco: AdamW on each worker for
    itself, and at the end of each round an exchange, dense or sparse, of how far they came. adamw:
    ordinary data parallelism with a dense all-reduce."""
    preset: PresetName = "tiny"
    """Size of the model: about 1M (tiny) and 10M (small) parameters, or the paper's two; nano is
    for trying out the machinery."""
    text: tuple[Path, ...] = ()
    """Files or folders to learn from, *.arrayrecord files of text, or folders that Hugging Face
    datasets were saved to; by default the source of Python's standard library."""
    tokenizer: Path | None = None
    """File of the library tokenizers, learned from the text where it does not exist yet; with
    several hosts one that all of them see. By default every byte is a token."""
    vocabulary: Annotated[int, Field(gt=256, le=2**20)] = 4096
    """Tokens of a tokenizer that is yet to be learned."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """In which the model computes, by default the preset's; its parameters are float32."""
    remat: bool = False
    """Compute each layer's activations again on the way back, to save memory."""
    scan_layers: bool = False
    """Compile one layer instead of all: quicker to compile, often a little slower to run."""
    workers: Devices | None = None
    """DeMo workers, of all processes together; by default one on each accelerator, or 8 simulated
    ones on the CPU."""
    fsdp: Devices = 1
    """Devices of each worker, which share its batch and hold a part of its parameters each."""
    steps: Count = 600
    """Updates of the parameters."""
    batch_size: Count = 32
    """Sequences in one step, of all workers together. Like the next, chosen for tiny on a CPU."""
    sequence_length: Count = 64
    """Tokens in a sequence."""
    local_steps: Count | None = None
    """Steps of a round of diloco and sparseloco, by default 20. Held-out text is read by the
    parameters of the last round's end."""
    microbatches: Count = 1
    """Parts into which each worker cuts its sequences, to save memory."""
    learning_rate: Annotated[float, Field(gt=0, le=1e3)] | None = None
    """Highest learning rate, behind a linear warm-up and before a cosine to a tenth. By default
    what suits the optimizer on tiny, less in proportion for wider models."""
    warmup_steps: Count | None = None
    """Steps of the warm-up, by default 50; at most half of all."""
    decay: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Decay of the momentum, for adamw b1; by default what suits the optimizer."""
    weight_decay: Annotated[float, Field(ge=0, le=1e3)] | None = None
    """Decoupled weight decay; by default what suits the optimizer."""
    clip_norm: Annotated[float, Field(gt=0, le=1e9)] = 1.0
    """Largest norm of each worker's own gradient."""
    topk: Count | None = None
    """Coefficients that are sent of each block, by default 32."""
    block_side: Annotated[int, Field(ge=1, le=2**12)] = 64
    """Elements per side of a block."""
    value_coding: ValueCoding | None = None
    """Coding of the values that are sent, by default sign for demo-scaled, float32 for demo and
    int4 for the others; benchmarks/value_codings.py compares them."""
    transform: TransformName = "dct"
    """Of the blocks, in whose coefficients the momentum is stored."""
    selection: Selection | None = None
    """Which coefficients: topk the largest, bins the largest of each of --topk bins; the others are
    known to every worker from the step, so that their positions do not travel (docs/settings.md
    says when). By default bins for demo-scaled and topk for the others."""
    exchange: ExchangeName = "all-gather"
    """all-gather: every worker gets all packets. two-phase: each averages a share of the blocks and
    sends that to all, traffic that does not grow with the workers."""
    topk_back: Count | None = None
    """Coefficients of each block that are sent back in two phases, by default four times --topk."""
    value_coding_back: ValueCoding | None = None
    """How the values that are sent back travel, by default as --value-coding has it."""
    delay: Literal[0, 1] = 0
    """1: packets are exchanged while the next step computes its gradient."""
    norm_limit: Annotated[float, Field(ge=1, lt=float("inf"))] | None = 10.0
    """Largest norm of a worker's message, in medians of all workers' messages: what bounds one
    broken worker. Ordinary runs never reach it; None sets no limit."""
    evaluate_every: Count = 100
    """Steps between two evaluations on held-out text."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Of the parameters' start and of the order of the text."""
    checkpoint_dir: Annotated[str, Field(min_length=1)] | None = None
    """Folder or gs:// URL to save to, and to go on from if there is something in it. With several
    hosts one that all of them see. SIGTERM and SIGINT save and stop; a second SIGINT only stops."""
    checkpoint_every: Count = 100
    """Steps between two checkpoints."""
    keep_checkpoints: Count = 3
    """Checkpoints to keep, the latest."""
    check_replicas_every: Count = 100
    """Steps between two comparisons of the workers' parameters, bit by bit; damage is repaired
    from the majority, or ends the run where there is none."""
    log_dir: Path | None = None
    """Folder for config.yaml, for steps.jsonl with a line for each step, and for TensorBoard,
    which has the held-out losses and samples too. Of several processes, all but the first log
    their own workers to folders inside of it."""
    profile_steps: CountOrZero = 0
    """Steps to profile, behind the tenth of this start; for TensorBoard or Perfetto, in
    --log-dir."""
    sample_length: CountOrZero = 0
    """Tokens of a sample that the trained model writes behind each prompt, at the end."""
    prompts: tuple[str, ...] = ("", "def ")
    """What the samples begin with."""
    coordinator: str | None = None
    """HOST:PORT of the first process, where there are several; needs the next two."""
    num_processes: Devices | None = None
    """Processes in all, one on each host."""
    process_id: CountOrZero | None = None
    """Number of this process, from 0."""
    distributed: bool = False
    """Several processes that JAX finds itself: under SLURM, Kubernetes, or on a TPU pod."""
    peer_timeout: Annotated[int, Field(ge=1, le=10**6)] = 300
    """Seconds without progress after which other processes are given up for gone."""

    def write(self, path: Path) -> None:
        """As a YAML file that ``--config`` takes, without what only this process is."""
        own = ("config", "coordinator", "num_processes", "process_id")
        settings = dataclasses.asdict(self).items()
        plain = {
            name: _plain(value) for name, value in settings if value is not None and name not in own
        }
        path.write_text(yaml.safe_dump(plain, sort_keys=False))


def _plain(value):
    if isinstance(value, tuple):
        return [_plain(x) for x in value]
    return str(value) if isinstance(value, Path) else value


DEFAULT = Config()


def refuse(message: object) -> NoReturn:
    """Leaves with one line on stderr."""
    line = " ".join(f"error: {message}".split())
    Console(stderr=True).print(line, style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(WRONG)


C = TypeVar("C", bound=Config)


def from_command_line(
    description: str | None, words: Sequence[str] | None = None, default: C = DEFAULT
) -> C:
    """The settings of the command line, in front of those of its file, and these of the default."""
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
    """Leaves with the first sentence of what tyro would draw a box around."""
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


def from_file(path: Path) -> list[str]:
    """A YAML file's settings as the words of a command line, which are checked like any other.

    Raises:
      OSError, ValueError, yaml.YAMLError: the file holds no settings.
    """
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

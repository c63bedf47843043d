"""The settings of a run, from the command line or a YAML file, and back to one."""

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
import yaml

from demo_optax.compression.values import ValueCoding

from .model import PresetName
from .recipes import OptimizerName

PROFILE_BEHIND = 10  # steps, the first of which compile and warm up


@dataclass(frozen=True)
class Config:
    config: Path | None = None
    """YAML file with any of these settings, `steps: 300` for --steps 300. What the command line
    says comes first."""
    optimizer: OptimizerName = "demo"
    """demo: DeMo with locally scaled gradients. demo-paper: DeMo as published. demo-*: decoupled
    momentum before other steps. adamw: ordinary data parallelism with a dense all-reduce."""
    preset: PresetName = "tiny"
    """Size of the model: about 1M (tiny) and 10M (small) parameters, or the paper's two; nano is
    for trying out the machinery."""
    text: tuple[Path, ...] = ()
    """Files or folders to learn from, *.arrayrecord files of text, or folders that Hugging Face
    datasets were saved to; by default the source of Python's standard library."""
    tokenizer: Path | None = None
    """File of the library tokenizers, learned from the text where it does not exist yet; with
    several hosts one that all of them see. By default every byte is a token."""
    vocabulary: int = 4096
    """Tokens of a tokenizer that is yet to be learned."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """In which the model computes, by default the preset's; its parameters are float32."""
    remat: bool = False
    """Compute each layer's activations again on the way back, to save memory."""
    scan_layers: bool = False
    """Compile one layer instead of all: quicker to compile, often a little slower to run."""
    workers: int | None = None
    """DeMo workers, of all processes together; by default one on each accelerator, or 8 simulated
    ones on the CPU."""
    fsdp: int = 1
    """Devices of each worker, which share its batch and hold a part of its parameters each."""
    steps: int = 600
    """Updates of the parameters."""
    batch_size: int = 32
    """Sequences in one step, of all workers together. Like the next, chosen for tiny on a CPU."""
    sequence_length: int = 64
    """Tokens in a sequence."""
    microbatches: int = 1
    """Parts into which each worker cuts its sequences, to save memory."""
    learning_rate: float | None = None
    """Highest learning rate, behind a linear warm-up and before a cosine to a tenth. By default
    what suits the optimizer on tiny, less in proportion for wider models."""
    warmup_steps: int = 50
    """Steps of the warm-up."""
    decay: float | None = None
    """Decay of the momentum, for adamw b1; by default what suits the optimizer."""
    weight_decay: float | None = None
    """Decoupled weight decay; by default what suits the optimizer."""
    clip_norm: float = 1.0
    """Largest norm of each worker's own gradient."""
    topk: int = 32
    """Coefficients that are sent of each block."""
    block_side: int = 64
    """Elements per side of a block."""
    value_coding: ValueCoding = "int4"
    """Coding of the values that are sent; benchmarks/value_codings.py compares them."""
    evaluate_every: int = 100
    """Steps between two evaluations on held-out text."""
    seed: int = 0
    """Of the parameters' start and of the order of the text."""
    checkpoint_dir: str | None = None
    """Folder or gs:// URL to save to, and to go on from if there is something in it. With several
    hosts one that all of them see. SIGTERM and SIGINT save and stop; a second SIGINT only stops."""
    checkpoint_every: int = 100
    """Steps between two checkpoints."""
    keep_checkpoints: int = 3
    """Checkpoints to keep, the latest."""
    check_replicas_every: int = 100
    """Steps between two comparisons of the workers' parameters, bit by bit; damage is repaired
    from the majority, or ends the run where there is none."""
    log_dir: Path | None = None
    """Folder for config.yaml, for steps.jsonl with a line for each step, and for TensorBoard,
    which has the held-out losses and samples too. Of several processes, all but the first log
    their own workers to folders inside of it."""
    profile_steps: int = 0
    """Steps to profile, behind the tenth of this start; for TensorBoard or Perfetto, in
    --log-dir."""
    sample_length: int = 0
    """Tokens of a sample that the trained model writes behind each prompt, at the end."""
    prompts: tuple[str, ...] = ("", "def ")
    """What the samples begin with."""
    coordinator: str | None = None
    """HOST:PORT of the first process, where there are several; needs the next two."""
    num_processes: int | None = None
    """Processes in all, one on each host."""
    process_id: int | None = None
    """Number of this process, from 0."""
    distributed: bool = False
    """Several processes that JAX finds itself: under SLURM, Kubernetes, or on a TPU pod."""
    peer_timeout: int = 300
    """Seconds without progress after which other processes are given up for gone."""

    def require_sensible(self, devices: int) -> None:
        """Raises ValueError for what no run could be made of."""
        for name in (
            "steps",
            "batch_size",
            "sequence_length",
            "microbatches",
            "learning_rate",
            "warmup_steps",
            "clip_norm",
            "evaluate_every",
            "fsdp",
            "checkpoint_every",
            "keep_checkpoints",
            "check_replicas_every",
            "peer_timeout",
            "vocabulary",
        ):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"--{name.replace('_', '-')} must be more than 0, not {value}.")
        if self.vocabulary <= 256:
            raise ValueError(
                f"--vocabulary {self.vocabulary} holds not even the 256 bytes and the end of a "
                "document: give at least a few hundred more, 4096 say."
            )
        for name in ("profile_steps", "sample_length"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"--{name.replace('_', '-')} must not be less than 0: {getattr(self, name)}."
                )
        if self.profile_steps and not self.log_dir:
            raise ValueError("--profile-steps needs a --log-dir to write the profile to.")
        if self.profile_steps and self.steps < PROFILE_BEHIND + self.profile_steps:
            raise ValueError(
                f"--profile-steps {self.profile_steps} follow {PROFILE_BEHIND} others: --steps "
                f"must be at least {PROFILE_BEHIND + self.profile_steps}, not {self.steps}."
            )
        if self.scan_layers and self.optimizer == "demo-muon":
            raise ValueError(
                "--scan-layers makes one array of all layers' matrices, which --optimizer "
                "demo-muon would not take for matrices: leave one of the two."
            )
        parts = devices * self.microbatches
        if self.batch_size % parts:
            raise ValueError(
                f"--batch-size {self.batch_size} cannot be divided among {devices} devices x "
                f"{self.microbatches} microbatches: choose a multiple of {parts}."
            )

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


def from_command_line(
    description: str | None, words: Sequence[str] | None = None, default: Config = DEFAULT
) -> Config:
    """The settings of the command line, in front of those of its file, and these of the default."""
    words = list(sys.argv[1:] if words is None else words)
    config = tyro.cli(Config, description=description, args=words, default=default)
    if config.config is None:
        return config
    words = from_file(config.config) + words
    return tyro.cli(Config, description=description, args=words, default=default)


def from_file(path: Path) -> list[str]:
    """A YAML file's settings as the words of a command line, which are checked like any other."""
    try:
        settings = yaml.safe_load(path.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        sys.exit(f"error: --config {path} cannot be read: {error}")
    if not isinstance(settings, dict):
        sys.exit(f"error: --config {path} must hold lines like `steps: 300`, not {settings!r}.")
    return [word for name, value in settings.items() for word in _words(name, value)]


def _words(name: str, value) -> list[str]:
    flag = f"--{str(name).replace('_', '-')}"
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [f"{flag}={value}"]

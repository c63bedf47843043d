"""The settings of a run, as the command line takes them."""

from dataclasses import dataclass
from pathlib import Path

from model import PresetName
from recipes import OptimizerName

from demo_optax.compression.values import ValueCoding


@dataclass(frozen=True)
class Config:
    optimizer: OptimizerName = "demo"
    """demo: DeMo with locally scaled gradients. demo-paper: DeMo as published. demo-*: decoupled
    momentum before other steps. adamw: ordinary data parallelism with a dense all-reduce."""
    preset: PresetName = "tiny"
    """Size of the model: about 1M (tiny) and 10M (small) parameters, or the paper's two; nano is
    for trying out the machinery."""
    text: tuple[Path, ...] = ()
    """Files or folders to learn from; by default the source of Python's standard library."""
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
    """Bytes in a sequence."""
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
    chunk_size: int = 64
    """Elements per side of a block."""
    values: ValueCoding = "int4"
    """Coding of the values that are sent; examples/value_codings.py compares them."""
    evaluate_every: int = 100
    """Steps between two evaluations on held-out text."""
    seed: int = 0
    """Of the parameters' start and of the order of the text."""
    checkpoint_dir: str | None = None
    """Folder or gs:// URL to save to, and to go on from if there is something in it. With several
    hosts one that all of them see. SIGTERM saves and stops."""
    checkpoint_every: int = 100
    """Steps between two checkpoints."""
    keep_checkpoints: int = 3
    """Checkpoints to keep, the latest."""
    check_replicas_every: int = 100
    """Steps between two comparisons of the workers' parameters, bit by bit; damage is repaired
    from the majority, or ends the run where there is none."""
    step_log: Path | None = None
    """File that gets a line of JSON for each step: its number, the loss of the first process's
    workers, seconds, bytes sent and what the exchange told."""
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
        ):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"--{name.replace('_', '-')} must be more than 0, not {value}.")
        parts = devices * self.microbatches
        if self.batch_size % parts:
            raise ValueError(
                f"--batch-size {self.batch_size} cannot be divided among {devices} devices x "
                f"{self.microbatches} microbatches: choose a multiple of {parts}."
            )

"""Trains a byte language model with DeMo on several workers, simulated or real.

    python examples/train_lm.py                      8 simulated workers, minutes on two CPU cores
    python examples/train_lm.py --optimizer adamw    ordinary data parallelism, for comparison
    python examples/train_lm.py --help               all settings

On a machine with accelerators each of them is a worker.
"""

import functools
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import data
import jax
import jax.numpy as jnp
import numpy as np
import optax
import report
import tyro
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from model import PRESETS, PresetName, build, cross_entropy
from recipes import RECIPES, OptimizerName, Settings
from report import console

import demo_optax
from demo_optax.compression.values import ValueCoding

SIMULATED_WORKERS = 8
TUNED_WIDTH = PRESETS["tiny"].width
EVALUATION_BYTES = 2**15
LAST_EVALUATION_BYTES = 2**18


@dataclass(frozen=True)
class Config:
    optimizer: OptimizerName = "demo"
    """demo: DeMo with locally scaled gradients. demo-paper: DeMo as published. demo-*: decoupled
    momentum before other steps. adamw: ordinary data parallelism with a dense all-reduce."""
    preset: PresetName = "tiny"
    """Size of the model: about 1M (tiny) and 10M (small) parameters, or the paper's two."""
    text: tuple[Path, ...] = ()
    """Files or folders to learn from; by default the source of Python's standard library."""
    workers: int | None = None
    """Devices to train on; by default all accelerators, or 8 simulated devices on the CPU."""
    steps: int = 600
    """Updates of the parameters."""
    batch_size: int = 16
    """Sequences in one step, of all workers together."""
    sequence_length: int = 128
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
    values: ValueCoding = "float32"
    """Coding of the values that are sent."""
    evaluate_every: int = 100
    """Steps between two evaluations on held-out text."""
    seed: int = 0
    """Of the parameters' start and of the order of the text."""


class Run(NamedTuple):
    """All that a run needs, made from its configuration before anything is trained."""

    config: Config
    text: data.Text
    mesh: Mesh
    loss_fn: Callable[..., jax.Array]
    params: nnx.State
    tx: optax.GradientTransformation

    @property
    def batch_shape(self) -> tuple[int, int]:
        return self.config.batch_size, self.config.sequence_length


def prepare(config: Config) -> Run:
    """Raises ValueError, TypeError or OSError for whatever a user may have set wrongly."""
    mesh = make_mesh(config.workers)
    require_sensible(config, mesh.size)
    text = data.read(config.text, config.sequence_length)
    preset = PRESETS[config.preset]
    definition, params = build(preset, config.seed)

    def loss_fn(params, bytes_BxT):
        model = nnx.merge(definition, params)
        return cross_entropy(model(bytes_BxT[:, :-1].astype(jnp.int32)), bytes_BxT[:, 1:])

    recipe = RECIPES[config.optimizer]
    peak = config.learning_rate or recipe.learning_rate * TUNED_WIDTH / preset.width
    settings = Settings(
        learning_rate=schedule(peak, config.warmup_steps, config.steps),
        decay=recipe.decay if config.decay is None else config.decay,
        weight_decay=recipe.weight_decay if config.weight_decay is None else config.weight_decay,
        topk=config.topk,
        chunk_size=config.chunk_size,
        values=config.values,
    )
    return Run(config, text, mesh, loss_fn, params, recipe.make(settings))


def make_mesh(workers: int | None) -> Mesh:
    """One axis of workers: accelerators where there are any, else simulated devices."""
    jax.config.update("jax_num_cpu_devices", max(workers or SIMULATED_WORKERS, 1))
    devices = jax.devices()
    count = len(devices) if workers is None else workers
    if not 1 <= count <= len(devices):
        raise ValueError(
            f"--workers {count}: there are {len(devices)} devices here ({devices[0].device_kind})."
        )
    return jax.make_mesh((count,), ("data",), devices=devices[:count])


def require_sensible(config: Config, workers: int) -> None:
    for name in ("steps", "batch_size", "sequence_length", "microbatches", "evaluate_every"):
        if getattr(config, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1.")
    parts = workers * config.microbatches
    if config.batch_size % parts:
        raise ValueError(
            f"--batch-size {config.batch_size} cannot be divided among {workers} workers x "
            f"{config.microbatches} microbatches: choose a multiple of {parts}."
        )


def schedule(peak: float, warmup_steps: int, steps: int) -> optax.Schedule:
    """A warm-up whose first step counts already, then a cosine to a tenth."""
    warmup_steps = min(warmup_steps, steps // 2)
    return optax.warmup_cosine_decay_schedule(
        peak / (warmup_steps + 1), peak, warmup_steps, steps, 0.1 * peak
    )


def train(run: Run) -> None:
    config, mesh, params = run.config, run.mesh, run.params
    packet_bytes = demo_optax.packet_bytes(run.tx, params)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    describe(run, parameters)

    opt_state = demo_optax.init_opt_state(run.tx, params, mesh)
    train_step = demo_optax.make_train_step(
        run.loss_fn,
        run.tx,
        mesh,
        microbatches=config.microbatches,
        clip_norm=config.clip_norm,
    )
    evaluate = make_evaluation(run)
    batches = data.random_windows(run.text.train, run.batch_shape, config.seed)
    log = report.Log(config.steps, math.prod(run.batch_shape), packet_bytes)
    unread = None
    with log.bar:
        for number, batch in zip(range(1, config.steps + 1), batches, strict=False):
            params, opt_state, metrics = train_step(params, opt_state, batch)
            # To read metrics is to wait for their step: by now the next one is on its way.
            if unread is not None:
                log.step(unread)
            unread = metrics
            if number % config.evaluate_every == 0 or number == config.steps:
                log.step(unread)
                unread = None
                log.evaluation(evaluate(params, EVALUATION_BYTES))
        loss = evaluate(params, LAST_EVALUATION_BYTES)

    bigrams = data.bigram_entropy(run.text)
    console.print(report.closing_table(log, loss, bigrams, 4 * parameters))
    same = replicas_are_identical(params)
    console.print(f"parameters on {mesh.size} devices: {'bit-identical' if same else 'DIFFERENT'}")


def describe(run: Run, parameters: int) -> None:
    text, device = run.text, run.mesh.devices.flat[0]
    console.print(
        f"{text.train_files} files, {text.train.size:,} bytes to train on; "
        f"{text.held_out_files} files, {text.held_out.size:,} bytes held out"
    )
    console.print(
        f"{run.config.preset}: {parameters:,} parameters, {run.mesh.size} workers "
        f"({device.device_kind}), optimizer {run.config.optimizer}"
    )
    if device.platform == "cpu":
        console.print(
            f"The workers are simulated and share {os.cpu_count()} CPU cores: times here say "
            "nothing about real workers."
        )


def make_evaluation(run: Run) -> Callable[[nnx.State, int], float]:
    """A function of parameters and a number of bytes: their loss on the same held-out text."""
    divided = NamedSharding(run.mesh, P("data"))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=run.mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    def losses_of_workers(params, batch):
        return run.loss_fn(params, batch)[None]

    def evaluate(params, total_bytes):
        count = max(total_bytes // math.prod(run.batch_shape), 1)
        batches = data.even_windows(run.text.held_out, run.batch_shape, count)
        losses = [
            np.mean(losses_of_workers(params, jax.device_put(batch, divided))) for batch in batches
        ]
        return float(np.mean(losses))

    return evaluate


def replicas_are_identical(params: nnx.State) -> bool:
    """Whether all devices hold the same bits."""
    for leaf in jax.tree.leaves(params):
        first, *others = (np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards)
        if any(other != first for other in others):
            return False
    return True


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    try:
        try:
            run = prepare(config)
        except (ValueError, TypeError, OSError) as error:
            console.print(f"[bold red]error:[/] {error}", highlight=False)
            sys.exit(2)
        train(run)
    except KeyboardInterrupt:
        console.print("Stopped before the end; nothing was saved.")
        sys.exit(130)


if __name__ == "__main__":
    main()

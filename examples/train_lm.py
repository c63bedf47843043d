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
from typing import NamedTuple

import data
import jax
import jax.numpy as jnp
import numpy as np
import optax
import report
import tyro
from config import Config
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from model import PRESETS, build, cross_entropy
from recipes import RECIPES, Settings
from report import console
from rich.console import Console

import demo_optax

SIMULATED_WORKERS = 8
TUNED_WIDTH = PRESETS["tiny"].width
EVALUATION_BYTES = 2**15
LAST_EVALUATION_BYTES = 2**18


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
    config.require_sensible(mesh.size)
    text = data.read(config.text, config.sequence_length)
    preset = PRESETS[config.preset]
    definition, params = build(preset, config.seed)

    def loss_fn(params, bytes_BxT):
        model = nnx.merge(definition, params)
        return cross_entropy(model(bytes_BxT[:, :-1].astype(jnp.int32)), bytes_BxT[:, 1:])

    recipe = RECIPES[config.optimizer]
    peak = default(config.learning_rate, recipe.learning_rate * TUNED_WIDTH / preset.width)
    settings = Settings(
        learning_rate=schedule(peak, config.warmup_steps, config.steps),
        decay=default(config.decay, recipe.decay),
        weight_decay=default(config.weight_decay, recipe.weight_decay),
        topk=config.topk,
        chunk_size=config.chunk_size,
        values=config.values,
    )
    return Run(config, text, mesh, loss_fn, params, recipe.make(settings))


def default(given: float | None, otherwise: float) -> float:
    return otherwise if given is None else given


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
    if not same:
        sys.exit(1)


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
            np.asarray(losses_of_workers(params, jax.device_put(batch, divided)))
            for batch in batches
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
            Console(stderr=True).print(f"error: {error}", style="red", markup=False, soft_wrap=True)
            sys.exit(2)
        train(run)
    except KeyboardInterrupt:
        console.print("Stopped before the end; nothing was saved.")
        sys.exit(130)


if __name__ == "__main__":
    main()

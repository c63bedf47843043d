"""Trains a byte language model with DeMo on several workers, simulated or real.

    python examples/train_lm.py                      8 simulated workers, minutes on two CPU cores
    python examples/train_lm.py --optimizer adamw    ordinary data parallelism, for comparison
    python examples/train_lm.py --help               all settings

On a machine with accelerators each of them is a worker. With one process on each of several hosts,
start the same command on all of them, with --distributed under SLURM, Kubernetes or on a TPU pod,
or with --coordinator, --num-processes and --process-id; examples/launch_local.py does so on one
machine for a try. With --checkpoint-dir a run that was stopped goes on when it is started again,
on as many processes or others.
"""

import contextlib
import math
import os
import sys
from collections.abc import Callable
from typing import NamedTuple

import data
import hosts
import jax
import jax.numpy as jnp
import numpy as np
import optax
import report
import tyro
from config import Config
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from model import PRESETS, build, cross_entropy
from recipes import RECIPES, Settings
from report import console
from rich.console import Console

import demo_optax
from demo_optax.checkpoint import Checkpointer

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
    param_specs: nnx.State
    tx: optax.GradientTransformation

    @property
    def batch_shape(self) -> tuple[int, int]:
        return self.config.batch_size, self.config.sequence_length


def prepare(config: Config) -> Run:
    """Raises ValueError, TypeError or OSError for whatever a user may have set wrongly."""
    mesh = make_mesh(config)
    config.require_sensible(mesh.size)
    text = data.read(config.text, config.sequence_length)
    preset = PRESETS[config.preset]
    definition, params = build(preset, config.seed)
    specs = jax.tree.map(lambda x: shard_spec(x.shape, config.fsdp), params)

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
    return Run(config, text, mesh, loss_fn, params, specs, recipe.make(settings))


def default(given: float | None, otherwise: float) -> float:
    return otherwise if given is None else given


def make_mesh(config: Config) -> Mesh:
    """Workers, and the devices of each; accelerators where there are any, else simulated ones."""
    wanted = (config.workers or SIMULATED_WORKERS) * config.fsdp
    jax.config.update("jax_num_cpu_devices", max(wanted // (config.num_processes or 1), 1))
    hosts.connect(config)
    devices = jax.devices()
    used = (config.workers or len(devices) // config.fsdp) * config.fsdp
    if not 1 <= used <= len(devices) or used % jax.process_count():
        raise ValueError(
            f"--workers {config.workers} of --fsdp {config.fsdp} devices each: there are "
            f"{len(devices)} devices ({devices[0].device_kind}) in {jax.process_count()} "
            "processes, of each of which as many are taken."
        )
    shape, kinds = (used // config.fsdp, config.fsdp), (AxisType.Auto, AxisType.Auto)
    return Mesh(np.reshape(chosen(devices, used), shape), ("data", "fsdp"), kinds)


def chosen(devices: list[jax.Device], used: int) -> list[jax.Device]:
    """As many devices of every process, so that a worker's lie together."""
    each = used // jax.process_count()
    return [
        device
        for process in range(jax.process_count())
        for device in [d for d in devices if d.process_index == process][:each]
    ]


def shard_spec(shape: tuple[int, ...], fsdp: int) -> P:
    """The first dimension that divides is divided among a worker's devices."""
    for axis, size in enumerate(shape):
        if fsdp > 1 and size % fsdp == 0:
            return P(*[None] * axis, "fsdp")
    return P()


def schedule(peak: float, warmup_steps: int, steps: int) -> optax.Schedule:
    """A warm-up whose first step counts already, then a cosine to a tenth."""
    warmup_steps = min(warmup_steps, steps // 2)
    return optax.warmup_cosine_decay_schedule(
        peak / (warmup_steps + 1), peak, warmup_steps, steps, 0.1 * peak
    )


def train(run: Run) -> None:
    config, mesh = run.config, run.mesh
    describe(run)
    train_step = demo_optax.make_train_step(
        run.loss_fn,
        run.tx,
        mesh,
        microbatches=config.microbatches,
        clip_norm=config.clip_norm,
        param_specs=run.param_specs,
    )
    regular = config.evaluate_every, config.check_replicas_every, config.checkpoint_every
    with (
        hosts.Watch(config.peer_timeout, how_to_go_on(config)) as watch,
        open_checkpoints(run) as checkpointer,
        watch.failures(),
    ):
        start, params, opt_state = begin(run, checkpointer)
        evaluate = make_evaluation(run, watch.progress)
        path = config.step_log if hosts.is_first() else None
        log = report.Log(config.steps, math.prod(run.batch_shape), start, path)
        unread = None
        with log.bar:
            for number in range(start + 1, config.steps + 1):
                params, opt_state, metrics = train_step(params, opt_state, batch_of(run, number))
                # To read metrics is to wait for their step: by now the next one is on its way.
                if unread is not None:
                    log.step(unread)
                    watch.progress(number - 1)
                unread = metrics
                stopping, last = hosts.stop_requested(number), number == config.steps
                if not (stopping or last or any(number % every == 0 for every in regular)):
                    continue
                log.step(unread)
                watch.progress(number)
                unread = None
                if number % config.check_replicas_every == 0:
                    params, opt_state = checked((params, opt_state), mesh)
                if number % config.evaluate_every == 0 or last:
                    log.evaluation(evaluate(params, EVALUATION_BYTES))
                if checkpointer and (stopping or last or number % config.checkpoint_every == 0):
                    with watch.paused():
                        checkpointer.save(
                            number, params, opt_state, data_order(config), wait=stopping or last
                        )
                if stopping and not last:
                    console.print(f"Stopped after step {number}. {how_to_go_on(config)}")
                    sys.exit(hosts.STOPPED)
        loss = evaluate(params, LAST_EVALUATION_BYTES)
        different = demo_optax.check_replicas(params, mesh)

    bigrams = data.bigram_entropy(run.text)
    console.print(report.closing_table(log, loss, bigrams, demo_optax.dense_bytes(run.params)))
    console.print(
        f"parameters on {mesh.size} devices: {'DIFFERENT' if different else 'bit-identical'}"
    )
    if different:
        sys.exit(1)


def how_to_go_on(config: Config) -> str:
    if config.checkpoint_dir:
        return (
            "Start the same command again, on as many processes or others, to go on from the last "
            f"checkpoint in {config.checkpoint_dir}."
        )
    return "Nothing was saved; with --checkpoint-dir it could go on."


def open_checkpoints(run: Run) -> contextlib.AbstractContextManager[Checkpointer | None]:
    config = run.config
    if config.checkpoint_dir is None:
        return contextlib.nullcontext()
    return Checkpointer(
        config.checkpoint_dir,
        run.tx,
        run.mesh,
        param_specs=run.param_specs,
        keep=config.keep_checkpoints,
    )


def begin(run: Run, checkpointer: Checkpointer | None) -> tuple[int, nnx.State, optax.OptState]:
    """Steps done, parameters and optimizer state: from the last checkpoint, or the start."""
    try:
        found = checkpointer and checkpointer.restore(run.params, data_order(run.config))
    except ValueError as error:
        sys.exit(f"error: {error}")
    if found:
        console.print(f"going on after step {found.step}, from {run.config.checkpoint_dir}")
        if found.extra != data_order(run.config):
            console.print(f"The text comes in another order than before: it was {found.extra}.")
        return found.step, found.params, found.opt_state
    opt_state = demo_optax.init_opt_state(run.tx, run.params, run.mesh, param_specs=run.param_specs)
    return 0, run.params, opt_state


def data_order(config: Config) -> dict[str, int]:
    """What the order of the text depends on, beside the number of the step."""
    return {
        "seed": config.seed,
        "batch_size": config.batch_size,
        "sequence_length": config.sequence_length,
    }


def batch_of(run: Run, step: int) -> jax.Array:
    """The batch of a step, of which each process reads the rows of its own devices."""
    batch, length = run.batch_shape
    windows = data.random_windows(run.text.train, run.batch_shape, run.config.seed, step)
    return divided(run.mesh, (batch, length + 1), windows)


def divided(mesh: Mesh, shape: tuple[int, int], rows: Callable) -> jax.Array:
    """An array whose rows are divided among all devices; each process makes those of its own."""
    sharding = NamedSharding(mesh, P(mesh.axis_names))
    return jax.make_array_from_callback(shape, sharding, lambda index: rows((index or [...])[0]))


def checked(state, mesh: Mesh):
    """The state with every replica like the majority; ends the run where there is none."""
    found = demo_optax.check_replicas(state, mesh)
    for drift in found:
        console.print(f"leaf{drift.leaf} differs on worker {drift.worker}, {drift.position}")
    try:
        return demo_optax.repair_replicas(state, mesh) if found else state
    except ValueError as error:
        sys.exit(f"error: {error}")


def describe(run: Run) -> None:
    text, device = run.text, run.mesh.devices.flat[0]
    parameters = sum(leaf.size for leaf in jax.tree.leaves(run.params))
    workers, devices_each = run.mesh.devices.shape
    console.print(
        f"{text.train_files} files, {text.train.size:,} bytes to train on; "
        f"{text.held_out_files} files, {text.held_out.size:,} bytes held out"
    )
    console.print(
        f"{run.config.preset}: {parameters:,} parameters, {workers} workers x {devices_each} "
        f"({device.device_kind}) in {jax.process_count()} processes, optimizer "
        f"{run.config.optimizer}"
    )
    if device.platform == "cpu":
        console.print(
            f"The workers are simulated and share {os.cpu_count()} CPU cores: times here say "
            "nothing about real workers."
        )


def make_evaluation(run: Run, progress: Callable) -> Callable[[nnx.State, int], float]:
    """A function of parameters and a number of bytes: their loss on the same held-out text."""

    @jax.jit
    def loss_of(params, batch):
        return run.loss_fn(params, batch)

    def evaluate(params, total_bytes):
        total_bytes = min(total_bytes, run.text.held_out.size)
        count = max(total_bytes // math.prod(run.batch_shape), 1)
        losses = []
        for batch in data.even_windows(run.text.held_out, run.batch_shape, count):
            rows = divided(run.mesh, batch.shape, batch.__getitem__)
            losses.append(float(loss_of(params, rows)))
            progress()
        return float(np.mean(losses))

    return evaluate


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    try:
        try:
            run = prepare(config)
            console.quiet = not hosts.is_first()
        except (ValueError, TypeError, OSError) as error:
            Console(stderr=True).print(f"error: {error}", style="red", markup=False, soft_wrap=True)
            sys.exit(2)
        train(run)
    except KeyboardInterrupt:
        console.print(f"Stopped at once. {how_to_go_on(config)}")
        sys.exit(130)


if __name__ == "__main__":
    main()

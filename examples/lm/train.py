"""The loop of training, from a prepared run to its figures: what is shown, saved and checked."""

import contextlib
import logging
import math
import os
import sys
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax.checkpoint import Checkpointer, DamagedCheckpoint, folder_of

from . import agreement, data, hosts, logs, report
from .config import Config, refuse
from .recipes import steps_of_a_round
from .report import console
from .sampling import samples
from .setup import Run, batches_of, make_evaluation, prepare
from .signals import Signals
from .utilization import flops_per_token
from .validation import require_sensible

EVALUATION_TOKENS = 2**15
LAST_EVALUATION_TOKENS = 2**18
PROMPTS = ["", "def "]  # of the samples


class Trained(NamedTuple):
    """A run's figures, and its final loss on held-out text in nats per byte.

    ``state_bytes`` is the optimizer's state of one worker, in bytes for each parameter.
    """

    log: report.Log
    loss: float
    state_bytes: float


def train(run: Run, signals: Signals | None = None) -> Trained:
    """Trains to the end, or exits with a status; shows and saves what the settings ask for."""
    config, mesh = run.config, run.mesh
    signals = signals or Signals(how_to_go_on(config))  # to which nobody listens
    describe(run)
    regular = config.evaluate_every, config.checkpoint_every
    with (
        hosts.Watch(config.peer_timeout, how_to_go_on(config)) as watch,
        open_checkpoints(run) as checkpointer,
        watch.failures(),
    ):
        start, windows, params, opt_state = begin(run, checkpointer)
        evaluate = make_evaluation(run, watch.progress)
        log = open_log(run, start)
        batches = batches_of(run, windows)
        unread, saved = None, True
        with contextlib.closing(log.files), log.bar:
            for number in range(start + 1, config.steps + 1):
                params, opt_state, metrics = run.train_step(params, opt_state, next(batches))
                apart = False
                # To read metrics is to wait for their step: by now the next one is on its way.
                if unread is not None:
                    log.step(unread)
                    watch.progress(number - 1)
                    apart = not agreed(unread)
                unread = metrics
                stopping, last = signals.stop_requested(), number == config.steps
                if not (apart or stopping or last or any(number % n == 0 for n in regular)):
                    continue
                log.step(unread)
                watch.progress(number)
                apart |= not agreed(unread)
                unread = None
                saving = checkpointer and (
                    stopping or last or number % config.checkpoint_every == 0
                )
                evaluating = last or number % config.evaluate_every == 0
                if apart or saving or evaluating:
                    params, opt_state = checked((params, opt_state), mesh)
                    require_finite("norm of the parameters", norm(params), number, config)
                    require_finite("loss of every worker", mean(metrics.loss), number, config)
                if evaluating:
                    loss = evaluate(params, EVALUATION_TOKENS)
                    require_finite("held-out loss", loss, number, config)
                    log.evaluation(loss)
                if checkpointer and saving:
                    with watch.paused():
                        read = windows + (number - start) * config.batch_size
                        state = params, opt_state, order(run, read)
                        saved = save(checkpointer, number, *state, wait=stopping or last)
                if stopping and not last:
                    console.print(f"Stopped after step {number}. {how_to_go_on(config)}")
                    sys.exit(signals.exit_status if saved else 1)
                log.resume()
            loss = evaluate(params, LAST_EVALUATION_TOKENS)
            with watch.paused():
                written = written_by(run, params)
            show(written)
            log.files.samples(log.done, written)
        different = demo_optax.check_replicas(params, mesh)

    bigrams = data.bigram_entropy(run.corpus) if config.tokenizer is None else None
    console.print(report.closing_table(log, loss, bigrams, demo_optax.dense_bytes(run.params)))
    console.print(
        f"parameters on {run.devices.size} devices: {'DIFFERENT' if different else 'bit-identical'}"
    )
    if not saved:
        advice = how_to_go_on(config)
        console.print(f"error: the end of the run was not saved. {advice}", soft_wrap=True)
    if different or not saved:
        sys.exit(1)
    return Trained(log, loss, state_bytes(run, opt_state))


def state_bytes(run: Run, opt_state: optax.OptState) -> float:
    """Bytes of a worker's optimizer state for each parameter."""
    specs = demo_optax.state_specs(run.tx, run.params, run.mesh, param_specs=run.param_specs)
    workers = run.mesh.shape["data"]
    sizes = jax.tree.map(
        lambda x, spec: x.nbytes / (workers if "data" in spec else 1), opt_state, specs
    )
    return sum(jax.tree.leaves(sizes)) / sum(x.size for x in jax.tree.leaves(run.params))


def open_log(run: Run, start: int) -> report.Log:
    config = run.config
    folder = folder_of(config.log_dir) if config.log_dir else None
    if folder and not hosts.is_first():
        folder /= f"process-{jax.process_index()}"
    with mistakes_said():
        files = logs.Files(folder, start, config if hosts.is_first() else None)
    tokens = math.prod(run.batch_shape)
    flops = tokens * flops_per_token(run.params, run.preset, config.sequence_length)
    every = steps_of_a_round(config.optimizer, config.local_steps) // (config.fragments or 1)
    return report.Log(
        config.steps,
        every,
        tokens,
        run.corpus.bytes_per_token,
        flops,
        run.devices.devices,
        start,
        files,
    )


def show(written: list[str]) -> None:
    for number, text in enumerate(written, 1):
        console.rule(f"the model writes, {number} of {len(written)}")
        console.print(text, highlight=False)


def written_by(run: Run, params: nnx.State) -> list[str]:
    """What the model writes after each prompt."""
    config = run.config
    if not config.sample_length:
        return []
    return samples(
        run.logits,
        on_one_device(params, run.devices),
        run.tokens,
        config.sequence_length,
        PROMPTS,
        config.sample_length,
        seed=config.seed,
    )


def how_to_go_on(config: Config) -> str:
    if config.checkpoint_dir:
        return (
            "Start the same command again, on any number of processes, to continue from the last "
            f"checkpoint in {config.checkpoint_dir}."
        )
    return "Nothing was saved. Give --checkpoint-dir to be able to continue a run."


def open_checkpoints(run: Run) -> contextlib.AbstractContextManager[Checkpointer | None]:
    config = run.config
    if config.checkpoint_dir is None:
        return contextlib.nullcontext()
    logging.getLogger("absl").setLevel("CRITICAL")  # a failed save is told in a line, by save()
    try:
        return Checkpointer(
            config.checkpoint_dir,
            run.tx,
            run.mesh,
            param_specs=run.param_specs,
        )
    except OSError as error:
        refuse(error)


def save(checkpointer: Checkpointer, number: int, *state, wait: bool) -> bool:
    """Saves, or says why not; whether this step is on disk, or on its way there."""
    try:
        checkpointer.save(number, *state, wait=wait)
    except OSError as error:
        console.print(f"error: {error}", soft_wrap=True)
    return checkpointer.latest == number


def on_one_device(params: nnx.State, mesh: Mesh) -> nnx.State:
    """Whole parameters on the first device of this process."""
    whole = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))(params)
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), whole)


def begin(
    run: Run, checkpointer: Checkpointer | None
) -> tuple[int, int, nnx.State, optax.OptState]:
    """Steps done, windows read, parameters, state: from the last checkpoint, or the start."""
    template = order(run, 0)
    try:
        with warnings.catch_warnings(record=True) as caught:
            found = checkpointer and checkpointer.restore(run.params, template)
    except DamagedCheckpoint as error:
        sys.exit(f"error: {error}")
    except (ValueError, OSError) as error:
        sys.exit(
            f"error: the run in {run.config.checkpoint_dir} cannot continue: {error} Give "
            "the --preset, --tokenizer, --optimizer and settings that it was started with, or "
            "another --checkpoint-dir."
        )
    for warning in caught:
        console.print(f"warning: {warning.message}", soft_wrap=True)
    if found:
        console.print(f"going on after step {found.step}, from {run.config.checkpoint_dir}")
        read = found.extra["windows"]
        if found.extra != order(run, read):
            console.print(
                "The text, its tokens or their order changed: reading begins anew. Before: "
                f"{found.extra}. Now: {order(run, read)}."
            )
            read = 0
        require_whole_rounds(run.config, found.step, found.opt_state)
        return found.step, read, found.params, found.opt_state
    opt_state = demo_optax.init_opt_state(run.tx, run.params, run.mesh, param_specs=run.param_specs)
    return 0, 0, run.params, opt_state


def require_whole_rounds(config: Config, step: int, opt_state: optax.OptState) -> None:
    """Refuses --local-steps by which the run would end inside a round, going on from a step."""
    if not isinstance(opt_state, demo_optax.LocalStepsState) or step >= config.steps:
        return
    every = steps_of_a_round(config.optimizer, config.local_steps) // (config.fragments or 1)
    following = int(opt_state.last_step) + 1
    if config.steps < following or following % every:
        refuse(
            f"in {config.checkpoint_dir} the next exchange is after step {following}, and the "
            f"others would follow {every} steps apart, so that --steps {config.steps} end inside a "
            f"round. Give at least {following} --steps, and the --local-steps of before or others "
            f"that divide {following}."
        )


def order(run: Run, windows: int) -> dict[str, int]:
    """How many windows of the text were read, and what their order depends on."""
    return {
        "seed": run.config.seed,
        "sequence_length": run.config.sequence_length,
        "text": run.corpus.checksum,
        "windows": windows,
    }


def agreed(metrics: demo_optax.TrainMetrics) -> bool:
    """Whether all workers had got the same packets on the step before."""
    return metrics.exchange is None or bool(metrics.exchange.agreed)


def norm(params: nnx.State) -> float:
    return float(jax.jit(optax.tree.norm)(params))


@jax.jit
def mean(losses: jax.Array) -> jax.Array:
    """Of those that are finite; NaN where none is."""
    return jnp.nanmean(jnp.where(jnp.isfinite(losses), losses, jnp.nan))


def require_finite(what: str, value: jax.Array | float, number: int, config: Config) -> None:
    """Ends a run that has diverged, before it would replace its checkpoints."""
    if not math.isfinite(value := float(value)):
        line = f"error: the {what} is {value} after step {number}, which is not saved."
        console.print(f"{line} Lower --learning-rate. {how_to_go_on(config)}", soft_wrap=True)
        sys.exit(1)


def checked(state, mesh: Mesh | AbstractMesh):
    """The state with every replica like the majority; ends the run where there is none."""
    found = demo_optax.check_replicas(state, mesh)
    for drift in found:
        console.print(f"leaf{drift.leaf} differs on worker {drift.worker}, {drift.position}")
    try:
        return demo_optax.repair_replicas(state, mesh) if found else state
    except ValueError as error:
        sys.exit(f"error: {error}")


def describe(run: Run) -> None:
    corpus, device = run.corpus, run.devices.devices.flat[0]
    parameters = sum(leaf.size for leaf in jax.tree.leaves(run.params))
    workers, each = run.mesh.shape["data"], run.config.fsdp
    console.print(
        f"{corpus.train.size:,} tokens to train on, {corpus.held_out.size:,} held out; bytes per "
        f"token: {corpus.bytes_per_token:.3g}; vocabulary of {run.tokens.vocabulary:,}"
    )
    console.print(
        f"{run.config.preset}: {parameters:,} parameters, {workers} workers x {each} "
        f"on {run.devices.size} devices ({device.device_kind}) in {jax.process_count()} processes, "
        f"optimizer {run.config.optimizer}"
    )
    if device.platform == "cpu":
        console.print(
            f"All workers share {os.cpu_count()} CPU cores: do not compare these times with those "
            "of workers on machines of their own."
        )


def run_or_exit(config: Config) -> Trained:
    """Prepares and trains; a wrong setting ends it with one clear line."""
    with mistakes_said():
        require_sensible(config)
        hosts.connect(config)
    with Signals(how_to_go_on(config)) as signals:
        with mistakes_said():
            agreement.require_same(agreement.facts(config), config.peer_timeout)
            run = prepare(config)
        console.quiet = not hosts.is_first()
        return train(run, signals)


@contextlib.contextmanager
def mistakes_said() -> Iterator[None]:
    """Ends the process with one line for a wrong setting."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        refuse(error)

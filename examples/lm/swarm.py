"""Training as one worker of a swarm: others come and go, and exchange packets over a store."""

import contextlib
import dataclasses
import hashlib
import math
import socket
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, cast

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from rich import progress

import demo_optax
from demo_optax.checkpoint import Checkpointer, folder_of
from demo_optax.swarm import (
    Left,
    Member,
    MembersOnly,
    ObjectStore,
    Store,
    StoreError,
    SwarmError,
    SwarmMetrics,
    SwarmWorker,
)

from . import logs, stores
from .config import Config
from .recipes import steps_of_a_round
from .report import console
from .setup import CLIP_NORM, Run, batches_of, delay, make_evaluation, prepare
from .signals import Signals
from .train import (
    EVALUATION_TOKENS,
    LAST_EVALUATION_TOKENS,
    describe,
    mistakes_said,
    show,
    written_by,
)
from .validation import require_sensible

CACHE = Path.home() / ".cache" / "demo_optax" / "compiled"
LEAVE_SECONDS = 15.0  # for a worker that leaves to send its progress
SHOWN_FIRST: dict[str, Any] = dict(loss="-", workers="-", waited=0.0, sent=0.0)  # on the bar
GO_ON = "Start the same command again to take part again, from where the others are then."

SAME = (
    "optimizer",
    "preset",
    "steps",
    "local_steps",
    "merge",
    "learning_rate",
    "warmup_steps",
    "decay",
    "weight_decay",
    "b2",
    "topk",
    "block_side",
    "value_coding",
    "transform",
    "selection",
    "norm_limit",
    "seed",
)
"""Settings that all workers of a swarm have in common."""


def run_or_exit(config: Config) -> None:
    """Prepares and trains; a wrong setting ends it with one clear line."""
    started = time.monotonic()
    keep_compiled_programs()
    with Signals(GO_ON, "Leaves after this step. A second Ctrl-C stops at once.") as signals:
        try:
            with mistakes_said():
                require_sensible(config)
                run = prepare(config)
                store = store_of(config)
            train(run, store, signals, started)
        except SwarmError as error:
            sys.exit(f"error: {error}")
        except StoreError as error:
            sys.exit(f"error: {error} {GO_ON}")


def store_of(config: Config) -> Store:
    """The store of the run, in which only members exist if this worker has a key."""
    store = ObjectStore(config.swarm or "")
    if config.key is None or config.owner is None:  # both, which is required
        return store
    return MembersOnly(store, config.key, config.owner, at_least=config.roster_at_least)


def roster_of(store: Store) -> str:
    """Names the members of a run for members only, and nobody in an open run."""
    if not isinstance(store, MembersOnly):
        return ""
    names = ", ".join(member.name for member in store.roster.members().values())
    return f"members only, roster {store.roster.number}: {names}"


def keep_compiled_programs() -> None:
    """So that a worker that comes back need not compile again."""
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(CACHE))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def train(run: Run, store: Store, signals: Signals, started: float) -> None:
    config = run.config
    bar = progress_bar()
    member = Member(
        store,
        "" if config.key else config.worker or socket.gethostname(),
        slots=config.slots,
        deadline=config.deadline,
        min_workers=config.min_workers,
        tell=lambda line: bar.console.print(line, soft_wrap=True),
    )
    describe(run)
    console.print(
        f"worker {member.worker} has slot {member.slot} of {member.slots} in {run.config.swarm}"
    )
    if roster := roster_of(store):
        console.print(roster)
    every = steps_of_a_round(config.optimizer, config.local_steps)
    overlaps = delay(config) and every > 1
    tokens = math.prod(run.batch_shape)
    assert isinstance(run.mesh, Mesh)  # validation refuses --simulate
    worker = SwarmWorker(
        run.loss_fn,
        cast(demo_optax.SplitTransformation, run.tx),
        run.mesh,
        member,
        delay=delay(config),
        round_seconds=config.round_seconds,
        snapshot_every=max(config.snapshot_every // every, 1),
        microbatches=config.microbatches,
        clip_norm=CLIP_NORM,
        param_specs=run.param_specs,
        weight=tokens,
        facts=facts_of(config),
    )
    unit = member.unit
    grace = LEAVE_SECONDS if overlaps else 0.0
    with (
        worker,
        leaves_at(signals, member, grace) as left_by_itself,
        contextlib.closing(open_log(config)) as log,
        bar,
    ):
        prepared = time.monotonic()
        console.print("compiles and joins; the first start on a machine takes longest")
        rows, length = run.batch_shape
        batch = jax.ShapeDtypeStruct((rows, length + 1), run.corpus.train.dtype)
        try:
            params, opt_state = worker.begin(run.params, batch)
        except Left:
            left(worker, signals, lost=0)
        joined = time.monotonic()
        console.print(
            f"joined before {unit} {worker.number}: {prepared - started:.1f} s to prepare, "
            f"{worker.seconds_compiling:.1f} s to compile, "
            f"{joined - prepared - worker.seconds_compiling:.1f} s to catch up"
        )
        batches = own_batches(run, member, worker.number, every)
        evaluate = make_evaluation(run, lambda: None)
        done = worker.number * every
        task = bar.add_task("", total=config.steps, completed=done, **SHOWN_FIRST)
        sent, members, skipped, alone = 0.0, (), (), 0
        while worker.number < config.steps // every:
            began, number, before = time.monotonic(), worker.number, done
            try:
                if signals.stop_requested():
                    raise Left
                params, opt_state, metrics = worker.step(params, opt_state, next(batches))
            except Left:
                left_by_itself.set()
                left(worker, signals, worker.leave(params, opt_state))
            done = worker.number * every
            sent += metrics.packet_bytes / 1e6
            seconds = time.monotonic() - began
            checked = digest(params) if config.log_checksums and worker.number > number else None
            loss = metrics.loss / run.corpus.bytes_per_token
            if config.log_dir:
                log.line(done, row(metrics, worker.number, checked, seconds, loss))
            if (now := roster_of(store)) != roster:
                bar.print(roster := now)
            alone = min(alone + 1, every - 1) if worker.number == number else 0
            if metrics.members and metrics.members != members:
                members = metrics.members
                bar.print(f"{unit} {metrics.applied}: {', '.join(members)} took part")
            if metrics.members and member.worker not in members + metrics.skipped:
                bar.print(f"{unit} {metrics.applied}: this worker was late")
            if metrics.applied is not None and metrics.skipped != skipped:
                skipped = metrics.skipped
                for name in skipped:
                    why = f"{name} skipped it, since its gradient was not finite"
                    bar.print(f"{unit} {metrics.applied}: {why}", markup=False)
            if metrics.members and not np.all(metrics.exchange.agreed):
                bar.print(f"{unit} {metrics.applied}: workers applied different packets before")
            for name in metrics.late:
                bar.print(f"{unit} {metrics.applied}: went on without {name}, which was late")
            if metrics.drift:
                differed = f"differed from the last snapshot by {metrics.drift:.1e} of its norm"
                bar.print(f"{unit} {metrics.step}: parameters {differed}")
            if metrics.replayed:
                now = f"{unit} {worker.number - 1}"
                bar.print(f"caught up to {now} (replayed: {metrics.replayed})")
            shown: Any = dict(workers=len(members), waited=metrics.waited, sent=sent)
            bar.update(task, completed=done + alone, loss=f"{loss:.3f}", **shown)
            if done // config.evaluate_every > before // config.evaluate_every:
                loss = evaluate(params, EVALUATION_TOKENS)
                bar.print(f"step {done}: {loss:.3f} nats per byte of part of the held-out text")
        loss = evaluate(params, LAST_EVALUATION_TOKENS)
        end = {"held_out": loss, "done": worker.number, "parameters": digest(params)}
        log.line(done, end)
    console.print(f"held-out text: {loss:.3f} nats per byte; parameters {digest(params)}")
    show(written_by(run, params))
    save(run, params)


def facts_of(config: Config) -> dict[str, Any]:
    """What all workers have in common; a tokenizer by its content."""
    values = {x: getattr(config, x) for x in SAME}
    facts = {
        f"--{name.replace('_', '-')}": "the default" if value is None else value
        for name, value in values.items()
    }
    if config.tokenizer is not None:
        facts["--tokenizer"] = hashlib.sha256(stores.read(config.tokenizer)).hexdigest()[:16]
    return facts


def left(worker: SwarmWorker, signals: Signals, lost: int) -> NoReturn:
    worker.close()
    member = worker.member
    sent = "It sent no packet."
    if member.last_sent is not None:
        sent = f"Its last packet was sent for {member.unit} {member.last_sent}."
    lost_too = f" Steps lost: {lost}." if lost else ""
    console.print(f"Left. {sent}{lost_too} {GO_ON}")
    sys.exit(signals.exit_status)


def save(run: Run, params) -> None:
    """Saves the parameters, for `evaluate.py`; this optimizer has no state.

    A worker that was started again to get the result may have saved it before.
    """
    folder, step = run.config.checkpoint_dir, run.config.steps
    if folder is None:
        return
    tx = optax.chain(demo_optax.mean_over_workers("data"), optax.set_to_zero())
    opt_state = demo_optax.init_opt_state(tx, params, run.mesh, param_specs=run.param_specs)
    try:
        with Checkpointer(folder, tx, run.mesh, param_specs=run.param_specs) as checkpointer:
            found = checkpointer.restore(params, step=step) if checkpointer.latest == step else None
            if found is None:
                checkpointer.save(step, params, opt_state, wait=True)
            elif digest(found.params) != digest(params):
                raise ValueError(f"{folder} holds other parameters after as many steps.")
    except (OSError, ValueError) as error:
        sys.exit(
            f"error: the parameters are not saved: {error} The store of the swarm still has them: "
            "repair this, or give another --checkpoint-dir, and start the same command again."
        )
    console.print(f"saved the parameters to {folder}", soft_wrap=True)


def own_batches(run: Run, member: Member, number: int, every: int) -> Iterator[jax.Array]:
    """Batches of an order of this worker's own, from an exchange on.

    Rounds take as many steps as there is time for, so that nobody knows where an earlier process of
    this worker ended: with rounds each process has another order.
    """
    process = f" {member.me}" if every > 1 else ""
    seed = zlib.crc32(f"{run.config.seed} {member.worker}{process}".encode())
    own = run._replace(config=dataclasses.replace(run.config, seed=seed))
    return batches_of(own, number * every * run.config.batch_size)


def progress_bar() -> progress.Progress:
    return progress.Progress(
        progress.TextColumn("step"),
        progress.MofNCompleteColumn(),
        progress.BarColumn(bar_width=None),
        progress.TextColumn("loss {task.fields[loss]}"),
        progress.TextColumn("{task.fields[workers]} workers"),
        progress.TextColumn("waited {task.fields[waited]:.2f} s"),
        progress.TextColumn("sent {task.fields[sent]:.3g} MB"),
        progress.TimeRemainingColumn(),
        console=console,
    )


@contextlib.contextmanager
def leaves_at(signals: Signals, member: Member, grace: float) -> Iterator[threading.Event]:
    """Ends a wait for other workers some seconds after a signal, unless the event is set."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.2):
            if signals.stop_requested():
                if not ended.wait(grace):
                    member.leave()
                return

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield ended
    finally:
        ended.set()


def open_log(config: Config) -> logs.Files:
    """A line of JSON for each step; a worker that comes back adds to those that are there."""
    with mistakes_said():
        return logs.Files(folder_of(config.log_dir) if config.log_dir else None, config=config)


def row(
    metrics: SwarmMetrics, done: int, parameters: str | None, seconds: float, loss: float
) -> dict[str, Any]:
    """A line on a step; the parameters are a checksum after ``done`` exchanges, or None."""
    exchange = {name: np.asarray(x).item() for name, x in metrics.exchange._asdict().items()}
    return metrics._asdict() | {
        "loss": loss,
        "exchange": exchange,
        "seconds": seconds,
        "done": done,
        "parameters": parameters,
        "time": time.time(),
    }


def digest(params) -> str:
    """A checksum of all parameters, in hexadecimal digits."""
    checksum = 0
    for x in jax.tree.leaves(params):
        checksum = zlib.crc32(np.ascontiguousarray(x).view(np.uint8).data, checksum)
    return f"{checksum:08x}"

"""A swarm's worker: it steps, catches up when it is late, and writes and adopts snapshots."""

import contextlib
import functools
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from demo_optax import checks
from demo_optax.axes import AxisName
from demo_optax.metrics import ExchangeMetrics
from demo_optax.parallel import shards, worker_axis
from demo_optax.swarm import snapshots
from demo_optax.swarm.member import Member, Round, SwarmError
from demo_optax.swarm.programs import (
    Arrived,
    MakeOptimizer,
    Own,
    Programs,
    compile_programs,
    pending_packets,
)
from demo_optax.swarm.records import Damaged, SnapshotIndex

SNAPSHOT_PATIENCE = 60.0  # seconds in which a snapshot that is due should appear


class SwarmMetrics(NamedTuple):
    """Measurements of a step.

    Attributes:
      step: int, its number, from 0; catching up may have followed it.
      loss: float, this worker's.
      gradient_norm: float, of its gradient before clipping.
      exchange: `demo_optax.ExchangeMetrics` of the exchange whose result the parameters got.
      members: names of the workers whose packets counted in it.
      late: names of workers that it waited for in vain.
      waited: float, seconds that this worker spent in the exchange; with a delay, those that were
        not hidden by its gradient.
      packet_bytes: int, bytes that it sent.
      replayed: int, steps that it caught up with afterwards.
      drift: float, norm of what parameters and shared state differed by from the last snapshot,
        relative to the norm of the snapshot; 0 where they were equal.
    """

    step: int
    loss: float
    gradient_norm: float
    exchange: ExchangeMetrics
    members: tuple[str, ...]
    late: tuple[str, ...]
    waited: float
    packet_bytes: int
    replayed: int
    drift: float


class SwarmWorker:
    """Trains as one worker of a swarm, whatever the others do.

    Args:
      loss_fn: as in `demo_optax.make_train_step`.
      make_optimizer: the optimizer for an exchange, as in
        ``lambda exchange: demo_optax.demo_scaled(3e-3, exchange=exchange)``.
      mesh: of this worker: ``axis_name`` has size 1, other axes share the worker's batch and hold
        its parameters whole or sharded.
      member: this worker's place in the swarm.
      axis_name: an axis of size 1.
      delay: 1 exchanges packets while the next step computes its gradient, as `demo_optax.Delayed`.
      snapshot_every: steps between two snapshots; the same for all workers.
      norm_limit: as in `demo_optax.AllGather`.
      microbatches: as in `demo_optax.make_train_step`, and so are the next three.
      clip_norm: largest norm of the gradient.
      param_specs: of the parameters.
      batch_specs: of the batch.
      weight: of this worker's messages in the mean, such as the tokens of its batch. By default
        all workers count the same.
      facts: what all workers must have in common, for the comparison when one joins.

    Example:
      See ``docs/how_to/swarm.md``, or ``examples/train_lm.py --swarm``.
    """

    def __init__(
        self,
        loss_fn: Callable,
        make_optimizer: MakeOptimizer,
        mesh: Mesh,
        member: Member,
        axis_name: AxisName = "data",
        *,
        delay: int = 0,
        snapshot_every: int = 100,
        norm_limit: float | None = None,
        microbatches: int = 1,
        clip_norm: float | None = None,
        param_specs=None,
        batch_specs=None,
        weight: float = 1.0,
        facts: Mapping[str, Any] | None = None,
    ):
        checks.one_of("delay", delay, (0, 1))
        checks.static_integer("snapshot_every", snapshot_every, at_least=1)
        if (workers := shards.num_workers(mesh, axis_name)) != 1:
            raise ValueError(
                f"the mesh holds {workers} workers along {axis_name!r}, but a process of a swarm "
                "is one worker: give the axis the size 1, and the devices to another axis, whose "
                "devices share the worker's batch."
            )
        self.member, self.mesh, self.axis_name = member, mesh, axis_name
        self.delay, self.every = bool(delay), snapshot_every
        self.number = 0
        self.seconds_compiling = 0.0
        checks.in_interval("weight", weight, "(0, inf)")
        self._weight = np.array([weight], np.float32)
        self._compile = functools.partial(
            compile_programs,
            loss_fn,
            make_optimizer,
            mesh,
            axis_name,
            slots=member.slots,
            delay=self.delay,
            norm_limit=norm_limit,
            param_specs=param_specs,
            batch_specs=batch_specs,
            microbatches=microbatches,
            clip_norm=clip_norm,
        )
        self._facts = {"snapshot_every": snapshot_every, "slots": member.slots, "delay": delay}
        self._facts |= dict(facts or {})
        self._exchanging = ThreadPoolExecutor(1, "exchange")
        self._writing = ThreadPoolExecutor(1, "snapshots")
        self._sent: Future[Round] | None = None
        self._compared: Future | None = None
        self._programs: Programs | None = None

    def begin(self, params, batch) -> tuple[Any, Any]:
        """Joins: compiles, takes over the last snapshot, and catches up with the others.

        Args:
          params: initial parameters. The first worker's are those of the run.
          batch: one, or its shapes.

        Returns:
          Parameters and optimizer state.

        Raises:
          SwarmError: the run has other settings, or another model.
        """
        started = time.monotonic()
        self._programs = self._compile(params, batch)
        self.seconds_compiling = time.monotonic() - started
        layout = self._programs.layout
        self._require_same({"packets": list(self._programs.shape[::2]), **self._facts})
        params = jax.device_put(params, shards.shardings(self.mesh, layout.params))
        opt_state = worker_axis.init_stacked(self._programs.template, layout, params)
        params, opt_state = self._jump(params, opt_state)
        params, opt_state, _ = self._catch_up(params, opt_state)
        self.member.announce(self.number)
        return params, opt_state

    def step(self, params, opt_state, batch) -> tuple[Any, Any, SwarmMetrics]:
        """A step with a batch of this worker; and those that the others took meanwhile, if any.

        The arrays are given away. Each worker should read other batches than the rest.

        Raises:
          SwarmError, StoreError: this worker cannot go on.
          Left: ``member.leave()`` was called while it waited.
        """
        programs, began = self._require_begun(), time.monotonic()
        number, drift = self.number, 0.0
        if (index := self._to_adopt()) is not None:
            params, opt_state, drift = self._adopt(index, params, opt_state)
            number = self.number
        found = programs.gradients(params, batch)
        own = Own(found.gradients, jnp.isfinite(found.norm), self._weight)
        if self.delay:
            jax.block_until_ready(found.gradients)
            ready = time.monotonic()
            round_ = self._pending_round()
            if round_ is not None and round_.swept:
                params, opt_state = self._apply_alone(round_, params, opt_state)
                params, opt_state = self._jump(params, opt_state)
                params, opt_state, _ = self._catch_up(params, opt_state)
                return self.step(params, opt_state, batch)
            waited = time.monotonic() - ready
            arrived = self._arrived(round_)
            params, opt_state, exchange = programs.apply(own, params, opt_state, arrived)
            packet = self._packet(opt_state)
            self._sent = self._exchanging.submit(self.member.exchange, number, packet)
        else:
            opt_state = programs.seal(own, opt_state, params)
            packet = self._packet(opt_state)
            ready = time.monotonic()
            round_ = self.member.exchange(number, packet)
            waited = round_.waited
            params, opt_state, exchange = programs.apply(params, opt_state, self._arrived(round_))
        self.number += 1
        self._snapshot(params, opt_state, round_)
        replayed = 0
        if round_ is not None and round_.swept:
            params, opt_state = self._jump(params, opt_state)
        if round_ is not None and not round_.counts:
            params, opt_state, replayed = self._catch_up(params, opt_state)
            if ready - began < self.member.deadline:
                self.member.announce(self.number)
        metrics = SwarmMetrics(
            step=number,
            loss=float(found.loss[0]),
            gradient_norm=float(found.norm[0]),
            exchange=exchange,
            members=self._names(round_),
            late=round_.late if round_ else (),
            waited=waited,
            packet_bytes=len(packet),
            replayed=replayed,
            drift=drift,
        )
        return params, opt_state, metrics

    def close(self) -> None:
        """Tells the others not to wait for this worker, and finishes what it writes."""
        with contextlib.suppress(OSError):
            self.member.leave(self.number)
        self._exchanging.shutdown(wait=False, cancel_futures=True)
        self._writing.shutdown(wait=True)

    def __enter__(self) -> "SwarmWorker":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _require_begun(self) -> Programs:
        if self._programs is None:
            raise SwarmError("call begin(params, batch) before the first step.")
        return self._programs

    def _require_same(self, facts: dict[str, Any]) -> None:
        own = {name: str(value) for name, value in facts.items()}
        self.member.store.create("run.json", json.dumps(own).encode())
        run = json.loads(self.member.store.get("run.json") or b"{}")
        different = [
            f"{name} is {run.get(name)} there and {own.get(name)} here"
            for name in sorted(run.keys() | own.keys())
            if run.get(name) != own.get(name)
        ]
        if different:
            raise SwarmError(
                f"the run there has other settings: {'; '.join(different)}. Start this worker "
                "with the run's settings, or a new run in another place."
            )

    def _packet(self, opt_state) -> bytes:
        return np.asarray(pending_packets(opt_state)).tobytes()

    def _arrived(self, found: Round | None) -> Arrived:
        number, slots, words = self._require_begun().shape
        rows = np.zeros((number, slots, words), np.uint32)
        for slot, data in (found.packets if found else {}).items():
            if len(data) == 4 * number * words:
                rows[:, slot] = np.frombuffer(data, np.uint32).reshape(number, words)
        own = self.member.slot if found and found.counts else -1
        return Arrived(rows, np.array(own, np.int32))

    def _names(self, found: Round | None) -> tuple[str, ...]:
        packets = found.manifest.packets if found else ()
        return tuple(self.member.name_of(packet.member) for packet in packets)

    def _catch_up(self, params, opt_state) -> tuple[Any, Any, int]:
        """Applies what the others exchanged, until a step that is not decided yet."""
        steps = 0
        while self.member.manifest(self.number) is not None:
            found = self._pending_round() if self.delay else self.member.receive(self.number)
            params, opt_state = self._apply_alone(found, params, opt_state)
            self.number += 1
            steps += 1
            if found is not None and found.swept:
                params, opt_state = self._jump(params, opt_state)
        return params, opt_state, steps

    def _pending_round(self) -> Round | None:
        """With a delay, what was exchanged for the step before; takes it from its thread."""
        sent, self._sent = self._sent, None
        return sent.result() if sent else self.member.receive(self.number - 1)

    def _apply_alone(self, found: Round | None, params, opt_state) -> tuple[Any, Any]:
        """Applies what the others exchanged, without a gradient of this worker's own."""
        programs, arrived = self._require_begun(), self._arrived(found)
        nothing = []
        if self.delay:
            zeros = jax.tree.map(lambda x: np.zeros((1, *x.shape), x.dtype), params)
            nothing = [Own(zeros, np.zeros(1, bool), self._weight)]
        params, opt_state, _ = programs.apply(*nothing, params, opt_state, arrived)
        return params, opt_state

    def _shared(self, params, opt_state) -> list[Any]:
        """Parameters, and the leaves of the state that all workers share."""
        own = jax.tree.leaves(self._require_begun().layout.is_own)
        leaves = zip(jax.tree.leaves(opt_state), own, strict=True)
        return [*jax.tree.leaves(params), *[x for x, is_own in leaves if not is_own]]

    def _with_shared(self, params, opt_state, shared: list[np.ndarray]) -> tuple[Any, Any]:
        layout, values = self._require_begun().layout, iter(shared)
        placed = shards.shardings(self.mesh, (layout.params, layout.state))
        params = jax.tree.map(lambda x: next(values), params)
        opt_state = jax.tree.map(
            lambda x, own: x if own else next(values), opt_state, layout.is_own
        )
        return jax.device_put((params, opt_state), placed)

    def _jump(self, params, opt_state) -> tuple[Any, Any]:
        """Takes over the newest snapshot that can be read; where there is none, writes one."""
        store, shared = self.member.store, self._shared(params, opt_state)
        if not snapshots.steps_of(store):
            snapshots.write(store, 0, [np.asarray(x) for x in shared])
        failures = []
        for step in reversed(snapshots.steps_of(store)):
            try:
                index = snapshots.read_index(store, step)
                if index is not None:
                    return self._take_over(index, params, opt_state)
            except Damaged as error:
                failures.append(str(error))
        raise SwarmError(f"no snapshot can be read: {'; '.join(failures)}.")

    def _take_over(self, index: SnapshotIndex, params, opt_state) -> tuple[Any, Any]:
        shared = self._shared(params, opt_state)
        read = snapshots.read(self.member.store, index, shared)
        self.number = index.step
        return self._with_shared(params, opt_state, read)

    def _snapshot(self, params, opt_state, found: Round | None) -> None:
        """Every so many steps one worker in turn writes a snapshot; the others compare theirs."""
        if found is None or self.number % self.every:
            return
        step, shared = self.number, [np.array(x) for x in self._shared(params, opt_state)]
        members = [packet.member for packet in found.manifest.packets]
        writer = members[step // self.every % len(members)]
        if writer == self.member.me:
            self._compared = self._writing.submit(self._write, step, shared)
        else:
            self._compared = self._writing.submit(self._compare, step, shared)

    def _write(self, step: int, shared: list[np.ndarray]) -> None:
        snapshots.write(self.member.store, step, shared)
        snapshots.sweep(self.member.store)

    def _compare(self, step: int, shared: list[np.ndarray]) -> tuple[SnapshotIndex, list] | None:
        """The snapshot of a step, and this worker's own, if they differ."""
        own, started = snapshots.digest(shared), time.monotonic()
        while (index := snapshots.read_index(self.member.store, step)) is None:
            if time.monotonic() - started > SNAPSHOT_PATIENCE or self.member.leaving:
                return None
            time.sleep(0.25)
        return None if index.digest == own else (index, shared)

    def _to_adopt(self) -> tuple[SnapshotIndex, list] | None:
        if self._compared is None or not self._compared.done():
            return None
        done, self._compared = self._compared, None
        return done.result()

    def _adopt(self, differing: tuple[SnapshotIndex, list], params, opt_state):
        """Goes on from a snapshot that this worker's parameters differ from."""
        index, own = differing
        if self.delay:  # first applies what is under way, so that nothing of its own is lost
            params, opt_state = self._apply_alone(self._pending_round(), params, opt_state)
        params, opt_state = self._take_over(index, params, opt_state)
        drift = relative_difference(own, [np.asarray(x) for x in self._shared(params, opt_state)])
        params, opt_state, _ = self._catch_up(params, opt_state)
        self.member.announce(self.number)
        return params, opt_state, drift


def relative_difference(own: list[np.ndarray], other: list[np.ndarray]) -> float:
    """Norm of the difference of floating arrays, relative to that of the others."""
    pairs = [(x, y) for x, y in zip(own, other, strict=True) if np.issubdtype(y.dtype, np.floating)]
    wide = [(x.astype(np.float64), y.astype(np.float64)) for x, y in pairs]
    difference = sum(float(np.sum((x - y) ** 2)) for x, y in wide)
    norm = sum(float(np.sum(y**2)) for _, y in wide)
    return float(np.sqrt(difference / norm)) if norm else 0.0

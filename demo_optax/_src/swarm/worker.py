"""A swarm's worker: it steps, catches up when it is late, and writes and adopts snapshots."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from demo_optax._src import checks
from demo_optax._src.axes import AxisName
from demo_optax._src.halves import SplitTransformation
from demo_optax._src.metrics import exchange_metrics
from demo_optax._src.parallel import shards, worker_axis
from demo_optax._src.swarm import agreement, snapshots
from demo_optax._src.swarm.lead import by_lead, is_lead, to_devices, to_host
from demo_optax._src.swarm.member import Member, Round
from demo_optax._src.swarm.metrics import SwarmMetrics
from demo_optax._src.swarm.programs import (
    Contribution,
    Programs,
    Stepped,
    compile_programs,
    require_optimizer,
    shapes_of,
)
from demo_optax._src.swarm.shared import shared_leaves, with_shared_leaves
from demo_optax._src.swarm.slots import SwarmError
from demo_optax._src.swarm.snapshot_turns import SnapshotTurns

TOLD_EVERY = 200  # steps of catching up
READ_AT_ONCE = 16  # steps, once so many were caught up with


class SwarmWorker:
    """Trains as one worker of a swarm, whatever the others do.

    Args:
      loss_fn: as in `demo_optax.make_train_step`.
      tx: an optimizer of this library without an axis of workers, such as
        ``demo_optax.demo_scaled(3e-3)``.
      mesh: of this worker: ``axis_name`` has size 1, other axes share the worker's batch and hold
        its parameters whole or sharded.
      member: this worker's place in the swarm. A worker may have several processes, those of one
        JAX job: then the first has the place, and the others have None.
      axis_name: an axis of size 1.
      delay: 1 exchanges packets while the next step computes its gradient, as `demo_optax.Delayed`
        does. A message is applied with the learning rate of the step that sent it.
      snapshot_every: steps between two snapshots; the same for all workers.
      microbatches: as in `demo_optax.make_train_step`, and so are the next four.
      clip_norm: largest norm of the gradient.
      param_specs: of the parameters.
      batch_specs: of the batch.
      check_vma: False lets the loss have loops that start from zeros.
      weight: of this worker's messages in the mean, such as the tokens of its batch. By default
        all workers count the same.
      facts: what else all workers must have in common, compared when one joins. On one kind of
        device its whole optimizer is compared; on unlike ones only these, trees and packets are.

    Example:
      See ``docs/how_to/swarm.md``, or ``examples/train_lm.py --swarm``.
    """

    def __init__(
        self,
        loss_fn: Callable,
        tx: SplitTransformation,
        mesh: Mesh,
        member: Member | None,
        axis_name: AxisName = "data",
        *,
        delay: int = 0,
        snapshot_every: int = 100,
        microbatches: int = 1,
        clip_norm: float | None = None,
        param_specs=None,
        batch_specs=None,
        check_vma: bool = True,
        weight: float = 1.0,
        facts: Mapping[str, Any] | None = None,
    ):
        require_optimizer(tx)
        checks.one_of("delay", delay, (0, 1))
        checks.static_integer("snapshot_every", snapshot_every, at_least=1)
        checks.in_interval("weight", np.float32(weight), f"[{np.finfo(np.float32).tiny}, inf)")
        if (workers := shards.num_workers(mesh, axis_name)) != 1:
            raise ValueError(
                f"the mesh holds {workers} workers along {axis_name!r}, but a swarm's worker is "
                "one: give the axis the size 1, and the devices to another axis, whose devices "
                "share the worker's batch."
            )
        if (member is not None) != is_lead():
            raise ValueError(
                f"member={member} in process {jax.process_index()} of the worker: give a Member "
                "to the first process, and None to the others."
            )
        # the programs reshard what they are given, so that no axis needs to be Explicit
        automatic = (AxisType.Auto,) * len(mesh.axis_names)
        mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=automatic)
        self._member, self.mesh = member, mesh
        slots, slot = by_lead(lambda: (self.member.slots, self.member.slot))
        self.delay, self.every, self.number = bool(delay), snapshot_every, 0
        self.seconds_compiling = 0.0
        self._tx, self._slot = tx, np.array(slot, np.int32)
        self._weight = np.array([by_lead(lambda: weight)], np.float32)
        self._compile = functools.partial(
            compile_programs,
            loss_fn,
            tx,
            mesh,
            axis_name,
            slots=slots,
            param_specs=param_specs,
            batch_specs=batch_specs,
            microbatches=microbatches,
            clip_norm=clip_norm,
            check_vma=check_vma,
        )
        own_facts = dict(snapshot_every=snapshot_every, slots=slots, delay=delay)
        self._facts: dict[str, Any] = own_facts | dict(facts or {})
        self._exchanging = ThreadPoolExecutor(1, "exchange")
        self._turns = SnapshotTurns(member, snapshot_every) if member else None
        self._outbox: Any = None  # what was sent and is not applied yet
        self._sent: Future[Round] | None = None
        self._late = 0  # steps in a row in which this worker's packet did not count
        self._programs: Programs | None = None
        self._stopped: BaseException | None = None

    @property
    def member(self) -> Member:
        """This worker's place in the swarm, in its first process."""
        if self._member is None:
            raise SwarmError(f"process {jax.process_index()} has no place: use the first process.")
        return self._member

    @shards.no_context_mesh()
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
        with self._stops_at_errors():
            started = time.monotonic()
            self._programs = programs = self._compile(params, batch)
            self.seconds_compiling = time.monotonic() - started
            layout = programs.layout
            params = to_devices(params, shards.shardings(self.mesh, layout.params))
            opt_state = worker_axis.init_stacked(self._tx, layout, params)
            facts = agreement.facts_of(self._tx, params, opt_state, programs.shape[-1])
            facts = self._facts | facts
            by_lead(lambda: agreement.require(self.member.store, facts, programs.fingerprint))
            params, opt_state = self._jump(params, opt_state)
            params, opt_state, _ = self._catch_up(params, opt_state)
            self._announce()
            return params, opt_state

    @shards.no_context_mesh()
    def step(self, params, opt_state, batch) -> tuple[Any, Any, SwarmMetrics]:
        """A step with a batch of this worker; and those that the others took meanwhile, if any.

        The arrays are given away. Each worker should read other batches than the rest. After an
        error this worker cannot go on: start its process again.

        Raises:
          ValueError: the batch has other shapes than that of `begin`.
          SwarmError, StoreError: this worker cannot go on.
          Left: ``member.leave()`` was called while it waited.
        """
        if (given := shapes_of(batch)) != (expected := self._require_begun().batch):
            raise ValueError(
                f"the batch has {given}, but that of begin() had {expected}: give every step "
                "batches of one shape, or begin again in a new process."
            )
        with self._stops_at_errors():
            return self._step(params, opt_state, batch)

    def close(self) -> None:
        """Tells the others not to wait for this worker, and finishes what it writes."""
        if self._turns is None:
            return
        with contextlib.suppress(OSError):
            self.member.leave(self.number)
        self._exchanging.shutdown(wait=False, cancel_futures=True)
        self._turns.close()

    def __enter__(self) -> "SwarmWorker":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @contextlib.contextmanager
    def _stops_at_errors(self) -> Iterator[None]:
        """After an error nobody knows which half of a step was done."""
        if self._stopped is not None:
            raise SwarmError(
                f"this worker stopped at an error before: {self._stopped!r}. Start its process "
                "again, so that it joins from a snapshot; call nothing but close() here."
            )
        try:
            yield
        except BaseException as error:
            self._stopped = error
            raise

    def _step(self, params, opt_state, batch) -> tuple[Any, Any, SwarmMetrics]:
        programs = self._require_begun()
        params, opt_state, drift = self._adopt(params, opt_state)
        while True:
            number = self.number
            found = programs.gradients(params, opt_state, batch)
            norm = to_host(found.gradient_norm)
            own = Contribution(found.gradients, norm, self._weight, self._slot)
            was_sent = not self.delay or self._outbox is not None
            ready = time.monotonic()
            round_ = self._pending_round() if self.delay else None
            if round_ is None or not round_.swept:
                break
            params, opt_state, _ = self._go_on(round_, params, opt_state)  # others are far ahead
        waited = time.monotonic() - ready
        if self.delay:
            params, opt_state, exchange = self._apply(round_, params, opt_state)
            opt_state, packet = self._send(own, params, opt_state)
            if self._member is not None:
                self._sent = self._exchanging.submit(self._member.exchange, number, packet)
        else:
            opt_state, packet = self._send(own, params, opt_state)
            round_ = by_lead(lambda: self.member.exchange(number, packet))
            waited = round_.waited
            params, opt_state, exchange = self._apply(round_, params, opt_state)
        self.number += 1
        replayed = 0
        if round_ is not None:
            if round_.swept:
                params, opt_state = self._jump(params, opt_state)
            else:
                self._take_snapshot(params, opt_state, round_)
            if was_sent:
                self._late = self._late + 1 if round_.own is None else 0
            if self._late:
                params, opt_state, replayed = self._catch_up(params, opt_state)
            # after 1, 2, 4, 8, ...: who is always late is waited for ever more rarely
            if was_sent and self._late.bit_count() == 1:
                self._announce()
        metrics = SwarmMetrics(
            step=number,
            loss=float(to_host(found.loss)[0]),
            gradient_norm=float(norm[0]),
            exchange=exchange,
            members=self._names(round_),
            late=round_.late if round_ else (),
            waited=waited,
            packet_bytes=len(packet),
            replayed=replayed,
            drift=drift,
        )
        return params, opt_state, metrics

    def _require_begun(self) -> Programs:
        if self._programs is None:
            raise SwarmError("call begin(params, batch) before the first step.")
        return self._programs

    def _announce(self) -> None:
        """Asks the others to wait for this worker."""
        by_lead(lambda: self.member.announce(self.number))

    def _no_packet(self) -> bytes:
        number, _, words = self._require_begun().shape
        return bytes(4 * number * words)

    def _send(self, own: Contribution, params, opt_state) -> tuple[Any, bytes]:
        """Returns the state that the message has left, and the packet that holds the message."""
        self._outbox, opt_state = self._require_begun().send(own, opt_state, params)
        return opt_state, to_host(self._outbox.packets).tobytes()

    def _apply(self, found: Round | None, params, opt_state) -> Stepped:
        """Applies what arrived, and gives back to the momentum what did not count.

        Before the first exchange of a run with a delay there is nothing to apply.
        """
        programs = self._require_begun()
        if found is None:
            metrics = jax.tree.map(jnp.copy, exchange_metrics(opt_state))  # send takes the state
            return Stepped(params, opt_state, metrics)
        number, slots, words = programs.shape
        packets = np.zeros((number, slots, words), np.uint32)
        for slot, data in found.packets.items():
            if len(data) == 4 * number * words:
                packets[:, slot] = np.frombuffer(data, np.uint32).reshape(number, words)
        outbox, self._outbox = self._outbox or programs.empty_outbox, None
        return programs.apply(params, opt_state, outbox, packets, self._slot)

    def _names(self, found: Round | None) -> tuple[str, ...]:
        if found is None:
            return ()
        packets = found.manifest.packets
        return by_lead(lambda: tuple(self.member.name_of(packet.member) for packet in packets))

    def _catch_up(self, params, opt_state) -> tuple[Any, Any, int]:
        """Applies what the others exchanged, until a step that is not decided yet."""
        steps = 0
        while by_lead(self._is_behind):
            if steps and steps % READ_AT_ONCE == 0:
                by_lead(lambda: self.member.read_ahead(self.number, READ_AT_ONCE))
            found = self._pending_round() if self.delay else self._received(self.number)
            params, opt_state, jumped = self._go_on(found, params, opt_state)
            steps += 1
            if not jumped and steps % TOLD_EVERY == 0 and self._member is not None:
                self._member.tell(f"caught up with {steps} steps, to step {self.number}")
        return params, opt_state, steps

    def _is_behind(self) -> bool:
        self.member.end_if_leaving()
        return self.member.manifest(self.number) is not None

    def _go_on(self, found: Round | None, params, opt_state) -> tuple[Any, Any, bool]:
        """Applies what the others exchanged; jumps to a snapshot where that was swept."""
        params, opt_state, _ = self._apply(found, params, opt_state)
        self.number += 1
        if found is None or not found.swept:
            return params, opt_state, False
        return *self._jump(params, opt_state), True

    def _received(self, number: int) -> Round:
        return by_lead(lambda: self.member.receive(number))

    def _pending_round(self) -> Round | None:
        """With a delay, what was exchanged in the step before.

        Where that step was never decided, because everybody stopped, it is decided now, without a
        message of this worker.
        """
        if self.number == 0:
            return None
        sent, self._sent = self._sent, None

        def ask() -> Round:
            before = self.number - 1
            if sent is not None:
                return sent.result()
            if self.member.manifest(before) is None:
                return self.member.exchange(before, self._no_packet())
            return self.member.receive(before)

        return by_lead(ask)

    def _shared(self, params, opt_state) -> list[jax.Array]:
        return shared_leaves(params, opt_state)

    def _with_shared(self, params, opt_state, leaves: list[np.ndarray]) -> tuple[Any, Any]:
        layout = self._require_begun().layout
        return with_shared_leaves(layout, self.mesh, params, opt_state, leaves)

    def _jump(self, params, opt_state) -> tuple[Any, Any]:
        """Takes over the newest snapshot; the first worker of all writes one."""
        shared = self._shared(params, opt_state)
        like, initial = shapes_of(shared), [to_host(x) for x in shared]
        self.number, read = by_lead(lambda: snapshots.read_newest(self.member.store, initial, like))
        return self._with_shared(params, opt_state, read)

    def _take_snapshot(self, params, opt_state, found: Round) -> None:
        if self.number % self.every == 0:
            shared = [np.array(to_host(x)) for x in self._shared(params, opt_state)]
            given = self.number, shared, len(jax.tree.leaves(params)), found.manifest
            by_lead(lambda: self._turns.take(*given) if self._turns else None)

    def _adopt(self, params, opt_state) -> tuple[Any, Any, float | None]:
        """Goes on from a snapshot, if this worker's parameters differ from it; and by how much."""
        like = shapes_of(self._shared(params, opt_state))
        found = by_lead(lambda: self._turns.adoption(like) if self._turns else None)
        if found is None or found.leaves is None:
            return params, opt_state, found.drift if found else None
        if self.delay:  # first applies what is under way, so that nothing of its own is lost
            params, opt_state, _ = self._apply(self._pending_round(), params, opt_state)
        params, opt_state = self._with_shared(params, opt_state, found.leaves)
        self.number = found.step
        params, opt_state, _ = self._catch_up(params, opt_state)
        self._announce()
        return params, opt_state, found.drift

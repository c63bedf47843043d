"""A worker of a swarm: it steps, catches up when it is late, and takes over snapshots."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from demo_optax._src import axes, checks, metrics, transport
from demo_optax._src.local_state import nodes
from demo_optax._src.momentum import DecoupledMomentumState
from demo_optax._src.parallel import shards
from demo_optax._src.parallel.processes import by_lead, is_lead
from demo_optax._src.swarm import agreement, replicated_state, snapshots
from demo_optax._src.swarm.member import ExchangeResult, Left, Member
from demo_optax._src.swarm.programs import compile_programs, require_optimizer
from demo_optax._src.swarm.records import Manifest, SnapshotIndex, SwarmError
from demo_optax._src.swarm.replicated_state import replace_leaves, shared_leaves, to_host
from demo_optax._src.swarm.round_clock import RoundClock
from demo_optax._src.swarm.snapshot_turns import SnapshotTurns

LEAVE_SECONDS = 10.0  # for which a worker that leaves waits for the result of its last packet
DECISION_SECONDS = 1.0  # for which it then waits for a decision that others may be taking
LOG_EVERY_STEPS = 200  # of catching up
READ_AT_ONCE = 16  # steps, after it has caught up with as many


class SwarmMetrics(NamedTuple):
    """Holds what `SwarmWorker.step` measured in a step.

    Attributes:
      step: int, the number of the exchange that the step's gradient goes into, from 0. With
        `demo_optax.local_steps` it is the number of the round.
      loss: float, the loss of this worker.
      gradient_norm: float, the norm of its gradient before clipping.
      exchange: `demo_optax.ExchangeMetrics` of the exchange that the parameters were updated with.
      applied: int, the number of the exchange whose result came in this step, or None if none came.
        With a delay it is an earlier one than ``step``.
      members: names of the workers whose packets counted in that exchange; empty if none came.
      skipped: names of the workers that had nothing finite to send in that exchange.
      late: names of the workers for which this worker waited in vain in that exchange.
      waited: float, seconds in the exchange; with a delay, those that the gradient did not hide.
      packet_bytes: int, bytes that it sent.
      replayed: int, steps that it caught up with afterwards, or rounds.
      drift: float, the norm by which its parameters differed from the last snapshot, relative to
        that of the snapshot, or the same of the shared state if that is larger; None in steps
        without a comparison.
      round_steps: int, the steps in the round that this step ended, else 0; 1 without rounds.
    """

    step: int
    loss: float
    gradient_norm: float
    exchange: metrics.ExchangeMetrics
    applied: int | None
    members: tuple[str, ...]
    skipped: tuple[str, ...]
    late: tuple[str, ...]
    waited: float
    packet_bytes: int
    replayed: int
    drift: float | None
    round_steps: int


class SwarmWorker:
    """Trains as one worker of a swarm, whatever the others do.

    With an optimizer from `demo_optax.local_steps` the workers exchange once in a round. With
    ``delay=1`` as well, a worker goes on with its next steps while packets travel, for as long as
    they need: it never waits for the others.

    Args:
      loss_fn: the loss, as in `demo_optax.make_train_step`.
      tx: an optimizer of this library without an axis of workers, such as
        ``demo_optax.demo_scaled(3e-3)``, or `demo_optax.local_steps` around one.
      mesh: the devices of this worker. ``axis_name`` has size 1; the other axes divide the worker's
        batch, and may divide its parameters.
      member: this worker's place in the swarm. If the worker is a JAX job of several processes, the
        first one has the place, and the others pass None.
      axis_name: an axis of size 1.
      delay: 1 exchanges packets while the next step computes its gradient, as `demo_optax.Delayed`
        does, or during the next steps of a round. A message is applied with the learning rate of
        the step that sent it.
      round_seconds: the duration of a round instead of a number of steps. The first worker whose
        time is over ends the round for all, so that workers of unequal speed need not wait for each
        other.
      snapshot_every: steps or rounds between two snapshots; the same for all workers.
      weight: the weight of a step in the mean of the messages, such as the number of tokens in this
        worker's batch. A round has the sum of its steps. By default all steps count the same.
      facts: what else all workers must have in common. It is compared when one joins, together with
        trees, packets and, on devices of one kind, the whole optimizer.

    The other arguments are those of `demo_optax.make_train_step`. There are examples in
    ``docs/how_to/swarm.md`` and in ``examples/lm/swarm.py``.
    """

    def __init__(
        self,
        loss_fn: Callable,
        tx: transport.SplitTransformation,
        mesh: Mesh,
        member: Member | None,
        axis_name: axes.AxisName = "data",
        *,
        delay: int = 0,
        round_seconds: float | None = None,
        snapshot_every: int = 100,
        microbatches: int = 1,
        clip_norm: float | None = None,
        param_specs=None,
        batch_specs=None,
        weight: float = 1.0,
        facts: Mapping[str, Any] | None = None,
    ):
        require_optimizer(tx)
        checks.one_of("delay", delay, (0, 1))
        checks.static_integer("snapshot_every", snapshot_every, at_least=1)
        checks.in_interval("weight", np.float32(weight), f"[{np.finfo(np.float32).tiny}, inf)")
        if round_seconds is not None:
            checks.in_interval("round_seconds", round_seconds, "(0, inf)")
            if not tx.steps_per_round:
                raise ValueError(
                    f"round_seconds={round_seconds} needs rounds, but the optimizer exchanges on "
                    "every step: give SwarmWorker an optimizer local_steps(inner, outer, every=30)."
                )
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
        # The programs place their arguments themselves, so that no axis needs to be Explicit.
        automatic = (AxisType.Auto,) * len(mesh.axis_names)
        mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=automatic)
        self._member, self.mesh = member, mesh
        slots, slot, weight = by_lead(lambda: (self.member.slots, self.member.slot, weight))
        self.delay, self.every, self.number = bool(delay), snapshot_every, 0
        self._tx, self.seconds_compiling = tx, 0.0
        self._slot, self._weight = np.array(slot, np.int32), np.array([weight], np.float32)
        self._tokens_per_step = float(weight)
        options: dict[str, Any] = dict(microbatches=microbatches, clip_norm=clip_norm)
        options |= dict(param_specs=param_specs, batch_specs=batch_specs)
        self._compile = lambda params, batch: compile_programs(
            loss_fn, tx, mesh, axis_name, params, batch, slots, options
        )
        self._facts: dict[str, Any] = dict(snapshot_every=snapshot_every, slots=slots, delay=delay)
        self._facts |= dict(steps_per_round=tx.steps_per_round, round_seconds=round_seconds)
        self._facts |= facts or {}
        self._thread = ThreadPoolExecutor(1, "exchange")
        self._under_way: Future[ExchangeResult] | None = None
        self._turns = SnapshotTurns(member, snapshot_every) if member else None
        self._has_rounds, self._clock = bool(tx.steps_per_round), None
        self._ends_rounds = round_seconds is not None  # for all, when this worker's time is over
        if member and tx.steps_per_round:
            self._clock = RoundClock(member, tx.steps_per_round, round_seconds)
            member.pace.unit = "round"
        self._steps = 0  # that this worker took since it last sent a packet
        self._finite_steps = 0  # those of them whose gradient was finite
        self._sent_steps = 0  # those of them that its last packet holds
        self._returned_steps = 0  # whose message came too late, and is in the outer momentum again
        self._outbox: Any = None  # the message that was sent and is not applied yet
        self._times_late = 0  # successive exchanges in which this worker's packet did not count
        self._programs: Any = None  # what `begin` compiles,
        self._batch: Any = None  # for batches of these shapes and dtypes
        self._exchange: Any = None  # the metrics of the last exchange
        self._members: tuple[str, ...] = ()  # whose packets were given to it
        self._damaged = 0  # packets that did not count in the exchange before
        self._error: BaseException | None = None
        self._is_leaving = False
        self._lost: int | None = None  # steps, once it has left

    @property
    def member(self) -> Member:
        """This worker's place in the swarm, in its first process."""
        if self._member is None:
            raise SwarmError(f"process {jax.process_index()} has no place: use the first process.")
        return self._member

    @shards.no_context_mesh()
    def begin(self, params, batch) -> tuple[Any, Any]:
        """Joins the run, and returns parameters and optimizer state.

        It compares its settings with the run's, compiles, takes over the last snapshot, and catches
        up. A run starts with the parameters of its first worker. The batch may consist of shapes.

        Raises:
          SwarmError: the run has other settings, or another model.
        """
        with self._stops_at_errors():
            facts = self._facts | agreement.facts_of(self._tx, params)
            by_lead(lambda: agreement.compare(self.member.store, facts))
            started = time.monotonic()
            self._programs = programs = self._compile(params, batch)
            self._batch = checks.shapes_of("batch", batch)
            self.seconds_compiling = time.monotonic() - started
            params = replicated_state.to_devices(params, programs.shardings[0])
            opt_state = programs.init(params)
            facts |= {"number of shards": programs.division}
            by_lead(lambda: agreement.require(self.member.store, facts, programs.fingerprint))
            by_lead(lambda: self.member.expect(programs.packet_bytes))
            params, opt_state, _ = self._catch_up(*self._jump(params, opt_state))
            self._announce()
            if self._clock is not None:
                self._clock.restart()
            # A copy, since programs donate the state.
            self._exchange = jax.tree.map(jnp.copy, metrics.exchange_metrics(opt_state))
            return params, opt_state

    @shards.no_context_mesh()
    def step(self, params, opt_state, batch) -> tuple[Any, Any, SwarmMetrics]:
        """Takes a step with a batch of this worker, then the steps that it missed meanwhile.

        The arrays are donated. Each worker should read batches of its own. A worker that raised an
        error cannot go on: start its process again.

        Raises:
          ValueError: the batch has other shapes than that of `begin`.
          SwarmError, StoreError: this worker cannot go on.
          Left: ``member.leave()`` was called while it waited.
        """
        if self._programs is None:
            raise SwarmError("call begin(params, batch) before the first step.")
        if self._lost is not None:
            raise SwarmError(
                "this worker has left, with what it had not sent: start its process again, so that "
                "it joins from a snapshot; call nothing but close() here."
            )
        if (shapes := checks.shapes_of("batch", batch)) != self._batch:
            raise ValueError(
                f"the batch has {shapes}, but that of begin() had {self._batch}: give every step "
                "batches of one shape, or begin again in a new process."
            )
        with self._stops_at_errors():
            return self._step(params, opt_state, batch)

    @shards.no_context_mesh()
    def leave(self, params, opt_state) -> int:
        """Sends the progress of a round that has not ended, before the worker leaves.

        Returns the number of its steps that are lost: those of a packet that came too late, or
        could not be sent in time. It is 0 if the packet was there before the others decided. They
        need not wait for it, since it counts in the round that they are in. A message that came too
        late before is sent again. What one packet cannot hold of the outer momentum leaves with the
        worker, which tells its share. Call this before ``member.leave()``, which ends the wait for
        a packet under way. The arrays are donated, and the worker takes no steps afterwards.
        """
        if self._lost is None:
            self._lost = self._leave(params, opt_state)
        return self._lost

    def _leave(self, params, opt_state) -> int:
        if self._error is not None or self._programs is None or not self._has_rounds:
            return self._lost_steps()
        self._is_leaving = True
        with self._stops_at_errors(), contextlib.suppress(Left):
            if self._outbox is not None:
                result = self._result(LEAVE_SECONDS)
                if result is None:
                    return self._lost_steps()
                params, opt_state, _ = self._go_on(result, params, opt_state)
            params, opt_state, _ = self._catch_up(params, opt_state)
            unsent = self._steps + self._returned_steps
            # An earlier process of this worker may have left its packet in the same round.
            if unsent and by_lead(lambda: self.member.may_send(self.number)):
                # A message that is sent again has its weight again.
                weight = np.float32(self._returned_steps * self._weight[0])
                opt_state = opt_state._replace(weight=to_host(opt_state.weight) + weight)
                self._finite_steps += self._returned_steps
                zeros = jax.tree.map(lambda x: np.zeros((1, *x.shape), x.dtype), params)
                nothing = zeros, np.array([np.nan], np.float32), self._weight, self._slot
                opt_state, sent = self._send(params, opt_state, *nothing)
                by_lead(lambda: self.member.send(*sent))
                self._tell_rest(opt_state)
                if self._sent_steps:  # else nothing was finite
                    self._sent_steps, self._steps, self._returned_steps = unsent, 0, 0
        return self._lost_steps()

    def _lost_steps(self) -> int:
        """Returns the steps that no packet delivers, as far as it is known by now.

        A packet under way delivers what came too late before it, if it counts.
        """
        lost = self._steps + self._returned_steps
        if self._outbox is None:
            return lost
        has_failed = self._error is not None and not isinstance(self._error, Left)
        counts = not has_failed and by_lead(self._counts_unless_decided)
        return self._steps if counts and self._sent_steps else lost + self._sent_steps

    def _counts_unless_decided(self) -> bool:
        """Tells whether the last packet counts, as far as others have decided on it by now."""
        until, has_sent = time.monotonic() + DECISION_SECONDS, self.member.last_sent == self.number
        while (manifest := self.member.manifest(self.number)) is None and time.monotonic() < until:
            time.sleep(DECISION_SECONDS / 10)
        return has_sent if manifest is None else self.member.me in manifest.members

    def _tell_rest(self, opt_state) -> None:
        """Tells the share of the outer momentum that its last packet does not hold."""
        (momentum,) = nodes(opt_state, DecoupledMomentumState)
        rest, sent = (
            np.hypot.reduce([float(np.linalg.norm(to_host(x))) for x in jax.tree.leaves(tree)])
            for tree in (momentum.momentum, self._outbox.message.values)
        )
        share = rest / np.hypot(rest, sent) if rest else 0.0
        if share >= 0.01 and self._member is not None:
            self._member.tell(
                f"leaves with {share:.0%} of its outer momentum, by norm: a packet holds no more"
            )

    def close(self) -> None:
        """Tells the others not to wait for this worker, and finishes what it writes."""
        if self._turns is None:
            return
        with contextlib.suppress(OSError):
            self.member.leave(self.number)
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._clock is not None:
            self._clock.close()
        self._turns.close()

    def __enter__(self) -> "SwarmWorker":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @contextlib.contextmanager
    def _stops_at_errors(self) -> Iterator[None]:
        """Refuses to go on after an error, when nobody knows how much of a step was done."""
        if self._error is not None:
            raise SwarmError(
                f"this worker stopped at an error before: {self._error!r}. Start its process "
                "again, so that it joins from a snapshot; call nothing but close() here."
            )
        try:
            yield
        except BaseException as error:
            self._error = error
            raise

    def _step(self, params, opt_state, batch) -> tuple[Any, Any, SwarmMetrics]:
        drift = None
        if not self._has_rounds:
            params, opt_state, drift = self._adopt(params, opt_state)
        while True:
            gradients = self._programs.gradients(params, opt_state, batch)
            norm = to_host(gradients.gradient_norm)
            self._say_what_was_damaged()
            ready = time.monotonic()
            result = self._result(timeout=0.0 if self._has_rounds else None)
            if result is None or not result.swept:
                break
            params, opt_state, _ = self._go_on(result, params, opt_state)  # others are far ahead
        waited, packet, replayed, round_steps = time.monotonic() - ready, b"", 0, 0
        self._steps += 1
        self._finite_steps += bool(np.isfinite(norm[0]))
        if result is not None:
            params, opt_state, replayed = self._go_on(result, params, opt_state)
        if self._has_rounds and self._outbox is None:  # so that it waits for no exchange
            params, opt_state, drift = self._adopt(params, opt_state)
        look = self._look()
        if look == "decided":
            params, opt_state, replayed = self._go_on(None, params, opt_state)
            look = self._look()
        number, sent = self.number, (gradients.gradients, norm, self._weight, self._slot)
        if look == "over":
            opt_state, sent = self._send(params, opt_state, *sent)
            packet, round_steps, self._steps = sent[1], self._steps, 0
            if self._clock is not None:
                self._clock.restart()
            if self._member is not None:
                exchange = self._member.exchange
                self._under_way = self._thread.submit(exchange, *sent, self._ends_rounds)
            if not self.delay:
                result = self._result()
                assert result is not None
                waited = result.waited
                params, opt_state, replayed = self._go_on(result, params, opt_state)
        else:
            opt_state = self._programs.step_alone(params, opt_state, *sent)
        measured = SwarmMetrics(
            step=number,
            loss=float(to_host(gradients.loss)[0]),
            gradient_norm=float(norm[0]),
            exchange=self._exchange,
            applied=result.manifest.step if result else None,
            members=result.members if result else (),
            skipped=result.skipped if result else (),
            late=result.late if result else (),
            waited=waited,
            packet_bytes=len(packet),
            replayed=replayed,
            drift=drift,
            round_steps=round_steps,
        )
        return params, opt_state, measured

    def _look(self) -> str:
        """Tells what has become of this worker's round; without rounds every step ends one.

        A round goes on for as long as the result of the last one is not there.
        """
        if not self._has_rounds:
            return "over"
        if self._outbox is not None:
            return "open"
        number, steps = self.number, self._steps
        return by_lead(lambda: self._clock.look(number, steps) if self._clock else "open")

    def _result(self, timeout: float | None = None) -> ExchangeResult | None:
        """Returns the result of the exchange under way, if there is one and it comes in time."""

        def ask() -> ExchangeResult | None:
            assert self._under_way is not None
            _, late = wait([self._under_way], timeout)
            return None if late else self._under_way.result()

        return None if self._outbox is None else by_lead(ask)

    def _go_on(self, result: ExchangeResult | None, params, opt_state) -> tuple[Any, Any, int]:
        """Applies the result of this worker's exchange, if there is one, and then what it missed.

        A worker that was late asks the others to wait for it, after 1, 2, 4, 8, ... times. If it
        asked each time, everybody would wait for a worker that is too slow.
        """
        is_late, replayed = result is None or result.own is None, 0
        if result is not None:
            params, opt_state = self._apply(result, params, opt_state)
        if is_late:
            params, opt_state, replayed = self._catch_up(params, opt_state)
        self._times_late = self._times_late + 1 if is_late else 0
        if self._times_late.bit_count() == 1:
            self._announce()
        return params, opt_state, replayed

    def _announce(self) -> None:
        by_lead(lambda: self.member.announce(self.number))

    def _send(self, params, opt_state, *sent) -> tuple[Any, tuple[int, bytes, int, float]]:
        """Returns the state without the message, and what `Member.send` sends of it."""
        self._outbox, opt_state = self._programs.send(params, opt_state, *sent)
        steps = self._finite_steps if to_host(self._outbox.factor) else 0
        self._finite_steps, self._sent_steps = 0, steps
        packet = to_host(self._outbox.packets).tobytes()
        return opt_state, (self.number, packet, steps, steps * self._tokens_per_step)

    def _is_behind(self) -> bool:
        if not self._is_leaving:
            self.member.end_if_leaving()
        return self.member.manifest(self.number) is not None

    def _apply(self, result: ExchangeResult, params, opt_state) -> tuple[Any, Any]:
        """Applies the packets; goes on to the next exchange, or to a snapshot if some are swept."""
        self.number += 1
        if self._outbox is not None:
            if result.own is None:
                self._returned_steps += self._sent_steps
            elif self._sent_steps:  # a packet in which nothing was finite delivers nothing
                self._returned_steps = 0
            self._sent_steps = 0
        num_shards, slots, words = self._programs.shape
        packets = np.zeros((num_shards, slots, words), np.uint32)
        for slot, data in result.packets.items():
            packets[:, slot] = np.frombuffer(data, np.uint32).reshape(num_shards, words)
        outbox, self._outbox = self._outbox or self._programs.empty_outbox, None
        applied = self._programs.apply(params, opt_state, outbox, packets, self._slot)
        params, opt_state, self._exchange = applied
        self._members = () if result.swept else result.members
        if result.swept:  # what was missed stands in later snapshots only
            return self._jump(params, opt_state, self.number)
        if self.number % self.every == 0:
            self._take_snapshot(params, opt_state, result.manifest)
        return params, opt_state

    def _say_what_was_damaged(self) -> None:
        """Looks at the last exchange, which gradients depend on, so that nothing waits for it."""
        if not self._members:
            return
        damaged = len(self._members) - int(to_host(self._exchange.participants))
        if self._member is not None and damaged > self._damaged:
            self._member.tell(
                f"{self._member.unit} {self.number - 1}: {damaged} of the packets of "
                f"{', '.join(self._members)} counted for nobody: a checksum was wrong"
            )
        self._damaged = damaged

    def _catch_up(self, params, opt_state) -> tuple[Any, Any, int]:
        """Applies what the others exchanged, until a step that is not decided yet."""
        steps = 0
        while by_lead(self._is_behind):
            if steps and steps % READ_AT_ONCE == 0:
                by_lead(lambda: self.member.read_ahead(self.number, READ_AT_ONCE))
            result = by_lead(lambda: self.member.receive(self.number))
            params, opt_state = self._apply(result, params, opt_state)
            steps += 1
            if steps % LOG_EVERY_STEPS == 0 and self._member is not None:
                self._member.tell(f"catches up, now at {self._member.unit} {self.number - 1}")
        if steps and self._clock is not None:
            self._clock.restart()
        return params, opt_state, steps

    def _jump(self, params, opt_state, first: int = 0) -> tuple[Any, Any]:
        """Takes over the newest snapshot; the first worker of a run writes one."""
        own = list(map(to_host, shared_leaves(params, opt_state)))

        def read() -> tuple[SnapshotIndex, Any]:
            store, chain = self.member.store, self.member.chain
            return snapshots.read_newest(store, own, 0 if chain.astray else first, chain.believes)

        return self._go_on_from(*by_lead(read), params, opt_state)

    def _go_on_from(self, index: SnapshotIndex, leaves, params, opt_state) -> tuple[Any, Any]:
        by_lead(lambda: self.member.go_on_from(index))
        by_lead(lambda: self._turns.go_on_from(index) if self._turns else None)
        self.number = index.step
        return replace_leaves(self._programs.shardings, params, opt_state, leaves)

    def _take_snapshot(self, params, opt_state, manifest: Manifest) -> None:
        shared = [np.array(to_host(x)) for x in shared_leaves(params, opt_state)]
        taken = self.number, shared, len(jax.tree.leaves(params)), manifest
        by_lead(lambda: self._turns.take(*taken) if self._turns else None)

    def _adopt(self, params, opt_state) -> tuple[Any, Any, float | None]:
        """Goes on from a snapshot that differs a little; returns the drift, if one was compared."""
        comparison = by_lead(lambda: self._turns.comparison() if self._turns else None)
        index, drift, leaves = comparison or (None, None, None)
        if index is None or leaves is None:
            return params, opt_state, drift
        # First it applies what is under way, so that its own message is not lost.
        result = self._result()
        if result is not None:
            params, opt_state, _ = self._go_on(result, params, opt_state)
        params, opt_state = self._go_on_from(index, leaves, params, opt_state)
        params, opt_state, _ = self._catch_up(params, opt_state)
        self._announce()
        return params, opt_state, drift

"""The protocol of exchanges, which turn the workers' messages into the same aggregate on all.

To add one, write a frozen dataclass with the methods of `Exchange` in a file of this folder, and
name it in the ``__init__.py`` of this folder and of ``demo_optax``. Users do the same in a file of
their own, which imports nothing private.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, UInt32

from demo_optax._src import axes
from demo_optax._src.arrays import IntScalar, zero_unless
from demo_optax._src.axes import AxisName
from demo_optax._src.compression import Compression, Plan
from demo_optax._src.compression.packet import Message, PacketLayout, Packets
from demo_optax._src.compression.settings import require_words, word_of
from demo_optax._src.compression.sparse import SparseSum
from demo_optax._src.metrics import ExchangeMetrics

Mean = Literal["senders", "workers"]
MEANS = get_args(Mean)


IN_ROUND, MESSAGE, EMPTY = range(3)
"""The status of an outbox: a round has not ended yet, a message was sent, or nothing was sent."""


class Outbox(NamedTuple):
    """The packets that a worker hands to an exchange, and the message in them.

    Attributes:
      packets: uint32 ``(packets, words)``, one packet for each owner of a share of the blocks.
      message: the message that the other workers decode from the packets.
      factor: float32 scalar, the fraction of the message that has left the momentum; 0 if the
        packet must be ignored.
      step: int32 scalar, the step in which the packets were built.
      status: int32 scalar; 0 for an outbox from inside a round of `demo_optax.local_steps`, for
        which ``apply`` changes nothing, 1 for one with a message, and 2 for an empty one.
      progress: with `demo_optax.local_steps`, a tree like the gradient: the progress of the round
        that the message was made of.

    Example:
      >>> import demo_optax
      >>> tx, params = demo_optax.demo(0.1), jnp.ones((8, 8))
      >>> outbox, state = jax.jit(tx.send)(params, tx.init(params), params)
      >>> outbox.packet.dtype, outbox.packet.shape, int(outbox.step)
      (dtype('uint32'), (128,), 0)
    """

    packets: Packets
    message: Message
    factor: Float32[Array, ""]
    step: IntScalar
    status: IntScalar
    progress: Any = ()

    local_fields = ("packets", "message", "factor", "progress")

    @classmethod
    def empty(cls, plan: Plan, exchange: "Exchange", progress: Any = ()) -> "Outbox":
        """Makes the outbox of a worker that has sent nothing, with packets that are ignored."""
        packets = jnp.zeros(
            (exchange.packets_per_worker(), exchange.layout(plan).words), jnp.uint32
        )
        message = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), plan.message_shapes())
        step, status = jnp.int32(0), jnp.int32(EMPTY)
        return cls(packets, message, jnp.float32(0), step, status, progress)

    @property
    def packet(self) -> Any:
        """The only packet of an exchange without owners, uint32 ``(words,)``.

        It is ``(workers, words)`` if ``send`` was mapped over workers, and a shape if it was
        evaluated by ``jax.eval_shape``.
        """
        *stacked, packets, words = self.packets.shape
        if packets != 1:
            raise ValueError(
                f"the outbox holds {packets} packets, one for each owner, and no single one: use "
                "outbox.packets."
            )
        if isinstance(self.packets, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((*stacked, words), self.packets.dtype)
        return self.packets.reshape(*stacked, words)


class Pending(NamedTuple):
    """An outbox that a state keeps for a later step.

    The positions and the values of all sections are one array each, so that the structure does not
    depend on the parameters' shapes. ``format`` is the word of the compression, which decides what
    the positions mean.
    """

    outbox: Outbox
    format: UInt32[Array, ""]  # type: ignore[assignment]

    @classmethod
    def of(cls, outbox: Outbox, compression: Compression, axis_name: AxisName) -> "Pending":
        """Keeps an outbox, whose step and status are the same on all workers."""
        pairs = zip(outbox.message, (jnp.int32, jnp.float32), strict=True)
        flat: Any = [
            jnp.concatenate([jnp.zeros(0, t), *[x.ravel() for x in xs]]) for xs, t in pairs
        ]
        varying = axes.as_varying(outbox._replace(message=Message(*flat)), axis_name)
        kept = varying._replace(step=outbox.step, status=outbox.status)
        return cls(kept, jnp.asarray(word_of(compression)))

    def restored(self, plan: Plan, compression: Compression) -> Outbox:
        """Returns the outbox that was kept, without its message if it is one of other settings."""
        advice = "Restore the run with demo_optax.checkpoint, which puts messages back."
        given, needed = {"format": self.format}, {"format": compression}
        require_words("the message that the state keeps", given, needed, advice)
        is_ours = self.format == word_of(compression)
        packets, factor = zero_unless(is_ours, (self.outbox.packets, self.outbox.factor))
        message = divide(plan, self.outbox.message)
        return self.outbox._replace(message=message, packets=packets, factor=factor)


def divide(plan: Plan, flat: Any) -> Message:
    """Divides the positions and the values of a `Pending` outbox among the sections."""
    divided = []
    for x, shapes in zip(flat, plan.message_shapes(), strict=True):
        ends = list(itertools.accumulate(math.prod(one.shape) for one in shapes))
        pairs = zip(jnp.split(x, ends), shapes, strict=False)
        divided.append(tuple(part.reshape(one.shape) for part, one in pairs))
    return Message(*divided)


class Aggregate(NamedTuple):
    """The result of an exchange on one worker.

    An exchange of your own takes it from ``AllGather.average`` and replaces what differs.

    Attributes:
      mean: the mean of each section, the same on all workers; its type must say so, as that of
        ``jax.lax.all_gather(..., to="invarying")`` and of `demo_optax.extend.declare_equal` does.
      accepted: float32 ``(blocks, 1)`` for each section, the fraction of this worker's message that
        counts; the rest of what has left the momentum returns to it.
      state: the new state of the exchange.
      metrics: `demo_optax.ExchangeMetrics`, the same on all workers.

    Example:
      >>> Aggregate(mean=(), accepted=(), state=(), metrics=None)._replace(state=3).state
      3
    """

    mean: Sequence[SparseSum]
    accepted: Sequence[Float32[Array, "_blocks 1"]]
    state: Any
    metrics: ExchangeMetrics


class Traffic(NamedTuple):
    """The traffic of one exchange on a worker's link, which an exchange tells from shapes alone.

    Attributes:
      sent: bytes that the worker hands to its collectives.
      received: bytes that it receives from the others.
      rounds: number of messages that must be sent one after another if every collective is a ring.
      overlaps: whether the exchange overlaps with the next step's compute.
      direct: bytes of the received ones that come straight from their senders, as in an all-to-all,
        and not around a ring.

    Example:
      A ring of eight workers passes on seven packets of 512 bytes.

      >>> Traffic(sent=7 * 512, received=7 * 512, rounds=7).overlaps
      False
    """

    sent: int
    received: float
    rounds: int
    overlaps: bool = False
    direct: float = 0.0


@runtime_checkable
class Exchange(Protocol):
    """Turns the workers' messages into the same aggregate on all of them.

    It is a frozen dataclass. ``docs/how_to/extend.md`` writes one, and `demo_optax.AllGather`
    takes a function for those that only move packets in another way.

    No packet is trusted. Every worker rejects a packet with a wrong checksum or from a different
    step or worker, as well as positions that the selector cannot send and values or energies that
    are not finite. A worker whose step counter differs rejects the packets of all others.

    Example:
      >>> import demo_optax
      >>> isinstance(demo_optax.AllGather("data"), Exchange), isinstance("all-gather", Exchange)
      (True, False)
    """

    @property
    def axis_name(self) -> AxisName:
        """The workers' axis, a tuple of axes, or None for a single worker."""
        ...

    def packets_per_worker(self) -> int:
        """Returns the number of packets of a worker's message, one for each owner of a share."""
        ...

    def layout(self, plan: Plan) -> PacketLayout:
        """Returns the layout of one of these packets; its ``words`` are their length."""
        ...

    def init(self, plan: Plan) -> Any:
        """Returns the initial state of one worker's exchange: arrays, or ``()``."""
        ...

    def exchange(
        self,
        plan: Plan,
        outbox: Outbox,
        state: Any,
        previous_metrics: ExchangeMetrics,
        mean: Mean,
        /,
    ) -> Aggregate:
        """Gives every worker the mean of the workers' messages.

        Args:
          plan: the plan of the tensors, the same on all workers.
          outbox: this worker's packets and the message in them.
          state: the state from the previous call.
          previous_metrics: the metrics of the previous call.
          mean: ``"senders"`` to average each coefficient over its senders, or ``"workers"`` to
            average it over all workers whose packets are accepted.
        """
        ...

    def traffic(self, plan: Plan, workers: int) -> Traffic:
        """Returns the traffic of one call among this number of workers."""
        ...

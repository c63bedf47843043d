"""What an exchange is: how the workers' messages become the same aggregate on all of them.

To add one, write a frozen dataclass with the methods of `Exchange` in a file of this folder, and
name it in the ``__init__.py`` of this folder and of ``demo_optax``. Only checkpoints depend on the
kind of exchange: they put the pending packets of `Delayed` back into the momentum.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, UInt32

from demo_optax._src.arrays import Coefficients, FloatScalar, IntScalar
from demo_optax._src.axes import AxisName
from demo_optax._src.compression import Plan
from demo_optax._src.compression.bits import true_once_computed
from demo_optax._src.compression.packet import Message, PacketLayout, Packets
from demo_optax._src.metrics import ExchangeMetrics

Mean = Literal["senders", "workers"]
MEANS = get_args(Mean)


class Outbox(NamedTuple):
    """What a worker hands to an exchange.

    Attributes:
      packets: uint32 ``(packets, words)``, one packet for each owner of a share of the blocks.
      message: the message that the others decode from them.
      factor: float32 scalar, the fraction of the message that leaves the momentum if the packet is
        accepted; 0 if the packet must be ignored.
      step: int32 scalar, the step in which the packets were built.

    Example:
      >>> import demo_optax
      >>> tx, params = demo_optax.demo(0.1), jnp.ones((8, 8))
      >>> outbox, state = tx.send(params, tx.init(params), params)
      >>> outbox.packet.dtype, outbox.packet.shape, int(outbox.step)
      (dtype('uint32'), (128,), 0)
    """

    packets: Packets
    message: Message
    factor: Float32[Array, ""]
    step: IntScalar

    @property
    def packet(self) -> UInt32[Array, "words"]:
        """The only packet, of an exchange without owners."""
        (packet,) = self.packets
        return packet


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["positions", "values"],
    meta_fields=["selector"],
)
@dataclasses.dataclass(frozen=True)
class SparseSum:
    """The aggregate of a section as a sum of sparse terms; `dense` adds them in their order.

    Attributes:
      positions: int32 ``(terms, blocks, places)``.
      values: float32 ``(terms, blocks, k)``.
      selector: what the positions mean.
    """

    positions: Array
    values: Array
    selector: Any

    def dense(self) -> Coefficients:
        """The coefficients ``(blocks, n)``, zero where no worker sent any."""
        blocks = self.values.shape[1]
        # Zeros that depend on the values; otherwise XLA makes those of all sections at once.
        zeros = jnp.where(true_once_computed([self.values]), jnp.float32(0), jnp.float32(1))
        zeros = jnp.broadcast_to(zeros, (blocks, self.selector.n))
        if len(self.values) == 1:
            return self.selector.add(zeros, self.positions[0], self.values[0])
        return self.selector.add_all(zeros, self.positions, self.values)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["message", "factors"],
    meta_fields=["delay", "under_way"],
)
@dataclasses.dataclass(frozen=True)
class Subtraction:
    """A message of a worker, and the fraction of it that leaves its momentum.

    Attributes:
      message: the message, as the others decode it.
      factors: for each section, the fraction for each of its blocks.
      delay: steps since the message was sent.
      under_way: whether nobody has applied the message yet.
    """

    message: Message
    factors: Sequence[Float32[Array, "_blocks 1"]]
    delay: int = 0
    under_way: bool = False

    @classmethod
    def uniform(
        cls, plan: Plan, message: Message, factor: FloatScalar, under_way: bool = False
    ) -> "Subtraction":
        """The same fraction of every block."""
        factors = [jnp.full((s.num_blocks, 1), factor) for s in plan.sections]
        return cls(message, factors, under_way=under_way)

    def undone(self) -> "Subtraction":
        """What brings the message back into the momentum."""
        return dataclasses.replace(self, factors=[-factor for factor in self.factors])

    def less(self, fraction: FloatScalar) -> "Subtraction":
        """What is left to subtract once this fraction of the message has left the momentum."""
        return dataclasses.replace(self, factors=[factor - fraction for factor in self.factors])

    def rows(self) -> list[tuple[Any, Any, Any]]:
        """For each section positions, values and factors, a row for each block."""
        return list(zip(*self.message, self.factors, strict=True))


class Aggregate(NamedTuple):
    """What an exchange returns on every worker.

    Attributes:
      mean: for each section the mean, the same on all workers.
      subtractions: what leaves this worker's momentum. An exchange inside `Delayed` has exactly
        one.
      state: state of the exchange for its next call.
      metrics: metrics of the step.
      delay: age in steps of the messages in ``mean``.
    """

    mean: Sequence[SparseSum]
    subtractions: Sequence[Subtraction]
    state: Any
    metrics: ExchangeMetrics
    delay: int = 0


class Traffic(NamedTuple):
    """Traffic of one exchange on a worker's link.

    Attributes:
      sent: bytes that the worker hands to its collectives.
      received: bytes that it receives from the others.
      rounds: messages that must be sent one after another, if every collective is a ring.
      overlaps: whether the exchange overlaps with the next step's compute.
    """

    sent: int
    received: float
    rounds: int
    overlaps: bool = False


@runtime_checkable
class Exchange(Protocol):
    """How the workers' messages become the same aggregate on all of them.

    No packet is trusted. Every worker rejects a packet with a wrong checksum, or of a different
    step or worker. It also rejects positions that the selector cannot send, and values or energies
    that are not finite. A worker whose step counter differs rejects the packets of all others.

    Example:
      >>> import demo_optax
      >>> isinstance(demo_optax.AllGather("data"), Exchange), isinstance("all-gather", Exchange)
      (True, False)
    """

    @property
    def axis_name(self) -> AxisName:
        """The workers' axis or axes; None for a single worker."""
        ...

    def packets_per_worker(self) -> int:
        """Packets into which a worker divides its message, one for each owner of a share."""
        ...

    def layout(self, plan: Plan) -> PacketLayout:
        """The layout of one of these packets."""
        ...

    def init(self, plan: Plan) -> Any:
        """The initial state of the exchange."""
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
          outbox: this worker's packets, and the message in them.
          state: state from the previous call.
          previous_metrics: metrics of the previous call.
          mean: which workers each coefficient is averaged over: its ``"senders"``, or all
            ``"workers"`` whose packets are accepted.
        """
        ...

    def traffic(self, plan: Plan, workers: int) -> Traffic:
        """Traffic of one call among this number of workers."""
        ...


def split_messages(plan: Plan, subtractions: Sequence[Subtraction]) -> list[Any]:
    """For each part of the plan its rows of each message."""
    rows = [plan.split_rows(subtraction.rows()) for subtraction in subtractions]
    return list(zip(*rows, strict=True)) or [()] * len(plan.parts)

"""What an exchange is: how the workers' messages become the same aggregate on all of them.

To add one, write a frozen dataclass with the methods of `Exchange` in a file of this folder, and
name it in the ``__init__.py`` of this folder and of ``demo_optax``. Nothing else in the library
asks which exchange it has, but for checkpoints, which put the pending packets of `Delayed` back.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from demo_optax import axes
from demo_optax.arrays import Coefficients, FloatScalar, IntScalar
from demo_optax.axes import AxisName
from demo_optax.compression import Plan
from demo_optax.compression.bits import true_once_computed
from demo_optax.compression.packet import Message, PacketLayout, Packets
from demo_optax.metrics import ExchangeMetrics

Mean = Literal["senders", "workers"]
MEANS = get_args(Mean)


class Outgoing(NamedTuple):
    """What a worker hands to an exchange.

    Attributes:
      packets: sealed, one for each owner of a share of the blocks.
      message: what the others decode of them.
      factor: the share of it that leaves the momentum if the packet is accepted; 0 if the packet
        must be ignored.
      step: in which the packets were sealed.
    """

    packets: Packets
    message: Message
    factor: Float32[Array, ""]
    step: IntScalar


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["positions", "values"],
    meta_fields=["selector"],
)
@dataclasses.dataclass(frozen=True)
class SparseSum:
    """The aggregate of a section as a sum of sparse terms, which `dense` adds up in their order.

    Attributes:
      positions: int32 ``(terms, blocks, places)``.
      values: float32 ``(terms, blocks, k)``.
      selector: what the positions mean.
    """

    positions: Array
    values: Array
    selector: Any

    def dense(self) -> Coefficients:
        """The coefficients ``(blocks, n)``, zero where nobody sent any."""
        blocks = self.values.shape[1]
        # Zeros that wait for the values: XLA would make those of all sections at once.
        zeros = jnp.where(true_once_computed([self.values]), jnp.float32(0), jnp.float32(1))
        zeros = jnp.broadcast_to(zeros, (blocks, self.selector.n))
        if len(self.values) == 1:
            return self.selector.add(zeros, self.positions[0], self.values[0])
        return self.selector.add_all(zeros, self.positions, self.values)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["message", "factors"], meta_fields=["delay"]
)
@dataclasses.dataclass(frozen=True)
class Subtraction:
    """A message of a worker, and the part of it that leaves its momentum.

    Attributes:
      message: as the others decode it.
      factors: for each section, of every block.
      delay: steps since it was sent.
    """

    message: Message
    factors: Sequence[Float32[Array, "_blocks 1"]]
    delay: int = 0

    @classmethod
    def uniform(cls, plan: Plan, message: Message, factor: FloatScalar) -> "Subtraction":
        """The same part of every block."""
        return cls(message, [jnp.full((s.num_blocks, 1), factor) for s in plan.sections])

    def rows(self) -> list[tuple[Any, Any, Any]]:
        """For each section positions, values and factors, a row for each block."""
        return list(zip(*self.message, self.factors, strict=True))


class Aggregate(NamedTuple):
    """What an exchange gives every worker.

    Attributes:
      mean: for each section, the same on all workers.
      subtractions: what leaves this worker's momentum; one, for an exchange inside `Delayed`.
      state: what the exchange keeps for its next call.
      metrics: of the step.
      delay: steps since the messages were sent that ``mean`` is of.
    """

    mean: Sequence[SparseSum]
    subtractions: Sequence[Subtraction]
    state: Any
    metrics: ExchangeMetrics
    delay: int = 0


class Traffic(NamedTuple):
    """What one exchange costs a worker's link.

    Attributes:
      sent: bytes that the worker hands to its collectives.
      received: bytes that it gets from the others.
      rounds: messages that must follow each other, if every collective is a ring.
      overlaps: whether the exchange overlaps with the next step's compute.
    """

    sent: int
    received: float
    rounds: int
    overlaps: bool = False


@runtime_checkable
class Exchange(Protocol):
    """How the workers' messages become the same aggregate on all of them.

    No packet is trusted. Every worker rejects a packet with a wrong checksum, or of another step or
    worker. It also rejects positions that the selector may not send, and values or energies that
    are not finite. A worker whose step counter differs rejects the packets of all others.

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
        """Packets into which a worker divides its message, one for each owner of some blocks."""
        ...

    def layout(self, plan: Plan) -> PacketLayout:
        """The layout of one of these packets."""
        ...

    def init(self, plan: Plan) -> Any:
        """What the exchange keeps between calls, before the first."""
        ...

    def exchange(
        self,
        plan: Plan,
        outgoing: Outgoing,
        state: Any,
        previous_metrics: ExchangeMetrics,
        mean: Mean,
        /,
    ) -> Aggregate:
        """Gives every worker the mean of the workers' messages.

        Args:
          plan: of the tensors, the same on all workers.
          outgoing: this worker's packets, and what is in them.
          state: of the call before.
          previous_metrics: metrics of the call before.
          mean: over the ``"senders"`` of each coefficient, or over all ``"workers"`` that count.
        """
        ...

    def traffic(self, plan: Plan, workers: int) -> Traffic:
        """What a call costs among so many workers."""
        ...


def packet_ids(owners: int, axis_name: AxisName) -> Array:
    """The numbers of a worker's packets among those of all, int32 ``(owners,)``."""
    return axes.index(axis_name) * owners + jnp.arange(owners, dtype=jnp.int32)

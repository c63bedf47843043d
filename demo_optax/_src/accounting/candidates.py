"""A method with what it costs over a link: bytes, seconds, memory and its measured loss."""

from typing import NamedTuple

from demo_optax._src.accounting.losses import MeasuredLoss
from demo_optax._src.accounting.methods import Method
from demo_optax._src.accounting.traffic import StepTime


class Memory(NamedTuple):
    """The bytes of memory that a worker needs, without those of the activations.

    Attributes:
      parameters, gradients, state: those of the model and of the optimizer's state.
      temporary: what an update needs for a while.
    """

    parameters: int
    gradients: int
    state: int
    temporary: int

    @property
    def total(self) -> int:
        """The sum of all."""
        return sum(self)


class Candidate(NamedTuple):
    """What a method costs over a link, in seconds, bytes, memory and loss.

    Attributes:
      method: what it sends, and the lines that use it.
      time: bytes and seconds of a step, whose compute includes that of an orthogonal step.
      loss: the measured loss, of the runs whose number of workers is closest.
      learning_rate: the rate to begin with if no AdamW was tuned for the model.
      memory: bytes that a worker needs without the activations.

    Example:
      >>> import demo_optax
      >>> model = dict(params=300_000_000, batch_tokens=65_536, width=1024)
      >>> link = dict(workers=8, bandwidth=1e9, latency=1e-3, compute_time=1.0)
      >>> candidate = demo_optax.accounting.choose(**model, **link).candidates[2]
      >>> candidate.method.name, candidate.learning_rate, round(candidate.time.step, 2)
      ('demo_muon', 0.000375, 1.22)
    """

    method: Method
    time: StepTime
    loss: MeasuredLoss
    learning_rate: float
    memory: Memory

"""The methods that `choose` compares: what each sends, how to use it, and which study measured it.

Each method has the letter of a row: A all-reduces whole gradients, B to D exchange packets on every
step, C and D late, and E exchanges once in a round of local steps. A swarm has B, C and E, without
an axis, and waits for packets in B alone.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from demo_optax._src.compression import Compression
from demo_optax._src.exchange import AllGather, Delayed, Exchange, TwoPhase

LOSSES = Path(__file__).with_name("losses.json")
"""Names the studies of each method; ``python -m benchmarks.quality write`` adds their losses."""

LOCAL_STEPS = 30
SIGNS = Compression(32, value_coding="sign", selection="bins")
INT8 = Compression(4096, value_coding="int8", transform="identity")
SPARSE_64 = Compression(64, value_coding="int2", transform="identity")
SPARSE_512 = dataclasses.replace(SPARSE_64, topk=512)
GATHER, OWNERS = AllGather("data"), TwoPhase("data", value_coding_back="int4")
NOT_IN_TRAINER = "Muon, all-reduce", "DiLoCo int8, all-gather", "DiLoCo int8, two phases"


class MeasuredLoss(NamedTuple):
    """The loss of a method minus that of AdamW, in nats per byte of held-out text.

    Attributes:
      study, method: the study in ``benchmarks/quality/studies.yaml``, and its method.
      difference: mean of the differences on each seed.
      error: its standard error; None for one seed.
      seeds, workers, parameters, steps: their numbers in the runs.
      rate: the learning rate as a multiple of AdamW's.
      differs: how the runs differ from what they stand for, if they do.

    Example:
      >>> MeasuredLoss("final", "DeMo-Muon", -0.042, 0.007, 3, 8, 1_081_344, 1020, 1.0).difference
      -0.042
    """

    study: str
    method: str
    difference: float
    error: float | None
    seeds: int
    workers: int
    parameters: int
    steps: int
    rate: float
    differs: str = ""


def read_losses() -> Any:
    """Returns what the studies measured: their largest model, most workers, and the methods."""
    return json.loads(LOSSES.read_text())


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to train that `choose` compares, with the lines that use it.

    Attributes:
      row: its letter.
      name: its name, by which ``losses.json`` has its losses.
      optimizer: the name of its optimizer in ``examples/train_lm.py``.
      sent, exchange: what it sends and how, but for a delay; ``sent`` is None for an all-reduce.
      rate: its learning rate as a multiple of AdamW's.
      state: bytes that the optimizer's state takes for each element of a matrix in any dtype,
      moments: and the number of those of its arrays that have the dtype of the parameters.
      look_ahead: the look-ahead with a delay on every step.
      fragments: fragments of a round, one after another.

    Example:
      >>> methods(topk_back=128)[2].code
      'tx = demo_optax.demo_muon(rate, axis_name="data")'
    """

    row: str
    name: str
    optimizer: str
    sent: Compression | None = None
    exchange: AllGather | TwoPhase = GATHER
    rate: float = 1.0
    state: float = 6.0
    moments: int = 0
    look_ahead: float | None = None
    fragments: int | None = None

    @property
    def orthogonal(self) -> bool:
        """Whether it makes matrices orthogonal, which takes compute."""
        return "muon" in self.optimizer

    @property
    def local_steps(self) -> int:
        """Steps for one exchange."""
        return LOCAL_STEPS if self.row == "E" else 1

    @property
    def in_swarm(self) -> bool:
        """Whether packets travel through the store of a swarm."""
        return self.exchange.axis_name is None

    @property
    def setting(self) -> tuple[Compression, Exchange] | None:
        """What it sends and how; None for an all-reduce."""
        late = self.row in ("CE" if self.in_swarm else "CD")
        return self.sent and (self.sent, Delayed(self.exchange) if late else self.exchange)

    def losses(self) -> list[MeasuredLoss]:
        """Returns all measured losses, and how each was measured in another way."""
        losses = [MeasuredLoss(**entry) for entry in read_losses()["methods"][self.name]]
        rates = ["" if x.rate == self.rate else f"{x.rate:g} times AdamW's rate" for x in losses]
        pairs = zip(losses, rates, strict=True)
        return [x._replace(differs=", ".join(filter(None, (x.differs, rate)))) for x, rate in pairs]

    def loss(self, workers: int) -> MeasuredLoss:
        """Returns the loss of the runs whose number of workers is closest, as a ratio."""
        return min(self.losses(), key=lambda loss: abs(math.log(loss.workers / workers)))

    @property
    def code(self) -> str:
        """Lines that make the optax optimizer ``tx`` from a learning rate ``rate``."""
        kind = self.row.lower() if self.in_swarm else self.row
        if kind == "E":
            kind = "F" if self.fragments else "E" if self.sent else "M"
        words = dict(
            function=self.optimizer.replace("-", "_"),
            sent=self.sent and _call(self.sent),
            exchange=_call(self.exchange),
            base=BASES.get(self.optimizer),
            inner=BASES["adamw"],
            decay=DECAYS.get(self.optimizer),
            look_ahead=self.look_ahead,
            every=LOCAL_STEPS,
        )
        rows = [line.split(maxsplit=1) for line in LINES.splitlines()]
        return "\n".join(line.format(**words) for kinds, line in rows if kind in kinds)

    @property
    def flags(self) -> str | None:
        """Settings of ``examples/train_lm.py``; None if the trainer does not have the method."""
        if self.name in NOT_IN_TRAINER:
            return None
        sparse = self.sent if self.optimizer == "sparseloco" else None
        back = self.exchange if isinstance(self.exchange, TwoPhase) else None
        given = {
            "swarm": "s3://bucket/run" if self.in_swarm else None,
            "worker": "paris" if self.in_swarm else None,
            "optimizer": self.optimizer,
            "local-steps": LOCAL_STEPS if self.row == "E" else None,
            "topk": sparse and sparse.topk,
            "value-coding": sparse and sparse.value_coding,
            "look-ahead": self.look_ahead,
            "delay": self.look_ahead and 1,
            "fragments": self.fragments,
            "exchange": back and "two-phase",
            "topk-back": back and back.topk_back,
            "value-coding-back": back and back.value_coding_back,
        }
        return " ".join(f"--{flag} {value}" for flag, value in given.items() if value is not None)


def methods(topk_back: int) -> list[Method]:
    """Returns all methods; in row D the owners send ``topk_back`` coefficients back."""
    owners = dataclasses.replace(OWNERS, topk_back=topk_back)
    muon: Any = dict(look_ahead=1.5)
    scaled: Any = dict(look_ahead=1.0, rate=0.5, state=8.0)
    return [
        Method("A", "AdamW, all-reduce", "adamw", state=0.0, moments=2),
        Method("A", "Muon, all-reduce", "muon", rate=2.0, state=0.0, moments=1),
        Method("B", "demo_muon", "demo-muon", SIGNS),
        Method("B", "demo_scaled", "demo-scaled", SIGNS),
        Method("C", "demo_muon, delayed", "demo-muon", SIGNS, **muon),
        Method("C", "demo_scaled, delayed", "demo-scaled", SIGNS, **scaled),
        Method("D", "demo_muon, two phases, delayed", "demo-muon", SIGNS, owners, **muon),
        Method("D", "demo_scaled, two phases, delayed", "demo-scaled", SIGNS, owners, **scaled),
        Method("E", "DiLoCo, all-reduce", "diloco", rate=0.5, state=4.0, moments=3),
        *_rounds("DiLoCo int8", "diloco", INT8, TwoPhase("data"), outer=1, rate=0.5),
        *_rounds("SparseLoCo k=512", "sparseloco", SPARSE_512, OWNERS),
        *_rounds("SparseLoCo k=64", "sparseloco", SPARSE_64, OWNERS),
    ]


def _rounds(
    name: str, optimizer: str, sent: Compression, owners: TwoPhase, outer: int = 0, rate: float = 1
) -> list[Method]:
    """Returns a round with each exchange, at its end and in fragments.

    The two moments of AdamW have the dtype of the parameters, and so have ``outer`` moments if
    there are no fragments.
    """
    whole: Any = dict(rate=rate, state=8.0, moments=2 + outer)
    parts: Any = dict(rate=rate, state=8.0 + 4 * outer, moments=2, fragments=LOCAL_STEPS)
    return [
        Method("E", f"{name}, all-gather", optimizer, sent, **whole),
        Method("E", f"{name}, two phases", optimizer, sent, owners, **whole),
        Method("E", f"{name}, fragments", optimizer, sent, **parts),
        Method("E", f"{name}, fragments in two phases", optimizer, sent, owners, **parts),
    ]


def methods_in_swarm() -> list[Method]:
    """Returns the methods that a swarm can carry, as `SwarmWorker` takes them.

    Example:
      >>> print(methods_in_swarm()[2].code)
      from demo_optax.swarm import SwarmWorker
      tx = demo_optax.demo_muon(rate, look_ahead=1.5)
      worker = SwarmWorker(loss_fn, tx, mesh, member, delay=1)
    """
    return [
        dataclasses.replace(
            method, name=method.name.replace("all-gather", "delayed"), exchange=AllGather()
        )
        for method in methods(topk_back=128)
        if method.sent and method.exchange == GATHER and not method.fragments
    ]


BASES = {
    "adamw": "optax.adamw(rate, b2=0.95, weight_decay=0.1)",
    "muon": "optax.contrib.muon(rate, weight_decay=0.1)",
    "diloco": "optax.sgd(0.7, momentum=0.9, nesterov=True)",
    "sparseloco": "optax.sgd(1.0)",
}
DECAYS = {"diloco": 1.0, "sparseloco": 0.95}  # of the residual, in each round
LINES = """\
bce from demo_optax.swarm import SwarmWorker
AM  mean = demo_optax.mean_over_workers("data")
A   tx = optax.chain(mean, {base})
M   outer = optax.chain(mean, {base})
EFe sent = {sent}
CDEF exchange = {exchange}
CD  delayed = demo_optax.Delayed(exchange)
B   tx = demo_optax.{function}(rate, axis_name="data")
CD  tx = demo_optax.{function}(rate, look_ahead={look_ahead}, exchange=delayed)
b   tx = demo_optax.{function}(rate)
c   tx = demo_optax.{function}(rate, look_ahead={look_ahead})
EFe feedback = dict(decay={decay}, gradient_weight=1.0, mean="workers")
EF  base = {base}
EF  outer = demo_optax.decoupled(base, sent, **feedback, exchange=exchange)
e   outer = demo_optax.decoupled({base}, sent, **feedback)
MEFe inner = {inner}
ME  tx = demo_optax.local_steps(inner, outer, every={every}, axis_name="data")
F   rounds = dict(every={every}, fragments={every}, axis_name="data")
F   tx = demo_optax.local_steps(inner, outer, **rounds)
e   tx = demo_optax.local_steps(inner, outer, every={every}, merge=0.5)
b   worker = SwarmWorker(loss_fn, tx, mesh, member, delay=0)
ce  worker = SwarmWorker(loss_fn, tx, mesh, member, delay=1)
"""
"""All lines, each with the kinds of methods that have it.

A kind is a row, in lower case for a swarm; rounds are E, M without packets and F in fragments.
"""


def _call(setting: Compression | Exchange) -> str:
    """Returns the call that makes a compression or an exchange, without its defaults."""
    first, *others = dataclasses.fields(setting)  # pyright: ignore[reportArgumentType]
    given = {field.name: getattr(setting, field.name) for field in others}
    words = [f"{f.name}={json.dumps(given[f.name])}" for f in others if given[f.name] != f.default]
    called = ", ".join([json.dumps(getattr(setting, first.name)), *words])
    return f"demo_optax.{type(setting).__name__}({called})"

"""The methods that `choose` compares: what each sends, how to use it, and which study measured it.

Each method has the letter of a row: A all-reduces whole gradients, B to D exchange packets on every
step, and E exchanges once in a round of local steps. A swarm has B, C and E, without an axis.
"""

import dataclasses
import json
from typing import Any

from demo_optax._src.compression import Compression
from demo_optax._src.exchange import AllGather, Delayed, Exchange, TwoPhase

LOCAL_STEPS = 30
SIGNS = Compression(32, value_coding="sign", selection="bins")
INT8 = Compression(4096, value_coding="int8", transform="identity")
SPARSE_64 = Compression(64, value_coding="int2", transform="identity")
SPARSE_512 = dataclasses.replace(SPARSE_64, topk=512)
NOT_IN_TRAINER = "Muon, all-reduce", "DiLoCo int8, all-gather", "DiLoCo int8, two phases"


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to train that `choose` compares, with the lines that use it.

    Attributes:
      row: its letter.
      name: its name, by which ``losses.json`` has its losses.
      setting: what it sends and how; None for an all-reduce.
      optimizer: the name of its optimizer in ``examples/train_lm.py``.
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
    setting: tuple[Compression, Exchange] | None
    optimizer: str
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
        return self.setting is not None and self.setting[1].axis_name is None

    @property
    def code(self) -> str:
        """Lines that make the optax optimizer ``tx`` from a learning rate ``rate``."""
        sent, exchange = self.setting or (None, None)
        kind = "swarm" if self.in_swarm else "packets" if sent else "mean"
        return LINES[kind, self.row].format(
            function=self.optimizer.replace("-", "_"),
            sent=sent and _call(sent),
            exchange=exchange and _call(_undelayed(exchange)),
            base=BASES.get(self.optimizer),
            inner=BASES["adamw"],
            decay=DECAYS.get(self.optimizer),
            look_ahead=self.look_ahead,
            steps=STEPS_IN_FRAGMENTS if self.fragments else STEPS,
        )

    @property
    def flags(self) -> str | None:
        """Settings of ``examples/train_lm.py``; None if the trainer does not have the method."""
        if self.name in NOT_IN_TRAINER:
            return None
        sent, exchange = self.setting or (None, None)
        sparse = sent if self.optimizer == "sparseloco" else None
        back = owners if isinstance(owners := _undelayed(exchange), TwoPhase) else None
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
    gather, back = AllGather("data"), TwoPhase("data", value_coding_back="int4")
    packets, gathered = (SIGNS, gather), (SIGNS, Delayed(gather))
    owned = SIGNS, Delayed(dataclasses.replace(back, topk_back=topk_back))
    muon: Any = dict(optimizer="demo-muon", look_ahead=1.5)
    scaled: Any = dict(optimizer="demo-scaled", look_ahead=1.0, rate=0.5, state=8.0)
    return [
        Method("A", "AdamW, all-reduce", None, "adamw", state=0.0, moments=2),
        Method("A", "Muon, all-reduce", None, "muon", rate=2.0, state=0.0, moments=1),
        Method("B", "demo_muon", packets, "demo-muon"),
        Method("B", "demo_scaled", packets, "demo-scaled"),
        Method("C", "demo_muon, delayed", gathered, **muon),
        Method("C", "demo_scaled, delayed", gathered, **scaled),
        Method("D", "demo_muon, two phases, delayed", owned, **muon),
        Method("D", "demo_scaled, two phases, delayed", owned, **scaled),
        Method("E", "DiLoCo, all-reduce", None, "diloco", rate=0.5, state=4.0, moments=3),
        *_rounds("DiLoCo int8", INT8, TwoPhase("data"), "diloco", outer=1, rate=0.5),
        *_rounds("SparseLoCo k=512", SPARSE_512, back, "sparseloco"),
        *_rounds("SparseLoCo k=64", SPARSE_64, back, "sparseloco"),
    ]


def _rounds(
    name: str, sent: Compression, back: TwoPhase, optimizer: str, outer: int = 0, rate: float = 1.0
) -> list[Method]:
    """Returns a round with each exchange, at its end and in fragments.

    The two moments of AdamW have the dtype of the parameters, and so have ``outer`` moments if
    there are no fragments.
    """
    gather, fragments = AllGather("data"), LOCAL_STEPS
    ways = {
        "all-gather": (gather, None),
        "two phases": (back, None),
        "fragments": (gather, fragments),
        "fragments in two phases": (back, fragments),
    }
    found = []
    for way, (exchange, number) in ways.items():
        wide = outer if number else 0
        state, moments = 8.0 + 4.0 * wide, 2 + outer - wide
        own: Any = dict(rate=rate, state=state, moments=moments, fragments=number)
        found.append(Method("E", f"{name}, {way}", (sent, exchange), optimizer, **own))
    return found


def methods_in_swarm() -> list[Method]:
    """Returns the methods that a swarm can carry, as `SwarmWorker` takes them.

    Example:
      >>> print(methods_in_swarm()[2].code)
      from demo_optax.swarm import SwarmWorker
      tx = demo_optax.demo_muon(rate, look_ahead=1.5)
      worker = SwarmWorker(loss_fn, tx, mesh, member, delay=1)
    """
    found = []
    for method in methods(topk_back=128):
        sent, exchange = method.setting or (None, None)
        if sent and _undelayed(exchange) == AllGather("data") and not method.fragments:
            alone = AllGather() if method.row == "B" else Delayed(AllGather())
            name = method.name.replace("all-gather", "delayed")
            found.append(dataclasses.replace(method, name=name, setting=(sent, alone)))
    return found


BASES = {
    "adamw": "optax.adamw(rate, b2=0.95, weight_decay=0.1)",
    "muon": "optax.contrib.muon(rate, weight_decay=0.1)",
    "diloco": "optax.sgd(0.7, momentum=0.9, nesterov=True)",
    "sparseloco": "optax.sgd(1.0)",
}
DECAYS = {"diloco": 1.0, "sparseloco": 0.95}  # of the residual, in each round
STEPS = f'tx = demo_optax.local_steps(inner, outer, every={LOCAL_STEPS}, axis_name="data")'
STEPS_IN_FRAGMENTS = f"""\
rounds = dict(every={LOCAL_STEPS}, fragments={LOCAL_STEPS}, axis_name="data")
tx = demo_optax.local_steps(inner, outer, **rounds)"""
DELAYED = """\
exchange = {exchange}
delayed = demo_optax.Delayed(exchange)
tx = demo_optax.{function}(rate, look_ahead={look_ahead}, exchange=delayed)"""
LINES = {
    ("mean", "A"): """\
mean = demo_optax.mean_over_workers("data")
tx = optax.chain(mean, {base})""",
    ("mean", "E"): """\
mean = demo_optax.mean_over_workers("data")
outer = optax.chain(mean, {base})
inner = {inner}
{steps}""",
    ("packets", "B"): 'tx = demo_optax.{function}(rate, axis_name="data")',
    ("packets", "C"): DELAYED,
    ("packets", "D"): DELAYED,
    ("packets", "E"): """\
sent = {sent}
exchange = {exchange}
feedback = dict(decay={decay}, gradient_weight=1.0, mean="workers")
base = {base}
outer = demo_optax.decoupled(base, sent, **feedback, exchange=exchange)
inner = {inner}
{steps}""",
    ("swarm", "B"): """\
from demo_optax.swarm import SwarmWorker
tx = demo_optax.{function}(rate)
worker = SwarmWorker(loss_fn, tx, mesh, member, delay=0)""",
    ("swarm", "C"): """\
from demo_optax.swarm import SwarmWorker
tx = demo_optax.{function}(rate, look_ahead={look_ahead})
worker = SwarmWorker(loss_fn, tx, mesh, member, delay=1)""",
    ("swarm", "E"): f"""\
from demo_optax.swarm import SwarmWorker
sent = {{sent}}
feedback = dict(decay={{decay}}, gradient_weight=1.0, mean="workers")
outer = demo_optax.decoupled({{base}}, sent, **feedback)
inner = {{inner}}
tx = demo_optax.local_steps(inner, outer, every={LOCAL_STEPS}, merge=0.5)
worker = SwarmWorker(loss_fn, tx, mesh, member, delay=1)""",
}
"""The lines of the methods, by what the workers exchange and by the row."""


def _undelayed(exchange: Any) -> Any:
    return exchange.inner if isinstance(exchange, Delayed) else exchange


def _call(setting: Compression | Exchange) -> str:
    """Returns the call that makes a compression or an exchange, without its defaults."""
    first, *others = dataclasses.fields(setting)  # pyright: ignore[reportArgumentType]
    given = {field.name: getattr(setting, field.name) for field in others}
    words = [f"{f.name}={json.dumps(given[f.name])}" for f in others if given[f.name] != f.default]
    called = ", ".join([json.dumps(getattr(setting, first.name)), *words])
    return f"demo_optax.{type(setting).__name__}({called})"

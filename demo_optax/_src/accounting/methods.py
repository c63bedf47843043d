"""The methods that `choose` compares: what each sends, which study measured it, and how to use it.

Each method has the letter of a row: A all-reduces whole gradients, B to D exchange packets on every
step, and E exchanges once in a round of local steps. A swarm has B, C and E, without an axis.
"""

import dataclasses
import json
from collections.abc import Callable
from typing import NamedTuple

from demo_optax._src.compression import Compression
from demo_optax._src.exchange import AllGather, Delayed, Exchange, TwoPhase

LOCAL_STEPS = 30
SIGNS = Compression(32, value_coding="sign", selection="bins")
EVERY_ELEMENT = Compression(4096, value_coding="int8", transform="identity")


class Measurement(NamedTuple):
    """A method of a study that measured a loss, and how it differs from the method here."""

    study: str
    method: str
    differs: str = ""


MEASUREMENTS = {
    "AdamW, all-reduce": [Measurement("final", "AdamW")],
    "Muon, all-reduce": [Measurement("final", "Muon")],
    "demo_muon": [Measurement("final", "DeMo-Muon"), Measurement("workers", "DeMo-Muon")],
    "demo_scaled": [Measurement("final", "DeMo-scaled"), Measurement("workers", "DeMo-scaled")],
    "demo_muon, delayed": [Measurement("final", "DeMo-Muon, delayed")],
    "demo_scaled, delayed": [
        Measurement("final", "DeMo-scaled, delayed, half the rate, look-ahead 1")
    ],
    "demo_muon, two phases, delayed": [
        Measurement("final", "DeMo-Muon, two phases, delayed"),
        Measurement("workers", "DeMo-Muon, two phases, 512 int4 back", "512 back, no delay"),
    ],
    "demo_scaled, two phases, delayed": [
        Measurement("final", "DeMo-scaled, delayed, half the rate, look-ahead 1", "all-gather"),
        Measurement("workers", "DeMo-scaled, two phases, 512 int4 back", "512 back, no delay"),
    ],
    "DiLoCo, all-reduce": [Measurement("local", "DiLoCo, H = 30")],
    "DiLoCo int8, all-gather": [Measurement("local", "DiLoCo, H = 30", "float32")],
    "DiLoCo int8, two phases": [Measurement("local", "DiLoCo, H = 30", "float32, all-reduce")],
    "DiLoCo int8, fragments": [Measurement("rounds", "DiLoCo, int8, 30 fragments")],
    "DiLoCo int8, fragments in two phases": [
        Measurement("rounds", "DiLoCo, int8, 30 fragments", "all-gather")
    ],
    "SparseLoCo k=512, all-gather": [Measurement("local", "SparseLoCo, H = 30, k = 512")],
    "SparseLoCo k=512, two phases": [
        Measurement("local", "SparseLoCo, H = 30, k = 512", "all-gather")
    ],
    "SparseLoCo k=512, fragments": [
        Measurement("local", "SparseLoCo, H = 30, k = 512", "no fragments")
    ],
    "SparseLoCo k=512, fragments in two phases": [
        Measurement("local", "SparseLoCo, H = 30, k = 512", "no fragments, all-gather")
    ],
    "SparseLoCo k=64, all-gather": [Measurement("local", "SparseLoCo, H = 30")],
    "SparseLoCo k=64, two phases": [Measurement("local", "SparseLoCo, H = 30", "all-gather")],
    "SparseLoCo k=64, fragments": [Measurement("local", "SparseLoCo, H = 30", "no fragments")],
    "SparseLoCo k=64, fragments in two phases": [
        Measurement("local", "SparseLoCo, H = 30", "no fragments, all-gather")
    ],
    "DiLoCo int8, delayed": [Measurement("local", "DiLoCo, H = 30", "float32, no delay")],
    "SparseLoCo k=512, delayed": [Measurement("local", "SparseLoCo, H = 30, k = 512", "no delay")],
    "SparseLoCo k=64, delayed": [Measurement("local", "SparseLoCo, H = 30", "no delay")],
}
"""The measurements of each method by its name, from studies of benchmarks/quality/studies.yaml."""


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to train.

    Attributes:
      row: its letter.
      name: its name, by which `MEASUREMENTS` has its losses.
      setting: what it sends and how; None for an all-reduce.
      code: lines that make the optax optimizer ``tx`` from a learning rate ``rate``.
      flags: settings of ``examples/train_lm.py``; None if the trainer does not have the method.
      rate: its learning rate as a multiple of AdamW's.
      orthogonal: whether it makes matrices orthogonal, which takes compute.
      local_steps: steps for one exchange.
      fragments: fragments of a round, one after another.
      state: bytes that the state of the optimizer takes for each element of a matrix.

    Example:
      >>> methods(topk_back=128)[2].code
      'tx = demo_optax.demo_muon(rate, axis_name="data")'
    """

    row: str
    name: str
    setting: tuple[Compression, Exchange] | None
    code: str
    flags: str | None
    rate: float = 1.0
    orthogonal: bool = False
    local_steps: int = 1
    fragments: int | None = None
    state: float = 6.0


def methods(topk_back: int) -> list[Method]:
    """Returns all methods; in row D the owners send ``topk_back`` coefficients back."""
    gather = AllGather("data")
    back = TwoPhase("data", topk_back=topk_back, value_coding_back="int4")
    return [
        Method("A", "AdamW, all-reduce", None, _all_reduced(ADAMW), "--optimizer adamw", state=8),
        Method(
            "A",
            "Muon, all-reduce",
            None,
            _all_reduced(MUON),
            None,
            rate=2.0,
            orthogonal=True,
            state=4,
        ),
        _on_every_step("B", "demo_muon", gather, orthogonal=True),
        _on_every_step("B", "demo_scaled", gather),
        _delayed("C", "demo_muon", "delayed", gather, 1.5, orthogonal=True),
        _delayed("C", "demo_scaled", "delayed", gather, 1.0, rate=0.5, state=8),
        _delayed("D", "demo_muon", "two phases, delayed", back, 1.5, orthogonal=True),
        _delayed("D", "demo_scaled", "two phases, delayed", back, 1.0, rate=0.5, state=8),
        Method(
            "E",
            "DiLoCo, all-reduce",
            None,
            f"{MEAN}\nouter = optax.chain(mean, {NESTEROV})\n{INNER}\n{STEPS}",
            DILOCO,
            rate=0.5,
            local_steps=LOCAL_STEPS,
            state=16,
        ),
        *_diloco_int8(),
        *_sparseloco(512),
        *_sparseloco(64),
    ]


def methods_in_swarm() -> list[Method]:
    """Returns the methods that a swarm can carry, as `SwarmWorker` takes them.

    Example:
      >>> print(methods_in_swarm()[2].code)
      from demo_optax.swarm import SwarmWorker
      tx = demo_optax.demo_muon(rate, look_ahead=1.5)
      worker = SwarmWorker(loss_fn, tx, mesh, member, delay=1)
    """
    gather = AllGather()
    every_step = [
        _on_every_step("B", "demo_muon", gather, orthogonal=True),
        _on_every_step("B", "demo_scaled", gather),
        _delayed("C", "demo_muon", "delayed", gather, 1.5, orthogonal=True),
        _delayed("C", "demo_scaled", "delayed", gather, 1.0, rate=0.5, state=8),
    ]
    made = "(rate)", "(rate)", "(rate, look_ahead=1.5)", "(rate, look_ahead=1.0)"
    names = [method.name.partition(",")[0] for method in every_step]
    return [
        *[
            _in_swarm(method, f"tx = demo_optax.{name}{arguments}")
            for method, name, arguments in zip(every_step, names, made, strict=True)
        ],
        _round_in_swarm("DiLoCo int8", EVERY_ELEMENT, NESTEROV, 1.0, 20.0, DILOCO, rate=0.5),
        *[
            _round_in_swarm(
                f"SparseLoCo k={topk}",
                _sparse(topk),
                "optax.sgd(1.0)",
                0.95,
                16.0,
                _sparse_flags(topk),
            )
            for topk in (512, 64)
        ],
    ]


DILOCO = f"--optimizer diloco --local-steps {LOCAL_STEPS}"
MEAN = 'mean = demo_optax.mean_over_workers("data")'
ADAMW = "optax.adamw(rate, b2=0.95, weight_decay=0.1)"
MUON = "optax.contrib.muon(rate, weight_decay=0.1)"
NESTEROV = "optax.sgd(0.7, momentum=0.9, nesterov=True)"
INNER = f"inner = {ADAMW}"
STEPS = f'tx = demo_optax.local_steps(inner, outer, every={LOCAL_STEPS}, axis_name="data")'
STEPS_IN_FRAGMENTS = f"""\
rounds = dict(every={LOCAL_STEPS}, fragments={LOCAL_STEPS}, axis_name="data")
tx = demo_optax.local_steps(inner, outer, **rounds)"""
ROUNDS = f"""\
sent = {{sent}}
exchange = {{exchange}}
feedback = dict(decay={{decay}}, gradient_weight=1.0, mean="workers")
base = {{base}}
outer = demo_optax.decoupled(base, sent, **feedback, exchange=exchange)
{INNER}
{{steps}}"""


ROUNDS_IN_SWARM = f"""\
sent = {{sent}}
feedback = dict(decay={{decay}}, gradient_weight=1.0, mean="workers")
outer = demo_optax.decoupled({{base}}, sent, **feedback)
{INNER}
tx = demo_optax.local_steps(inner, outer, every={LOCAL_STEPS}, merge=0.5)"""
IN_SWARM = "--swarm s3://bucket/run --worker paris"


def _all_reduced(optimizer: str) -> str:
    return f"{MEAN}\ntx = optax.chain(mean, {optimizer})"


def _on_every_step(row: str, optimizer: str, exchange: AllGather, **options) -> Method:
    code = f'tx = demo_optax.{optimizer}(rate, axis_name="data")'
    flags = f"--optimizer {optimizer.replace('_', '-')}"
    return Method(row, optimizer, (SIGNS, exchange), code, flags, **options)


def _delayed(
    row: str, optimizer: str, way: str, exchange: Exchange, look_ahead: float, **options
) -> Method:
    code = f"""\
exchange = {_code_of(exchange)}
delayed = demo_optax.Delayed(exchange)
tx = demo_optax.{optimizer}(rate, look_ahead={look_ahead}, exchange=delayed)"""
    flags = f"--optimizer {optimizer.replace('_', '-')} --look-ahead {look_ahead} --delay 1"
    setting = SIGNS, Delayed(exchange)
    name = f"{optimizer}, {way}"
    return Method(row, name, setting, code, flags + _flags_of(exchange), **options)


def _diloco_int8() -> list[Method]:
    def method(way: str, exchange: Exchange, fragments: int | None = None) -> Method:
        name = f"DiLoCo int8, {way}"
        trainer = DILOCO + _flags_of(exchange, fragments) if fragments else None
        base = NESTEROV, 1.0, 20.0
        return _round(name, EVERY_ELEMENT, exchange, *base, trainer, fragments, rate=0.5)

    return _ways(method, TwoPhase("data"))


def _sparseloco(topk: int) -> list[Method]:
    def method(way: str, exchange: Exchange, fragments: int | None = None) -> Method:
        trainer = _sparse_flags(topk) + _flags_of(exchange, fragments)
        name = f"SparseLoCo k={topk}, {way}"
        base = "optax.sgd(1.0)", 0.95, 16.0
        return _round(name, _sparse(topk), exchange, *base, trainer, fragments)

    return _ways(method, TwoPhase("data", value_coding_back="int4"))


def _sparse(topk: int) -> Compression:
    return Compression(topk, value_coding="int2", transform="identity")


def _sparse_flags(topk: int) -> str:
    return f"--optimizer sparseloco --local-steps {LOCAL_STEPS} --topk {topk} --value-coding int2"


def _ways(method: Callable[..., Method], back: TwoPhase) -> list[Method]:
    """Returns a round with each exchange, at its end and in fragments."""
    gather = AllGather("data")
    return [
        method("all-gather", gather),
        method("two phases", back),
        method("fragments", gather, LOCAL_STEPS),
        method("fragments in two phases", back, LOCAL_STEPS),
    ]


def _round(
    name: str,
    sent: Compression,
    exchange: Exchange,
    base: str,
    decay: float,
    state: float,
    flags: str | None,
    fragments: int | None,
    rate: float = 1.0,
) -> Method:
    code = ROUNDS.format(
        sent=_code_of(sent),
        exchange=_code_of(exchange),
        decay=decay,
        base=base,
        steps=STEPS_IN_FRAGMENTS if fragments else STEPS,
    )
    setting = sent, exchange
    return Method("E", name, setting, code, flags, rate, False, LOCAL_STEPS, fragments, state)


def _round_in_swarm(
    name: str,
    sent: Compression,
    base: str,
    decay: float,
    state: float,
    flags: str,
    rate: float = 1.0,
) -> Method:
    setting = sent, Delayed(AllGather())
    code = ROUNDS_IN_SWARM.format(sent=_code_of(sent), decay=decay, base=base)
    name = f"{name}, delayed"
    method = Method("E", name, setting, "", flags, rate, False, LOCAL_STEPS, state=state)
    return _in_swarm(method, code)


def _in_swarm(method: Method, code: str) -> Method:
    """Returns a method with the lines and settings that use it in a swarm."""
    _, exchange = method.setting or (None, None)
    delay = int(isinstance(exchange, Delayed))
    worker = f"worker = SwarmWorker(loss_fn, tx, mesh, member, delay={delay})"
    code = f"from demo_optax.swarm import SwarmWorker\n{code}\n{worker}"
    return dataclasses.replace(method, code=code, flags=f"{IN_SWARM} {method.flags}")


def _code_of(setting: Compression | Exchange) -> str:
    """Returns the call that makes a compression or an exchange, without its defaults."""
    first, *others = dataclasses.fields(setting)  # pyright: ignore[reportArgumentType]
    given = {f.name: getattr(setting, f.name) for f in others}
    changed = [f for f in others if given[f.name] != f.default]
    words = [f"{f.name}={json.dumps(given[f.name])}" for f in changed]
    called = ", ".join([json.dumps(getattr(setting, first.name)), *words])
    return f"demo_optax.{type(setting).__name__}({called})"


def _flags_of(exchange: Exchange, fragments: int | None = None) -> str:
    """Returns the trainer's settings of an exchange, each after a space."""
    words = [f"--fragments {fragments}"] if fragments else []
    if isinstance(exchange, TwoPhase):
        given = {"topk-back": exchange.topk_back, "value-coding-back": exchange.value_coding_back}
        words += ["--exchange two-phase", *[f"--{k} {v}" for k, v in given.items() if v]]
    return "".join(f" {word}" for word in words)

"""The methods that `choose` compares: what each sends, which study measured it, and how to use it.

Each method has the letter of a row: A all-reduces whole gradients, B to D exchange packets on every
step, and E exchanges once in a round of local steps.
"""

import dataclasses
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
    "demo_scaled, delayed": [Measurement("final", "DeMo-scaled, delayed, half the rate")],
    "demo_muon, two phases, delayed": [
        Measurement("final", "DeMo-Muon, two phases, delayed"),
        Measurement("workers", "DeMo-Muon, two phases, 512 int4 back", "512 back, no delay"),
    ],
    "demo_scaled, two phases, delayed": [
        Measurement("final", "DeMo-scaled, delayed, half the rate", "all-gather"),
        Measurement("workers", "DeMo-scaled, two phases, 512 int4 back", "512 back, no delay"),
    ],
    "DiLoCo, all-reduce": [Measurement("local", "DiLoCo, H = 30")],
    "DiLoCo int8, all-gather": [Measurement("local", "DiLoCo, H = 30", "float32")],
    "DiLoCo int8, two phases": [Measurement("local", "DiLoCo, H = 30", "float32, all-reduce")],
    "DiLoCo int8, fragments": [],
    "SparseLoCo k=512, all-gather": [Measurement("local", "SparseLoCo, H = 30, k = 512")],
    "SparseLoCo k=512, two phases": [
        Measurement("local", "SparseLoCo, H = 30, k = 512", "all-gather")
    ],
    "SparseLoCo k=512, fragments": [],
    "SparseLoCo k=64, all-gather": [Measurement("local", "SparseLoCo, H = 30")],
    "SparseLoCo k=64, two phases": [Measurement("local", "SparseLoCo, H = 30", "all-gather")],
    "SparseLoCo k=64, fragments": [],
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


def methods(topk_back: int) -> list[Method]:
    """Returns all methods; in row D the owners send ``topk_back`` coefficients back."""
    back = TwoPhase("data", topk_back=topk_back, value_coding_back="int4")
    back_code = (
        f'\n    demo_optax.TwoPhase("data", topk_back={topk_back}, value_coding_back="int4")\n'
    )
    back_flags = f"--exchange two-phase --topk-back {topk_back} --value-coding-back int4"
    return [
        Method("A", "AdamW, all-reduce", None, _all_reduced(ADAMW), "--optimizer adamw"),
        Method("A", "Muon, all-reduce", None, _all_reduced(MUON), None, 2.0, orthogonal=True),
        Method(
            "B",
            "demo_muon",
            (SIGNS, AllGather("data")),
            'tx = demo_optax.demo_muon(rate, axis_name="data")',
            "--optimizer demo-muon",
            orthogonal=True,
        ),
        Method(
            "B",
            "demo_scaled",
            (SIGNS, AllGather("data")),
            'tx = demo_optax.demo_scaled(rate, axis_name="data")',
            "--optimizer demo-scaled",
        ),
        *_delayed("C", "delayed", AllGather("data"), GATHER, ""),
        *_delayed("D", "two phases, delayed", back, back_code, f" {back_flags}"),
        Method(
            "E",
            "DiLoCo, all-reduce",
            None,
            DILOCO,
            f"--optimizer diloco --local-steps {LOCAL_STEPS}",
            rate=0.5,
            local_steps=LOCAL_STEPS,
        ),
        *_diloco_int8(),
        *_sparseloco(512),
        *_sparseloco(64),
    ]


GATHER = 'demo_optax.AllGather("data")'
ADAMW = "optax.adamw(rate, b2=0.95, weight_decay=0.1)"
MUON = "optax.contrib.muon(rate, weight_decay=0.1)"
NESTEROV = "optax.sgd(0.7, momentum=0.9, nesterov=True)"
STEPS = f'tx = demo_optax.local_steps(inner, outer, every={LOCAL_STEPS}, axis_name="data")'
DILOCO = f"""\
outer = optax.chain(
    demo_optax.mean_over_workers("data"),
    {NESTEROV},
)
inner = {ADAMW}
{STEPS}"""
ROUNDS = f"""\
sent = demo_optax.Compression({{topk}}, value_coding="{{coding}}", transform="identity")
outer = demo_optax.decoupled(
    {{base}},
    sent,
    decay={{decay}},
    gradient_weight=1.0,
    mean="workers",
    exchange={{exchange}},
)
inner = {ADAMW}
{{steps}}"""
STEPS_IN_FRAGMENTS = f"""\
fragments = dict(fragments={LOCAL_STEPS}, merge=0.5)
tx = demo_optax.local_steps(inner, outer, every={LOCAL_STEPS}, **fragments, axis_name="data")"""


def _all_reduced(optimizer: str) -> str:
    return f'tx = optax.chain(\n    demo_optax.mean_over_workers("data"),\n    {optimizer},\n)'


def _delayed(row: str, way: str, exchange: Exchange, code: str, flags: str) -> list[Method]:
    """Returns both optimizers with an exchange that is delayed by one step."""

    def method(optimizer: str, look_ahead: float, **options) -> Method:
        return Method(
            row,
            f"{optimizer}, {way}",
            (SIGNS, Delayed(exchange)),
            f"exchange = demo_optax.Delayed({code})\n"
            f"tx = demo_optax.{optimizer}(rate, look_ahead={look_ahead}, exchange=exchange)",
            f"--optimizer {optimizer.replace('_', '-')} --look-ahead {look_ahead} --delay 1{flags}",
            **options,
        )

    return [method("demo_muon", 1.5, orthogonal=True), method("demo_scaled", 1.0, rate=0.5)]


def _diloco_int8() -> list[Method]:
    two_phases = TwoPhase("data"), 'demo_optax.TwoPhase("data")'
    return _in_rounds("DiLoCo int8", EVERY_ELEMENT, NESTEROV, 1.0, 0.5, two_phases)


def _sparseloco(topk: int) -> list[Method]:
    sent = Compression(topk, value_coding="int2", transform="identity")
    back = 'demo_optax.TwoPhase("data", value_coding_back="int4")'
    two_phases = TwoPhase("data", value_coding_back="int4"), back
    gathered, owned, fragments = _in_rounds(
        f"SparseLoCo k={topk}", sent, "optax.sgd(1.0)", 0.95, 1.0, two_phases
    )
    flags = f"--optimizer sparseloco --local-steps {LOCAL_STEPS} --topk {topk} --value-coding int2"
    back_flags = f"{flags} --exchange two-phase --value-coding-back int4"
    return [
        dataclasses.replace(gathered, flags=flags),
        dataclasses.replace(owned, flags=back_flags),
        fragments,
    ]


def _in_rounds(
    name: str,
    sent: Compression,
    base: str,
    decay: float,
    rate: float,
    two_phases: tuple[Exchange, str],
) -> list[Method]:
    """Returns rounds with one all-gather, with two phases, and in fragments."""

    def method(way: str, exchange: Exchange, code: str, fragments: int | None = None) -> Method:
        lines = ROUNDS.format(
            topk=sent.topk,
            coding=sent.value_coding,
            base=base,
            decay=decay,
            exchange=code,
            steps=STEPS_IN_FRAGMENTS if fragments else STEPS,
        )
        return Method(
            "E",
            f"{name}, {way}",
            (sent, exchange),
            lines,
            None,
            rate,
            local_steps=LOCAL_STEPS,
            fragments=fragments,
        )

    return [
        method("all-gather", AllGather("data"), GATHER),
        method("two phases", *two_phases),
        method("fragments", AllGather("data"), GATHER, LOCAL_STEPS),
    ]

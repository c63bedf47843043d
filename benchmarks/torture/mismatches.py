"""Two processes of which one has another setting, another text or another version of a package.

A try survives where both end with exit status 2 and a single line that names what differs, and
nothing was written.
"""

import pathlib
from collections.abc import Iterator
from typing import NamedTuple

from .outcomes import Try, in_turn
from .processes import ROOT, Trainer, last_words, or_hangs, side_by_side, workplace

NOISE = "[Gloo]"  # which JAX's CPU backend prints for each group it makes
SAYS = "error: the processes differ: "


class Difference(NamedTuple):
    """What the second process has otherwise, and how it must be named."""

    named: str
    arguments: tuple[str, ...] = ()
    of_trainer: tuple[str, ...] = ()


SETTINGS = (
    "--batch-size=8 --block-side=32 --checkpoint-dir=elsewhere --checkpoint-every=7 "
    "--decay=0.5 --learning-rate=1e-3 --norm-limit=5 --optimizer=demo-sgd --seed=1 "
    "--sequence-length=32 --steps=5 --topk=8 --value-coding=int8 --workers=4"
)
PACKAGES = ("demo_optax", "jax", "jaxlib", "optax", "orbax-checkpoint")
DIFFERENCES = [
    *(Difference(f"{setting.partition('=')[0]} is ", (setting,)) for setting in SETTINGS.split()),
    *(Difference(f"{name} is ", (), ("--version", name, "9.9.9")) for name in PACKAGES),
    Difference("the text", ("--text", str(ROOT / "demo_optax" / "_src" / "parallel"))),
]
ROWS = ("processes that differ",)
EACH = len(DIFFERENCES)


def run(count: int, seed: int) -> Iterator[Try]:
    with workplace() as place:
        chosen = in_turn(DIFFERENCES, count, seed)
        pairs = [(place / f"pair{i}", one) for i, one in enumerate(chosen)]
        yield from side_by_side(started_together, pairs)


def started_together(folder: pathlib.Path, difference: Difference) -> list[Try]:
    written = ["--checkpoint-dir", folder / "saved", "--log-dir", folder / "log"]
    common = ["--steps", 4, *written]
    each = [common, [*common, *difference.arguments]]
    with Trainer(folder, each, difference.of_trainer) as trainer:
        reason = or_hangs(wrong, difference, trainer)
    left = sorted(path.name for path in folder.iterdir() if path not in trainer.outputs)
    reason = reason or (f"it wrote {left}" if left else "")
    return [Try(ROWS[0], reason and f"{difference}: {reason}")]


def wrong(difference: Difference, trainer: Trainer) -> str:
    for status, output in zip(trainer.wait(), trainer.outputs, strict=True):
        text = output.read_text()
        lines = [line for line in text.splitlines() if line.strip() and NOISE not in line]
        if status != 2 or len(lines) != 1:
            return f"status {status} and {len(lines)} lines: {last_words(text)}"
        if not lines[0].startswith(SAYS) or difference.named not in lines[0]:
            return f"it was not named: {lines[0]}"
    return ""

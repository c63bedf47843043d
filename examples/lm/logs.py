"""What a run writes while it trains: a line of JSON for each step, and the same for TensorBoard."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from tensorboardX import SummaryWriter

import demo_optax


class Step(NamedTuple):
    """One step's figures, on the host; the loss in nats per byte. Workers are this process's."""

    number: int
    loss: float
    seconds: float
    tokens_per_second: float
    utilization: float | None
    packet_bytes: int
    gradient_norms: dict[int, float]
    exchange: dict[str, float]

    def scalars(self) -> dict[str, float]:
        """By the names of TensorBoard."""
        found = {
            "loss/train": self.loss,
            "speed/seconds_per_step": self.seconds,
            "speed/tokens_per_second": self.tokens_per_second,
            "exchange/packet_bytes": self.packet_bytes,
        }
        if self.utilization is not None:
            found["speed/model_flops_utilization"] = self.utilization
        found |= {f"exchange/{name}": float(value) for name, value in self.exchange.items()}
        norms = self.gradient_norms.items()
        return found | {f"gradient_norm/worker_{worker}": norm for worker, norm in norms}


def fetch(metrics: demo_optax.TrainMetrics) -> tuple[float, dict[int, float], dict[str, float]]:
    """Mean loss per token, each worker's gradient norm, the exchange; waits until all is done."""
    # Fetched before it is averaged: np.mean of a jax.Array is a program with a collective, which
    # can lock up virtual CPU devices while the next step is under way.
    loss = float(np.mean(list(_of_workers(metrics.loss).values())))
    exchange = metrics.exchange._asdict() if metrics.exchange else {}
    exchanged = {name: np.asarray(value).item() for name, value in exchange.items()}
    return loss, _of_workers(metrics.gradient_norm), exchanged


def _of_workers(values: jax.Array) -> dict[int, float]:
    """Worker's number to value, for the workers of this process."""
    return {
        (shard.index[0].start or 0) + i: float(value)
        for shard in values.addressable_shards
        for i, value in enumerate(np.asarray(shard.data))
    }


class Files:
    """Writes to a folder; to nowhere without one. What lies there from later steps is replaced.

    TensorBoard's part is written by a thread.
    """

    def __init__(self, folder: Path | None, start: int):
        self.lines = self.board = None
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / "steps.jsonl"
            kept = _lines_until(path, start)
            self.lines = path.open("w", buffering=1)
            self.lines.writelines(kept)
            self.board = SummaryWriter(str(folder), purge_step=start + 1, max_queue=10_000)

    def step(self, step: Step) -> None:
        if self.lines and self.board:
            try:
                print(json.dumps(step._asdict()), file=self.lines)
            except OSError as error:  # such as a full disk, which must not end the training
                print(f"warning: the log ends at step {step.number}: {error}", file=sys.stderr)
                with contextlib.suppress(OSError):
                    self.lines.close()
                self.lines = None
                return
            for name, value in step.scalars().items():
                self.board.add_scalar(name, value, step.number)

    def held_out_loss(self, number: int, loss: float) -> None:
        if self.board:
            self.board.add_scalar("loss/held_out", loss, number)

    def samples(self, number: int, texts: list[str]) -> None:
        for i, text in enumerate(texts):
            if self.board:
                self.board.add_text(f"sample/{i}", f"```\n{text}\n```", number)

    def close(self) -> None:
        if self.lines:
            self.lines.close()
        if self.board:
            self.board.close()


def _lines_until(path: Path, step: int) -> list[str]:
    """The whole lines of a file that are of this step or an earlier one."""
    lines = path.read_text().splitlines(keepends=True) if step and path.exists() else []
    return [x for x in lines if x.endswith("\n") and json.loads(x)["number"] <= step]

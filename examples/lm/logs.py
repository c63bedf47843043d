"""What a run writes while it trains: a line of JSON for each step, and the same for TensorBoard."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from tensorboardX import RecordWriter, summary
from tensorboardX.proto.event_pb2 import Event, SessionLog  # type: ignore[attr-defined]
from tensorboardX.proto.summary_pb2 import Summary  # type: ignore[attr-defined]

import demo_optax

from . import output
from .config import Config


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
    """Writes to a folder, or to nowhere without one. A full disk ends the log, and no training.

    What lies there from steps after ``start`` is replaced. Without ``start`` lines are added to
    those that lie there, and TensorBoard gets nothing.
    """

    def __init__(self, folder: Path | None, start: int | None = None, config: Config | None = None):
        self.lines = self.board = None
        if folder is None:
            return
        with self._ends_alone("before the first step"):
            folder.mkdir(parents=True, exist_ok=True)
            if config:
                config.write(folder / "config.yaml")
            path = folder / "steps.jsonl"
            kept = _lines_until(path, start or 0)
            self.lines = path.open("a" if start is None else "w", buffering=1)
            if start is not None:
                self.lines.writelines(kept)
                # Not tensorboardX's own thread: where it ends, whoever adds to its queue waits.
                name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}"
                self.board = RecordWriter(str(folder / name))
                self._add(start + 1, file_version="brain.Event:2")
                self._add(start + 1, session_log=SessionLog(status=SessionLog.START))

    def step(self, step: Step) -> None:
        self.line(step.number, step._asdict())
        self._add(step.number, summary=_scalars(step.scalars()))

    def line(self, number: int, values: dict[str, Any]) -> None:
        """Writes only a line."""
        with self._ends_alone(f"at step {number}"):
            if self.lines:
                print(json.dumps(values), file=self.lines)

    def held_out_loss(self, number: int, loss: float) -> None:
        self._add(number, summary=_scalars({"loss/held_out": loss}))
        with self._ends_alone(f"at step {number}"):
            if self.board:
                self.board.flush()

    def samples(self, number: int, texts: list[str]) -> None:
        for i, text in enumerate(texts):
            self._add(number, summary=summary.text(f"sample/{i}", f"```\n{text}\n```"))

    def close(self) -> None:
        with self._ends_alone("at its end"):
            if self.lines:
                self.lines.close()
            if self.board:
                self.board.close()

    def _add(self, number: int, **what) -> None:
        with self._ends_alone(f"at step {number}"):
            if self.board:
                event = Event(wall_time=time.time(), step=number, **what)
                self.board.write(event.SerializeToString())

    @contextlib.contextmanager
    def _ends_alone(self, when: str) -> Iterator[None]:
        """Tells of the first failure; raises it only if it is a mistake in the folder's name."""
        try:
            yield
        except OSError as error:
            if self.lines is None and error.errno not in output.FULL:
                raise
            print(f"warning: the log ends {when}: {error}", file=sys.stderr)
            files, self.lines, self.board = (self.lines, self.board), None, None
            for file in filter(None, files):
                with contextlib.suppress(OSError):
                    file.close()


def _scalars(values: dict[str, float]) -> Summary:
    return Summary(value=[Summary.Value(tag=tag, simple_value=x) for tag, x in values.items()])


def _lines_until(path: Path, step: int) -> list[str]:
    """The whole lines of a file that are of this step or an earlier one."""
    lines = path.read_text().splitlines(keepends=True) if step and path.exists() else []
    return [x for x in lines if x.endswith("\n") and json.loads(x)["number"] <= step]

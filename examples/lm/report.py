"""What a run shows: a bar while it trains, and a table at its end."""

import time
from typing import Any, NamedTuple

import numpy as np
from rich import progress
from rich.console import Console
from rich.table import Table

import demo_optax

from . import logs
from .utilization import utilization

console = Console(markup=False, emoji=False)  # texts of others are shown as they are


class Point(NamedTuple):
    """A loss after so many steps, and what each worker has sent until then."""

    step: int
    megabytes: float
    loss: float


class Log:
    """Counts what the steps of a run tell, shows it on ``bar``, and hands it to ``files``.

    Args:
      steps: of the run.
      every: steps for one exchange.
      tokens: of one step.
      bytes_per_token: of the text.
      flops: of one step, forward and backward.
      devices: that take part.
      start: steps that were done before.
      files: that get every step's figures.
    """

    def __init__(
        self,
        steps: int,
        every: int,
        tokens: int,
        bytes_per_token: float,
        flops: float,
        devices: np.ndarray,
        start: int,
        files: logs.Files,
    ):
        self.tokens, self.flops, self.devices, self.files = tokens, flops, devices, files
        self.every = every
        self.bytes_per_token, self.packet_bytes = bytes_per_token, 0
        self.first_step_seconds = self.other_steps_seconds = 0.0
        self.sent_shares: list[float] = []
        self.checked = False
        self.evaluations: list[Point] = []
        self.start = self.done = start
        self.bar = progress.Progress(
            progress.TextColumn("step"),
            progress.MofNCompleteColumn(),
            progress.BarColumn(bar_width=None),
            progress.TextColumn("loss {task.fields[loss]}"),
            progress.TextColumn("{task.fields[speed]:,.0f} tokens/s"),
            progress.TextColumn("sent {task.fields[sent]:.3g} MB"),
            progress.TimeRemainingColumn(),
            console=console,
        )
        self.task = self.bar.add_task(
            "", total=steps, completed=start, loss="-", speed=0.0, sent=0.0
        )
        self.resume()

    @property
    def steps_per_second(self) -> float:
        """The first step, which is compiled, does not count."""
        seconds = self.other_steps_seconds
        return (self.done - self.start - 1) / seconds if seconds else 0.0

    @property
    def utilization(self) -> float | None:
        return utilization(self.flops * self.steps_per_second, self.devices)

    @property
    def bytes_per_step(self) -> float:
        """That each worker hands to the exchange, the mean over a round."""
        return self.packet_bytes / self.every

    @property
    def megabytes(self) -> float:
        """That each worker has handed to the exchange, in all steps that were done."""
        return self.done // self.every * self.packet_bytes / 1e6

    def step(self, metrics: demo_optax.TrainMetrics) -> None:
        """Shows a step's metrics; waits until the step is done."""
        loss, gradient_norms, exchange = logs.fetch(metrics)
        exchanged = bool(np.asarray(metrics.exchanged))
        loss /= self.bytes_per_token
        if metrics.exchange is not None:
            if exchanged and exchange["participants"] and not self.checked:
                demo_optax.check_metrics(metrics.exchange)
                self.checked = True
            if exchanged:
                self.sent_shares.append(exchange["sent_share"])
        self.packet_bytes = metrics.packet_bytes or 0
        seconds = time.monotonic() - self.resumed
        if self.done == self.start:
            self.first_step_seconds = seconds
        else:
            self.other_steps_seconds += seconds
        self.done += 1
        speed = self.tokens * self.steps_per_second
        self.files.step(
            logs.Step(
                self.done,
                loss,
                seconds,
                self.tokens / seconds,
                utilization(self.flops / seconds, self.devices),
                self.packet_bytes if exchanged else 0,
                gradient_norms,
                exchange,
            )
        )
        shown: dict[str, Any] = dict(loss=f"{loss:.3f}", speed=speed, sent=self.megabytes)
        self.bar.update(self.task, completed=self.done, **shown)
        self.resume()

    def resume(self) -> None:
        """Says that the next step begins now: what was done since the last counts for none."""
        self.resumed = time.monotonic()

    def evaluation(self, loss: float) -> None:
        """Shows a loss on held-out text, in nats per byte."""
        self.evaluations.append(Point(self.done, self.megabytes, loss))
        self.files.held_out_loss(self.done, loss)
        self.bar.print(f"step {self.done}: {loss:.3f} nats per byte of part of the held-out text")


def closing_table(log: Log, loss: float, bigrams: float | None, dense_bytes: int) -> Table:
    """Losses in nats per byte; bytes are those of one step and worker."""
    seconds = log.first_step_seconds + log.other_steps_seconds
    table = Table(show_header=False)
    table.add_row("loss on held-out text", f"{loss:.3f} nats per byte")
    if bigrams is not None:
        table.add_row("bigrams of bytes on the same text", f"{bigrams:.3f} nats per byte")
    if log.packet_bytes:
        table.add_row("sent per step and worker", f"{log.bytes_per_step / 1e6:.4g} MB")
        if log.sent_shares:
            table.add_row("dense float32 all-reduce", f"{dense_bytes / 1e6:.4g} MB")
            table.add_row("ratio", f"{dense_bytes / log.bytes_per_step:.3g} x less")
    if log.sent_shares:
        table.add_row("share of the momentum's energy sent", f"{np.mean(log.sent_shares):.1%}")
    table.add_row(
        "training time", f"{seconds:.0f} s, {log.first_step_seconds:.0f} s of it compiling"
    )
    if log.steps_per_second:
        table.add_row("speed", f"{log.tokens * log.steps_per_second:,.0f} tokens/s")
    if log.utilization is not None:
        table.add_row("model FLOP/s utilization", f"{log.utilization:.1%}")
    return table

"""What a run shows: a bar while it trains, and a table at its end."""

import json
import pathlib
import time

import numpy as np
from rich import progress
from rich.console import Console
from rich.table import Table

import demo_optax

console = Console()


class Log:
    """Counts what the steps of a run tell, and shows it on ``bar``.

    Args:
      steps: of the run.
      tokens: of one step.
      start: steps that were done before.
      path: of a file that gets a line of JSON for each step.
    """

    def __init__(self, steps: int, tokens: int, start: int, path: pathlib.Path | None):
        self.tokens, self.packet_bytes = tokens, 0
        self.file = path and path.open("a", buffering=1)
        self.first_step_seconds = self.other_steps_seconds = 0.0
        self.sent_shares: list[float] = []
        self.start = self.done = start
        self.bar = progress.Progress(
            progress.TextColumn("step"),
            progress.MofNCompleteColumn(),
            progress.BarColumn(bar_width=None),
            progress.TextColumn("loss {task.fields[loss]:.3f}"),
            progress.TextColumn("{task.fields[speed]:,.0f} tokens/s"),
            progress.TextColumn("sent {task.fields[sent]:.1f} MB"),
            progress.TimeRemainingColumn(),
            console=console,
        )
        self.task = self.bar.add_task(
            "", total=steps, completed=start, loss=np.nan, speed=0.0, sent=0.0
        )
        self.resumed = time.monotonic()

    @property
    def speed(self) -> float:
        """Tokens per second; the first step, which is compiled, does not count."""
        seconds = self.other_steps_seconds
        return self.tokens * (self.done - self.start - 1) / seconds if seconds else 0.0

    def step(self, metrics: demo_optax.TrainMetrics) -> None:
        """Shows a step's metrics; waits until the step is done."""
        # Fetched before it is averaged: np.mean of a jax.Array is a program with a collective,
        # which can lock up simulated devices while the next step is under way.
        loss = np.mean([np.asarray(shard.data) for shard in metrics.loss.addressable_shards])
        if metrics.exchange is not None:
            if self.done == self.start:
                demo_optax.check_metrics(metrics.exchange)
            self.sent_shares.append(float(metrics.exchange.sent_share))
        self.packet_bytes = metrics.packet_bytes
        seconds = time.monotonic() - self.resumed
        if self.done == self.start:
            self.first_step_seconds = seconds
        else:
            self.other_steps_seconds += seconds
        self.done += 1
        if self.file:
            exchanged = metrics.exchange._asdict() if metrics.exchange else {}
            line = {"step": self.done, "loss": float(loss), "seconds": seconds}
            line |= {"packet_bytes": metrics.packet_bytes}
            line |= {name: np.asarray(x).item() for name, x in exchanged.items()}
            print(json.dumps(line), file=self.file)
        sent = (self.done - self.start) * self.packet_bytes / 1e6
        self.bar.update(self.task, completed=self.done, loss=loss, speed=self.speed, sent=sent)
        self.resumed = time.monotonic()

    def evaluation(self, loss: float) -> None:
        """Shows a loss on held-out text; the time that it took counts for no step."""
        self.bar.print(f"step {self.done}: {loss:.3f} nats per byte of held-out text")
        self.resumed = time.monotonic()


def closing_table(log: Log, loss: float, bigrams: float, dense_bytes: int) -> Table:
    """Losses in nats per byte; bytes are those of one step and worker."""
    seconds = log.first_step_seconds + log.other_steps_seconds
    table = Table(show_header=False)
    table.add_row("loss on held-out text", f"{loss:.3f} nats per byte")
    table.add_row("bigrams of bytes on the same text", f"{bigrams:.3f} nats per byte")
    if log.packet_bytes:
        table.add_row("sent per step and worker", f"{log.packet_bytes / 1e6:.4g} MB")
        table.add_row("dense float32 all-reduce", f"{dense_bytes / 1e6:.4g} MB")
        table.add_row("ratio", f"{dense_bytes / log.packet_bytes:.3g} x less")
    if log.sent_shares:
        table.add_row("share of the momentum's energy sent", f"{np.mean(log.sent_shares):.1%}")
    table.add_row(
        "training time", f"{seconds:.0f} s, {log.first_step_seconds:.0f} s of it compiling"
    )
    table.add_row("speed", f"{log.speed:,.0f} tokens/s")
    return table

"""Trains a language model with DeMo. This is one file to copy and to change.

python examples/train.py                        one worker on each GPU, or eight on a CPU
python examples/train.py --text my_text.txt     learns from your own text
python examples/train.py --checkpoint-dir run   saves, and continues when it is started again
srun python examples/train.py --distributed     many hosts, with one process for each GPU
"""

import contextlib
import itertools
import sys
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import Progress, TextColumn

import demo_optax
from demo_optax.checkpoint import Checkpointer


@dataclass(frozen=True)
class Settings:
    text: str | None = None
    """File to learn from, the same on all hosts and no URL. By default Python's library."""
    layers: int = 4
    """Layers of the transformer."""
    width: int = 128
    """Width of the transformer."""
    heads: int = 2
    """Attention heads, twice of which must divide the width."""
    sequence_length: int = 64
    """Tokens in a sequence."""
    batch_size: int = 32
    """Sequences in one step, of all workers together."""
    steps: int = 600
    """Updates of the parameters."""
    optimizer: Literal["demo_muon", "demo_scaled"] = "demo_muon"
    """demo_muon ends at a lower loss; demo_scaled takes less time where batches are small."""
    learning_rate: float = 3e-3
    """Highest learning rate, after a warm-up and before a cosine to a tenth."""
    seed: int = 0
    """Seed of the initial parameters and of the order of the text."""
    evaluate_every: int = 100
    """Steps between two evaluations on held-out text."""
    checkpoint_dir: str | None = None
    """Folder or URL for checkpoints, which all hosts must see. A run continues from the latest."""
    checkpoint_every: int = 100
    """Steps between two checkpoints; one that is stopped loses the steps since the last of them."""
    cpu_devices: int = 8
    """Workers of this process if it has no GPU or TPU, on virtual devices of its CPU."""
    distributed: bool = False
    """There are several processes, and JAX finds them: under SLURM, Kubernetes, or on a TPU pod."""
    coordinator: str | None = None
    """HOST:PORT of the first process, to start several processes by hand."""
    num_processes: int | None = None
    """Number of processes."""
    process_id: int | None = None
    """Number of this process, from 0."""


class Block(nnx.Module):
    """Causal self-attention and an MLP, each of which adds to its input."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.heads = heads
        self.attention_norm = nnx.LayerNorm(width, use_bias=False, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.attention_out = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(width, use_bias=False, rngs=rngs)
        self.mlp_in = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs)
        self.mlp_out = nnx.Linear(4 * width, width, use_bias=False, rngs=rngs)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        batch, time, width = x_BxTxD.shape
        qkv = self.qkv(self.attention_norm(x_BxTxD)).reshape(batch, time, 3, self.heads, -1)
        q, k, v = jnp.moveaxis(qkv, 2, 0)
        mixed = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x_BxTxD += self.attention_out(mixed.reshape(batch, time, width))
        return x_BxTxD + self.mlp_out(nnx.gelu(self.mlp_in(self.mlp_norm(x_BxTxD))))


def rotate(x_BxTxHxK: jax.Array) -> jax.Array:
    """Rotary positions: turns pairs of features by angles that grow with time."""
    time, half = x_BxTxHxK.shape[1], x_BxTxHxK.shape[3] // 2
    angles_TxK = jnp.outer(jnp.arange(time), 10_000.0 ** (-jnp.arange(half) / half))
    sin, cos = jnp.sin(angles_TxK)[None, :, None], jnp.cos(angles_TxK)[None, :, None]
    a, b = jnp.split(x_BxTxHxK, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class LanguageModel(nnx.Module):
    def __init__(self, settings: Settings, rngs: nnx.Rngs):
        width, layers = settings.width, range(settings.layers)
        self.embedding = nnx.Embed(256, width, rngs=rngs)  # the tokens are bytes
        self.blocks = nnx.List(Block(width, settings.heads, rngs) for _ in layers)
        self.norm = nnx.LayerNorm(width, use_bias=False, rngs=rngs)

    def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
        """Logits ``(B, T, 256)`` of the token that follows each one."""
        x_BxTxD = self.embedding(tokens_BxT)
        for block in self.blocks:
            x_BxTxD = block(x_BxTxD)
        return self.embedding.attend(self.norm(x_BxTxD))


def read_text(settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Tokens to train on and to hold out, the last twentieth: any two 1-D arrays of integers."""
    if settings.text is not None:
        with mistakes_in("--text"), open(settings.text, "rb") as file:
            text = file.read()
    else:
        library = Path(sysconfig.get_path("stdlib"))
        sources = [p for p in library.rglob("*.py") if "site-packages" not in p.parts]
        # In the order of a checksum of their names, so that the held-out files are like the others.
        sources.sort(key=lambda p: zlib.crc32(p.relative_to(library).as_posix().encode()))
        text = b"\0".join(p.read_bytes() for p in sources)
    held_out = max(len(text) // 20, 1)
    return np.frombuffer(text[:-held_out], np.uint8), np.frombuffer(text[-held_out:], np.uint8)


def read_batches(tokens: np.ndarray, settings: Settings) -> grain.DatasetIterator:
    """Endless shuffled batches ``(batch, length + 1)``; each process reads its own part of each."""
    length, processes = settings.sequence_length, jax.process_count()
    starts = grain.MapDataset.range(0, tokens.size - length, length)
    windows = starts.map(lambda start: tokens[start : start + length + 1])
    shuffled = windows.seed(settings.seed).shuffle().repeat()
    parts = shuffled.batch(settings.batch_size // processes)
    ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)
    return iter(parts[jax.process_index() :: processes].to_iter_dataset(ahead))


def to_devices(part: np.ndarray, mesh: Mesh) -> jax.Array:
    """The whole batch, of which each process has read its part, with rows for every worker."""
    return jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), part)


def train(settings: Settings) -> float:
    """Returns the final loss on held-out text, in nats per token."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), (AxisType.Auto,))
    train_text, held_out_text = read_text(settings)
    rows, length, width = settings.batch_size, settings.sequence_length, settings.width
    counts = rows, length, settings.heads, settings.evaluate_every, settings.checkpoint_every
    for is_wrong, message in (
        (min(*counts, settings.steps) < 1, "--steps and all other numbers must be at least 1"),
        (rows % mesh.size, f"--batch-size {rows} must be a multiple of the {mesh.size} workers"),
        (width % (2 * settings.heads or 1), f"--width {width} is no multiple of twice the --heads"),
        (len(held_out_text) <= length, f"--sequence-length {length} is too long for this text"),
    ):
        if is_wrong:
            sys.exit(f"error: {message}.")
    model = LanguageModel(settings, nnx.Rngs(settings.seed))
    graph, params, rest = nnx.split(model, nnx.Param, ...)  # for dropout see stateful=True

    def loss_fn(params, batch_BxT):
        tokens_BxT = batch_BxT.astype(jnp.int32)
        logits_BxTxV = nnx.merge(graph, params, rest, copy=True)(tokens_BxT[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits_BxTxV, tokens_BxT[:, 1:])
        return losses.mean()

    peak, warmup = settings.learning_rate, min(50, settings.steps // 2)
    rate = optax.warmup_cosine_decay_schedule(peak / 50, peak, warmup, settings.steps, peak / 10)
    tx = getattr(demo_optax, settings.optimizer)(rate, axis_name="data")
    train_step = demo_optax.make_train_step(loss_fn, tx, mesh, clip_norm=1.0)
    eval_step = jax.jit(loss_fn)
    batches = read_batches(train_text, settings)
    held_out = list(itertools.islice(read_batches(held_out_text, settings), 16))

    def evaluate(params) -> float:
        return float(sum(eval_step(params, to_devices(x, mesh)) for x in held_out)) / len(held_out)

    console = Console(quiet=jax.process_index() > 0, markup=False, emoji=False)
    sent, dense = demo_optax.packet_bytes(tx, params), demo_optax.dense_bytes(params)
    console.print(f"{mesh.size} workers send {sent:,} bytes a step each; a gradient has {dense:,}")
    columns = *Progress.get_default_columns(), TextColumn("loss {task.fields[loss]}")
    bar, folder = Progress(*columns, console=console), settings.checkpoint_dir
    data = f"{rows} x {length}, seed {settings.seed}, text {zlib.crc32(train_text.data):08x}"
    with mistakes_in("--checkpoint-dir"):
        saver = None if folder is None else Checkpointer(folder, tx, mesh)
        found = saver and saver.restore(params, (data, batches.get_state()))
        if found and found.extra[0] != data:
            raise ValueError(f"{folder} reads {found.extra[0]}, not {data}: use another folder")
    with saver or contextlib.nullcontext(), bar:
        if found:
            start, params, opt_state = found.step, found.params, found.opt_state
            batches.set_state(found.extra[1])
            console.print(f"continues after step {start} of {settings.steps}")
        else:
            start, opt_state = 0, demo_optax.init_opt_state(tx, params, mesh)
        task = bar.add_task("training", total=settings.steps, completed=start, loss="-")
        for step in range(start + 1, settings.steps + 1):
            batch = to_devices(next(batches), mesh)
            params, opt_state, metrics = train_step(params, opt_state, batch)
            last = step == settings.steps
            if step % 10 == 0 or last:  # to read a loss is to wait for its step
                demo_optax.check_metrics(metrics.exchange)
                loss = float(metrics.loss.mean())
                bar.update(task, completed=step, loss=f"{loss:.3f}")
                if not np.isfinite(loss):
                    sys.exit(f"error: the loss is {loss} at step {step}: lower --learning-rate.")
            if step % settings.evaluate_every == 0 and not last:
                console.print(f"step {step}: {evaluate(params):.3f} nats per held-out token")
            if saver and (step % settings.checkpoint_every == 0 or last):
                try:
                    saver.save(step, params, opt_state, (data, batches.get_state()), wait=last)
                except OSError as error:  # such as a full disk; the next one may succeed
                    console.print(f"warning: {error}")
    loss = evaluate(params)
    console.print(f"in the end: {loss:.3f} nats per held-out token")
    if saver and (saver.latest or 0) < settings.steps:
        sys.exit(f"error: {folder} lacks the last step: repair it and start again to save it.")
    return loss


@contextlib.contextmanager
def mistakes_in(flag: str):
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        sys.exit(f"error: {flag}: {error}")


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    jax.config.update("jax_num_cpu_devices", max(settings.cpu_devices, 1))
    where = settings.coordinator, settings.num_processes, settings.process_id
    if settings.distributed or any(x is not None for x in where):  # before any other use of JAX
        with mistakes_in("--distributed" if settings.distributed else "--coordinator"):
            jax.distributed.initialize(*where)
    try:
        train(settings)
    except KeyboardInterrupt:
        sys.exit("Stopped. With --checkpoint-dir, the run continues from its last checkpoint.")


if __name__ == "__main__":
    main()

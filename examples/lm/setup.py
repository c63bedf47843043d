"""Everything that a run needs, made from its configuration before anything is trained."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import demo_optax

from . import agreement, data, hosts, recipes, stores
from . import tokens as coding
from .config import Config
from .model import PRESETS, Preset, build, cross_entropy
from .recipes import LOOK_AHEAD, MERGE, RECIPES, OptimizerName, Settings
from .report import console
from .validation import require_divisible, require_enough, require_sensible

WORKERS_ON_CPU = 8
VIRTUAL_AT_MOST = 256  # CPU devices of a process: JAX needs seconds for them
VIRTUAL_WAIT = "--xla_cpu_collective_call_terminate_timeout_seconds"  # 40 s by default
WARMUP_STEPS = 50
CLIP_NORM = 1.0  # as in the paper
TUNED_WIDTH = PRESETS["tiny"].width
EVALUATED_AT_ONCE = 2**11  # tokens on each device

MakeOptimizer = Callable[[OptimizerName, Settings, int | None], optax.GradientTransformation]


class Run(NamedTuple):
    """The text, the model, the optimizer and the devices of a run."""

    config: Config
    tokens: coding.Tokens
    corpus: data.Corpus
    mesh: Mesh | AbstractMesh
    preset: Preset
    definition: nnx.GraphDef
    loss_fn: Callable[..., jax.Array]
    params: nnx.State
    param_specs: nnx.State
    tx: optax.GradientTransformation
    train_step: Any

    @property
    def devices(self) -> Mesh:
        """The mesh; with simulated workers, one of their single device."""
        if isinstance(self.mesh, Mesh):
            return self.mesh
        return jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])

    @property
    def batch_shape(self) -> tuple[int, int]:
        return self.config.batch_size, self.config.sequence_length

    def logits(self, params: nnx.State, tokens_BxT: jax.Array) -> jax.Array:
        return nnx.merge(self.definition, params)(tokens_BxT)


def prepare(config: Config, make_optimizer: MakeOptimizer = recipes.make) -> Run:
    """Raises ValueError, TypeError or OSError for whatever a user may have set wrongly.

    ``make_optimizer`` gets the optimizer's name, its settings, and the local steps if any.
    """
    require_sensible(config)
    mesh = make_mesh(config)
    require_divisible(config, mesh.size)
    text = data.read(config.text)
    require_enough(config, text.train)
    tokens = tokens_of(config, text)
    corpus = data.encode(text, tokens, config.sequence_length)
    agreement.require_same(
        {"the text, or its tokens,": f"{corpus.checksum:x}"}, config.peer_timeout
    )
    preset = architecture(config, tokens.vocabulary)
    definition, params = build(preset, config.seed)
    specs = jax.tree.map_with_path(
        lambda path, x: shard_spec(x.shape, config.fsdp, stacked=is_stacked(path, preset)), params
    )

    def loss_fn(params, tokens_BxT):
        model = nnx.merge(definition, params)
        return cross_entropy(model(tokens_BxT[:, :-1].astype(jnp.int32)), tokens_BxT[:, 1:])

    recipe = RECIPES[config.optimizer]
    comes_late = config.swarm and delay(config)
    settings = Settings(
        learning_rate=schedule(
            peak_rate(config, preset.width), config.warmup_steps or WARMUP_STEPS, config.steps
        ),
        decay=default(config.decay, recipe.decay),
        weight_decay=default(config.weight_decay, recipe.weight_decay),
        compression=compression(config),
        exchange=exchange(config),
        b2=default(config.b2, recipe.b2 or 0.0),
        look_ahead=default(config.look_ahead, recipe.looks_ahead * LOOK_AHEAD[delay(config)])
        or None,
        merge=MERGE if comes_late and config.merge is None else config.merge,
        matrices=functools.partial(jax.tree.map_with_path, dimension_numbers),
        fragments=config.fragments,
    )

    tx = make_optimizer(config.optimizer, settings, config.local_steps)
    train_step = demo_optax.make_train_step(
        loss_fn,
        tx,
        mesh,
        microbatches=config.microbatches,
        clip_norm=CLIP_NORM,
        param_specs=specs,
    )
    run = Run(
        config,
        tokens,
        corpus,
        mesh,
        preset,
        definition,
        loss_fn,
        params,
        specs,
        tx,
        train_step,
    )
    if jax.process_count() > 1:
        agreement.require_same(
            {"the step, before XLA compiles it,": agreement.digest(lowered(run).as_text())},
            config.peer_timeout,
        )
    return run


def lowered(run: Run) -> jax.stages.Lowered:
    """The program of a step."""
    opt_state = jax.eval_shape(
        lambda params: demo_optax.init_opt_state(
            run.tx, params, run.mesh, param_specs=run.param_specs
        ),
        run.params,
    )
    rows, length = run.batch_shape
    batch = jax.ShapeDtypeStruct((rows, length + 1), run.corpus.train.dtype)
    return run.train_step.lower(run.params, opt_state, batch)


def tokens_of(config: Config, text: data.Text) -> coding.Tokens:
    """Bytes, or byte pairs from a file, which the first process makes where there is none."""
    if config.tokenizer is None:
        return coding.Bytes()
    if hosts.is_first() and not stores.exists(config.tokenizer):
        coding.train(text.train, config.vocabulary, config.tokenizer)
        console.print(f"learned a tokenizer of {config.vocabulary:,} tokens: {config.tokenizer}")
    hosts.meet("tokenizer")
    return coding.load(config.tokenizer)


def architecture(config: Config, vocabulary: int) -> Preset:
    """The preset, as the configuration changes it."""
    preset = PRESETS[config.preset]
    return preset._replace(
        vocabulary=max(preset.vocabulary, vocabulary),
        dtype=jnp.dtype(config.dtype or preset.dtype),
        remat=config.remat,
        scan=config.scan_layers,
    )


def default(given: float | None, otherwise: float) -> float:
    return otherwise if given is None else given


def peak_rate(config: Config, width: int) -> float:
    """The highest learning rate; the optimizer's is for width 128, and falls as 1 / width."""
    usual = RECIPES[config.optimizer].learning_rate * TUNED_WIDTH / width
    return default(config.learning_rate, usual)


def compression(config: Config) -> demo_optax.Compression:
    """What the settings say, and for the rest what suits the optimizer."""
    usual = RECIPES[config.optimizer].compression or demo_optax.Compression()
    given = {
        "topk": config.topk,
        "block_side": config.block_side,
        "value_coding": config.value_coding,
        "transform": config.transform,
        "selection": config.selection,
    }
    return dataclasses.replace(usual, **{k: v for k, v in given.items() if v is not None})


def exchange(config: Config) -> demo_optax.Exchange:
    """How the packets travel; in a swarm the host carries them, and the step has no axis."""
    if config.swarm:
        return demo_optax.AllGather(norm_limit=config.norm_limit)
    made: demo_optax.Exchange = demo_optax.AllGather("data", config.norm_limit)
    if config.exchange == "two-phase":
        back = config.topk_back, config.value_coding_back
        made = demo_optax.TwoPhase("data", *back, config.norm_limit)
    return demo_optax.Delayed(made) if config.delay else made


def delay(config: Config) -> int:
    """Whether packets travel while the worker goes on, as they do in a swarm with rounds."""
    if config.delay is None:
        return int(bool(config.swarm and RECIPES[config.optimizer].outer))
    return config.delay


def make_mesh(config: Config) -> Mesh | AbstractMesh:
    """Workers and their devices: accelerators, else virtual CPU devices; none with ``simulate``."""
    if config.simulate:
        return AbstractMesh((config.simulate,), ("data",))
    if config.swarm:
        config = dataclasses.replace(config, workers=1)
    wanted = (config.workers or WORKERS_ON_CPU) * config.fsdp
    with contextlib.suppress(RuntimeError):  # once JAX runs, its devices are what they are
        each = max(wanted // (config.num_processes or 1), 1)
        jax.config.update("jax_num_cpu_devices", min(each, VIRTUAL_AT_MOST))
        os.environ["XLA_FLAGS"] = with_long_waits(os.environ.get("XLA_FLAGS", ""), each)
    devices = jax.devices()
    used = (config.workers or len(devices) // config.fsdp) * config.fsdp
    if not 1 <= used <= len(devices) or used % jax.process_count():
        raise ValueError(
            f"--workers {config.workers} with --fsdp {config.fsdp} devices each do not fit: there "
            f"are {len(devices)} devices ({devices[0].device_kind}) in {jax.process_count()} "
            "processes, and each process gives the same number. Give other --workers or --fsdp."
        )
    shape, kinds = (used // config.fsdp, config.fsdp), (AxisType.Auto, AxisType.Auto)
    return Mesh(np.reshape(chosen(devices, used), shape), ("data", "fsdp"), kinds)


def with_long_waits(flags: str, virtual_devices: int) -> str:
    """XLA's flags, by which virtual devices wait 10 minutes for each other unless the user says.

    XLA ends the process after that time, and at once for a flag that it does not know.
    """
    is_known = jax.__version_info__ < (0, 13)
    if virtual_devices < 2 or VIRTUAL_WAIT in flags or not is_known:
        return flags
    return f"{flags} {VIRTUAL_WAIT}=600".strip()


def chosen(devices: list, used: int) -> list:
    """An equal number of devices of every process, in the order of the processes."""
    each = used // jax.process_count()
    return [
        device
        for process in range(jax.process_count())
        for device in [d for d in devices if d.process_index == process][:each]
    ]


def is_stacked(path, preset: Preset) -> bool:
    """Whether a parameter holds those of all layers."""
    return preset.scan and "blocks" in jax.tree_util.keystr(path)


def shard_spec(shape: tuple[int, ...], fsdp: int, stacked: bool = False) -> P:
    """The first dimension that divides is divided among a worker's devices; never the layers."""
    for axis, size in enumerate(shape):
        if fsdp > 1 and size % fsdp == 0 and axis >= stacked:
            return P(*[None] * axis, "fsdp")
    return P()


def dimension_numbers(path, x) -> optax.contrib.MuonDimensionNumbers | None:
    """The last two dimensions are those of a matrix, but for embeddings."""
    is_matrix = x.ndim > 1 and "embedding" not in jax.tree_util.keystr(path)
    return optax.contrib.MuonDimensionNumbers(-2, -1) if is_matrix else None


def schedule(peak: float, warmup_steps: int, steps: int) -> optax.Schedule:
    """A warm-up whose first step counts already, then a cosine to a tenth."""
    warmup_steps = min(warmup_steps, steps // 2)
    return optax.warmup_cosine_decay_schedule(
        peak / (warmup_steps + 1), peak, warmup_steps, steps, 0.1 * peak
    )


def batches_of(run: Run, windows: int) -> Iterator[jax.Array]:
    """Batches after so many windows; each process reads the rows of its own devices."""
    sharding = rows_sharding(run.devices)
    where = windows, jax.process_index(), jax.process_count()
    for rows in data.batches(run.corpus.train, run.batch_shape, run.config.seed, *where):
        yield jax.make_array_from_process_local_data(sharding, rows)


def rows_sharding(mesh: Mesh) -> NamedSharding:
    """Rows are divided among all devices."""
    return NamedSharding(mesh, P(mesh.axis_names))


def make_evaluation(run: Run, progress: Callable) -> Callable[[nnx.State, int], float]:
    """A function of parameters and a number of tokens: nats per byte of the same held-out text."""
    length, sharding = run.config.sequence_length, rows_sharding(run.devices)
    rows = max(EVALUATED_AT_ONCE // length, 1) * run.devices.size

    @jax.jit
    def sum_of(params, batch, counts):
        losses = jax.vmap(lambda row: run.loss_fn(params, row[None]))(batch)
        return jnp.sum(losses * counts)

    def evaluate(params, total):
        windows, loss = data.even_windows(run.corpus.held_out, length, total), 0.0
        for start in range(0, len(windows), rows):
            batch = windows[start : start + rows]
            missing = rows - len(batch)
            counts = np.pad(np.ones(len(batch), np.float32), (0, missing))
            batch = np.pad(batch, ((0, missing), (0, 0)))
            placed = [
                jax.make_array_from_callback(x.shape, sharding, x.__getitem__)
                for x in (batch, counts)
            ]
            loss += float(sum_of(params, *placed))
            progress()
        return loss / len(windows) / run.corpus.bytes_per_token

    return evaluate

"""Refuses wrong settings, before anything is read, compiled or written."""

import os
from collections.abc import Callable
from pathlib import Path

import pydantic
from etils import epath

from demo_optax.checkpoint import folder_of

from . import stores
from .config import DEFAULT, Config
from .recipes import RECIPES, steps_of_a_round

OF_PACKETS = (
    "exchange",
    "delay",
    "selection",
    "topk",
    "topk_back",
    "value_coding",
    "value_coding_back",
    "transform",
    "block_side",
    "norm_limit",
)
"""Settings only of optimizers that send packets."""

_RANGES = pydantic.TypeAdapter(Config)


def require_sensible(config: Config) -> None:
    """Raises ValueError or OSError for settings that no run is possible with, on any devices."""
    try:
        _RANGES.validate_python(vars(config))
    except pydantic.ValidationError as error:
        raise ValueError("; ".join(map(_sentence, error.errors()))) from None
    _require_agreement(config)
    if workers := config.simulate or config.workers:
        require_divisible(config, workers * config.fsdp)
    if config.swarm:
        _path("--swarm", config.swarm)
    if config.log_dir:
        if (folder := _path("--log-dir", config.log_dir)) is None:
            raise ValueError(f"--log-dir {config.log_dir} is a URL: give a folder of this machine.")
        _require_folder("--log-dir", folder)
    if config.tokenizer:
        if file := _path("--tokenizer", config.tokenizer):
            _require_folder("--tokenizer", file.parent)
        else:
            _require_reachable("--tokenizer", config.tokenizer, stores.exists)
    if config.checkpoint_dir:
        if folder := _path("--checkpoint-dir", config.checkpoint_dir):
            _require_folder("--checkpoint-dir", folder)
        else:
            _require_reachable(
                "--checkpoint-dir", config.checkpoint_dir, lambda url: epath.Path(url).exists()
            )


def require_divisible(config: Config, devices: int) -> None:
    """Raises ValueError where a batch cannot be divided."""
    parts = devices * config.microbatches
    if config.batch_size % parts:
        raise ValueError(
            f"--batch-size {config.batch_size} cannot be divided among {devices} devices x "
            f"{config.microbatches} microbatches: choose a multiple of {parts}."
        )


def require_enough(config: Config, documents: list[str]) -> None:
    """Raises ValueError where one batch is more than all the text, if every byte is a token."""
    size = sum(len(document.encode()) + 1 for document in documents)
    if config.batch_size * config.sequence_length > size:
        raise ValueError(
            f"--batch-size {config.batch_size} of --sequence-length {config.sequence_length} is "
            f"more than the text has, {size:,} bytes to train on: give more text, or smaller "
            "batches."
        )


def _sentence(error) -> str:
    """One of pydantic's errors, by the flag's name."""
    flag = f"--{str(error['loc'][0]).replace('_', '-')}"
    expected = error["msg"].partition("should ")[2]  # "Input should be greater than 0"
    return f"{flag} {error['input']!r} must {expected}"


def _require_agreement(config: Config) -> None:
    """Raises ValueError for settings that exclude each other."""
    several = {
        "--workers": config.workers,
        "--fsdp": config.fsdp > 1,
        "--distributed": config.distributed,
        "--num-processes": config.num_processes,
    }
    for flag in [flag for flag, given in several.items() if config.simulate and given]:
        raise ValueError(
            f"--simulate {config.simulate} puts all workers on one device of one process, and "
            f"{flag} is for several devices: give only one of the two settings."
        )
    _require_swarm(config)
    if (config.warmup_steps or 0) > config.steps:
        raise ValueError(
            f"--warmup-steps {config.warmup_steps} would never end: give fewer than the --steps, "
            f"{config.steps}."
        )
    if config.local_steps and not RECIPES[config.optimizer].outer:
        raise ValueError(
            f"--local-steps {config.local_steps} are for --optimizer diloco and sparseloco: "
            f"{config.optimizer} exchanges on every step. Leave them out, or choose one of the two."
        )
    for name in ("merge", "round_seconds", "fragments"):
        if getattr(config, name) is not None and not RECIPES[config.optimizer].outer:
            raise ValueError(
                f"--{name.replace('_', '-')} {getattr(config, name)} is for rounds of local steps, "
                f"but {config.optimizer} exchanges on every step: leave it out, or choose "
                "--optimizer diloco or sparseloco."
            )
    every = steps_of_a_round(config.optimizer, config.local_steps)
    if config.steps % every:
        raise ValueError(
            f"--steps {config.steps} end inside a round of --local-steps {every}; workers exchange "
            "only at its end. Choose a multiple, such as "
            f"{config.steps - config.steps % every + every}."
        )
    if every % (config.fragments or 1):
        raise ValueError(
            f"--fragments {config.fragments} are exchanged one after another in a round of "
            f"--local-steps {every}: give a divisor of it, such as {every}."
        )
    if config.fragments and (config.fsdp > 1 or config.delay):
        raise ValueError(
            f"--fragments {config.fragments} are cut from whole parameters and come late anyway: "
            "leave out --fsdp and --delay, or --fragments."
        )
    for name in ("topk_back", "value_coding_back"):
        if getattr(config, name) and config.exchange != "two-phase":
            raise ValueError(
                f"--{name.replace('_', '-')} {getattr(config, name)} is for what owners send back, "
                "and --exchange all-gather has no owners: leave it out, or set --exchange "
                "two-phase."
            )
    sends_packets = config.swarm or config.fragments or not RECIPES[config.optimizer].reduces
    for name in OF_PACKETS:
        if not sends_packets and getattr(config, name) != getattr(DEFAULT, name):
            raise ValueError(
                f"--{name.replace('_', '-')} {getattr(config, name)} is for optimizers that send "
                f"packets: {config.optimizer} all-reduces whole gradients. Leave it out, or choose "
                "another --optimizer."
            )
    if config.transform is not None and RECIPES[config.optimizer].outer:
        raise ValueError(
            f"--transform {config.transform} is for momenta, but --optimizer {config.optimizer} "
            "sends parts of parameters as they are, without a transform: leave it out."
        )
    for name in ("topk", "topk_back"):
        number = getattr(config, name) or 0
        if number > config.block_side**2:
            raise ValueError(
                f"--{name.replace('_', '-')} {number} is more than a block has: give at most "
                f"{config.block_side**2}, which is all of it, or a --block-side larger than "
                f"{config.block_side}."
            )
    if config.look_ahead is not None and config.optimizer not in ("demo-scaled", "demo-muon"):
        raise ValueError(
            f"--look-ahead {config.look_ahead} is for demo-scaled and demo-muon, not for "
            f"{config.optimizer}: leave it out, or choose another --optimizer."
        )
    if config.b2 is not None and RECIPES[config.optimizer].b2 is None:
        raise ValueError(
            f"--b2 {config.b2} is the decay of a second moment, and {config.optimizer} has none: "
            "leave it out, or choose another --optimizer."
        )
    explicit = config.coordinator, config.num_processes, config.process_id
    if not config.distributed and 0 < explicit.count(None) < len(explicit):
        raise ValueError(
            "--coordinator, --num-processes and --process-id belong together, and some are "
            "missing: give all three, or --distributed where JAX can find them."
        )
    number, processes = config.process_id or 0, config.num_processes or 2**16
    if number >= processes:
        raise ValueError(
            f"--process-id {number} is not one of --num-processes {processes}, which count from 0 "
            f"to {processes - 1}."
        )
    if config.coordinator is not None:
        host, _, port = config.coordinator.rpartition(":")
        if not (host and port.isdecimal() and 0 < int(port) < 2**16):
            raise ValueError(
                f"--coordinator {config.coordinator!r} must be HOST:PORT with a port from 1 to "
                "65535, as in 10.0.0.1:1234."
            )


def _require_swarm(config: Config) -> None:
    """Raises ValueError for settings that a swarm cannot have, or that only a swarm has."""
    if config.swarm is None:
        for name in (
            "worker",
            "key",
            "owner",
            "roster_at_least",
            "slots",
            "deadline",
            "min_workers",
            "snapshot_every",
            "log_checksums",
            "round_seconds",
        ):
            if getattr(config, name) != getattr(DEFAULT, name):
                raise ValueError(
                    f"--{name.replace('_', '-')} {getattr(config, name)} is for workers of a "
                    "swarm: give --swarm URL as well, or leave it out."
                )
        return
    excluded = {
        "--workers": config.workers,
        "--simulate": config.simulate,
        "--coordinator": config.coordinator,
        "--distributed": config.distributed,
        "--fragments": config.fragments,
    }
    for flag in [flag for flag, given in excluded.items() if given]:
        raise ValueError(
            f"{flag} is for runs that are one JAX job, but with --swarm each worker is a job of "
            "its own: leave it out."
        )
    if config.exchange == "two-phase":
        raise ValueError(
            "--exchange two-phase divides the blocks among a fixed number of workers, but those "
            "of a --swarm come and go: leave it out."
        )
    if RECIPES[config.optimizer].compression is None:
        raise ValueError(
            f"--optimizer {config.optimizer} sends no packets: with --swarm choose diloco, "
            "sparseloco, or one whose name begins with demo."
        )
    if config.transform == "random":
        raise ValueError(
            "--transform random changes the basis of the momentum on each step, but a worker of a "
            "--swarm that was away skips steps: choose dct or randomized-dct."
        )
    if not (config.worker or "").isprintable():
        raise ValueError(
            f"--worker {config.worker!r} has characters that cannot be printed: give another name."
        )
    if bool(config.key) != bool(config.owner) or (config.roster_at_least and not config.key):
        raise ValueError(
            "--key, --owner and --roster-at-least are for a swarm for members only: "
            "give --key with the file of this worker's key and --owner with the owner's public "
            "line, or leave all of them out."
        )
    if config.min_workers > config.slots:
        raise ValueError(
            f"--min-workers {config.min_workers} can never come together in --slots "
            f"{config.slots}: give more slots, or fewer workers."
        )


def _path(flag: str, place: str) -> Path | None:
    """The path that a setting names, or None for a URL of a store; ValueError for neither."""
    try:
        return folder_of(place)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None


def _require_folder(flag: str, folder: Path) -> None:
    """Raises OSError where a folder cannot be made or written to."""
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise NotADirectoryError(f"{flag} {folder}: {there} is no folder. Give another path.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(
            f"{flag} {folder}: {there} cannot be written to. Give another path, or permission."
        )


def _require_reachable(flag: str, url: str, exists: Callable[[str], bool]) -> None:
    """Raises ValueError where a store, or the package for it, is missing."""
    try:
        exists(url)
    except Exception as error:  # each store's package has errors of its own
        raise ValueError(
            f"{flag} {url} cannot be reached ({type(error).__name__}: {error}): gs:// "
            "needs the package gcsfs, s3:// needs s3fs, and other stores are not known."
        ) from error

"""Compares what must be the same on all processes, before they hang, abort or diverge.

They talk over JAX's coordination service, to which JAX has no public interface.
``multihost_utils.process_allgather`` and ``assert_equal`` run a program on all devices. They need
as many devices on each process, which ``--workers`` may have made unequal, and would hang or abort
instead of naming the difference. They would also wait for the steps that are under way.
"""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Mapping
from importlib import metadata

import jax
from jax._src.distributed import global_state

from demo_optax.swarm import jax_settings

from . import hosts
from .config import Config

# Where a process finds its settings and the others, its text, which is compared by itself, and
# what it logs.
MAY_DIFFER = (
    "config",
    "coordinator",
    "distributed",
    "log_dir",
    "process_id",
    "text",
)
PACKAGES = ("demo_optax", "flax", "grain", "jax", "jaxlib", "optax", "orbax-checkpoint")

_rounds = itertools.count()


def facts(config: Config) -> dict[str, str]:
    """Settings, as they are given, those of JAX, and versions."""
    settings = dataclasses.asdict(config).items()
    versions = {package: metadata.version(package) for package in PACKAGES}
    given = {
        f"--{name.replace('_', '-')}": str(value)
        for name, value in settings
        if name not in MAY_DIFFER
    }
    return given | jax_settings() | versions


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def require_same(facts: Mapping[str, str], timeout: float) -> None:
    """Raises ValueError, on all processes, for facts that differ between them.

    Where not all come here within ``timeout`` seconds, it ends those that did.
    """
    if not jax.distributed.is_initialized():
        return
    try:
        held = _gathered(f"facts/{next(_rounds)}", json.dumps(facts), timeout)
    except jax.errors.JaxRuntimeError as error:
        hosts.leave(
            f"process {global_state.process_id}, which prepares: another one is gone, or did not "
            f"come as far within --peer-timeout {timeout:g} s ({str(error).splitlines()[0][:60]})"
        )
    if found := differences({process: json.loads(text) for process, text in held.items()}):
        raise ValueError(
            f"the processes differ: {'; '.join(found)}. Start the same command on all hosts, with "
            "the same files, versions and settings of JAX."
        )


def differences(held: Mapping[int, Mapping[str, str]]) -> list[str]:
    """What each process holds, where they do not hold the same; from process to its facts."""
    found = []
    for name in dict.fromkeys(itertools.chain(*held.values())):
        holders: dict[str, list[int]] = {}
        for process, facts in sorted(held.items()):
            holders.setdefault(facts.get(name, "unknown"), []).append(process)
        if len(holders) > 1:
            each = [f"{value:.80} on {_named(numbers)}" for value, numbers in holders.items()]
            found.append(f"{name} is {', '.join(each)}")
    return found


def _named(processes: list[int]) -> str:
    if len(processes) == 1:
        return f"process {processes[0]}"
    more = f" and {len(processes) - 4} more" if len(processes) > 4 else ""
    return f"processes {', '.join(map(str, processes[:4]))}{more}"


def say_first(what: str, text: str) -> None:
    """Tells it to all processes, unless one has said something of it already."""
    try:
        _client().key_value_set(f"{what}/said", text)
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise


def said(what: str) -> str | None:
    """What a process has said, the same for all once it is said."""
    found = _client().key_value_dir_get(f"{what}/")
    return found[0][1] if found else None


def _gathered(place: str, text: str, timeout: float) -> dict[int, str]:
    """Every process's text, when all are at that place, to which each comes once.

    Raises:
      jax.errors.JaxRuntimeError: not all came within ``timeout`` seconds, or one is gone.
    """
    client, wait = _client(), int(1000 * timeout)
    client.key_value_set(f"{place}/{global_state.process_id}", text)
    client.wait_at_barrier(f"{place}/written", wait)
    held = client.key_value_dir_get(f"{place}/")
    # The first process, which runs the service, stays until all have read.
    client.wait_at_barrier(f"{place}/read", wait)
    return {int(key.rpartition("/")[2]): value for key, value in held}


def _client():
    assert global_state.client is not None
    return global_state.client

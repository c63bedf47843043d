"""What all workers of a swarm must have in common, and whether a worker that joins has it."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax

from demo_optax._src.halves import SplitTransformation
from demo_optax._src.swarm import records
from demo_optax._src.swarm.programs import Fingerprint
from demo_optax._src.swarm.records import Damaged
from demo_optax._src.swarm.slots import SwarmError
from demo_optax._src.swarm.store import Store

JAX_SETTINGS = (
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_random_seed_offset",
    "jax_threefry_partitionable",
)


def jax_settings() -> dict[str, str]:
    """The settings of JAX that decide which random numbers and dtypes a program has."""
    return {name: str(getattr(jax.config, name)) for name in JAX_SETTINGS}


def facts_of(tx: SplitTransformation, params, opt_state, words: int) -> dict[str, Any]:
    """Returns what is compared on every kind of device.

    These are trees, shapes, dtypes, the compression, the exchange, the format, and `jax_settings`:
    links behind the exchange, such as ``optax.add_noise``, may draw random numbers of their own.
    """
    return {
        "parameters": _description(params),
        "optimizer state": _description(opt_state),
        "packets": f"{words} words",
        "compression": str(tx.compression),
        "exchange": str(tx.exchange),
        "format of the store": records.FORMAT,
    } | jax_settings()


def require(store: Store, facts: Mapping[str, Any], fingerprint: Fingerprint) -> None:
    """Compares with the workers that joined before; the first of all writes what the others read.

    Workers with the same kind of device and JAX must have the same programs of `send` and `apply`
    to the letter: they hold the learning rate and all else of the optimizer that facts leave out.

    Raises:
      SwarmError: something differs.
    """
    _require_equal(store, "run.json", {name: str(value) for name, value in facts.items()})
    key = f"programs/{hashlib.sha256(fingerprint.device.encode()).hexdigest()[:16]}.json"
    _require_equal(store, key, {"device": fingerprint.device, "optimizer": fingerprint.program})


def _require_equal(store: Store, key: str, own: dict[str, str]) -> None:
    store.create(key, json.dumps(own).encode())
    try:
        run = records.parsed(store.get(key) or b"")
    except Damaged as error:
        raise SwarmError(f"{key}: {error}") from error
    different = [
        f"{name} is {run.get(name, 'missing')} there and {own.get(name, 'missing')} here"
        for name in sorted(run.keys() | own.keys())
        if run.get(name) != own.get(name)
    ]
    if different:
        raise SwarmError(
            f"the run there has other settings: {'; '.join(different)}. Give this worker the run's "
            "settings, or start a new run in another place."
        )


def _description(tree) -> str:
    leaves = jax.tree.leaves_with_path(tree)
    written = "".join(f"{jax.tree_util.keystr(p)}{x.dtype}{x.shape}" for p, x in leaves)
    digest = hashlib.sha256(written.encode()).hexdigest()[:8]
    return f"{sum(x.size for _, x in leaves)} numbers in {len(leaves)} arrays ({digest})"

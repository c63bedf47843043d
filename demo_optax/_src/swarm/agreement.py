"""Compares a worker that joins with the others: what all workers must have in common."""

import json
from collections.abc import Mapping
from typing import Any

import jax

from demo_optax._src import checks
from demo_optax._src.arrays import unboxed
from demo_optax._src.swarm import records
from demo_optax._src.swarm.records import SwarmError
from demo_optax._src.swarm.store import Store
from demo_optax._src.transport import SplitTransformation

JAX_SETTINGS = (
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_random_seed_offset",
    "jax_threefry_partitionable",
)


def jax_settings() -> dict[str, str]:
    """Returns the settings of JAX that decide a program's random numbers and dtypes.

    All workers of a run need the same ones.

    Example:
      >>> jax_settings()["jax_default_prng_impl"]
      'threefry2x32'
    """
    return {name: str(getattr(jax.config, name)) for name in JAX_SETTINGS}


def facts_of(tx: SplitTransformation, params) -> dict[str, Any]:
    """Returns what is compared on every kind of device, and is known before a step is compiled."""
    shapes = checks.shapes_of("parameter", params)
    facts = {
        "parameters": _description(shapes),
        "optimizer state": _description(jax.eval_shape(tx.init, unboxed(shapes))),
        "compression": str(tx.compression),
        "exchange": str(tx.exchange),
        "format of the store": records.FORMAT,
    }
    return facts | jax_settings()  # links such as optax.add_noise may draw random numbers


def compare(store: Store, facts: Mapping[str, Any]) -> None:
    """Compares some facts with a run that has begun, and writes nothing.

    Raises:
      SwarmError: something differs.
    """
    if (run := store.get("run.json")) is not None:
        there = records.parse(run, key="run.json")
        own = {name: str(value) for name, value in facts.items()}
        _require_equal({name: there[name] for name in own.keys() & there.keys()}, own)


def require(store: Store, facts: Mapping[str, Any], fingerprint: dict[str, str]) -> None:
    """Compares with the workers that joined before; the first worker writes what others read.

    Workers with the same kind of device and version of JAX must have identical programs of `send`
    and `apply` for one device, whatever mesh they have. The programs contain the learning rate and
    all else that the facts leave out.

    Raises:
      SwarmError: something differs.
    """
    key = records.sha256(fingerprint["device"].encode())[:16]
    for name, own in (
        ("run.json", {name: str(value) for name, value in facts.items()}),
        (f"programs/{key}.json", fingerprint),
    ):
        store.create(name, json.dumps(own).encode())
        _require_equal(records.parse(store.get(name), key=name), own)


def _require_equal(run: Mapping[str, Any], own: Mapping[str, str]) -> None:
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
    text = "".join(f"{jax.tree_util.keystr(path)}{x.dtype}{x.shape}" for path, x in leaves)
    digest = records.sha256(text.encode())[:8]
    return f"{sum(x.size for _, x in leaves)} numbers in {len(leaves)} arrays ({digest})"

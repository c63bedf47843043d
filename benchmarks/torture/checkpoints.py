"""Damage to the files of the newest of two checkpoints, and then a restore.

A try survives where the very same values come back, or those of the older checkpoint with one
warning of a line. Half of the tries restore the whole run, the others the parameters alone.
"""

import pathlib
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator

import jax
import numpy as np

import demo_optax
from demo_optax import checkpoint

from .outcomes import Try

SHAPES = {"b": (48,), "w": (96, 48)}
TX = demo_optax.demo(1e-2, demo_optax.Compression(4, 16), axis_name="data")
WORKERS = 2
OLDER, NEWEST = 1, 2
RUN = 64  # bytes that become zeros


ROWS = FLIPPED, ZEROED, TRUNCATED, MISSING = (
    "checkpoints with a flipped bit",
    f"checkpoints with {RUN} zeroed bytes",
    "checkpoints with a truncated file",
    "checkpoints with a missing file",
)
EACH = 30


def run(count: int, seed: int) -> Iterator[Try]:
    draws = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        saved, copy = pathlib.Path(place, "saved"), pathlib.Path(place, "copy")
        states = {step: state(step) for step in (OLDER, NEWEST)}
        with checkpointer(saved) as writer:
            for step, (params, opt_state) in states.items():
                writer.save(step, params, opt_state, {"windows": step})
        files = sorted(p.relative_to(saved) for p in (saved / str(NEWEST)).rglob("*"))
        files = [name for name in files if (saved / name).is_file()]
        for row in ROWS:
            draws.shuffle(files)
            for number in range(count):
                name = files[number % len(files)]
                shutil.copytree(saved, copy)
                damage(copy / name, row, draws)
                reason = outcome(READERS[number % 2], copy, states)
                yield Try(row, reason and f"{name}: {reason}")
                shutil.rmtree(copy)


def damage(path: pathlib.Path, row: str, draws: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if row == MISSING:
        path.unlink()
        return
    if row == FLIPPED and data:
        bit = draws.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
    elif row == ZEROED:
        start = draws.randrange(max(len(data) - RUN, 0) + 1)
        data[start : start + RUN] = bytes(len(data[start : start + RUN]))
    elif data:
        del data[draws.randrange(len(data)) :]
    path.write_bytes(data)


def state(step: int) -> tuple:
    """Parameters and state that no other step has."""
    rng = np.random.default_rng(step)
    params = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    opt_state = demo_optax.init_opt_state(TX, params, mesh())

    def drawn(x):
        if not np.issubdtype(x.dtype, np.floating):
            return x
        return jax.device_put(rng.normal(size=x.shape).astype(x.dtype), x.sharding)

    placed = jax.device_put(params, jax.NamedSharding(mesh(), jax.P()))
    return jax.tree.map(drawn, (placed, opt_state))


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((WORKERS,), ("data",), devices=jax.devices()[:WORKERS])


def checkpointer(folder: pathlib.Path) -> checkpoint.Checkpointer:
    return checkpoint.Checkpointer(folder, TX, mesh())


def restored(folder: pathlib.Path, states: dict) -> list[int]:
    """The steps whose parameters and state these are, to the last bit."""
    with checkpointer(folder) as reader:
        found = reader.restore(states[NEWEST][0], {"windows": 0})
    return [
        step
        for step, both in states.items()
        if equal((found.params, found.opt_state), both) and found.extra == {"windows": step}
    ]


def loaded(folder: pathlib.Path, states: dict) -> list[int]:
    """The steps whose parameters these are."""
    found = checkpoint.load_params(folder, states[NEWEST][0])
    return [step for step, (params, _) in states.items() if equal(found, params)]


READERS = (restored, loaded)


def equal(one, other) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def outcome(read: Callable, folder: pathlib.Path, states: dict) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            steps = read(folder, states)
        except Exception as error:
            text = str(error)
            return f"{type(error).__name__} of {len(text.splitlines())} lines, {text[:100]}"
    # Python's own, of resources that Orbax leaves to the garbage collector, are not meant here.
    told = [str(one.message) for one in caught if issubclass(one.category, UserWarning)]
    if any("\n" in text for text in told):
        return "a warning of several lines"
    if steps == [NEWEST]:
        return ""
    if steps == [OLDER]:
        return "" if len(told) == 1 else f"fell back with {len(told)} warnings"
    return "loaded values that were never saved"

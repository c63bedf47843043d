"""Compiles steps, and measures their time and memory on the first device."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import demo_optax

from .models import AXIS, Model

WARM_UP = 2


class Step(NamedTuple):
    """``run(params, state, given)`` returns parameters, state and figures; ``init`` the state."""

    run: Callable[[Any, Any, Any], tuple[Any, Any, dict[str, jax.Array]]]
    init: Callable[[Any], Any]


class Program(NamedTuple):
    """A compiled step, which consumes parameters and state, and the seconds that it took."""

    compiled: Any
    init: Callable[[Any], Any]
    seconds: float

    @property
    def planned_bytes(self) -> int:
        """Memory that XLA plans for arguments, results and temporary arrays."""
        plan = self.compiled.memory_analysis()
        results = plan.output_size_in_bytes - plan.alias_size_in_bytes
        return plan.argument_size_in_bytes + results + plan.temp_size_in_bytes


class Running(NamedTuple):
    """A program after its first steps.

    Attributes:
      program: which it is.
      carry: parameters and state.
      figures: what the last step told, such as the loss.
      peak_bytes: memory that the first steps needed; None where the device does not tell.
    """

    program: Program
    carry: tuple[Any, Any]
    figures: dict[str, float]
    peak_bytes: int | None


def update_step(tx: optax.GradientTransformation) -> Step:
    """The update of parameters by a gradient, without an exchange."""

    def run(params, state, gradient):
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, {}

    return Step(run, jax.jit(tx.init))


def train_step(tx: optax.GradientTransformation, model: Model) -> Step:
    """A whole step of one worker, which tells its loss."""
    mesh = jax.make_mesh((1,), (AXIS,), devices=jax.devices()[:1])
    step = demo_optax.make_train_step(model.loss_fn, tx, mesh)

    def run(params, state, batch):
        params, state, metrics = step(params, state, batch)
        return params, state, {"loss": metrics.loss[0]}

    return Step(run, lambda params: demo_optax.init_opt_state(tx, params, mesh))


def compile_step(step: Step, params, given) -> Program:
    """Compiles a step for arrays or shapes of the parameters and of what each step is given."""
    start = time.perf_counter()
    state = jax.eval_shape(step.init, params)
    compiled = jax.jit(step.run, donate_argnums=(0, 1)).lower(params, state, given).compile()
    return Program(compiled, step.init, time.perf_counter() - start)


def start(program: Program, params, given) -> Running:
    """Runs the first steps, with a copy of the parameters."""
    shared = sum(x.nbytes for x in jax.tree.leaves(given))
    filler = jax.block_until_ready(_filler(program.planned_bytes - shared))
    before = _memory()
    carry, told = (jax.tree.map(jnp.copy, params), program.init(params)), {}
    for _ in range(WARM_UP):
        *carry, told = jax.block_until_ready(program.compiled(*carry, given))
    after = _memory()
    del filler
    figures = {name: float(value) for name, value in told.items()}
    return Running(program, tuple(carry), figures, bytes_needed(before, after, shared))


def time_in_turn(running: Mapping[str, Running], given, rounds: int) -> dict[str, float]:
    """Returns the median milliseconds of a step of each program, which take turns."""
    carries = {name: each.carry for name, each in running.items()}
    times: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(rounds):
        for name, each in running.items():
            begin = time.perf_counter()
            *carry, _ = jax.block_until_ready(each.program.compiled(*carries[name], given))
            times[name].append(1e3 * (time.perf_counter() - begin))
            carries[name] = tuple(carry)
    return {name: statistics.median(found) for name, found in times.items()}


def _memory() -> Mapping[str, int]:
    """Returns the bytes in use and their peak, or nothing where the device does not tell."""
    return jax.devices()[0].memory_stats() or {}


def _filler(needed: int) -> jax.Array | None:
    """Makes an array so large that a step that takes ``needed`` bytes more sets a new peak."""
    megabytes = filler_bytes(_memory(), needed) // 2**20
    return jnp.zeros((megabytes, 2**20), jnp.uint8) if megabytes else None


def filler_bytes(memory: Mapping[str, int], needed: int) -> int:
    """Returns how much must be in use before, so that nine tenths of ``needed`` are a new peak.

    The peak of a process never falls, and would be that of the largest step before.
    """
    free = memory.get("peak_bytes_in_use", 0) - memory.get("bytes_in_use", 0)
    return max(free - 9 * needed // 10, 0)


def bytes_needed(before: Mapping[str, int], after: Mapping[str, int], shared: int) -> int | None:
    """Returns what came into use, and the ``shared`` bytes of before, if there is a new peak."""
    if after.get("peak_bytes_in_use", 0) <= before.get("peak_bytes_in_use", 0):
        return None
    return after["peak_bytes_in_use"] - before["bytes_in_use"] + shared

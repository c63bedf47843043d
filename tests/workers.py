"""Many workers: their mesh, their training, and one worker's function run on all of them."""

import functools
import math

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import demo_optax
from tests import model

MODES = ("vmap", "pmap", "shard_map", "shard_map unchecked")


def mesh_of(*sizes, names=("data", "fsdp", "tensor"), kind=AxisType.Explicit):
    """The mesh of these sizes, on the first devices; without other names, of ``data`` workers."""
    devices = jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(sizes, names[: len(sizes)], (kind,) * len(sizes), devices=devices)


def train(
    tx, steps, *, mesh=None, start=None, params=model.init, loss=model.loss, batch=model.batch,
    axis_name="data", param_specs=None, **options,
):  # fmt: skip
    """Trains on ``batch(i)`` for each ``i`` of ``steps``, from ``start`` or from the beginning.

    Returns what ``start`` holds (parameters and state, unless given) and the metrics of each step.
    """
    mesh = mesh or mesh_of(model.WORKERS)
    carry = start or initial(tx, mesh, params, axis_name, param_specs)
    step = step_of(tx, mesh, loss, axis_name, param_specs=param_specs, **options)
    all_metrics = []
    for i in steps:
        # Simulated devices share a few threads: several steps in flight can wait for each other.
        *carry, metrics = jax.block_until_ready(step(*carry, batch(i)))
        all_metrics.append(metrics)
    return *carry, all_metrics


def initial(tx, mesh, params=model.init, axis_name="data", param_specs=None):
    """``params()`` and a state for them, which is made once for all that give the same arguments.

    The arrays are the caller's own, who may donate them.
    """
    specs, structure = jax.tree.flatten(param_specs)
    state = _initial_state(tx, mesh, params, axis_name, structure, *specs)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    return params(), jax.device_put(state, shardings, may_alias=False)


@functools.lru_cache(64)
def _initial_state(tx, mesh, params, axis_name, structure, *specs):
    specs = jax.tree.unflatten(structure, specs)
    return demo_optax.init_opt_state(tx, params(), mesh, axis_name, specs)


def step_of(tx, mesh, loss=model.loss, axis_name="data", **options):
    """The train step, which is compiled once for all that give the same arguments."""
    leaves, structure = jax.tree.flatten(options)
    return _step_of(tx, mesh, loss, axis_name, structure, *leaves)


@functools.lru_cache(32)
def _step_of(tx, mesh, loss, axis_name, structure, *leaves):
    options = jax.tree.unflatten(structure, leaves)
    return demo_optax.make_train_step(loss, tx, mesh, axis_name, **options)


def spread(fn, in_specs, out_specs, workers, mode):
    """``fn`` for all workers; where a spec is ``P("data")``, arrays have an axis of them in front.

    The results are NumPy arrays.
    """
    mesh = mesh_of(workers)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), in_specs)
    axes = jax.tree.map(lambda spec: 0 if spec == P("data") else None, (in_specs, out_specs))

    def own(spec, tree):
        return jax.tree.map(lambda x: x[0], tree) if spec == P("data") else tree

    def stack(spec, tree):
        return jax.tree.map(lambda x: x[None], tree) if spec == P("data") else tree

    def worker(*args):
        return jax.tree.map(stack, out_specs, fn(*jax.tree.map(own, in_specs, args)))

    if mode == "vmap":
        run = jax.jit(jax.vmap(fn, *axes, axis_name="data"))
    elif mode == "pmap":
        run = jax.pmap(fn, "data", in_axes=axes[0], out_axes=axes[1], devices=list(mesh.devices))
    else:
        checked = mode == "shard_map"
        run = jax.jit(
            jax.shard_map(
                worker, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=checked
            )
        )

    def placed(*args):
        args = jax.device_put(args, shardings) if mode.startswith("shard_map") else args
        return jax.tree.map(np.asarray, run(*args))

    return placed


def started(tx, params, workers, mode="vmap"):
    """``tx.update`` for all workers, and the first state.

    Gradients go in, and the updates that all workers agree on come out. The state is of NumPy
    arrays; leaves that differ between workers have a leading axis.
    """
    state = demo_optax.init_opt_state(tx, params, mesh_of(workers))
    specs = specs_of(state)
    update = spread(tx.update, (P("data"), specs, P()), (P(), specs), workers, mode)
    return update, jax.tree.map(np.asarray, state)


def specs_of(state):
    """The PartitionSpecs of a state, which to ask of the library would trace an update again."""
    return jax.tree.map(lambda x: x.sharding.spec, state)

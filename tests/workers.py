"""One worker's function run on many workers, in each of the ways that JAX has."""

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import demo_optax

MODES = ("vmap", "pmap", "shard_map", "shard_map unchecked")


def mesh_of(workers):
    return jax.make_mesh((workers,), ("data",), devices=jax.devices()[:workers])


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


def update_of(tx, params, workers, mode="vmap"):
    """``tx.update`` for all workers: gradients in, the updates they agree on out."""
    specs = demo_optax.state_specs(tx, params, mesh_of(workers))
    return spread(tx.update, (P("data"), specs, P()), (P(), specs), workers, mode)


def init(tx, params, workers):
    """The state as NumPy arrays; leaves that differ between workers have a leading axis."""
    state = demo_optax.init_opt_state(tx, params, mesh_of(workers))
    return jax.tree.map(np.asarray, state)

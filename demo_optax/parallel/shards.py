"""One worker on several devices: parameters sharded inside it, or its batch alone.

A mesh may have axes beside the workers' own (``fsdp``, ``tensor``, ``local``). Along these inner
axes the devices of one worker share its parameters as their PartitionSpecs say, average their
gradients, and compress each its own shard, whose blocks end where it ends (From
et al., "DeToNATION", FlexDeMo). What the shards of a worker hold in common they must agree on.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from demo_optax import axes, metrics
from demo_optax._decoupled_momentum import DecoupledMomentumState
from demo_optax.arrays import energy, unboxed
from demo_optax.axes import AxisName


def num_workers(mesh: Mesh | AbstractMesh, axis_name: AxisName) -> int:
    """Workers along ``axis_name``: the product of the sizes of its axes."""
    missing = [name for name in axes.names(axis_name) if name not in mesh.shape]
    if missing or axis_name is None:
        raise ValueError(
            f"axis_name must be one or several of the mesh's axes {tuple(mesh.shape)}, not "
            f"{axis_name!r}."
        )
    size = 1
    for name in axes.names(axis_name):
        size *= mesh.shape[name]
    return size


def inner_axes(mesh: Mesh | AbstractMesh, axis_name: AxisName) -> tuple[str, ...]:
    """The mesh's axes inside a worker."""
    return tuple(name for name in mesh.axis_names if name not in axes.names(axis_name))


def axes_of(spec: P) -> tuple[str, ...]:
    """The axes that a PartitionSpec shards over."""
    return tuple(name for entry in spec for name in axes.names(entry))


def leaf_specs(params, param_specs, mesh: Mesh | AbstractMesh, axis_name: AxisName):
    """A PartitionSpec for every parameter, from a tree of these or of NamedShardings.

    A prefix of a tree will do; None is ``P()``.

    Raises:
      ValueError: a spec shards over the workers' axis, or over one that the mesh lacks.
    """
    specs = broadcast("param_specs", param_specs, unboxed(params))
    inner = inner_axes(mesh, axis_name)
    for path, spec in jax.tree.leaves_with_path(specs):
        if wrong := [name for name in axes_of(spec) if name not in inner]:
            what = "the workers' axis" if wrong[0] in axes.names(axis_name) else "not among them"
            raise ValueError(
                f"param_specs{jax.tree_util.keystr(path)} is {spec}, but parameters are sharded "
                f"inside a worker only, over the axes {inner}: {wrong[0]!r} is {what}. Leave it "
                "out, or name another axis."
            )
    structure: Any = jax.tree.structure(params)
    return structure.unflatten(jax.tree.leaves(specs))


def broadcast(what: str, given, tree):
    """A PartitionSpec for every leaf, from a tree or a prefix of these, NamedShardings and None."""

    def spec_of(path, x) -> P:
        if x is None:
            return P()
        if isinstance(x, NamedSharding):
            return x.spec
        if isinstance(x, P):
            return x
        raise TypeError(
            f"{what}{jax.tree_util.keystr(path)} must be a jax.P or a jax.NamedSharding, not "
            f"{x!r}: name the axes that divide each dimension, as in jax.P('fsdp')."
        )

    prefix = jax.tree.map_with_path(spec_of, unboxed(given), is_leaf=lambda x: x is None)
    return jax.tree.broadcast(prefix, tree)


def shardings(mesh: Mesh | AbstractMesh, specs):
    """How arrays of these specs lie on the mesh."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def constrain_sharding(tree, mesh: Mesh, specs):
    """The tree, each leaf sharded as its spec says, in programs that the compiler partitions."""
    place = jax.device_put  # the only one where kinds of axes are mixed
    if set(mesh.axis_types) == {AxisType.Auto}:
        place = jax.lax.with_sharding_constraint
    elif set(mesh.axis_types) == {AxisType.Explicit}:
        place = jax.sharding.reshard
    return jax.tree.map(place, tree, shardings(mesh, specs))


def copies(params, mesh: Mesh, axis_name: AxisName, specs):
    """Shared parameters, a copy for each worker: ``(workers, *shape)``, where specs are theirs.

    Of what workers hold in common, XLA may fetch a part from another worker.
    """
    workers = num_workers(mesh, axis_name)
    copied = jax.tree.map(lambda x: jnp.broadcast_to(x, (workers, *jnp.shape(x))), params)
    return constrain_sharding(copied, mesh, stacked_specs(specs, axis_name))


def stacked_specs(specs, axis_name: AxisName):
    """Of arrays with an axis of workers in front."""
    return jax.tree.map(lambda spec: P(axis_name, *spec), specs)


def reshaped(x: jax.Array, shape: tuple[int, ...], mesh: Mesh, spec: P) -> jax.Array:
    """An array in another shape, divided as the spec says; Auto axes may divide the rest of it."""
    if AxisType.Explicit in mesh.axis_types:
        return jnp.reshape(x, shape, out_sharding=NamedSharding(mesh, spec))
    free = [P.UNCONSTRAINED if entry is None else entry for entry in spec]
    free += [P.UNCONSTRAINED] * (len(shape) - len(free))
    return jax.lax.with_sharding_constraint(x.reshape(shape), NamedSharding(mesh, P(*free)))


def sharded_axes(specs) -> tuple[str, ...]:
    """All axes that any of the specs shards over, in the order of their first use."""
    return tuple(dict.fromkeys(name for spec in jax.tree.leaves(specs) for name in axes_of(spec)))


def shard_shapes(params, specs, mesh: Mesh | AbstractMesh):
    """Shapes and dtypes of one device's shards; ValueError where a dimension does not divide."""

    def shard(x, spec):
        return jax.ShapeDtypeStruct(NamedSharding(mesh, spec).shard_shape(x.shape), x.dtype)

    return jax.tree.map(shard, params, specs)


def counts(shape: tuple[int, ...], spec: P, mesh: Mesh | AbstractMesh) -> tuple[int, ...]:
    """Into how many shards a spec divides each dimension."""
    divided = [math.prod(mesh.shape[name] for name in axes.names(entry)) for entry in spec]
    return (*divided, *[1] * (len(shape) - len(divided)))


def whole_shapes(parts, specs, mesh: Mesh | AbstractMesh):
    """Shapes and dtypes of the whole arrays that these are one device's shards of."""

    def whole(x, spec):
        divided = counts(x.shape, spec, mesh)
        shape = tuple(size * count for size, count in zip(x.shape, divided, strict=True))
        return jax.ShapeDtypeStruct(shape, x.dtype)

    return jax.tree.map(whole, parts, specs)


def gather_params(shards, specs):
    """Whole parameters from a device's shards; its gradient sums over the shards by itself."""

    def gather(x, spec):
        for dimension, entry in enumerate(spec):
            if entry is not None:
                x = jax.lax.all_gather(x, entry, axis=dimension, tiled=True)
        return x

    return jax.tree.map(gather, shards, specs)


def mean_gradient(gradient, specs, inner: tuple[str, ...]):
    """The worker's mean gradient, from what `gather_params` and one device's batch gave.

    In the dtype of the gradient, float32 for float32 parameters.
    """

    def mean(g, spec):
        rest = tuple(name for name in inner if name not in axes_of(spec))
        g = jax.lax.pmean(g, rest) if rest else g
        return (g / axes.size(axes_of(spec))).astype(g.dtype) if axes_of(spec) else g

    return jax.tree.map(mean, gradient, specs)


def agreed(tree, inner: tuple[str, ...]):
    """A model state that the devices of a worker agree on: means of floats, the first's else."""

    def agree(x):
        x = axes.as_varying(x, inner)
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jax.lax.pmean(x, inner)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            numbers = from_first(jax.random.key_data(x), inner)
            return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(x))
        return from_first(x, inner)

    return jax.tree.map(agree, tree)


def norm(tree, specs) -> jax.Array:
    """Global norm of a worker's sharded tree, float32."""
    shards: dict[tuple[str, ...], list[jax.Array]] = {}
    for x, spec in zip(jax.tree.leaves(tree), jax.tree.leaves(specs), strict=True):
        shards.setdefault(axes_of(spec), []).append(x)
    energies = [
        jax.lax.psum(energy(x), names) if names else energy(x) for names, x in shards.items()
    ]
    return jnp.sqrt(sum(energies))


def from_first(x: jax.Array, copied_axes: tuple[str, ...]) -> jax.Array:
    """What the first device along some axes has, on all of them.

    What all shards of a worker hold was exchanged by each of them. Should one of their packets
    arrive damaged, they would differ from then on.
    """
    if not copied_axes:
        return x
    number = x.astype(jnp.int32) if x.dtype == bool else x
    is_first = jax.lax.axis_index(copied_axes) == 0
    first = jax.lax.psum(jnp.where(is_first, number, 0), copied_axes)
    return first.astype(x.dtype)


def metrics_of_worker(new, old, sharded: tuple[str, ...]):
    """A new state whose metrics are those of a worker; the old ones where it did not exchange."""

    def combine(new, old):
        if not _is_momentum(new):
            return new
        exchanged = new.count != old.count
        own = metrics.of_worker(new.metrics, sharded)
        chosen = [jnp.where(exchanged, x, y) for x, y in zip(own, old.metrics, strict=True)]
        return new._replace(metrics=own._make(chosen))

    return jax.tree.map(combine, new, old, is_leaf=_is_momentum) if sharded else new


def momenta_of(state) -> list[DecoupledMomentumState]:
    """The states of decoupled momentum in a state."""
    nodes = jax.tree.leaves(state, is_leaf=_is_momentum)
    return [node for node in nodes if _is_momentum(node)]


def _is_momentum(x) -> bool:
    return isinstance(x, DecoupledMomentumState)

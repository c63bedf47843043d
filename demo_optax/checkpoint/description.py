"""What the numbers of a saved state mean, in JSON: by it a restore sees what has changed."""

import dataclasses

import jax
import optax
from jax.sharding import Mesh
from jax.tree_util import keystr

from demo_optax._decoupled_momentum import DecoupledMomentumState
from demo_optax.axes import AxisName
from demo_optax.boxes import unboxed
from demo_optax.checkpoint.reading import FORMAT
from demo_optax.parallel import layout, shards


def of_state(
    tx: optax.GradientTransformation,
    params,
    opt_state,
    mesh: Mesh,
    axis_name: AxisName,
    param_specs,
) -> dict:
    """Describes a state, of arrays or shapes.

    Returns:
      ``format`` and the number of ``workers``; for each of the ``momenta`` its coordinates, and the
      shape and the shards of its parameter, None and none where ``optax.flatten`` made one vector
      of all; what an exchange keeps ``beside`` them on each device; and, where it does, along which
      of a worker's ``devices`` each parameter is cut.
    """
    specs = shards.leaf_specs(params, param_specs, mesh, axis_name)
    spec_of = list(zip(_leaves(unboxed(params)), jax.tree.leaves(specs), strict=True))
    tensors = {path: (x.shape, shards.counts(x.shape, spec, mesh)) for (path, x), spec in spec_of}
    momenta = {}
    for path, node in jax.tree.leaves_with_path(opt_state, is_leaf=_is_momentum):
        if _is_momentum(node):
            for inside, _ in _leaves(node.momentum):
                shape, counts = tensors.get(inside, (None, ()))
                momenta[f"{keystr(path)}.momentum{keystr(inside)}"] = {
                    "coordinates": dataclasses.asdict(node.coordinates),
                    "shape": shape and list(shape),
                    "shards": list(counts),
                    "count": f"{keystr(path)}.count",
                }
    state_specs = layout.state_specs(tx, params, mesh, axis_name, param_specs)
    leaves, spec_at = dict(_leaves(opt_state)), dict(_leaves(state_specs))
    beside = {}
    for path in layout.paths_of_devices(opt_state):
        shape = leaves[path].shape
        parts = shards.counts(shape, spec_at[path], mesh)[1]
        beside[keystr(path)] = {"shape": list(shape), "parts": parts}
    cut = {name for _, spec in spec_of for name in shards.axes_of(spec)}
    inner = [name for name in mesh.axis_names if name in cut]
    cuts = {keystr(path): _cuts(spec, inner) for (path, _), spec in spec_of}
    return {
        "format": FORMAT,
        "workers": shards.num_workers(mesh, axis_name),
        "momenta": momenta,
        "beside": beside,
        "devices": cuts if beside else {},
    }


def _cuts(spec, inner: list[str]) -> list[list[int]]:
    """Along which of the inner axes, by their numbers, each dimension is cut."""
    names = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    cuts = [[inner.index(name) for name in of_dim if name is not None] for of_dim in names]
    while cuts and not cuts[-1]:
        cuts.pop()
    return cuts


def _leaves(tree) -> list[tuple]:
    return jax.tree.leaves_with_path(tree)


def _is_momentum(x) -> bool:
    return isinstance(x, DecoupledMomentumState)

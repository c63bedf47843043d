"""PartitionSpecs of the parameters inside a worker: trees of them, and the axes that they name."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr

from demo_optax._src import axes
from demo_optax._src.arrays import unboxed

PARAM_SPECS = "param_specs"
"""Extra argument of an update: the specs of the parameters, whose shards it sees."""


def axes_of(spec: P) -> tuple[str, ...]:
    """The axes that a PartitionSpec shards over."""
    return tuple(name for entry in spec for name in axes.names(entry))


def sharded_axes(specs) -> tuple[str, ...]:
    """All axes that any of the specs shards over, in the order of their first use."""
    return tuple(dict.fromkeys(name for spec in jax.tree.leaves(specs) for name in axes_of(spec)))


def sharded_axes_in(extra_args: Mapping[str, Any]) -> tuple[str, ...]:
    """The axes that any parameter is sharded over, by the extra arguments of an update."""
    return sharded_axes(unboxed(extra_args.get(PARAM_SPECS, ())))


def of_leaves(tree: Any, extra_args: Mapping[str, Any]) -> list[P]:
    """The spec of each leaf, from the extra arguments of an update; ``P()`` without them.

    Leaves that ``optax.masked`` or ``optax.partition`` left out of the tree have none.
    """
    specs = unboxed(extra_args.get(PARAM_SPECS, P()))
    if not sharded_axes(specs):  # the tree may be another one then, such as a flattened one
        return [P()] * len(jax.tree.leaves(tree))

    def is_masked(x) -> bool:  # instead of a leaf, or of a whole subtree
        return isinstance(x, optax.MaskedNode)

    try:
        kept = jax.tree.map(
            lambda x, spec: x if is_masked(x) else spec, unboxed(tree), specs, is_leaf=is_masked
        )
        return per_leaf(kept, unboxed(tree), lambda x: isinstance(x, P))
    except ValueError:
        raise ValueError(
            f"param_specs are {specs}, but the gradients have another structure, "
            f"{jax.tree.structure(tree)}: shards cannot be flattened, so leave out optax.flatten."
        ) from None


def per_leaf(prefix: Any, tree: Any, is_value: Callable[[Any], bool]) -> list:
    """For each leaf of a tree the value that a prefix of the tree has for it."""
    return jax.tree.leaves(jax.tree.broadcast(prefix, tree, is_leaf=is_value), is_leaf=is_value)


def broadcast(what: str, given: Any, tree: Any) -> Any:
    """A PartitionSpec for every leaf, from a tree or a prefix of these, NamedShardings and None."""

    def spec_of(path, x) -> P:
        if x is None:
            return P()
        if isinstance(x, NamedSharding):
            return x.spec
        if isinstance(x, P):
            return x
        raise TypeError(
            f"{what}{keystr(path)} must be a jax.P or a jax.NamedSharding, not "
            f"{x!r}: name the axes that divide each dimension, as in jax.P('fsdp')."
        )

    prefix = jax.tree.map_with_path(spec_of, unboxed(given), is_leaf=lambda x: x is None)
    return jax.tree.broadcast(prefix, tree)

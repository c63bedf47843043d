"""Trees without what Flax wraps around arrays.

``nn.Partitioned`` and ``nnx.Variable`` carry how a parameter is partitioned. A momentum has another
shape, so it must not inherit that.
"""

import jax


def unboxed(tree):
    """The tree with each box of Flax's replaced by the one leaf that it holds."""

    def content(x):
        leaves = jax.tree.leaves(x)
        return leaves[0] if _is_box(x) and len(leaves) == 1 else x

    return jax.tree.map(content, tree, is_leaf=_is_box)


def _is_box(x) -> bool:
    names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(x).__mro__}
    return bool(names & {"flax.AxisMetadata", "flax.Variable"})

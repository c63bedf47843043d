"""Settings of a user's own, as docs/how_to/extend.md writes them."""

import pathlib

import numpy as np

import demo_optax
from tests import pages

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "how_to" / "extend.md"
DEFINITIONS = [block for block in pages.blocks(PAGE, "python") if "print(" not in block]

NAMES: dict = {"__name__": "extend", "demo_optax": demo_optax}
exec(compile("\n".join(DEFINITIONS), str(PAGE), "exec"), NAMES)
MoreOfMatrices, Threshold, Ternary, Hartley, ring = map(
    NAMES.get, ("MoreOfMatrices", "Threshold", "Ternary", "Hartley", "ring")
)

COMPRESSIONS = {
    "k by tensor": demo_optax.Compression(MoreOfMatrices(6, 2), 8),
    "threshold": demo_optax.Compression(6, 8, selection=Threshold(0.8)),
    "ternary": demo_optax.Compression(6, 8, Ternary()),
    "transform": demo_optax.Compression(6, 8, transform=Hartley()),
    "all": demo_optax.Compression(
        MoreOfMatrices(6, 2), 8, Ternary(), Hartley(), selection=Threshold(0.5)
    ),
}


def inverse_hartley(block):
    """The tensor of a block's coefficients, by one matrix after another."""
    for axis, side in enumerate(block.shape):
        block = np.moveaxis(np.tensordot(Hartley()(side).T, block, (1, axis)), 0, axis)
    return block

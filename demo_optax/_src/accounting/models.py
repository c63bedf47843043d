"""Parameter shapes of the paper's models, to count with."""

import jax
import jax.numpy as jnp

PRESETS = {"300m": 1024, "1b": 2048}


def preset_shapes(preset: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Parameter shapes of the models in Peng et al., version 2: 16 layers, all matrices.

    Example:
      >>> import math
      >>> sum(math.prod(leaf.shape) for leaf in preset_shapes("300m").values())
      319946752
    """
    width = PRESETS[preset]
    shapes = {"embedding": (50304, width)}
    for layer in range(16):
        shapes |= {
            f"layers/{layer}/att_proj": (width, 3 * width),
            f"layers/{layer}/att_out": (width, width),
            f"layers/{layer}/ff_proj": (width, 8 * width),
            f"layers/{layer}/ff_out": (4 * width, width),
        }
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}

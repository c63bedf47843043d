"""Parameter shapes to count with: the paper's models, or a checkpoint's."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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


def checkpoint_shapes(path: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of the floating-point arrays in an Orbax checkpoint or an ``.npz`` file.

    Only the entry ``params`` is counted where there is one.
    """
    file = pathlib.Path(path)
    if file.suffix == ".npz":
        with np.load(file) as arrays:
            leaves = {name: arrays[name] for name in arrays.files}
    else:
        leaves = _orbax_metadata(file)
    inside = {name: leaf for name, leaf in leaves.items() if "params" in name.split("/")}
    shapes = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for name, leaf in (inside or leaves).items()
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    }
    if not shapes:
        raise ValueError(
            f"{path} holds no floating-point arrays to count: give a checkpoint that holds the "
            "model's parameters."
        )
    return shapes


def _orbax_metadata(path: pathlib.Path) -> dict:
    try:
        from orbax import checkpoint
    except ImportError as error:
        raise ImportError(
            "reading a checkpoint needs Orbax: pip install 'demo_optax[checkpoint]'."
        ) from error
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path} is neither an Orbax checkpoint, which is a folder, nor an .npz file: give the "
            "path of one of them."
        )
    with checkpoint.PyTreeCheckpointer() as checkpointer:
        metadata: Any = checkpointer.metadata(path.resolve())
    return {
        jax.tree_util.keystr(keys, simple=True, separator="/"): leaf
        for keys, leaf in jax.tree.leaves_with_path(metadata.item_metadata.tree)
        if getattr(leaf, "shape", None) is not None
    }

"""The models of each size of the run, and the optimizers that it compares."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import demo_optax
from lm.model import PRESETS, Preset, build, cross_entropy

AXIS = "data"
RATE = 1e-3
DEVIATION = np.float32(0.02)


class Size(NamedTuple):
    """What one run does.

    Attributes:
      measured: the model whose updates and train steps are measured.
      simulated: the model of the simulated workers.
      width: of the matrices that workers exchange by hand.
      sequences, length: the batch of a train step; ``length`` is in tokens.
      rounds: how often each step is timed.
      optimized: whether XLA optimizes; compiling is faster without.
    """

    measured: Preset
    simulated: Preset
    width: int
    sequences: int
    length: int
    rounds: int
    optimized: bool = True

    @property
    def matrices(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of an embedding and of a matrix, in blocks that need no padding."""
        shapes = {"embedding": (4 * self.width, self.width), "matrix": (self.width, 3 * self.width)}
        return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


NANO, TINY, LARGE = (PRESETS[name] for name in ("nano", "tiny", "300m"))
SIZES = {
    "tiny": Size(TINY._replace(layers=1), NANO, 64, 2, 64, rounds=3, optimized=False),
    "300m": Size(LARGE, TINY, 512, 8, 1024, rounds=30),
}


class Model(NamedTuple):
    """The shapes of a model's parameters, and its loss for token ids ``(sequences, length + 1)``.

    ``shapes`` is a tree of ``jax.ShapeDtypeStruct``, as the model's definition has it.
    """

    shapes: Any
    loss_fn: Callable[[Any, jax.Array], jax.Array]
    vocabulary: int

    @property
    def named_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes by the paths of the parameters."""
        leaves = jax.tree.leaves_with_path(self.shapes)
        return {jax.tree_util.keystr(path): x for path, x in leaves}


def model_of(preset: Preset) -> Model:
    """Makes a model that computes in bfloat16, and its activations again in the backward pass."""
    preset = preset._replace(dtype=jnp.bfloat16, remat=True)
    definition, shapes = nnx.eval_shape(lambda: build(preset))

    def loss_fn(params, tokens_BxT):
        model = nnx.merge(definition, params)
        return cross_entropy(model(tokens_BxT[:, :-1]), tokens_BxT[:, 1:])

    return Model(shapes, loss_fn, preset.vocabulary)


def random(shapes, seed: int) -> Any:
    """Draws a tree of normal float32 arrays with these shapes, on the device."""
    drawn = optax.tree.random_like(jax.random.key(seed), shapes, jax.random.normal)
    return jax.tree.map(lambda x: DEVIATION * x, drawn)


def random_on_host(shapes, *seed: int) -> Any:
    """Draws such a tree with NumPy, the same on every machine."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: DEVIATION * rng.standard_normal(x.shape, np.float32), shapes)


def tokens(model: Model, sequences: int, length: int, seed: int = 0) -> np.ndarray:
    """Draws token ids, int32 ``(sequences, length + 1)``."""
    shape = sequences, length + 1
    return np.random.default_rng(seed).integers(model.vocabulary, size=shape, dtype=np.int32)


def matrices(params) -> Any:
    """Returns the dimension numbers of what Muon makes orthogonal: all matrices but embeddings."""

    def numbers(path, x):
        is_matrix = x.ndim == 2 and "embedding" not in jax.tree_util.keystr(path)
        return optax.contrib.MuonDimensionNumbers() if is_matrix else None

    return jax.tree.map_with_path(numbers, params)


def optimizers(axis_name: str | None = None) -> dict[str, optax.GradientTransformation]:
    """Makes the optimizers by name; adamw and muon are for one worker or averaged gradients."""
    options: Any = dict(axis_name=axis_name)
    return {
        "adamw": optax.adamw(RATE),
        "muon": optax.contrib.muon(RATE, muon_weight_dimension_numbers=matrices),
        "demo": demo_optax.demo(RATE, **options),
        "demo_scaled": demo_optax.demo_scaled(RATE, **options),
        "demo_muon": demo_optax.demo_muon(RATE, weight_dimension_numbers=matrices, **options),
    }


def trained_optimizers() -> dict[str, optax.GradientTransformation]:
    """Makes those of the whole train step, whose workers exchange over ``AXIS``."""
    made = optimizers(AXIS)
    adamw = optax.chain(demo_optax.mean_over_workers(AXIS), made["adamw"])
    return {"adamw": adamw} | {name: made[name] for name in ("demo_scaled", "demo_muon")}

"""A decoder-only language model of the paper's family, in Flax NNX.

Rotary positions, SwiGLU, a fused attention projection, a tied embedding; layer norms without
parameters and no biases, so that every parameter is a matrix. In the names of arrays B is the
batch, T time, H heads, K the width of a head, D the model's width, V the vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

PresetName = Literal["nano", "tiny", "small", "medium", "300m", "1b"]


class Preset(NamedTuple):
    """A model's shape, and how it is computed."""

    layers: int
    width: int
    heads: int
    vocabulary: int = 256
    dtype: DTypeLike = jnp.float32  # of the computation; parameters are always float32
    remat: bool = False  # each layer's activations are computed again on the way back
    scan: bool = False  # layers are one array each, and one program, whatever their number


PRESETS: dict[PresetName, Preset] = {
    "nano": Preset(layers=1, width=64, heads=1),
    "tiny": Preset(layers=4, width=128, heads=2),
    "small": Preset(layers=6, width=320, heads=5),
    "medium": Preset(layers=7, width=512, heads=8),
    "300m": Preset(layers=16, width=1024, heads=8, vocabulary=50304, dtype=jnp.bfloat16),
    "1b": Preset(layers=16, width=2048, heads=16, vocabulary=50304, dtype=jnp.bfloat16),
}


class Block(nnx.Module):
    def __init__(self, preset: Preset, rngs: nnx.Rngs):
        width = preset.width

        def matrix(rows: int, columns: int, scale: float = 1.0) -> nnx.Linear:
            init = nnx.initializers.variance_scaling(scale, "fan_in", "normal")
            return nnx.Linear(
                rows, columns, use_bias=False, kernel_init=init, dtype=preset.dtype, rngs=rngs
            )

        # What is added to the residual stream starts small, so that its depth does not count.
        shallow = 1 / (2 * preset.layers)
        self.heads = preset.heads
        self.attn_proj = matrix(width, 3 * width)
        self.attn_out = matrix(width, width, shallow)
        self.ff_proj = matrix(width, 8 * width)
        self.ff_out = matrix(4 * width, width, shallow)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        x_BxTxD += self.attention(normalize(x_BxTxD))
        gate, value = jnp.split(self.ff_proj(normalize(x_BxTxD)), 2, axis=-1)
        return x_BxTxD + self.ff_out(jax.nn.silu(gate) * value)

    def attention(self, x_BxTxD: jax.Array) -> jax.Array:
        batch, time, width = x_BxTxD.shape
        fused_BxTx3xHxK = self.attn_proj(x_BxTxD).reshape(batch, time, 3, self.heads, -1)
        query, key, value = fused_BxTx3xHxK.transpose(2, 0, 3, 1, 4)
        scores_BxHxTxT = jnp.matmul(
            rotary(query), rotary(key).swapaxes(-1, -2), preferred_element_type=jnp.float32
        )
        scores_BxHxTxT *= query.shape[-1] ** -0.5
        past = jnp.tril(jnp.ones((1, 1, time, time), bool))
        scores_BxHxTxT = jnp.where(past, scores_BxHxTxT, -jnp.inf)
        mixed_BxHxTxK = jax.nn.softmax(scores_BxHxTxT).astype(value.dtype) @ value
        return self.attn_out(mixed_BxHxTxK.swapaxes(1, 2).reshape(batch, time, width))


class LanguageModel(nnx.Module):
    def __init__(self, preset: Preset, rngs: nnx.Rngs):
        init = nnx.initializers.normal(preset.width**-0.5)
        self.embedding = nnx.Embed(
            preset.vocabulary, preset.width, embedding_init=init, dtype=preset.dtype, rngs=rngs
        )
        self.remat, self.scan = preset.remat, preset.scan
        stack = nnx.vmap(lambda rngs: Block(preset, rngs), axis_size=preset.layers)
        self.blocks: Any = (
            stack(rngs.split(preset.layers))
            if preset.scan
            else nnx.List(Block(preset, rngs) for _ in range(preset.layers))
        )

    def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
        """Logits, float32 ``(B, T, V)``."""
        x_BxTxD = self.embedding(tokens_BxT)
        for blocks in [self.blocks] if self.scan else self.blocks:
            definition, params = nnx.split(blocks)
            layer: Callable = functools.partial(_layer, definition)
            if self.remat:
                layer = jax.checkpoint(layer, prevent_cse=not self.scan)
            if self.scan:
                x_BxTxD, _ = jax.lax.scan(layer, x_BxTxD, params)
            else:
                x_BxTxD, _ = layer(x_BxTxD, params)
        embedding_VxD = self.embedding.embedding[...].astype(x_BxTxD.dtype)
        return jnp.matmul(normalize(x_BxTxD), embedding_VxD.T, preferred_element_type=jnp.float32)


def _layer(definition: nnx.GraphDef, x_BxTxD: jax.Array, params: nnx.State):
    return nnx.merge(definition, params)(x_BxTxD), None


def normalize(x: jax.Array) -> jax.Array:
    """Layer norm without parameters."""
    return jax.nn.standardize(x.astype(jnp.float32), epsilon=1e-5).astype(x.dtype)


def rotary(x_BxHxTxK: jax.Array) -> jax.Array:
    """Rotary positions: pairs of features turned by angles that grow with time."""
    time, half = x_BxHxTxK.shape[-2], x_BxHxTxK.shape[-1] // 2
    frequency = 10_000.0 ** (-jnp.arange(half) / half)
    angle_1x1xTxK = jnp.outer(jnp.arange(time), frequency)[None, None]
    sin, cos = jnp.sin(angle_1x1xTxK), jnp.cos(angle_1x1xTxK)
    a, b = jnp.split(x_BxHxTxK.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x_BxHxTxK.dtype)


def cross_entropy(logits_BxTxV: jax.Array, targets_BxT: jax.Array) -> jax.Array:
    """Mean loss in nats per token."""
    # A comparison instead of a gather, whose gradient would be a slow scatter.
    vocabulary = jnp.arange(logits_BxTxV.shape[-1])[None, None]
    chosen = jnp.where(targets_BxT[..., None] == vocabulary, logits_BxTxV, 0.0).sum(-1)
    return jnp.mean(jax.nn.logsumexp(logits_BxTxV, axis=-1) - chosen)


def build(preset: Preset, seed: int = 0):
    """The model's definition and its parameters."""
    return nnx.split(LanguageModel(preset, nnx.Rngs(seed)), nnx.Param)

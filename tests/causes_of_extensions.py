"""What raises each error of settings and exchanges of a user's own."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

import demo_optax
from demo_optax._src.checkpoint import elastic
from demo_optax._src.compression.settings import KNOWN
from demo_optax.extend import Quantiser
from tests import extensions

WEIGHTS = np.ones((8, 8), np.float32)


@dataclasses.dataclass(frozen=True)
class Returns:
    """Returns the same array, whatever it is called with."""

    dtype: str
    sizes: tuple[int, ...]

    def __call__(self, *_):
        return np.zeros(self.sizes, self.dtype)


@dataclasses.dataclass(frozen=True)
class OfLongOnes:
    def __call__(self, shape):
        return 2 if shape[0] > 8 else 4


@dataclasses.dataclass(frozen=True)
class WithoutScales(extensions.Ternary):
    def encode(self, values):
        return super().encode(values)[0], values


def update(**settings):
    tx = demo_optax.demo(1e-3, demo_optax.Compression(**{"topk": 4, "block_side": 8} | settings))
    jax.eval_shape(lambda: tx.update(WEIGHTS, tx.init(WEIGHTS), WEIGHTS))


def gathered(own):
    tx = demo_optax.demo(1e-3, exchange=demo_optax.AllGather("data", gather=own))
    stacked = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data")
    jax.eval_shape(stacked, np.stack([WEIGHTS] * 2))


def in_fragments():
    outer = demo_optax.demo(1e-3, demo_optax.Compression(extensions.MoreOfMatrices(4, 2), 8))
    demo_optax.local_steps(optax.sgd(0.1), outer, 4, fragments=2)


def owned_by_different_numbers():
    compression = demo_optax.Compression(OfLongOnes(), 8)
    tx = demo_optax.demo(1e-3, compression, exchange=demo_optax.TwoPhase())
    tx.init([WEIGHTS, np.ones((16, 8), np.float32)])


def restored_without_its_code():
    with mock.patch.dict(KNOWN, clear=True):
        elastic._settings_of({"topk": 4, "selection": {"own": "Gone(share=0.5)"}})


RAISED = [
    (
        r"<lambda> at 0x.*frozen dataclass",
        lambda: demo_optax.Compression(selection=lambda coefficients, k: coefficients),
    ),
    lambda: demo_optax.Compression(topk=functools.partial(max, 3, key=jnp.sum)),
    (
        r"of a tensor \(8, 8\) must be at least 1, not 0",
        lambda: update(topk=extensions.MoreOfMatrices(0, 2)),
    ),
    (
        r"returned int32 \(1, 3\), but int32 \(1, 4\) is needed",
        lambda: update(selection=Returns("int32", (1, 3))),
    ),
    (
        r"returned uint32 \(1,\), float32 \(1, 4\), but uint32 \(1,\), uint32 \(1, 4\)",
        lambda: update(value_coding=WithoutScales()),
    ),
    (r"shape \(8, 8\) .*orthonormal", lambda: update(transform=Returns("float32", (8, 8)))),
    (
        r"returned uint32 \(2, 3\), but uint32 \(2, 128\)",
        lambda: gathered(Returns("uint32", (2, 3))),
    ),
    lambda: Quantiser(1, (-1, 0, 1)),
    lambda: Quantiser(2, (1, 0, 3)),
    lambda: Quantiser(2, (-3, 0, 1)),
    ("ascending integers", lambda: Quantiser(2, (-1.5, -0.5, 0.5, 1.5))),
    ("at most 32", lambda: Quantiser(40, (-1, 1))),
    ("mean_level must lie", lambda: Quantiser(2, (-1, 0, 1), mean_level=0.0)),
    ("must be hashable", lambda: demo_optax.Compression(value_coding=Quantiser(2, [-1, 0, 1]))),
    in_fragments,
    owned_by_different_numbers,
    ("Gone.*before you restore", restored_without_its_code),
]
